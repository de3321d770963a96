"""Blocks of many tables on disk: rows in segments, the index in LevelDB. A cache of the upstream."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa

from sorter import block, metrics, order, shared_block
from sorter.block import BlockMeta
from sorter.database import IndexDatabase
from sorter.errors import SorterDiskError
from sorter.index import Entry, RunEntries, TableIndex, decode_entry, encode_entry
from sorter.recent import RecentBlocks
from sorter.segment import Segment, SegmentLog
from sorter.shared_block import Share
from sorter.stats import Counters
from storage.kv import WriteBatch

_SMALL_SHARE: Final = 8
_RUNS_OF_A_SIZE: Final = 64
_SMALLEST_BLOCK: Final = 3
_SPARSE_SEGMENTS: Final = 4
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
        self.small_bytes = max(block_bytes // _SMALL_SHARE, 1)
        self._numbers = itertools.count(1)
        self._shared = RecentBlocks()
        self._looked_at = 0
        self.counters = counters

    def index(self, unique_id: int, table_id: int, dead_ts: int) -> TableIndex:
        """The index of an incarnation of a table, of which everything up to `dead_ts` is dead."""
        return TableIndex(self._database, unique_id, table_id, dead_ts)

    def spilled_bytes(self, runs: int) -> int:
        """How large the blocks of rows are that are spilled before they are resolved, when there are so many `runs`.

        A fetch has a block or two of each run that overlaps in memory, and one huge transaction comes in as many runs:
        the more there are, the smaller their blocks.
        """
        halved = 1 + min((runs // _RUNS_OF_A_SIZE).bit_length(), _SMALLEST_BLOCK)
        return max(self.block_bytes >> halved, 1)

    def write(self, index: TableIndex, batch: pa.RecordBatch, run: int | None) -> Entry:
        """Write one sorted batch as one block, the next one of `run` or (None) the first of a new one.

        Raises:
            SorterDiskError: the disk does not take it; nothing has changed.
        """
        entry = self.append(index, batch, run)
        self.replace(index, [entry], [])
        return entry

    def append(self, index: TableIndex, batch: pa.RecordBatch, run: int | None) -> Entry:
        """As `write`, but the block is not in the index yet."""
        timestamps = order.commit_ts(batch)
        first, last = int(timestamps[0]), int(timestamps[-1])
        number = next(self._numbers)
        meta = BlockMeta(index.unique_id, index.table_id, number, batch.num_rows, first, last)
        pointer = self._segments.append(*block.encode(meta, batch))
        self.counters.wrote(pointer.length)
        return Entry(meta, pointer, number if run is None else run, pointer.length)

    def write_shared(self, shares: Sequence[Share]) -> list[Entry]:
        """Write rows of several tables as one block, of which each table gets its entry.

        Raises:
            SorterDiskError: the disk does not take it; nothing has changed.
        """
        number = next(self._numbers)
        metas, header, payload = shared_block.encode(number, shares)
        pointer = self._segments.append(header, payload, len(metas))
        self.counters.wrote(pointer.length, len(metas))
        rows, batch = sum(meta.rows for meta in metas), WriteBatch()
        entries = [Entry(meta, pointer, number, pointer.length * meta.rows // rows) for meta in metas]
        for entry in entries:
            batch.put(*encode_entry(entry))
        try:
            self._database.write(batch)
        except SorterDiskError:
            self.release(entries)
            raise
        return entries

    def append_run(
        self, index: TableIndex, batches: Iterable[pa.RecordBatch], run: int, block_bytes: int
    ) -> list[Entry]:
        """Write what comes sorted in `batches` as one run, which is not in the index yet.

        Raises:
            SorterDiskError: the disk does not take it; nothing has changed.
            BlockCorruptError: one of the blocks that `batches` reads is damaged; nothing has changed.
        """
        new: list[Entry] = []
        try:
            new.extend(self.append(index, piece, run) for piece in _regrouped(batches, block_bytes))
        except BaseException:
            self.release(new)
            raise
        return new

    def replace(self, index: TableIndex, new: Sequence[Entry], old: Sequence[Entry]) -> None:
        """Let blocks that were appended be read instead of `old`, which are given up.

        Raises:
            SorterDiskError: there is no room; `new` are given up, nothing else has changed.
        """
        try:
            index.replace(new, old)
        except SorterDiskError:
            self.release(new)
            raise
        self.release(old)

    @property
    def began_segment(self) -> bool:
        """Whether a segment was begun since `sparse` was asked last."""
        return self._segments.created != self._looked_at

    def sparse(self) -> frozenset[int]:
        """Segments of which little is alive, once they are several.

        What is taken again and again from tables that stand still would keep whole segments alive for ever.
        """
        self._looked_at = self._segments.created
        sparse = self._segments.sparse()
        return sparse if len(sparse) >= _SPARSE_SEGMENTS else frozenset()

    def entries_in(self, segments: frozenset[int]) -> Iterator[tuple[int, list[Entry]]]:
        """The blocks of these segments, with the unique id of their table; table by table, as the index is walked.

        Raises:
            CorruptError: the index cannot be read.
        """
        entries = (decode_entry(key, value) for key, value in self._database.walk())
        found = (entry for entry in entries if entry.pointer.segment in segments)
        for unique_id, those in itertools.groupby(found, key=lambda entry: entry.meta.unique_id):
            yield unique_id, list(those)

    def move(self, index: TableIndex, entry: Entry) -> None:
        """Write a block, or a table's share of one, to another segment.

        Raises:
            SorterDiskError: the disk does not take it; nothing has changed.
            BlockCorruptError: it is damaged; nothing has changed.
        """
        header, payload = block.encode(entry.meta, self.reader(entry)())
        pointer = self._segments.append(header, payload)
        self.counters.wrote(pointer.length)
        metrics.MOVED_BYTES.inc(pointer.length)
        self.replace(index, [Entry(entry.meta, pointer, entry.run, pointer.length)], [entry])

    def release(self, entries: Sequence[Entry]) -> None:
        """These blocks are in no index any more."""
        for entry in entries:
            self._segments.release(entry.pointer)
        self.counters.dropped(len(entries))

    def reader(self, entry: Entry) -> Reader:
        """Reads the block's rows; works even after the block has been forgotten."""
        segment = self._segments.segment(entry.pointer.segment)
        return lambda: self._read(segment, entry)

    def readers(self, entries: RunEntries) -> Iterator[Reader]:
        """Reads the blocks of a run, one after another; works even after they have been forgotten."""
        held = {number: self._segments.segment(number) for number in entries.segments}
        return (partial(self._read, held[entry.pointer.segment], entry) for entry in entries)

    def forget(self, index: TableIndex, commit_ts: int) -> None:
        """Give up the table's blocks that have no row above `commit_ts`."""
        for dead in index.delete_up_to(commit_ts):
            self.release(dead)

    def sizes(self) -> tuple[int, int]:
        """(number of segments, their bytes)."""
        return self._segments.sizes()

    def close(self) -> None:
        """Remove the segments and let go of the directory."""
        self._segments.close()
        self._database.close()

    def _read(self, segment: Segment, entry: Entry) -> pa.RecordBatch:
        self.counters.read(entry.meta.rows)
        shared = self._shared.get(entry.pointer)
        if shared is None:
            try:
                data = segment.read(entry.pointer)
            except OSError as err:
                raise block.corrupt(entry.meta, f"it cannot be read: {err.strerror}") from err
            if not block.is_shared(data):
                return block.decode(entry.meta, data)
            shared = shared_block.decode(entry.meta, data)
            self._shared.put(entry.pointer, shared)
        return shared.rows_of(entry.meta)


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
