"""What nobody should send to PD's GC calls: a clear status each, and nothing is lost or grows."""

from pathlib import Path
from typing import Any

import pytest
from kvproto import pdpb_pb2

from gcsafepoint.state.compat import Compat
from tests.integration.coordinator.gc_cases import (
    MAX_TS,
    NEVER_S,
    NOT_FOUND,
    STATE,
    Answer,
    Call,
    Refused,
    Status,
    barrier,
    call,
    everywhere,
    info,
    service,
    state,
    unknown,
    worker,
)
from tests.integration.coordinator.gc_server import assert_answer, ours

TOO_LONG = (
    "[PD:common:ErrInvalidArgument]invalid argument for barrierID: {} bytes long, at most 1024 "
    "are kept"
)
NO_UTF8 = "[PD:common:ErrInvalidArgument]invalid argument for barrierID: not UTF-8"
V2 = "UpdateServiceSafePointV2"


def v2(service_id: bytes, **fields: Any) -> Call:
    return Call(
        V2, {"keyspace_id": 0, "service_id": service_id, "safe_point": 60, "ttl": 100, **fields}
    )


BAD = [
    (service("x" * (1 << 20), 60), unknown(TOO_LONG.format(1 << 20))),
    (service("x" * 1025, 60), unknown(TOO_LONG.format(1025))),
    (service("é" * 513, 60), unknown(TOO_LONG.format(1026))),
    (service(b"\xff\xfe", 60), unknown(NO_UTF8)),
    (service(b"\xed\xa0\x80", 60), unknown(NO_UTF8)),
    (v2(b"x" * (1 << 20)), unknown(TOO_LONG.format(1 << 20))),
    (v2(b"\xff"), unknown(NO_UTF8)),
    (barrier("x" * (1 << 20), 60), Refused(TOO_LONG.format(1 << 20))),
    (everywhere("x" * 1025, 60), Refused(TOO_LONG.format(1025))),
    (
        barrier("a", 60, -(1 << 63)),
        Refused("[PD:common:ErrInvalidArgument]invalid argument for ttl: 0s"),
    ),
    (
        everywhere("a", 60, -1),
        Refused("[PD:common:ErrInvalidArgument]invalid argument for ttl: 0s"),
    ),
    (barrier("a", 60, keyspace=0xFFFFFF), Refused(NOT_FOUND)),
    (v2(b"a", keyspace_id=1), unknown(NOT_FOUND)),
    (v2(b"gc_worker", keyspace_id=1, ttl=NEVER_S), unknown(NOT_FOUND)),
    (call("GetGCState", 1), Refused(NOT_FOUND)),
]


@pytest.mark.parametrize("compat", list(Compat))
async def test_each_is_refused_clearly_and_leaves_the_state_alone(
    tmp_path: Path, compat: Compat
) -> None:
    async with ours(tmp_path, compat) as asked:
        for step in (worker(50), service("a", 100)):
            await asked.take(step)
        for question, expected in BAD:
            assert_answer(await asked.ask(question), expected)
        assert_answer(await asked.ask(STATE), state(50, 0, [info("a", 100)]))


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (service("a", 0), unknown("")),
        (service("a", MAX_TS, NEVER_S), {"a": (MAX_TS, NEVER_S)}),
        (service("a", 60, 1), {"a": (60, 1)}),
        (service("x" * 1024, 60), {"x" * 1024: (60, 1000)}),
        (service("é/../\0", 60), {"é/../\0": (60, 1000)}),
        (barrier("a", MAX_TS, NEVER_S), {"a": (MAX_TS, NEVER_S)}),
    ],
)
async def test_what_is_only_strange_is_kept_as_it_is(
    tmp_path: Path, question: Call, expected: Answer | dict[str, tuple[int, int]]
) -> None:
    """Timestamps far above the TSO too, as PD does: a barrier there holds nothing back."""
    async with ours(tmp_path, Compat.CLASSIC) as asked:
        await asked.take(worker(50))
        await asked.take(question)
        kept = {} if isinstance(expected, Status) else expected
        barriers = [info(barrier_id, *values) for barrier_id, values in kept.items()]
        assert_answer(await asked.ask(STATE), state(50, 0, barriers))


SERVICE_FIELDS = {
    "the first design: service_id = 3, TTL = 4": b"\x1a\x05ticdc\x20\xe8\x07",
    "a service id alone": b"\x1a\x05ticdc",
    "a TTL alone": b"\x20\xe8\x07",
    "a TTL below zero": b"\x20" + b"\xff" * 9 + b"\x01",
    "an UpdateServiceGCSafePointRequest": b"\x12\x05ticdc\x18\xe8\x07\x20\x50",
}


@pytest.mark.parametrize("compat", list(Compat))
@pytest.mark.parametrize("fields", SERVICE_FIELDS.values(), ids=list(SERVICE_FIELDS))
async def test_a_service_s_fields_do_not_move_the_safe_point_of_gc_itself(
    tmp_path: Path, compat: Compat, fields: bytes
) -> None:
    async with ours(tmp_path, compat) as asked:
        await asked.take(worker(100))
        request = pdpb_pb2.UpdateGCSafePointRequest(safe_point=80)
        request.header.cluster_id = asked.cluster_id
        raw = request.SerializeToString()

        refused = await asked.raw("UpdateGCSafePoint", raw + fields)
        assert refused.code == "UNKNOWN"
        assert refused.text.startswith(
            "[TM:ErrGcSafePointOfService] UpdateGCSafePoint moves GC's own safe point"
        )
        assert "UpdateServiceGCSafePoint" in refused.text
        assert_answer(await asked.ask(STATE), state(100, 0, []))

        for harmless in (
            b"\x1a\x00\x20\x00",
            b"\xf8\x07\x01",
        ):  # empty id and TTL 0; a field of a later kvproto
            assert (await asked.raw("UpdateGCSafePoint", raw + harmless)).code == "OK"
        assert_answer(await asked.ask(STATE), state(100, 80, []))


async def test_a_service_s_fields_do_not_move_the_safe_point_of_a_keyspace_s_gc(
    tmp_path: Path,
) -> None:
    async with ours(tmp_path, Compat.CLASSIC) as asked:
        request = pdpb_pb2.UpdateServiceSafePointV2Request(
            keyspace_id=0, service_id=b"ticdc", safe_point=60, ttl=100
        )
        request.header.cluster_id = asked.cluster_id
        refused = await asked.raw("UpdateGCSafePointV2", request.SerializeToString())
        assert refused.text.startswith(
            "[TM:ErrGcSafePointOfService] UpdateGCSafePointV2 moves GC's own safe point"
        )
        assert "UpdateServiceSafePointV2" in refused.text


async def test_what_is_no_message_is_refused_and_the_next_call_is_answered(tmp_path: Path) -> None:
    async with ours(tmp_path, Compat.CLASSIC) as asked:
        header = pdpb_pb2.RequestHeader(cluster_id=asked.cluster_id)
        no_utf8 = (
            pdpb_pb2.UpdateServiceGCSafePointRequest(header=header).SerializeToString()
            + b"\x1a\x02\xff\xfe"
        )
        for method in ("UpdateServiceGCSafePoint", "GetGCSafePoint", "SetGCBarrier", "GetGCState"):
            status = await asked.raw(method, b"\xff\xff\xff")
            assert status.code == "INTERNAL", method
        status = await asked.raw("SetGCBarrier", no_utf8)
        assert status.code == "INTERNAL"
        await asked.take(service("a", 100))
