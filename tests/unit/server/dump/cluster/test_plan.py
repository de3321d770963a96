"""Ranges of a table of the cluster: they cover each part exactly, whatever its keys are;
estimates are near.
"""

import bisect
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.dump.cluster.plan import (
    RANGES_MAX,
    ChunkPace,
    Extent,
    KeyRange,
    KeyScale,
    RowEstimate,
    cursor_of,
    cuts,
    key_ranges,
    least_s,
    planned_ranges,
)
from server.dump.job import Job
from server.dump.progress import Range
from storage.model.span import Span
from storage.tidb.record import record_key, record_prefix, table_span

KEYS = st.binary(min_size=1, max_size=24)


def extent(
    first: bytes, last: bytes, bounds: list[bytes], *, is_small: bool, number: int
) -> Extent:
    span = Span(number, b"%03d" % number, b"%03d" % (number + 1))
    prefix = span.start_key
    inner = tuple(sorted({prefix + key for key in bounds if first < key < last}))
    return Extent(span, KeyScale([prefix + first, prefix + last]), inner, 9 if is_small else None)


@st.composite
def extents(draw: st.DrawFn) -> list[Extent]:
    found = []
    for number in range(draw(st.integers(1, 5))):
        first, last = sorted(draw(st.lists(KEYS, min_size=2, max_size=2)))
        bounds = draw(st.lists(KEYS, max_size=60))
        found.append(extent(first, last, bounds, is_small=draw(st.booleans()), number=number))
    return found


@given(extents())
def test_planned_ranges_cover_each_part_without_hole_or_overlap(
    given_extents: list[Extent],
) -> None:
    parts = [each.part for each in given_extents]
    planned = planned_ranges(given_extents)
    ranges = key_ranges(planned, parts)
    assert ranges is not None
    assert len(ranges) == len(planned) <= RANGES_MAX + len(parts)
    for part in parts:
        inside = [each for each in ranges if part.start_key <= each.start_key < part.end_key]
        assert (inside[0].start_key, inside[-1].end_key) == (part.start_key, part.end_key)
        assert all(left.end_key == right.start_key for left, right in itertools.pairwise(inside))
        assert all(each.start_key < each.end_key for each in inside)


@given(extents(), st.data())
def test_ranges_of_other_parts_are_told_apart(
    given_extents: list[Extent], data: st.DataObject
) -> None:
    planned = planned_ranges(given_extents)
    gone = data.draw(st.integers(0, len(given_extents) - 1))
    parts = [each.part for place, each in enumerate(given_extents) if place != gone]
    assert key_ranges(planned, parts) is None


def test_progress_of_a_version_that_had_one_range_for_each_part_goes_on() -> None:
    parts = [Span(1, b"a", b"b"), Span(2, b"c", b"d")]
    old = [Range(None, cursor_of(part.end_key)) for part in parts]
    assert key_ranges(old, parts) == [KeyRange(b"a", b"b"), KeyRange(b"c", b"d")]


@given(KEYS, KEYS, st.lists(KEYS, max_size=80), st.integers(1, 40))
def test_cuts_ascend_strictly_inside(
    left: bytes, right: bytes, bounds: list[bytes], pieces: int
) -> None:
    first, last = sorted((left, right))
    found = cuts(KeyScale([first, last]), sorted(set(bounds)), pieces)
    assert len(found) < pieces
    assert found == sorted(set(found))
    assert all(first < key < last for key in found)


@given(st.lists(KEYS, min_size=1, unique=True))
def test_a_scale_keeps_the_order_of_the_keys_that_it_was_made_of(seen: list[bytes]) -> None:
    scale = KeyScale(sorted(seen))
    places = [scale.at(key) for key in sorted(seen)]
    assert places == sorted(places)
    assert scale.at(b"") == places[0] >= 0
    assert scale.at(b"\xff" * 30) == places[-1]


@given(st.integers(0, 1 << 62), st.integers(0, 1 << 62), st.integers(0, 1 << 62))
def test_keys_of_a_scale_are_where_it_says(one: int, other: int, between: int) -> None:
    low, high = sorted((one, other))
    scale = KeyScale([record_key(5, low), record_key(5, high)])
    at = scale.at(record_key(5, min(max(between, low), high)))
    assert scale.at(scale.key(at)) == at


def test_a_table_of_one_region_is_split_in_equal_steps_of_its_numbers() -> None:
    first, last = record_key(5, 1), record_key(5, 64_000)
    found = cuts(KeyScale([first, last]), [], 32)
    assert len(found) == 31
    handles = [sum(record_key(5, handle) < key for handle in range(1, 64_001)) for key in found]
    steps = [right - left for left, right in itertools.pairwise([0, *handles, 64_000])]
    assert max(steps) - min(steps) <= 2


