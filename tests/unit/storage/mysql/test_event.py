"""Framing: the same events however the bytes arrive; damaged ones are errors of ours."""

import struct
import zlib
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.model.errors import CorruptError, TidemarkError
from storage.mysql.buffer import PAD_BYTES
from storage.mysql.compressed import expanded
from storage.mysql.control import FormatDescription, MariaGtid, MysqlGtid, Query, Rotate, XaPrepare
from storage.mysql.event import (
    EventChecksumError,
    Events,
    EventType,
    EventUnsupportedError,
    check_events,
    split_events,
    split_packets,
)
from storage.mysql.table_map import TableMap
from tests.unit.storage.mysql.encode import event, events, payload

LATIN1, SWE7, EUCJPMS = 8, 10, 97
"""Collations of the character sets."""
BODIES = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=40)), max_size=8)


def with_crc(content: bytes) -> bytes:
    body = content[:9] + struct.pack("<I", len(content) + 4) + content[13:]
    return body + struct.pack("<I", zlib.crc32(body))


@given(BODIES, st.integers(0, 400))
def test_a_log_cut_anywhere_gives_the_same_events(
    bodies: list[tuple[int, bytes]], cut: int
) -> None:
    log = b"".join(with_crc(event(kind, body)) for kind, body in bodies)
    cut = min(cut, len(log))
    first, at = split_events(log[:cut] + bytes(PAD_BYTES), checksums=True, end=cut)
    second, end = split_events(log + bytes(PAD_BYTES), checksums=True, begin=at, end=len(log))
    assert end == len(log)
    found = [
        (int(each.types[n]), each.body(n)) for each in (first, second) for n in range(len(each))
    ]
    assert found == bodies
    check_events(first)
    check_events(second)


@given(BODIES, st.integers(0, 400))
def test_packets_cut_anywhere_give_the_same_events_and_stop_at_what_is_none(
    bodies: list[tuple[int, bytes]], cut: int
) -> None:
    sent = [event(kind, body) for kind, body in bodies]
    stream = (
        b"".join(struct.pack("<I", len(each) + 1) + b"\0" + each for each in sent)
        + b"\x05\0\0\x07\xfeabcd"
    )
    cut = min(cut, len(stream))
    first, at = split_packets(stream[:cut] + bytes(PAD_BYTES), checksums=False, end=cut)
    second, stop = split_packets(
        stream + bytes(PAD_BYTES), checksums=False, begin=at, end=len(stream)
    )
    assert stream[stop:] == b"\x05\0\0\x07\xfeabcd"
    assert [
        each.header(n) + each.body(n) for each in (first, second) for n in range(len(each))
    ] == sent


def test_a_packet_of_another_size_than_its_event_is_damaged() -> None:
    sent = event(2, b"body")
    stream = struct.pack("<I", len(sent) + 2) + b"\0" + sent + b"x"
    with pytest.raises(CorruptError):
        split_packets(stream + bytes(PAD_BYTES), checksums=False, end=len(stream))


