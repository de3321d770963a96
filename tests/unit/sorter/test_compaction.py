"""Segments that a table which stands still keeps alive are emptied, and cost little."""

from pathlib import Path

import pytest

from sorter import Sorter, SorterSettings, spill
from sorter.errors import SorterDiskError
from sorter.store import BlockStore
from storage.model.event import INSERT, Position, raw_batch
from storage.model.span import Span

STUCK, ALSO_STUCK, BUSY = Span(1, b"a", b"b"), Span(2, b"b", b"c"), Span(3, b"c", b"d")
SEGMENT_BYTES = 64 << 10


def add(sorter: Sorter, span: Span, first_ts: int, rows: int, size: int) -> None:
    ts = list(range(first_ts, first_ts + rows))
    keys = [b"%08d" % it for it in ts]
    sorter.add(
        span,
        raw_batch(
            ts, [it - 1 for it in ts], [INSERT] * rows, keys, [bytes(size)] * rows, [None] * rows
        ),
    )


def fetched(sorter: Sorter, span: Span, upper_ts: int) -> list[int]:
    return [
        ts
        for batch in sorter.fetch(span, Position(1, 0), Position.fence(upper_ts))
        for ts in batch[0].to_pylist()
    ]


def feed(sorter: Sorter, rounds: int) -> None:
    """In each round most of a segment, cleaned at once,
    and some rows of two tables that stand still.
    """
    for span in (STUCK, ALSO_STUCK, BUSY):
        sorter.add_table(span, 0)
    for turn in range(rounds):
        add(sorter, STUCK, turn + 1, 1, 2500)  # a block of its own
        add(sorter, ALSO_STUCK, turn + 1, 1, 50)
        add(sorter, BUSY, 100 * turn + 1, 100, 400)
        for span in (STUCK, ALSO_STUCK):
            sorter.resolve(span, turn + 1)
        sorter.resolve(BUSY, 100 * turn + 100)
        sorter.clean(BUSY, Position.fence(100 * turn + 100))


def opened(directory: Path) -> Sorter:
    return Sorter(
        directory,
        SorterSettings(
            memory_bytes=1,
            block_bytes=16 << 10,
            segment_bytes=SEGMENT_BYTES,
            shards=1,
            clean_interval_s=0,
        ),
    )


def test_a_table_that_stands_still_keeps_few_segments_alive_at_little_cost(tmp_path: Path) -> None:
    sorter = opened(tmp_path)
    feed(sorter, 200)
    stats = sorter.stats()
    live = 200 * 2600
    assert stats.disk_bytes < 4 * live + 8 * SEGMENT_BYTES
    assert stats.disk_bytes < stats.bytes_written / 4
    assert stats.bytes_written < 1.5 * (live + 200 * 100 * 440)
    for span in (STUCK, ALSO_STUCK):
        assert fetched(sorter, span, 200) == list(range(1, 201))
    sorter.close()


def test_a_fetch_under_way_is_not_disturbed_and_a_full_disk_leaves_all_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sorter = opened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(spill, "_empty_segments", lambda *_: None)
        feed(sorter, 50)
    before = sorter.stats().segments
    batches = sorter.fetch(STUCK, Position(1, 0), Position.fence(50))
    first = next(batches)
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            raise SorterDiskError("full")

        patch.setattr(BlockStore, "move", refuse)
        add(sorter, BUSY, 5001, 500, 400)
        assert sorter.stats().segments >= before
    add(sorter, BUSY, 5501, 500, 400)
    assert sorter.stats().segments < before
    assert [ts for batch in (first, *batches) for ts in batch[0].to_pylist()] == list(range(1, 51))
    assert fetched(sorter, STUCK, 50) == list(range(1, 51))
    sorter.close()
