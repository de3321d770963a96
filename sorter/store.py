"""Blocks of many tables on disk: rows in segments, the index in LevelDB. A cache of the upstream."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pyarrow as pa

from sorter import block, order
from sorter.block import BlockMeta
from sorter.database import IndexDatabase
from sorter.errors import SorterDiskError
from sorter.index import Entry, TableIndex
from sorter.segment import Segment, SegmentLog
from sorter.stats import Counters

_SPILLED_SHARE: Final = 8
Reader = Callable[[], pa.RecordBatch]


class BlockStore:
    """Writes, finds and forgets blocks; safe to call from several threads, one at a time per table."""

    def __init__(self, directory: Path, *, segment_bytes: int, block_bytes: int, counters: Counters) -> None:
        """Begin with nothing in `directory`, which does not exist yet.

        Raises:
            DirectoryUnusableError: it cannot be created or written.
        """
        self._database = IndexDatabase(directory / "index")
        self._segments = SegmentLog(directory / "segments", segment_bytes)
        self.block_bytes = block_bytes
        self.small_bytes = max(block_bytes // _SPILLED_SHARE, 1)
        self._numbers = itertools.count(1)
        self._counters = counters

    def index(self, unique_id: int, table_id: int) -> TableIndex:
        """The index of a new incarnation of a table."""
        return TableIndex(self._database, unique_id, table_id)

    def pieces(self, batch: pa.RecordBatch, *, spilled: bool) -> list[pa.RecordBatch]:
        """A sorted batch in slices of about one block each.

        Rows that are spilled before they are resolved get smaller blocks: a fetch has one block of each run that
        overlaps in memory, and one huge transaction comes in as many runs.
        """
        block_bytes = self.small_bytes if spilled else max(self.block_bytes, 1)
        count = max(min(batch.nbytes // block_bytes, batch.num_rows), 1)
        rows = -(-batch.num_rows // count)
        return [batch.slice(first, rows) for first in range(0, batch.num_rows, rows)]

    def write(self, index: TableIndex, batch: pa.RecordBatch, run: int | None) -> int:
        """Write one sorted batch as one block, the next one of `run` or (None) the first of a new one; returns the run.

        Raises:
            SorterDiskError: the disk does not take it; nothing has changed.
        """
        entry = self.append(index, batch, run)
        try:
            index.replace([entry], [])
        except SorterDiskError:
            self.release([entry])
            raise
        return entry.run

    def append(self, index: TableIndex, batch: pa.RecordBatch, run: int | None) -> Entry:
        """As `write`, but the block is not in the index yet."""
        timestamps = order.commit_ts(batch)
        first, last = int(timestamps[0]), int(timestamps[-1])
        number = next(self._numbers)
        meta = BlockMeta(index.unique_id, index.table_id, number, batch.num_rows, first, last)
        pointer = self._segments.append(*block.encode(meta, batch))
        self._counters.wrote(pointer.length)
        return Entry(meta, pointer, number if run is None else run)

    def rewrite(self, index: TableIndex, old: Sequence[Entry], batches: Iterable[pa.RecordBatch], run: int) -> None:
        """Write the rows of `old`, which come sorted in `batches`, as one run, and give up `old`.

        Raises:
            SorterDiskError: the disk does not take them; nothing has changed.
            BlockCorruptError: one of `old` is damaged; nothing has changed.
        """
        new: list[Entry] = []
        try:
            pieces = _regrouped(batches, self.small_bytes)
            new.extend(self.append(index, piece, run) for piece in pieces)
            index.replace(new, old)
        except BaseException:
            self.release(new)
            raise
        self.release(old)

    def release(self, entries: Sequence[Entry]) -> None:
        """These blocks are in no index any more."""
        for entry in entries:
            self._segments.release(entry.pointer.segment)
        self._counters.dropped(len(entries))

    def reader(self, entry: Entry) -> Reader:
        """Reads the block's rows; works even after the block has been forgotten."""
        segment = self._segments.segment(entry.pointer.segment)
        return lambda: self._read(segment, entry)

    def forget(self, index: TableIndex, commit_ts: int) -> None:
        """Give up the table's blocks that have no row above `commit_ts`."""
        self.release(index.delete_up_to(commit_ts))

    def sizes(self) -> tuple[int, int]:
        """(number of segments, their bytes)."""
        return self._segments.sizes()

    def close(self) -> None:
        """Remove the segments and let go of the directory."""
        self._segments.close()
        self._database.close()

    def _read(self, segment: Segment, entry: Entry) -> pa.RecordBatch:
        self._counters.read(entry.meta.rows)
        try:
            return block.decode(entry.meta, segment.read(entry.pointer))
        except OSError as err:
            raise block.corrupt(entry.meta, f"it cannot be read: {err.strerror}") from err


def open_shards(
    directory: Path, count: int, *, segment_bytes: int, block_bytes: int, counters: Counters
) -> list[BlockStore]:
    """`count` stores in directories of their own, which do not exist yet.

    Raises:
        DirectoryUnusableError: as `BlockStore`; none of them stays open.
    """
    with ExitStack() as opened:
        stores = []
        for number in range(count):
            store = BlockStore(
                directory / f"{number:02d}", segment_bytes=segment_bytes, block_bytes=block_bytes, counters=counters
            )
            opened.callback(store.close)
            stores.append(store)
        opened.pop_all()
    return stores


def _regrouped(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """A sorted stream, each batch with all copies of its rows, in pieces of about `size` bytes that keep them too."""
    rest: list[pa.RecordBatch] = []
    for batch in batches:
        rest.append(batch)
        if sum(part.nbytes for part in rest) >= size:
            yield from _cut(pa.concat_batches(rest), size)
            rest = []
    if rest:
        yield from _cut(pa.concat_batches(rest), size)


def _cut(rows: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    step, first = max(rows.num_rows * size // rows.nbytes, 1), 0
    while first < rows.num_rows:
        last = order.row_key(rows, min(first + step, rows.num_rows) - 1)
        end = order.count_up_to(rows, last)
        yield rows.slice(first, end - first)
        first = end
