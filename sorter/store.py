"""Blocks of many tables on disk: rows in segments, the index in LevelDB. A cache of the upstream, wiped at open."""

import itertools
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pyarrow as pa

from sorter import block, order
from sorter.block import BlockMeta
from sorter.index import Entry, TableIndex
from sorter.segment import Segment, SegmentLog
from sorter.stats import Counters
from storage.leveldb import CorruptDatabaseError, LevelDB

_SPILLED_SHARE: Final = 8
Reader = Callable[[], pa.RecordBatch]


class BlockStore:
    """Writes, finds and forgets blocks; safe to call from several threads, one at a time per table."""

    def __init__(self, directory: Path, *, segment_bytes: int, block_bytes: int, counters: Counters) -> None:
        """Take the directory and forget what an earlier process left there.

        Raises:
            DirectoryLockedError: another process uses it; its files are left alone.
            DirectoryUnusableError: it cannot be created or written.
        """
        self._kv = _open_empty(directory / "index")
        self._segments = SegmentLog(directory / "segments", segment_bytes)
        self._block_bytes = block_bytes
        self._numbers = itertools.count(1)
        self._counters = counters

    def index(self, unique_id: int, table_id: int) -> TableIndex:
        """The index of a new incarnation of a table."""
        return TableIndex(self._kv, unique_id, table_id)

    def pieces(self, batch: pa.RecordBatch, *, spilled: bool) -> list[pa.RecordBatch]:
        """A sorted batch in slices of about one block each.

        Rows that are spilled before they are resolved get smaller blocks: a fetch has one block of each run that
        overlaps in memory, and one huge transaction comes in as many runs.
        """
        block_bytes = self._block_bytes // _SPILLED_SHARE if spilled else self._block_bytes
        count = max(min(batch.nbytes // max(block_bytes, 1), batch.num_rows), 1)
        rows = -(-batch.num_rows // count)
        return [batch.slice(first, rows) for first in range(0, batch.num_rows, rows)]

    def write(self, index: TableIndex, batch: pa.RecordBatch, run: int | None) -> int:
        """Write one sorted batch as one block, the next one of `run` or (None) the first of a new one; returns the run.

        Raises:
            SorterDiskError: the disk does not take it; nothing has changed.
        """
        timestamps = order.commit_ts(batch)
        first, last = int(timestamps[0]), int(timestamps[-1])
        number = next(self._numbers)
        meta = BlockMeta(index.unique_id, index.table_id, number, batch.num_rows, first, last)
        pointer = self._segments.append(*block.encode(meta, batch))
        entry = Entry(meta, pointer, number if run is None else run)
        index.put(entry)
        self._counters.wrote(pointer.length)
        return entry.run

    def reader(self, entry: Entry) -> Reader:
        """Reads the block's rows; works even after the block has been forgotten."""
        segment = self._segments.segment(entry.pointer.segment)
        return lambda: self._read(segment, entry)

    def forget(self, index: TableIndex, commit_ts: int) -> None:
        """Give up the table's blocks that have no row above `commit_ts`."""
        dead = index.delete_up_to(commit_ts)
        for entry in dead:
            self._segments.release(entry.pointer.segment)
        self._counters.dropped(len(dead))

    def sizes(self) -> tuple[int, int]:
        """(number of segments, their bytes)."""
        return self._segments.sizes()

    def close(self) -> None:
        """Remove the segments and let go of the directory."""
        self._segments.close()
        self._kv.close()

    def _read(self, segment: Segment, entry: Entry) -> pa.RecordBatch:
        self._counters.read()
        return block.decode(entry.meta, segment.read(entry.pointer))


def open_shards(
    directory: Path, count: int, *, segment_bytes: int, block_bytes: int, counters: Counters
) -> list[BlockStore]:
    """`count` stores in directories of their own; a directory of an earlier process with more of them is removed.

    Raises:
        DirectoryLockedError, DirectoryUnusableError: as `BlockStore`; none of them stays open.
    """
    names = [f"{number:02d}" for number in range(count)]
    with ExitStack() as opened:
        stores = []
        for name in names:
            store = BlockStore(
                directory / name, segment_bytes=segment_bytes, block_bytes=block_bytes, counters=counters
            )
            opened.callback(store.close)
            stores.append(store)
        opened.pop_all()
    for leftover in directory.glob("[0-9][0-9]"):
        if leftover.name not in names:
            shutil.rmtree(leftover)
    return stores


def _open_empty(directory: Path) -> LevelDB:
    try:
        kv = LevelDB(directory)
    except CorruptDatabaseError:
        # A damaged cache is worth nothing; LevelDB's lock, taken before it looks at the files, shows it is ours.
        shutil.rmtree(directory)
        kv = LevelDB(directory)
    kv.delete_range(b"", b"")
    return kv
