"""The frontier against a model that keeps one timestamp per key."""

from hypothesis import given
from hypothesis import strategies as st

from server.puller.tikv.frontier import Frontier
from storage.model.span import KeyRange

WIDTH = 12


def key(cell):
    return b"" if cell == WIDTH else bytes([cell])


SPAN = KeyRange(key(0), b"")


def test_a_new_frontier_is_one_gap_at_the_start():
    frontier = Frontier(SPAN, 7)
    assert frontier.gaps() == [SPAN]
    assert frontier.resolved_ts == 7


def test_resolved_waits_for_the_part_nobody_serves():
    frontier = Frontier(SPAN, 7)
    frontier.assign(KeyRange(key(0), key(6)), 1)
    frontier.advance(1, 20)
    assert frontier.resolved_ts == 7
    assert frontier.gaps() == [KeyRange(key(6), b"")]


def test_a_split_region_is_taken_up_again_from_where_it_was():
    frontier = Frontier(SPAN, 7)
    frontier.assign(SPAN, 1)
    frontier.advance(1, 20)
    frontier.release(1)
    assert frontier.resolved_ts == 20
    assert frontier.assign(KeyRange(key(0), key(4)), 2) == 20
    assert frontier.assign(KeyRange(key(4), b""), 3) == 20


def test_a_merged_region_is_taken_up_from_its_slower_part():
    frontier = Frontier(SPAN, 7)
    frontier.assign(KeyRange(key(0), key(4)), 1)
    frontier.assign(KeyRange(key(4), b""), 2)
    frontier.advance(1, 20)
    frontier.advance(2, 30)
    assert frontier.lowest_gap() is None
    frontier.release(2)
    assert frontier.lowest_gap() == 30
    frontier.release(1)
    assert frontier.lowest_gap() == 20
    assert frontier.gaps() == [SPAN]
    assert frontier.assign(SPAN, 3) == 20


def test_a_released_owner_moves_nothing():
    frontier = Frontier(SPAN, 7)
    frontier.assign(SPAN, 1)
    frontier.release(1)
    frontier.advance(1, 20)
    assert frontier.resolved_ts == 7


def test_clip_respects_open_ends():
    assert KeyRange(b"b", b"").clip(KeyRange(b"", b"c")) == KeyRange(b"b", b"c")
    assert KeyRange(b"b", b"d").clip(KeyRange(b"d", b"")) is None
    assert KeyRange(b"", b"").clip(KeyRange(b"", b"")) == KeyRange(b"", b"")


@given(st.data(), st.sampled_from([b"", bytes([WIDTH])]))
def test_resolved_is_the_minimum_over_all_keys_and_never_goes_back(data, span_end):
    frontier = Frontier(KeyRange(key(0), span_end), 1)

    def cells(part):
        return part.start_key[0], part.end_key[0] if part.end_key else WIDTH

    ts, owner = [1] * WIDTH, [None] * WIDTH
    last, names = 1, iter(range(1000))
    for _ in range(data.draw(st.integers(0, 25))):
        owners = sorted({name for name in owner if name is not None})
        action = data.draw(st.sampled_from(["assign", "advance", "release"]))
        if action == "assign" and (gaps := frontier.gaps()):
            gap = data.draw(st.sampled_from(gaps))
            low, high = cells(gap)
            start = data.draw(st.integers(low, high - 1))
            end = data.draw(st.integers(start + 1, high))
            name = next(names)
            from_ts = frontier.assign(KeyRange(key(start), key(end) or span_end), name)
            assert from_ts == min(ts[start:end])
            ts[start:end] = [from_ts] * (end - start)
            owner[start:end] = [name] * (end - start)
        elif action != "assign" and owners:
            name = data.draw(st.sampled_from(owners))
            if action == "release":
                frontier.release(name)
                owner = [None if held == name else held for held in owner]
            else:
                new = data.draw(st.integers(1, 50))
                frontier.advance(name, new)
                ts = [
                    max(old, new) if held == name else old
                    for old, held in zip(ts, owner, strict=True)
                ]
        assert frontier.resolved_ts == min(ts) >= last
        last = frontier.resolved_ts
        uncovered = [cell for gap in frontier.gaps() for cell in range(*cells(gap))]
        assert uncovered == [cell for cell, held in enumerate(owner) if held is None]
        assert len(frontier) == len({held for held in owner if held is not None})
