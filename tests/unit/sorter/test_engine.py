"""What the sorter promises, claim by claim."""

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from sorter import Sorter, SorterSettings
from sorter.errors import (
    EventBatchError,
    EventBelowResolvedError,
    NotResolvedError,
    RangeCleanedError,
    ResolvedRegressedError,
    SorterClosedError,
    TableExistsError,
    TableNotFoundError,
)
from storage.model.event import INSERT, Position, raw_batch
from storage.model.span import Span

SPAN, OTHER = Span(1, b"a", b"b"), Span(2, b"b", b"c")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sorter(tmp_path: Path, clock: Clock) -> Iterator[Sorter]:
    engine = Sorter(
        tmp_path,
        SorterSettings(memory_bytes=1 << 20, segment_bytes=4096, block_bytes=1024),
        clock=clock,
    )
    engine.add_table(SPAN, 0)
    yield engine
    engine.close()


def rows(first_ts: int, count: int, *, size: int = 100) -> pa.RecordBatch:
    """Rows with commit_ts `first_ts`, `first_ts` + 1, ... in descending order."""
    timestamps = list(range(first_ts + count - 1, first_ts - 1, -1))
    return raw_batch(
        timestamps,
        [ts - 1 for ts in timestamps],
        [INSERT] * count,
        [b"k"] * count,
        [bytes(size)] * count,
        [None] * count,
    )


def fetched(sorter: Sorter, lower_ts: int, upper_ts: int, span: Span = SPAN) -> list[int]:
    batches = sorter.fetch(span, Position(lower_ts, 0), Position.fence(upper_ts))
    return [ts for batch in batches for ts in batch.column(0).to_pylist()]


def segments(sorter: Sorter, tmp_path: Path) -> int:
    return len(list(tmp_path.glob("*/segments/*")))


def test_rows_can_be_fetched_when_the_hook_is_called(sorter: Sorter) -> None:
    seen: list[tuple[Span, int, list[int]]] = []
    sorter.on_resolve(lambda span, ts: seen.append((span, ts, fetched(sorter, 1, ts))))
    sorter.add(SPAN, rows(1, 3))
    sorter.resolve(SPAN, 2)
    assert seen == [(SPAN, 2, [1, 2])]


def test_a_row_at_or_below_resolved_is_refused_with_its_whole_batch(sorter: Sorter) -> None:
    sorter.resolve(SPAN, 5)
    with pytest.raises(EventBelowResolvedError, match=r"ErrEventBelowResolved.*commit_ts 5"):
        sorter.add(SPAN, rows(5, 2))
    sorter.resolve(SPAN, 10)
    assert fetched(sorter, 1, 10) == []


def test_bad_calls_are_named_and_do_no_harm(sorter: Sorter) -> None:
    sorter.add(SPAN, rows(1, 3))
    sorter.resolve(SPAN, 3)
    with pytest.raises(ResolvedRegressedError):
        sorter.resolve(SPAN, 2)
    with pytest.raises(NotResolvedError):
        sorter.fetch(SPAN, Position(1, 0), Position.fence(4))
    with pytest.raises(NotResolvedError):
        sorter.clean(SPAN, Position.fence(4))
    with pytest.raises(TableExistsError):
        sorter.add_table(SPAN, 0)
    with pytest.raises(TableNotFoundError):
        sorter.add(OTHER, rows(1, 1))
    with pytest.raises(EventBatchError, match="schema"):
        sorter.add(SPAN, pa.record_batch({"commit_ts": [1]}))
    assert fetched(sorter, 1, 3) == [1, 2, 3]


def test_null_keys_are_refused(sorter: Sorter) -> None:
    batch = rows(1, 1)
    nulls = batch.set_column(3, batch.schema.field(3), pa.array([None], pa.binary()))
    with pytest.raises(EventBatchError, match="'key' holds nulls"):
        sorter.add(SPAN, nulls)


def test_a_table_added_again_sees_no_rows_of_its_earlier_life(sorter: Sorter) -> None:
    sorter.add(SPAN, rows(1, 50))
    sorter.resolve(SPAN, 50)
    assert sorter.stats().live_blocks
    sorter.remove_table(SPAN)
    assert sorter.stats().live_blocks == sorter.stats().memory_bytes == sorter.stats().segments == 0
    sorter.add_table(SPAN, 0)
    sorter.resolve(SPAN, 50)
    assert fetched(sorter, 1, 50) == []


def test_resolved_rows_fill_blocks_that_do_not_overlap(sorter: Sorter) -> None:
    for first in range(1, 200, 10):
        sorter.add(SPAN, rows(first, 10))
        sorter.resolve(SPAN, first + 9)
    extents = sorter.extents(SPAN, 1, 200)
    assert len(extents) > 5
    assert all(one.max_commit_ts < two.min_commit_ts for one, two in itertools.pairwise(extents))
    assert fetched(sorter, 1, 200) == list(range(1, 201))


def test_blocks_of_other_ranges_and_tables_are_not_read(sorter: Sorter) -> None:
    sorter.add_table(OTHER, 0)
    for span in (SPAN, OTHER):
        for first in range(1, 500, 10):
            sorter.add(span, rows(first, 10))
            sorter.resolve(span, first + 9)
    before = sorter.stats()
    assert fetched(sorter, 101, 110) == list(range(101, 111))
    after = sorter.stats()
    assert after.blocks_read - before.blocks_read <= 2
    assert after.blocks_skipped_by_range - before.blocks_skipped_by_range >= 20
    assert after.blocks_skipped_by_table - before.blocks_skipped_by_table >= 20


