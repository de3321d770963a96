"""Blocks of many tables on disk: rows in segments, their index in LevelDB. A cache of the upstream.

`BlockStore` is one directory of segments and one index. A sorter has a few of them and deals its
tables to them (`shard_of`), so that one slow write to a disk stops only some of the tables. A block
is first appended to a segment and then put into the index; it is dead once it is in no index, and
its segment is unlinked once all its blocks are dead.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import google_crc32c
import pyarrow as pa

from sorter import block, order
from sorter.block import BlockMeta, Share, SharedBlock
from sorter.errors import SorterDiskError
from sorter.index import Entry, IndexDatabase, RunEntries, TableIndex, decode_entry, encode_entry
from sorter.segment import Pointer, Segment, SegmentLog
from sorter.stats import Counters
from storage.codec import encode_i64
from storage.kv import WriteBatch
from storage.model.span import Span
from storage.spill_codec import PLAIN, SpillCodec, SpillDamagedError

Reader = Callable[[], pa.RecordBatch]
"""Reads the rows of one block."""

# a resolved run below this share of a block is merged with others
_SMALL_SHARE: Final = 8
_RUNS_OF_A_SIZE: Final = 64
_MOST_HALVINGS: Final = 3
_SPARSE_SEGMENTS: Final = 4
_CACHED_BLOCKS: Final = 8


class BlockStore:
    """Writes, finds and deletes blocks; safe to call from several threads,
    one at a time per table.
    """

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int,
        block_bytes: int,
        counters: Counters,
        codec: SpillCodec = PLAIN,
    ) -> None:
        """Create the files in `directory`, which does not exist yet; `codec` says how blocks lie
        in them.

        Raises:
            DirectoryUnusableError: it cannot be created or written.
        """
        self._database = IndexDatabase(directory / "index")
        self._segments = SegmentLog(directory / "segments", segment_bytes)
        self.block_bytes = block_bytes
        self.small_bytes = max(block_bytes // _SMALL_SHARE, 1)
        self._numbers = itertools.count(1)
        self._shared_blocks = _SharedBlockCache()
        self._segments_checked = 0
        self._codec = codec
        self.counters = counters

    def index(self, unique_id: int, table_id: int, dead_ts: int) -> TableIndex:
        """The index of an incarnation of a table, of which everything up to `dead_ts` is dead."""
        return TableIndex(self._database, unique_id, table_id, dead_ts)

    def spilled_bytes(self, runs: int) -> int:
        """The size of blocks of rows that are spilled before they are resolved,
        when there are so many `runs`.

        A fetch has a block or two of each overlapping run in memory, and one huge transaction comes
        in many runs: the more there are, the smaller their blocks.
        """
        halvings = 1 + min((runs // _RUNS_OF_A_SIZE).bit_length(), _MOST_HALVINGS)
        return max(self.block_bytes >> halvings, 1)

    def write(self, index: TableIndex, batch: pa.RecordBatch, run: int | None) -> Entry:
        """Write one sorted batch as one block, the next one of `run` or (None) the first of a new
        one.

        Raises:
            SorterDiskError: the disk does not take it; nothing has changed.
        """
        entry = self.append(index, batch, run)
        self.replace(index, [entry], [])
        return entry

    def append(self, index: TableIndex, batch: pa.RecordBatch, run: int | None) -> Entry:
        """Write a block as `write` does, but leave it out of the index."""
        timestamps = order.commit_ts(batch)
        first, last = int(timestamps[0]), int(timestamps[-1])
        number = next(self._numbers)
        meta = BlockMeta(index.unique_id, index.table_id, number, batch.num_rows, first, last)
        pointer, size = self._append(*block.encode(meta, batch))
        return Entry(meta, pointer, number if run is None else run, size)

    def write_shared(self, shares: Sequence[Share]) -> list[Entry]:
        """Write rows of several tables as one block, and an index entry for each table.

        Raises:
            SorterDiskError: the disk does not take it; nothing has changed.
        """
        number = next(self._numbers)
        metas, header, payload = block.encode_shared(number, shares)
        pointer, size = self._append(header, payload, len(metas))
        rows, batch = sum(meta.rows for meta in metas), WriteBatch()
        entries = [Entry(meta, pointer, number, size * meta.rows // rows) for meta in metas]
        for entry in entries:
            batch.put(*encode_entry(entry))
        try:
            self._database.write(batch)
        except SorterDiskError:
            # Blocks without an index entry are never read or deleted: their space must be given
            # back here.
            self.release(entries)
            raise
        return entries

    def append_run(
        self, index: TableIndex, batches: Iterable[pa.RecordBatch], run: int, block_bytes: int
    ) -> list[Entry]:
        """Write the sorted `batches` as one run, which is not in the index yet.

        Raises:
            SorterDiskError: the disk does not take it; nothing has changed.
            BlockCorruptError: one of the blocks that `batches` reads is damaged; nothing has
                changed.
        """
        new: list[Entry] = []
        try:
            new.extend(self.append(index, piece, run) for piece in _regroup(batches, block_bytes))
        except BaseException:
            # Whatever ended it: blocks that are in no index would keep their segments for ever.
            self.release(new)
            raise
        return new

    def replace(self, index: TableIndex, new: Sequence[Entry], old: Sequence[Entry]) -> None:
        """Put blocks that were appended into the index, in the place of `old`,
        whose space is released.

        Raises:
            SorterDiskError: there is no room; `new` are released, nothing else has changed.
        """
        try:
            index.replace(new, old)
        except SorterDiskError:
            self.release(new)
            raise
        # After the index has let go of them: until then, a lookup may lead there.
        self.release(old)

    @property
    def began_segment(self) -> bool:
        """Whether a segment was begun since the last call of `sparse`."""
        return self._segments.created != self._segments_checked

    def sparse(self) -> frozenset[int]:
        """Segments of which little is alive, once there are several.

        Without compaction, a few blocks of tables that are not read would keep whole segments alive
        for ever.
        """
        self._segments_checked = self._segments.created
        sparse = self._segments.sparse()
        return sparse if len(sparse) >= _SPARSE_SEGMENTS else frozenset()

    def entries_in(self, segments: frozenset[int]) -> Iterator[tuple[int, list[Entry]]]:
        """The blocks of these segments, with the unique id of their table; table by table,
        as the index is walked.

        Raises:
            CorruptError: the index cannot be read.
        """
        entries = (decode_entry(key, value) for key, value in self._database.walk())
        inside = (entry for entry in entries if entry.pointer.segment in segments)
        for unique_id, of_table in itertools.groupby(
            inside, key=lambda entry: entry.meta.unique_id
        ):
            yield unique_id, list(of_table)

    def move(self, index: TableIndex, entry: Entry) -> None:
        """Write a block, or a table's share of one, to another segment.

        Raises:
            SorterDiskError: the disk does not take it; nothing has changed.
            BlockCorruptError: it is damaged; nothing has changed.
        """
        header, payload = block.encode(entry.meta, self.reader(entry)())
        pointer, size = self._append(header, payload)
        self.counters.add_moved_bytes(pointer.length)
        self.replace(index, [Entry(entry.meta, pointer, entry.run, size)], [entry])

    def release(self, entries: Sequence[Entry]) -> None:
        """Release the space of blocks that are in no index any more."""
        for entry in entries:
            self._segments.release(entry.pointer)
        self.counters.remove_blocks(len(entries))

    def reader(self, entry: Entry) -> Reader:
        """A reader of the block's rows; it works even after the block was deleted."""
        # The segment object holds the open file: unlinked or not, it can be read until this reader
        # is gone.
        segment = self._segments.segment(entry.pointer.segment)
        return lambda: self._read(segment, entry)

    def readers(self, entries: RunEntries) -> Iterator[Reader]:
        """Readers of the blocks of a run, in order; they work even after the blocks were
        deleted.
        """
        # Taken now, not when a block is read: the segments stay readable while this reader goes on,
        # though cleaning unlinks them.
        segments = {number: self._segments.segment(number) for number in entries.segments}
        return (partial(self._read, segments[entry.pointer.segment], entry) for entry in entries)

    def delete_up_to(self, index: TableIndex, commit_ts: int) -> None:
        """Delete the table's blocks that have no row above `commit_ts`."""
        for dead in index.delete_up_to(commit_ts):
            self.release(dead)

    def sizes(self) -> tuple[int, int]:
        """(number of segments, their bytes)."""
        return self._segments.sizes()

    def close(self) -> None:
        """Remove the segments and close the index."""
        self._segments.close()
        self._database.close()

    def _append(self, header: bytes, payload: pa.Buffer, tables: int = 1) -> tuple[Pointer, int]:
        """Write a block of so many tables; returns its place, and its bytes in memory.

        Raises:
            SorterDiskError: the disk does not take it.
        """
        size = len(header) + payload.size
        if not self._codec.is_plain:
            stored = self._codec.encode(header + payload.to_pybytes())
            header, payload = b"", pa.py_buffer(stored)
        pointer = self._segments.append(header, payload, tables)
        self.counters.add_written_block(pointer.length, tables)
        return pointer, size

    def _stored(self, segment: Segment, entry: Entry) -> pa.Buffer:
        """The bytes of a block, as `block` encoded them, if the disk is whole.

        Raises:
            BlockCorruptError: they cannot be read, or not decoded.
        """
        try:
            data = segment.read(entry.pointer)
            return data if self._codec.is_plain else self._codec.decode(data.to_pybytes())
        except OSError as err:
            raise block.corrupt(entry.meta, f"it cannot be read: {err.strerror}") from err
        except SpillDamagedError as err:
            raise block.corrupt(entry.meta, err.message) from err

    def _read(self, segment: Segment, entry: Entry) -> pa.RecordBatch:
        self.counters.add_read_block(entry.meta.rows)
        shared = self._shared_blocks.get(entry.pointer)
        if shared is None:
            data = self._stored(segment, entry)
            if not block.is_shared(data):
                return block.decode(entry.meta, data)
            shared = block.decode_shared(entry.meta, data)
            self._shared_blocks.put(entry.pointer, shared)
        return shared.rows_of(entry.meta)


