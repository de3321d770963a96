"""What rows were at a cut, of those that the log changed after it: the before-image of each key's first change.

A row that the log does not change between the cut and a later look at the table is at the cut what it is at the look;
one that it does change was at the cut what its first change found. So the two together are the table at the cut,
whoever writes meanwhile. Invariant: of a key only the first change is kept, so memory goes with the keys that changed.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from server.puller.tikv.open_transactions import OpenTransactions
from server.verify.errors import VerifyHistoryError
from storage.model.event import RAW_SCHEMA
from storage.model.span import Span

BYTES_MAX: Final = 512 << 20
_FOLD_BYTES: Final = 32 << 20
_SCHEMA: Final = pa.schema([RAW_SCHEMA.field(name) for name in ("key", "old_value")])


class Changed:
    """A set of keys that is asked about one piece of a table after the other.

    Only what lies between a piece's least and greatest key is hashed: of a table that is read in the order of its key
    that is as much as the piece has, not every key that has changed.
    """

    def __init__(self, keys: pa.Array) -> None:
        self._keys = pc.unique(keys).sort()

    def holds(self, keys: pa.Array) -> pa.Array:
        """For each key whether it is one of the set."""
        if not len(keys):
            return pa.array([], pa.bool_())
        ends = pc.min_max(keys)
        begin = bisect_left(self._keys, ends["min"].as_py(), key=_bytes)
        end = bisect_right(self._keys, ends["max"].as_py(), begin, key=_bytes)
        return pc.is_in(keys, value_set=self._keys[begin:end])


class Before:
    """Implements `server.puller.source.Rows`: takes the changes above each table's cut, in the order of the log."""

    def __init__(self, cuts: Mapping[int, int], bytes_max: int = BYTES_MAX) -> None:
        """`cuts` are the tables' ts by id; changes of other tables are passed over."""
        self._cuts = cuts
        self._bytes_max = bytes_max
        self._bytes = 0
        self._folded_bytes = 0
        self._parts: dict[int, list[pa.RecordBatch]] = {table_id: [] for table_id in cuts}

    @property
    def executor(self) -> Executor:
        """Threads of its own: nobody asks for them here."""
        return ThreadPoolExecutor(1)

    @property
    def open_transactions(self) -> OpenTransactions:
        """All in memory: logs have none of them."""
        return OpenTransactions()

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """Take changes of RAW_SCHEMA.

        Raises:
            VerifyHistoryError: more rows have changed than fit into memory.
        """
        parts = self._parts.get(span.table_id)
        if parts is None:
            return
        late = pc.greater(batch["commit_ts"], pa.scalar(self._cuts[span.table_id], pa.uint64()))
        part = batch.select(_SCHEMA.names).filter(late)
        if part.num_rows:
            parts.append(part)
            self._bytes += part.nbytes
        if self._bytes > self._folded_bytes + _FOLD_BYTES:
            self._fold()

    def resolve(self, span: Span, ts: int) -> None:
        """Nothing: a log is read up to a place, not up to a ts."""

    def changed(self, table_id: int) -> Changed:
        """The canonical keys that changed after the cut."""
        return Changed(_joined(self._parts[table_id])["key"].combine_chunks())

    def rows(self, table_id: int) -> pa.RecordBatch:
        """`key` and `old_value` of the rows that were there at the cut, and changed after it."""
        first = _first(_joined(self._parts[table_id]))
        return first.filter(first["old_value"].is_valid())

    def _fold(self) -> None:
        self._parts = {table_id: [_first(_joined(parts))] for table_id, parts in self._parts.items()}
        self._bytes = self._folded_bytes = sum(part.nbytes for (part,) in self._parts.values())
        if self._bytes > self._bytes_max:
            raise VerifyHistoryError(
                f"more than {self._bytes_max >> 20} MiB of rows have changed since the cut: verify the newest cut, or "
                "table by table (--table)"
            )


def _bytes(key: pa.Scalar) -> bytes:
    return bytes(key.as_py())


def _joined(parts: list[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(parts, _SCHEMA)


def _first(changes: pa.Table) -> pa.RecordBatch:
    """The first change of each key, in order."""
    codes = changes["key"].combine_chunks().dictionary_encode().indices
    _, places = np.unique(np.asarray(codes), return_index=True)
    first = changes.take(pa.array(np.sort(places)))
    return pa.RecordBatch.from_arrays([column.combine_chunks() for column in first.columns], schema=_SCHEMA)