@given(st.binary(min_size=1, max_size=30), st.integers(0, 52))
def test_one_wrong_bit_fails_the_checksum(body: bytes, bit: int) -> None:
    log = bytearray(with_crc(event(EventType.QUERY, body)))
    at = 17 * 8 + bit if 17 * 8 + bit < len(log) * 8 else 0
    log[at // 8] ^= 1 << at % 8
    with pytest.raises(EventChecksumError):
        check_events(split_events(bytes(log) + bytes(PAD_BYTES), checksums=True, end=len(log))[0])


def test_the_mark_of_a_file_in_use_is_not_under_the_checksum() -> None:
    log = bytearray(with_crc(event(EventType.FORMAT_DESCRIPTION, b"body")))
    log[17] |= 1
    check_events(split_events(bytes(log) + bytes(PAD_BYTES), checksums=True, end=len(log))[0])


PARSERS: list[Callable[[bytes], object]] = [
    lambda body: FormatDescription.parse(body, split_with_checksums=True),
    lambda body: TableMap.parse(body, mariadb=True),
    lambda body: MariaGtid.parse(bytes(19), body),
    Query.parse,
    XaPrepare.parse,
    Rotate.parse,
    MysqlGtid.parse,
]


@given(st.sampled_from(PARSERS), st.binary(max_size=80))
def test_foreign_bytes_are_read_or_refused_by_an_error_of_ours(
    parse: Callable[[bytes], object], body: bytes
) -> None:
    with suppress(TidemarkError):
        parse(body)


@given(st.sampled_from([40, 165, 166, 167, 168, 170]), st.binary(max_size=80))
def test_foreign_compressed_bytes_are_read_or_refused_by_an_error_of_ours(
    kind: int, body: bytes
) -> None:
    with suppress(TidemarkError):
        list(expanded(events([event(kind, body)])))


def plain_events(found: Events) -> list[bytes]:
    return [found.header(number) + found.body(number) for number in range(len(found))]


@pytest.mark.parametrize("zstd", [True, False])
def test_a_transaction_payload_becomes_the_events_in_it(zstd: bool) -> None:
    inner = [event(EventType.QUERY, b"q" * 20), event(EventType.XID, bytes(8))]
    outer = [event(EventType.GTID, b"g"), payload(b"".join(inner), zstd=zstd)]
    [found] = expanded(events(outer))
    assert plain_events(found) == [outer[0], *inner]


@pytest.mark.parametrize("zstd", [True, False])
def test_a_large_transaction_is_unpacked_piece_by_piece(zstd: bool) -> None:
    large, small = (
        event(EventType.WRITE_ROWS, b"r" * (3 << 20)),
        event(EventType.WRITE_ROWS, b"r" * 8000),
    )
    inner = [*[small] * 1000, large, *[small] * 1000, event(EventType.XID, bytes(8))]
    pieces = list(
        expanded(
            events([event(EventType.GTID, b"g"), payload(b"".join(inner), zstd=zstd)]), 1 << 20
        )
    )
    assert max(int(piece.end[-1]) for piece in pieces) <= (1 << 20) + len(large)
    assert len(pieces) > 15
    assert [each for piece in pieces for each in plain_events(piece)][1:] == inner


@pytest.mark.parametrize("zstd", [True, False])
@pytest.mark.parametrize("more", [-1, 1])
def test_a_payload_that_holds_another_number_of_bytes_than_it_claims_is_refused(
    zstd: bool, more: int
) -> None:
    plain = event(EventType.XID, bytes(8))
    with pytest.raises(CorruptError, match="claims to hold"):
        list(expanded(events([payload(plain, zstd=zstd, claimed=len(plain) + more)])))


def test_an_unknown_compression_says_which_setting_to_turn_off() -> None:
    body = b"\x01\x01\x03" + b"\x02\x01\x07" + b"\x03\x01\x03" + b"\0abc"
    with pytest.raises(EventUnsupportedError, match="binlog_transaction_compression"):
        list(expanded(events([event(EventType.TRANSACTION_PAYLOAD, body)])))


@pytest.mark.parametrize(
    ("variables", "explicit"),
    [
        # MariaDB 10.11.19, whose flags tell
        ("00000000010100002054000000000603737464042d002d002d00810700000000000000", True),
        ("00000000000100002054000000000603737464042d002d002d00810b00000000000000", False),
        # MySQL 9.7.4, which tells it behind the schemas, and only where a TIMESTAMP needs it
        (
            (
                "000000000001000020440000000006037374640408000800ff0005062b30323a30300704000c0164001001"
                "11110000000000000012ff001300"
            ),
            True,
        ),
        (
            (
                "0000000000010000204400000000060373746404ff00ff00ff0005062b30303a30300c0164001000110b00"
                "00000000000012ff001300"
            ),
            False,
        ),
        ("0000000000010000204400000000060373746404ff00ff00ff000c016400110a00000000000000", False),
    ],
)
def test_a_statement_tells_what_timestamps_are_by_themselves(
    variables: str, explicit: bool
) -> None:
    data = bytes.fromhex(variables)
    body = struct.pack("<IIBHH", 7, 0, 1, 0, len(data)) + data + b"d\0ALTER TABLE a ADD y TIMESTAMP"
    query = Query.parse(body)
    assert query.sql == "ALTER TABLE a ADD y TIMESTAMP"
    assert query.explicit_timestamps is explicit


@pytest.mark.parametrize(
    ("client", "data", "sql", "unread"),
    [
        # as MariaDB 10.11 wrote them, in a session with SET NAMES latin1
        (LATIN1, b"DROP TABLE `\xe9` /* generated by server */", "DROP TABLE `é` /*", ""),
        (LATIN1, b"ALTER TABLE `\xe9` ADD x INT", "ALTER TABLE `é` ADD", ""),
        (
            LATIN1,
            b"DROP TABLE IF EXISTS `d`.`\xc3\xa9`/* Generated to handle failed CREATE OR REPLACE */",
            "DROP TABLE IF EXISTS `d`.`é`/*",
            "",
        ),
        (LATIN1, b"DROP TABLE IF EXISTS `t\xc3\xb6`", "DROP TABLE IF EXISTS `tö`", ""),
        (
            LATIN1,
            b"CREATE OR REPLACE TABLE `\xc3\xa97` (\n  `c` int DEFAULT 1)",
            "CREATE OR REPLACE TABLE `é7` (",
            "",
        ),
        (LATIN1, b"CREATE TABLE `\xe9` (\n  `c` int)", "CREATE TABLE `é` (", ""),
        (LATIN1, b"CREATE TABLE `\xc3\xa9` (c INT)", "CREATE TABLE `Ã©` (c INT)", ""),
        # a table of Japanese letters, and one without
        (EUCJPMS, b"DROP TABLE `\xc6\xfc`", "DROP TABLE `", "eucjpms"),
        (EUCJPMS, b"DROP TABLE t", "DROP TABLE t", ""),
        (SWE7, b"DROP TABLE t", "DROP TABLE t", "swe7"),
    ],
)
def test_a_statement_has_its_sessions_letters_but_what_the_server_makes_is_utf8(
    client: int, data: bytes, sql: str, unread: str
) -> None:
    variables = b"\x04" + struct.pack("<HHH", client, client, 45)
    head = struct.pack("<IIBHH", 1, 0, 1, 0, len(variables))
    query = Query.parse(head + variables + b"d\0" + data)
    assert query.sql.startswith(sql)
    assert query.unread_charset == unread


def test_behind_a_sessions_default_collations_stands_its_character_set() -> None:
    """As MariaDB 11.8 wrote it: SET NAMES latin1, character_set_collations with two of its own."""
    body = bytes.fromhex(
        "060000000000000001" "00002d00" "00000000010100002054000000000603737464" "8302"
        "08002f002d002e00" "040800080000098109000000000000006400"
    )  # fmt: skip
    statement = "CREATE TABLE ü (é VARCHAR(9) CHARACTER SET utf8mb4)"
    query = Query.parse(body + statement.encode("latin1"))
    assert query.sql == statement
    assert query.connection == "latin1"
    assert query.default_collations == {"latin1": 47, "utf8mb4": 46}


def test_mysql_tells_a_sessions_default_collation_of_one_character_set() -> None:
    """As MySQL 8 writes it behind the number that the DDL has in its engine."""
    variables = b"\x10\x01" + b"\x11" + bytes(8) + b"\x12\x2d\0" + b"\x13\0"
    head = struct.pack("<IIBHH", 7, 0, 1, 0, len(variables))
    query = Query.parse(head + variables + b"d\0CREATE TABLE t (a TEXT) CHARSET utf8mb4")
    assert query.default_collations == {"utf8mb4": 45}
