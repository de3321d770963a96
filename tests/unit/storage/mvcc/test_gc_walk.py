"""The walk of a store's GC: whatever safepoints come in the middle,
all of it is collected at the last one.
"""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.model.errors import CorruptError
from storage.mvcc.gc import GcWalk, decode_walk

BORDERS = [bytes([at]) for at in range(1, 6)]
ENDS = [*BORDERS, b""]


def next_end(walk: GcWalk) -> bytes:
    return next(end for end in ENDS if not end or end > walk.next_key)


@given(st.lists(st.integers(0, 8), max_size=8), st.booleans())
def test_every_region_is_collected_at_the_last_safepoint(
    newer_after: Sequence[int], restarted: bool
) -> None:
    walk = GcWalk().switched(1)
    collected: dict[bytes, int] = {}
    for steps in (*newer_after, 1000):
        for _ in range(steps):
            if walk.finished:
                break
            end = next_end(walk)
            collected[end] = walk.safe_point
            walk = walk.passed(end)
            walk = decode_walk(walk.encode()) if restarted else walk
        if walk.finished:
            assert set(collected.values()) == {walk.safe_point}
            assert set(collected) == set(ENDS)
        if steps < 1000:
            walk = walk.switched(walk.safe_point + 1)
    assert walk.finished
    assert walk.begun_safe_point == walk.safe_point


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_no_region_is_walked_more_often_than_needed(newer_after: Sequence[int]) -> None:
    walk, walked = GcWalk().switched(1), 0
    for steps in newer_after:
        for _ in range(min(steps, len(ENDS) - 1)):
            if not walk.finished:
                walk, walked = walk.passed(next_end(walk)), walked + 1
        walk = walk.switched(walk.safe_point + 1)
        walked_then = walked
    while not walk.finished:
        walk, walked = walk.passed(next_end(walk)), walked + 1
    assert walked - walked_then == len(ENDS)


def test_what_was_collected_by_request_is_remembered() -> None:
    walk = GcWalk().begun(7)
    assert (walk.finished, walk.safe_point, walk.begun_safe_point) == (True, 0, 7)
    assert walk.switched(5).begun_safe_point == 7


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", GcWalk().encode().replace(b'"format": 1', b'"format": 9')]
)
def test_damaged_progress_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_walk(data)


def test_progress_has_the_documented_bytes() -> None:
    walk = GcWalk(7, b"k", b"m", wrapped=True, finished=False, begun_safe_point=9)
    assert walk.encode() == (
        b'{"format": 1, "safe_point": 7, "next_key": "6b", "rewind_key": "6d", "wrapped": true, "finished": false, '
        b'"begun_safe_point": 9}'
    )
    assert decode_walk(walk.encode()) == walk
