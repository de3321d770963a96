"""The course of central GC: everything once, what was left first,
and nothing twice at the same safepoint.
"""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gcsafepoint.worker.do_gc import Position, RangeWalk
from storage.model.span import KeyRange


def stores_of(keys: list[bytes], owners: list[int]) -> dict[int, list[KeyRange]]:
    found: dict[int, list[KeyRange]] = {}
    for (start, end), owner in zip(pairwise(keys), owners, strict=False):
        found.setdefault(owner, []).append(KeyRange(start, end))
    return found


LETTERS = [bytes([letter]) for letter in b"abcdefghij"]
borders = st.sets(st.sampled_from(LETTERS), max_size=9).map(lambda keys: [b"", *sorted(keys), b""])
clusters = st.builds(
    stores_of,
    borders,
    st.lists(st.integers(1, 3), min_size=11, max_size=11),
)
positions = st.builds(
    Position,
    st.sampled_from([5, 6]),
    st.sampled_from([b"", *LETTERS]),
    st.sampled_from([b"", *LETTERS]),
)


def letters_in(ranges: list[KeyRange]) -> list[bytes]:
    """The single-letter keys that the ranges hold, in their order."""
    return [
        key
        for it in ranges
        for key in [b"", *LETTERS]
        if it.start_key <= key and (not it.end_key or key < it.end_key)
    ]


@given(positions)
def test_a_position_reads_back_the_same(it: Position) -> None:
    assert Position.from_json(it.to_json()) == it


def test_what_cannot_be_read_means_from_the_beginning() -> None:
    for text in ("", "[]", '{"safe_point": 1}', '{"safe_point": 1, "key": "zz", "until": ""}'):
        assert Position.from_json(text) is None


@given(clusters, st.none() | positions)
def test_a_newer_safepoint_goes_everywhere_once_and_first_where_the_older_one_broke_off(
    stores: dict[int, list[KeyRange]], broke_off: Position | None
) -> None:
    course = RangeWalk.plan(stores, broke_off, 7)
    visited = letters_in([it for _, it in course.store_ranges])
    assert sorted(visited) == [b"", *LETTERS]
    assert visited[0] == (broke_off.key if broke_off else b"")
    for number, ranges in stores.items():
        mine = letters_in([it for store, it in course.store_ranges if store == number])
        assert sorted(mine) == sorted(letters_in(ranges))


@given(clusters, positions, clusters)
def test_the_same_safepoint_does_what_was_left_and_no_more_however_regions_changed_meanwhile(
    stores: dict[int, list[KeyRange]], broke_off: Position, later: dict[int, list[KeyRange]]
) -> None:
    ring = [b"", *LETTERS]
    left = letters_in(
        [it for _, it in RangeWalk.plan(stores, broke_off, broke_off.safe_point).store_ranges]
    )
    first, until = ring.index(broke_off.key), ring.index(broke_off.until)
    expected = (ring[first:] + ring[:first])[: (until - first) % len(ring) or len(ring)]
    assert left == expected
    assert (
        letters_in(
            [it for _, it in RangeWalk.plan(later, broke_off, broke_off.safe_point).store_ranges]
        )
        == expected
    )


@given(clusters, st.none() | positions, st.data())
def test_a_walk_broken_off_anywhere_and_taken_up_again_misses_nothing(
    stores: dict[int, list[KeyRange]], broke_off: Position | None, data: st.DataObject
) -> None:
    course = RangeWalk.plan(stores, broke_off, 7)
    order = data.draw(st.permutations(list(course.store_ranges)))
    done = order[: data.draw(st.integers(0, len(order) - 1))]
    saved = broke_off
    for _, it in done:
        if course.reached(it):
            saved = course.position
    rest = RangeWalk.plan(stores, saved, 7)
    assert set(letters_in([it for _, it in done])) | set(
        letters_in([it for _, it in rest.store_ranges])
    ) == {
        b"",
        *LETTERS,
    }
