"""Small runs become one beside everybody else: nobody waits for it,
and nobody else is told what went wrong with it.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sorter import Sorter, SorterSettings, engine
from sorter.errors import BlockCorruptError, IndexLostError, SorterDiskError
from sorter.index import Entry, TableIndex
from sorter.merge import RunLevels
from sorter.store import BlockStore
from storage.leveldb import CorruptDatabaseError, LevelDB
from storage.model.event import INSERT, Position, raw_batch
from storage.model.span import Span

ONE, OTHER = Span(1, b"a", b"b"), Span(2, b"b", b"c")


def add(sorter: Sorter, span: Span, ts: int) -> None:
    sorter.add(span, raw_batch([ts], [ts - 1], [INSERT], [b"k"], [b"v"], [None]))


def add_all(sorter: Sorter, timestamps: Iterable[int]) -> None:
    for ts in timestamps:
        add(sorter, ONE, ts)


def fetched(sorter: Sorter, span: Span, lower_ts: int, upper_ts: int) -> list[int]:
    batches = sorter.fetch(span, Position(lower_ts, 0), Position.fence(upper_ts))
    return [ts for batch in batches for ts in batch.column(0).to_pylist()]


@pytest.fixture
def sorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sorter]:
    """Each row becomes a run; four of them are merged; all tables share one lock."""
    monkeypatch.setattr(RunLevels, "fan_in", 4)
    monkeypatch.setattr(engine, "_LOCKS", 1)
    sorter = Sorter(tmp_path, SorterSettings(memory_bytes=0, shards=1, clean_interval_s=0))
    for span in (ONE, OTHER):
        sorter.add_table(span, 0)
    yield sorter
    sorter.close()


class Paused:
    """A merge in another thread that has written its rows and waits, until the block ends."""

    def __init__(self, sorter: Sorter, monkeypatch: pytest.MonkeyPatch) -> None:
        append_run, self._written, self._go = (
            BlockStore.append_run,
            threading.Event(),
            threading.Event(),
        )

        def appended(*of_run: Any) -> list[Entry]:
            new = append_run(*of_run)
            self._written.set()
            assert self._go.wait(60)
            return new

        monkeypatch.setattr(BlockStore, "append_run", appended)
        self._thread = threading.Thread(target=add_all, args=(sorter, range(1, 5)))

    def __enter__(self) -> None:
        self._thread.start()
        assert self._written.wait(60)

    def __exit__(self, *_: object) -> None:
        self._go.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_tables_are_used_while_runs_of_one_are_merged(
    sorter: Sorter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Paused(sorter, monkeypatch):
        sorter.resolve(ONE, 4)
        sorter.resolve(OTHER, 9)
        assert fetched(sorter, ONE, 1, 4) == [1, 2, 3, 4]
        assert fetched(sorter, OTHER, 1, 9) == []
        assert sorter.table_stats(ONE).runs == 4
    assert sorter.table_stats(ONE).runs == sorter.table_stats(ONE).blocks == 1
    assert fetched(sorter, ONE, 1, 4) == [1, 2, 3, 4]


def test_what_is_cleaned_meanwhile_stays_clean(
    sorter: Sorter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Paused(sorter, monkeypatch):
        sorter.resolve(ONE, 4)
        sorter.clean(ONE, Position.fence(3))
    assert fetched(sorter, ONE, 4, 4) == [4]
    sorter.clean(ONE, Position.fence(4))
    assert (sorter.stats().live_blocks, sorter.stats().disk_bytes) == (0, 0)


def test_a_table_may_be_removed_or_added_again_meanwhile(
    sorter: Sorter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Paused(sorter, monkeypatch):
        sorter.remove_table(ONE)
        sorter.add_table(ONE, 0)
    assert (sorter.stats().live_blocks, sorter.stats().disk_bytes) == (0, 0)


def test_closing_waits_for_it_and_leaves_nothing(
    sorter: Sorter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closing = threading.Thread(target=sorter.close)
    with Paused(sorter, monkeypatch):
        closing.start()
    closing.join(60)
    assert not closing.is_alive()
    assert not list(tmp_path.glob("*/segments/*"))


def test_damaged_runs_are_told_to_who_fetches_them_and_not_to_who_adds(
    sorter: Sorter, tmp_path: Path
) -> None:
    for ts in range(1, 4):
        add(sorter, ONE, ts)
    (segment,) = tmp_path.glob("*/segments/*")
    data = bytearray(segment.read_bytes())
    data[100] ^= 1
    segment.write_bytes(data)
    for ts in range(4, 20):
        add(sorter, ONE, ts)
        add(sorter, OTHER, ts)
    for span in (ONE, OTHER):
        sorter.resolve(span, 19)
    with pytest.raises(BlockCorruptError, match="table 1"):
        fetched(sorter, ONE, 1, 19)
    assert fetched(sorter, OTHER, 1, 19) == list(range(4, 20))


@pytest.mark.parametrize("call", ["append_run", "replace"])
def test_what_a_full_disk_refuses_is_merged_later(
    sorter: Sorter, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    method: Callable[..., object] = getattr(BlockStore, call)

    def refuse(store: BlockStore, index: TableIndex, new: Any, old: Any, *more: Any) -> object:
        if call == "replace":
            if not old:
                return method(store, index, new, old)
            store.release(new)
        raise SorterDiskError("full")

    with monkeypatch.context() as patch:
        patch.setattr(BlockStore, call, refuse)
        for ts in range(1, 7):
            add(sorter, ONE, ts)
        assert sorter.table_stats(ONE).runs == 6
    add(sorter, ONE, 7)
    assert sorter.table_stats(ONE).runs == 4
    sorter.resolve(ONE, 7)
    assert fetched(sorter, ONE, 1, 7) == list(range(1, 8))


def test_entries_that_only_move_are_counted_once(sorter: Sorter) -> None:
    (store,) = sorter._stores
    for ts in range(1, 4):
        add(sorter, ONE, ts)
    for _ in range(3):
        with sorter._tables[ONE].locked_backlog() as backlog:
            assert backlog is not None
            backlog.move(list(backlog.index.scan(0, 9)))
    assert store._database.live == 3
    add(sorter, ONE, 4)  # four become one
    assert store._database.live == len(store._database.scan(b"", b"")) == 1


def test_a_damaged_index_is_named_and_neither_removing_nor_closing_trips_over_it(
    sorter: Sorter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def torn(*_: object, **__: object) -> None:
        raise CorruptDatabaseError("torn")

    add(sorter, ONE, 1)
    sorter.resolve(ONE, 1)
    with monkeypatch.context() as patch:
        patch.setattr(LevelDB, "write", torn)
        patch.setattr(LevelDB, "scan", torn)
        with pytest.raises(IndexLostError, match="starts again at its checkpoint"):
            add(sorter, ONE, 2)
        with pytest.raises(BlockCorruptError, match="the index of table 1"):
            fetched(sorter, ONE, 1, 1)
        sorter.remove_table(ONE)
        sorter.close()
    Sorter(tmp_path).close()
