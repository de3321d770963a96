import base64
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tipb import binlog_pb2

from storage.pump.binlog import BinlogInvalidError, Kind, _join_fields, fake, join, parse

TIDB = Path(__file__).parents[3] / "golden" / "tidb" / "binlogs.jsonl.gz"

ts = st.integers(0, (1 << 63) - 1)
prewrites = st.builds(
    binlog_pb2.Binlog,
    tp=st.just(0),
    start_ts=ts,
    commit_ts=st.just(0),
    prewrite_key=st.binary(max_size=20),
    prewrite_value=st.none() | st.binary(max_size=400),
    ddl_query=st.none() | st.binary(max_size=40),
    ddl_job_id=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    ddl_schema_state=st.none() | st.integers(-(1 << 31), (1 << 31) - 1),
)


def tidb_payloads() -> list[dict]:
    with gzip.open(TIDB, "rt") as lines:
        return [json.loads(line) for line in lines]


@given(prewrites)
def test_a_prewrite_reads_as_protobuf_reads_it(message: binlog_pb2.Binlog) -> None:
    payload = message.SerializeToString()
    assert parse(payload) == (Kind.PREWRITE, message.start_ts, 0, payload)


@given(ts, ts, st.sampled_from(Kind), st.binary(max_size=30))
def test_kind_and_timestamps_read_as_protobuf_reads_them(
    start_ts: int, commit_ts: int, kind: Kind, key: bytes
) -> None:
    payload = binlog_pb2.Binlog(
        tp=kind, start_ts=start_ts, commit_ts=commit_ts, prewrite_key=key
    ).SerializeToString()
    if kind == Kind.COMMIT and commit_ts <= start_ts and (commit_ts or start_ts):
        with pytest.raises(BinlogInvalidError, match="not after start_ts"):
            parse(payload)
    else:
        assert parse(payload) == (kind, start_ts, commit_ts, payload)


@given(st.binary(max_size=60))
def test_whatever_protobuf_refuses_is_refused(data: bytes) -> None:
    try:
        message = binlog_pb2.Binlog.FromString(data)
    except DecodeError:
        with pytest.raises(BinlogInvalidError):
            parse(data)
        return
    try:
        binlog = parse(data)
    except BinlogInvalidError:
        return  # unknown types, groups, negative timestamps: protobuf is more lenient
    assert (binlog.start_ts, binlog.commit_ts) == (message.start_ts, message.commit_ts)


@given(prewrites, st.integers(0, 400))
def test_a_cut_payload_is_refused_or_ends_between_fields(
    message: binlog_pb2.Binlog, cut: int
) -> None:
    payload = message.SerializeToString()[:cut]
    try:
        binlog_pb2.Binlog.FromString(payload)
    except DecodeError:
        with pytest.raises(BinlogInvalidError, match="unexpected EOF"):
            parse(payload)
    else:
        parse(payload)


def test_a_garbage_payload_is_an_unexpected_end_as_in_the_original() -> None:
    with pytest.raises(BinlogInvalidError, match="unexpected EOF"):
        parse(b"\x22\x7fgarbage")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (binlog_pb2.Binlog(tp=3, start_ts=1), "unknown type 3 at start_ts 1"),
        (binlog_pb2.Binlog(tp=0, start_ts=-1), "negative timestamp"),
        (binlog_pb2.Binlog(tp=1, start_ts=9, commit_ts=8), "commit_ts 8 not after start_ts 9"),
    ],
)
def test_a_binlog_without_sense_is_refused_with_its_timestamps(
    message: binlog_pb2.Binlog, text: str
) -> None:
    with pytest.raises(BinlogInvalidError, match=text):
        parse(message.SerializeToString())


@given(st.integers(1, (1 << 63) - 1))
def test_a_heartbeat_is_a_rollback_at_its_own_commit_ts(at: int) -> None:
    message = binlog_pb2.Binlog.FromString(fake(at))
    assert (message.tp, message.start_ts, message.commit_ts) == (2, at, at)
    assert parse(fake(at)).is_fake


def test_an_empty_payload_is_a_probe() -> None:
    assert parse(b"").is_empty