def test_rows_above_resolved_are_spilled_when_memory_is_short(tmp_path: Path) -> None:
    sorter = Sorter(tmp_path, SorterSettings(memory_bytes=5000, block_bytes=1024))
    sorter.add_table(SPAN, 0)
    for part in range(20):
        sorter.add(
            SPAN,
            raw_batch(
                *zip(
                    *[(1 + part + 20 * i, 0, INSERT, b"k", bytes(50), None) for i in range(10)],
                    strict=True,
                )
            ),
        )
        assert sorter.stats().memory_bytes <= 5000
    assert sorter.stats().blocks_written > 5
    sorter.resolve(SPAN, 200)
    assert fetched(sorter, 1, 200) == list(range(1, 201))
    sorter.close()


def test_a_transaction_larger_than_memory_passes_in_small_batches(tmp_path: Path) -> None:
    sorter = Sorter(tmp_path, SorterSettings(memory_bytes=10_000, block_bytes=1024))
    sorter.add_table(SPAN, 0)
    for part in range(12):
        keys = [b"%05d" % ((part + 12 * i) * 7919 % 600) for i in range(50)]
        sorter.add(
            SPAN, raw_batch([9] * 50, [5] * 50, [INSERT] * 50, keys, [bytes(50)] * 50, [None] * 50)
        )
    sorter.resolve(SPAN, 9)
    batches = list(sorter.fetch(SPAN, Position(1, 0), Position.fence(9)))
    assert [key for batch in batches for key in batch.column(3).to_pylist()] == [
        b"%05d" % i for i in range(600)
    ]
    assert max(batch.nbytes for batch in batches) <= 3 * 1024
    sorter.close()


def test_of_rows_sent_again_the_last_is_kept(tmp_path: Path) -> None:
    sorter = Sorter(tmp_path, SorterSettings(memory_bytes=1, block_bytes=1))
    sorter.add_table(SPAN, 0)
    for value in (b"first", b"last"):
        sorter.add(SPAN, raw_batch([9], [5], [INSERT], [b"k"], [value], [None]))
    sorter.resolve(SPAN, 9)
    assert [
        batch.to_pylist()[0]["value"]
        for batch in sorter.fetch(SPAN, Position(1, 0), Position.fence(9))
    ] == [b"last"]
    sorter.close()


def test_cleaned_rows_are_gone_at_once_and_their_files_soon(
    sorter: Sorter, tmp_path: Path, clock: Clock
) -> None:
    for first in range(1, 200, 10):
        sorter.add(SPAN, rows(first, 10))
        sorter.resolve(SPAN, first + 9)
    sorter.clean(SPAN, Position.fence(10))
    blocks, files = sorter.stats().live_blocks, segments(sorter, tmp_path)
    sorter.clean(SPAN, Position.fence(150))
    with pytest.raises(RangeCleanedError):
        fetched(sorter, 150, 200)
    assert fetched(sorter, 151, 200) == list(range(151, 201))
    assert (sorter.stats().live_blocks, segments(sorter, tmp_path)) == (blocks, files)
    clock.now_s += 5
    sorter.resolve(SPAN, 201)
    assert sorter.stats().live_blocks < blocks / 2
    assert segments(sorter, tmp_path) < files / 2
    assert fetched(sorter, 151, 201) == list(range(151, 201))


def test_a_fetch_under_way_is_not_disturbed_by_cleaning_or_closing(sorter: Sorter) -> None:
    sorter.add(SPAN, rows(1, 200))
    sorter.resolve(SPAN, 200)
    batches = sorter.fetch(SPAN, Position(1, 0), Position.fence(200))
    first = next(batches)
    sorter.clean(SPAN, Position.fence(200))
    sorter.close()
    got = [ts for batch in (first, *batches) for ts in batch.column(0).to_pylist()]
    assert got == list(range(1, 201))
    with pytest.raises(SorterClosedError):
        sorter.add(SPAN, rows(201, 1))


def test_a_short_write_is_finished(sorter: Sorter, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda fd, parts, offset: write(fd, [bytes(parts[0])[:10]], offset)
    )
    sorter.add(SPAN, rows(1, 100))
    sorter.resolve(SPAN, 100)
    assert sorter.stats().live_blocks
    assert fetched(sorter, 1, 100) == list(range(1, 101))


def test_tables_are_dealt_to_several_databases_and_fewer_later_leave_none_behind(
    tmp_path: Path,
) -> None:
    first = Sorter(tmp_path, SorterSettings(memory_bytes=1, block_bytes=1, shards=4))
    for table in range(32):
        first.add_table(Span(table, b"%d" % table, b""), 0)
        first.add(Span(table, b"%d" % table, b""), rows(1, 1))
    assert {path.parent.parent.name for path in tmp_path.glob("*/segments/*")} == {
        "00",
        "01",
        "02",
        "03",
    }
    first.close()
    second = Sorter(tmp_path, SorterSettings(shards=2))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["00", "01"]
    second.close()


def test_threads_may_add_resolve_and_fetch_together(tmp_path: Path) -> None:
    sorter = Sorter(
        tmp_path, SorterSettings(memory_bytes=20_000, block_bytes=2048, segment_bytes=10_000)
    )
    spans = [Span(table, b"%d" % table, b"") for table in range(4)]
    errors: list[BaseException] = []

    def feed(span: Span) -> None:
        try:
            for first in range(1, 1000, 10):
                sorter.add(span, rows(first, 10))
                sorter.resolve(span, first + 9)
                assert fetched(sorter, max(first - 50, 1), first + 9, span) == list(
                    range(max(first - 50, 1), first + 10)
                )
        except BaseException as err:
            errors.append(err)
            raise

    for span in spans:
        sorter.add_table(span, 0)
    threads = [threading.Thread(target=feed, args=(span,)) for span in spans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorter.stats().rows_in == 4000
    sorter.close()