def open_shards(
    directory: Path,
    count: int,
    *,
    segment_bytes: int,
    block_bytes: int,
    counters: Counters,
    codec: SpillCodec = PLAIN,
) -> list[BlockStore]:
    """`count` stores in directories of their own, which do not exist yet.

    Raises:
        DirectoryUnusableError: as `BlockStore`; none of them stays open.
    """
    with ExitStack() as undo:
        stores = []
        for number in range(count):
            store = BlockStore(
                directory / f"{number:02d}",
                segment_bytes=segment_bytes,
                block_bytes=block_bytes,
                counters=counters,
                codec=codec,
            )
            undo.callback(store.close)
            stores.append(store)
        undo.pop_all()
    return stores


def shard_of(span: Span, count: int) -> int:
    """The number of the store that a span belongs to, in `[0, count)`;
    spans of one table may have different ones.

    Source: TiCDC's `getDB`, which hashes the table id and the start of the span.
    """
    digest: int = google_crc32c.extend(
        google_crc32c.value(encode_i64(span.table_id)), span.start_key
    )
    return digest % count


class _SharedBlockCache:
    """The shared blocks that were read last: tables of one block are often fetched one after
    another. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[Pointer, SharedBlock] = OrderedDict()

    def get(self, pointer: Pointer) -> SharedBlock | None:
        """The block, if it is cached."""
        # Most sorters never read a shared block, and need no lock for each block then.
        if not self._blocks:
            return None
        with self._lock:
            cached = self._blocks.get(pointer)
            if cached is not None:
                self._blocks.move_to_end(pointer)
            return cached

    def put(self, pointer: Pointer, block_read: SharedBlock) -> None:
        """Cache a block; the one used least recently makes room."""
        with self._lock:
            self._blocks[pointer] = block_read
            while len(self._blocks) > _CACHED_BLOCKS:
                self._blocks.popitem(last=False)


def _regroup(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """A sorted stream in pieces of about `size` bytes; all copies of a row,
    which one batch has, stay in one piece.
    """
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
        # The piece goes on to the last copy of its last row: in one run, copies stand in one block.
        last = order.row_key(rows, min(first + step, rows.num_rows) - 1)
        end = order.count_up_to(rows, last)
        yield rows.slice(first, end - first)
        first = end