@given(prewrites, st.integers(1, 1 << 62), st.binary(max_size=20))
def test_a_joined_commit_is_the_commit_with_the_rows_of_its_prewrite(
    prewrite: binlog_pb2.Binlog, later: int, key: bytes
) -> None:
    commit = binlog_pb2.Binlog(
        tp=1,
        start_ts=prewrite.start_ts % (1 << 62),
        prewrite_key=key,
        ddl_query=b"dropped",
        ddl_job_id=7,
    )
    commit.commit_ts = commit.start_ts + later
    expected = binlog_pb2.Binlog(
        tp=1, start_ts=commit.start_ts, commit_ts=commit.commit_ts, prewrite_key=key
    )
    for field in ("prewrite_value", "ddl_query", "ddl_job_id", "ddl_schema_state"):
        if prewrite.HasField(field):
            setattr(expected, field, getattr(prewrite, field))
    joined = join(commit.SerializeToString(), prewrite.SerializeToString())
    assert joined == expected.SerializeToString()


def field(number: int) -> st.SearchStrategy[bytes]:
    """One field of a binlog as some encoder may write it: numbers in more bytes than they need."""
    if number in (1, 2, 3, 7, 8):
        values = st.integers(0, (1 << 64) - 1).flatmap(
            lambda value: st.sampled_from([encoded(value), padded(encoded(value))])
        )
        return values.map(lambda value: bytes([number << 3]) + value)
    return st.binary(max_size=200).flatmap(
        lambda data: st.sampled_from([encoded(len(data)), padded(encoded(len(data)))]).map(
            lambda size: bytes([number << 3 | 2]) + size + data
        )
    )


def encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def padded(varint: bytes) -> bytes:
    return varint if len(varint) == 10 else varint[:-1] + bytes([varint[-1] | 0x80, 0])


known = st.lists(st.integers(1, 8).flatmap(field), max_size=8).map(b"".join)
unknown = st.sampled_from([b"", b"\x48\x07", b"\x82\x01\x02ab"])


@given(known, known, unknown)
def test_fields_in_any_order_are_joined_as_those_in_their_order(
    commit: bytes, prewrite: bytes, beyond: bytes
) -> None:
    assert join(commit, prewrite) == _join_fields(commit, prewrite)
    assert join(commit + beyond, prewrite) == _join_fields(commit + beyond, prewrite)
    assert join(commit, prewrite + beyond) == _join_fields(commit, prewrite + beyond)


@given(prewrites, st.integers(0, 500))
def test_a_cut_prewrite_is_joined_as_its_fields_are_or_refused_as_they_are(
    message: binlog_pb2.Binlog, cut: int
) -> None:
    commit, prewrite = b"\x08\x01\x10\x05\x18\x07", message.SerializeToString()[:cut]
    assert outcome_of(join, commit, prewrite) == outcome_of(_join_fields, commit, prewrite)


def outcome_of(joining: Callable[[bytes, bytes], bytes], commit: bytes, prewrite: bytes) -> object:
    try:
        return joining(commit, prewrite)
    except BinlogInvalidError as err:
        return str(err)


def test_every_binlog_of_a_real_tidb_is_read_and_joined_byte_for_byte() -> None:
    prewrites: dict[int, bytes] = {}
    for row in tidb_payloads():
        payload = base64.b64decode(row["payload_b64"])
        binlog = parse(payload)
        assert (Kind(binlog.kind).name.title(), binlog.start_ts, binlog.commit_ts) == (
            row["tp"],
            row["start_ts"],
            row["commit_ts"],
        )
        if binlog.kind == Kind.PREWRITE:
            prewrites[binlog.start_ts] = payload
        elif binlog.kind == Kind.COMMIT:
            message = binlog_pb2.Binlog.FromString(payload)
            rows = binlog_pb2.Binlog.FromString(prewrites[binlog.start_ts])
            if rows.HasField("prewrite_value"):
                message.prewrite_value = rows.prewrite_value
            assert join(payload, prewrites[binlog.start_ts]) == message.SerializeToString()
