"""A block with the rows of many small tables, and a directory that tells which are whose. Pure; docs/format/sorter.md.

A table of twenty rows would pay for a header, a message and a write of its own; here some thirty tables pay together.
Each table's rows stand together, sorted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sorter import block, order
from sorter.block import ALIGNMENT, SHARED, BlockMeta

_PLACE = np.dtype([("unique_id", "<u8"), ("table_id", "<i8"), ("first", "<u4"), ("rows", "<u4")])


@dataclass(frozen=True, slots=True)
class Share:
    """The unsorted rows of one table, in the order of their arrival."""

    unique_id: int
    table_id: int
    batches: Sequence[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """A block that was read and found whole."""

    number: int
    places: Any
    batch: pa.RecordBatch

    def rows_of(self, meta: BlockMeta) -> pa.RecordBatch:
        """The rows that the index entry with `meta` stands for, sorted.

        Raises:
            BlockCorruptError: they are not there.
        """
        at = int(np.searchsorted(self.places["unique_id"], np.uint64(meta.unique_id)))
        if at < len(self.places) and meta.number == self.number:
            place = self.places[at]
            rows = self.batch.slice(int(place["first"]), int(place["rows"]))
            low, high = (int(order.commit_ts(rows)[row]) for row in (0, -1))
            found = BlockMeta(int(place["unique_id"]), int(place["table_id"]), self.number, rows.num_rows, low, high)
            if found == meta:
                return rows
        raise block.corrupt(meta, f"the index points to block {self.number}, which has no such rows of this table")


def encode(number: int, shares: Sequence[Share]) -> tuple[list[BlockMeta], bytes, pa.Buffer]:
    """What the index has to know of each table, header with directory, and payload; unique ids ascend."""
    counts = [sum(batch.num_rows for batch in share.batches) for share in shares]
    rows = _sorted(pa.concat_batches([batch for share in shares for batch in share.batches]), np.asarray(counts))
    timestamps = order.commit_ts(rows)
    places, metas, first = np.zeros(len(shares), _PLACE), [], 0
    for at, (share, count) in enumerate(zip(shares, counts, strict=True)):
        places[at] = share.unique_id, share.table_id, first, count
        low, high = int(timestamps[first]), int(timestamps[first + count - 1])
        metas.append(BlockMeta(share.unique_id, share.table_id, number, count, low, high))
        first += count
    whole = BlockMeta(0, len(shares), number, first, int(timestamps.min()), int(timestamps.max()))
    directory = places.tobytes()
    header, payload = block.encode(whole, rows, directory + bytes(-len(directory) % ALIGNMENT), SHARED)
    return metas, header, payload


def decode(meta: BlockMeta, data: pa.Buffer) -> SharedBlock:
    """The block that an index entry with `meta` points to.

    Raises:
        BlockCorruptError: it is not whole, or another one.
    """
    opened = block.open_block(meta, data)
    tables, room = opened.meta.table_id, opened.rest.size - opened.payload_bytes
    if not opened.flags & SHARED or not 0 < tables * _PLACE.itemsize <= room:
        raise block.corrupt(meta, "it has no directory of tables")
    places = np.frombuffer(opened.rest, _PLACE, tables)
    return SharedBlock(opened.meta.number, places, opened.rows(meta))


def _sorted(rows: pa.RecordBatch, counts: Any) -> pa.RecordBatch:
    """Sort the rows of each table; copies of a row stay, in the order of their arrival."""
    table, timestamps = np.repeat(np.arange(len(counts), dtype=np.uint32), counts), order.commit_ts(rows)
    by_ts = np.lexsort((timestamps, table))
    there, ts = table[by_ts], timestamps[by_ts]
    if ((there[1:] == there[:-1]) & (ts[1:] == ts[:-1])).any():
        keyed = rows.add_column(0, "table", pa.array(table))
        by_ts = pc.sort_indices(keyed, sort_keys=[("table", "ascending"), *order.SORT_KEYS]).to_numpy()
    return rows.take(pa.array(by_ts))
