"""Barriers by id, by timestamp and by expiry: against one plain dict, and without garbage; and
which of them blocks.
"""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcsafepoint.state.errors import SafePointRequestError
from gcsafepoint.state.records import json_text, key_bytes, key_text, valid_text
from gcsafepoint.state.rules import (
    GC_WORKER,
    NEVER_S,
    Barriers,
    GcState,
    ServiceSafePoint,
    quoted,
    time_text,
)

BARRIERS = st.builds(
    ServiceSafePoint,
    st.sampled_from("abcdef"),
    st.integers(0, 20) | st.just(NEVER_S),
    st.integers(0, 20),
)


@given(st.lists(BARRIERS), st.lists(BARRIERS | st.sampled_from("abcdef") | st.integers(0, 21)))
def test_the_lowest_and_the_expired_are_those_of_a_dict(
    stored: list[ServiceSafePoint], steps: list[ServiceSafePoint | str | int]
) -> None:
    barriers, plain = Barriers(stored), {barrier.service_id: barrier for barrier in stored}
    for step in steps:
        if isinstance(step, ServiceSafePoint):
            barriers.put(step)
            plain[step.service_id] = step
        elif isinstance(step, str):
            assert barriers.remove(step) == plain.pop(step, None)
        else:
            barriers.drop_expired(step)
            plain = {name: barrier for name, barrier in plain.items() if barrier.expired_at >= step}
        expected = min(
            plain.values(),
            key=lambda barrier: (barrier.safe_point, barrier.service_id),
            default=None,
        )
        assert barriers.lowest() == expected
        assert set(barriers) == set(plain.values())


@pytest.mark.parametrize("services", [1, 10, 100])
def test_renewals_leave_no_more_garbage_than_state_and_seldom_look_at_all(services: int) -> None:
    barriers = Barriers()
    rebuilds = 0
    for number in range(10_000):
        heap = barriers._by_expiry
        barriers.put(ServiceSafePoint(f"s{number % services}", 1000 + number, number))
        rebuilds += barriers._by_expiry is not heap
        barriers.lowest()  # drops garbage of one heap; nothing expires in the other
        assert len(barriers._by_safe_point) <= 2 * services + 64
        assert len(barriers._by_expiry) <= 2 * services + 64
    assert rebuilds <= 10_000 / (services + 64)


@given(st.integers(0, 10), st.fractions(0, 10, max_denominator=4))
def test_a_ttl_shows_the_whole_seconds_that_are_left(expired_at: int, now_s: Fraction) -> None:
    left_s = max(0, math.floor(expired_at - now_s))
    assert ServiceSafePoint("a", expired_at, 0).ttl_s(float(now_s)) == left_s


POINTS = st.integers(1, 5)


@given(st.tuples(POINTS, POINTS, POINTS), POINTS)
def test_what_lies_lowest_below_the_target_blocks_of_equals_a_barrier_then_tidb(
    points: tuple[int, int, int], target: int
) -> None:
    barrier_ts, start_ts, global_ts = points
    state = GcState([ServiceSafePoint("barrier", NEVER_S, barrier_ts)])
    state.min_start_ts = {"tidb": start_ts}
    state.global_barriers.put(ServiceSafePoint("global", NEVER_S, global_ts))

    names = ("barrier", "tidb_min_start_ts_tidb", "global")
    below = [peer for peer in zip(points, names, strict=True) if peer[0] < target]
    blocker = state.blocker(target)
    found = (blocker.ts, blocker.service_id) if blocker else None
    assert found == min(below, key=lambda peer: peer[0], default=None)


@pytest.mark.parametrize("barrier_id", ["", GC_WORKER])
def test_no_id_and_gc_workers_are_refused(barrier_id: str) -> None:
    state = GcState()
    with pytest.raises(SafePointRequestError):
        state.set_barrier(barrier_id, 10, 60, 1000)
    with pytest.raises(SafePointRequestError):
        state.delete_barrier(barrier_id)


def test_a_barrier_is_described_as_pd_does() -> None:
    described = ServiceSafePoint('é"\n', 1795264103, 70).describe()
    assert described == (
        r'GCBarrier { BarrierID: "\u00e9\"\n", BarrierTS: 70, ExpirationTime: "2026-11-21 12:28:23 +0000 UTC" }'
    )
    assert 'ExpirationTime: "<nil>"' in ServiceSafePoint("a", NEVER_S, 70).describe(
        "GlobalGCBarrier"
    )


def test_texts_are_gos() -> None:
    assert quoted("a\x00\x7f🙂" + key_text(b"\xff")) == r'"a\x00\x7f\U0001f642\xff"'
    edges = "\x80\uffff\U00010000" + key_text(b"\x80")
    assert quoted(edges) == r'"\u0080\uffff\U00010000\x80"'
    assert time_text(253_402_300_799) == "9999-12-31 23:59:59 +0000 UTC"
    assert time_text(253_402_300_800) == "253402300800"
    assert time_text(0) == "1970-01-01 00:00:00 +0000 UTC"
    assert time_text(NEVER_S) == str(NEVER_S)
    assert json_text({"id": 'é<&>"\n'}) == b'{"id":"\xc3\xa9\\u003c\\u0026\\u003e\\"\\n"}'
    assert valid_text(key_text(b"a\xff")) == "a\ufffd"


@given(st.binary())
def test_any_key_is_a_text_and_back(raw: bytes) -> None:
    assert key_bytes(key_text(raw)) == raw
    valid_text(key_text(raw)).encode()