def numbered(number: int) -> bytes:
    return record_key(5, number)


def lettered(number: int) -> bytes:
    return record_prefix(5) + f"user{number:08}".encode()


def hexadecimal(number: int) -> bytes:
    return record_prefix(5) + f"{number * 0x9E3779B97F4A7C15 % (1 << 64):016x}".encode()


@pytest.mark.parametrize("key_of", [numbered, lettered, hexadecimal])
@pytest.mark.parametrize("step", [1, 7])
def test_the_outlook_of_even_keys_is_near_from_the_first_samples_on(
    key_of: Callable[[int], bytes], step: int
) -> None:
    keys = sorted(key_of(number) for number in range(1, 40_000 * step, step))
    span = table_span(5)
    plan = Extent(span, KeyScale([*keys[:4096], keys[-1]]))
    ranges = key_ranges(planned_ranges([plan]), [span])
    assert ranges is not None
    estimate = RowEstimate(ranges, [plan])
    for place, each in enumerate(ranges):
        begin = bisect.bisect_left(keys, each.start_key)
        seen = keys[begin : min(begin + 64, bisect.bisect_left(keys, each.end_key))]
        if seen and place % 3 == 0:  # the others are taken to be like these
            estimate.note_rows(place, seen[0], seen[-1], len(seen))
    left = estimate.left([(place, each.start_key) for place, each in enumerate(ranges)])
    assert 0.5 * len(keys) < left < 2 * len(keys)
    assert estimate.left([(len(ranges) - 1, keys[-1])]) == 0
    small = RowEstimate(
        [KeyRange(span.start_key, span.end_key)], [Extent(span, KeyScale(keys), rows=len(keys))]
    )
    assert small.left([(0, span.start_key)]) == len(keys)
    held = [
        bisect.bisect_left(keys, each.end_key) - bisect.bisect_left(keys, each.start_key)
        for each in ranges
    ]
    assert max(held) < 6 * len(keys) / len(ranges), "ranges are of about the same size"


@given(st.integers(1, 10_000_000), st.integers(1, 2_000_000))
def test_chunks_come_to_a_quarter_of_a_second_or_a_mebibyte_by_factors_of_two(
    rows_per_s: int, row_bytes: int
) -> None:
    pace = ChunkPace()
    for _ in range(30):
        before = pace.rows
        pace.took(before, before * row_bytes, before / rows_per_s)
        assert before // 2 <= pace.rows <= before * 2
    target_rows = max(min(rows_per_s / 4, (1 << 20) / row_bytes, 65_536), 1)
    assert pace.rows in (int(target_rows), int(target_rows - 1e-6) or 1)
    assert pace.row_bytes == row_bytes


def test_a_page_without_rows_tells_nothing_and_one_that_failed_is_a_quarter_next() -> None:
    pace = ChunkPace()
    assert pace.rows == 64
    pace.took(0, 0, 9.0)
    assert (pace.rows, pace.row_bytes) == (64, 0.0)
    sizes = [pace.rows for _ in range(5) if pace.failed() is None]
    assert sizes == [16, 4, 1, 1, 1]


@pytest.mark.parametrize(
    ("job", "limit"),
    [
        (Job("1"), 64),
        (Job("1", rows_per_s=100), 25),
        (Job("1", rows_per_s=1000), 64),
        (Job("1", bytes_per_s=4000), 10),
        (Job("1", rows_per_s=20, bytes_per_s=4000), 5),
        (Job("1", rows_per_s=1), 1),
    ],
)
def test_four_pages_together_have_no_more_than_the_job_allows_in_a_second(
    job: Job, limit: int
) -> None:
    assert ChunkPace(64, 100.0).limit(job, 4) == limit
    assert ChunkPace(64).limit(Job("1", bytes_per_s=4000), 4) == 64, "no row was seen yet"


def test_reading_takes_as_long_as_the_slower_rate_says() -> None:
    assert least_s(Job("1"), 100, 1000) == 0
    assert least_s(Job("1", rows_per_s=10), 100, 1000) == 10
    assert least_s(Job("1", bytes_per_s=50), 100, 1000) == 20
    assert least_s(Job("1", rows_per_s=10, bytes_per_s=50), 100, 1000) == 20
    assert least_s(Job("1", rows_per_s=5, bytes_per_s=500), 100, 1000) == 20
