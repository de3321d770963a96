"""Binlog mutations: what transactions did to the rows of one table,
turned into the changes the store would tell. Pure.

A TableMutation lists a transaction's statements row by row, in old datum encoding:

    inserted  the handle, then pairs of column id and value
    updated   the pairs of the old row, then of the new one
    deleted   the pairs of the old row
    sequence  which of the three lists comes next

Invariants:
1. A transaction tells one change for each record key, as the store does: an insert that it deleted
   again is nothing.
2. Keys are those of the store, but for two kinds: rows of a partition stand under the table's id (a
   binlog does not name the partition), and characters in a clustered key stand for themselves, not
   as their collation's sort key.
3. A row value names all columns, also those that the key tells; a mounter reads it first.

Source: tipb binlog.proto, TiDB table/tables (binlog), the vectors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.model.errors import CorruptError
from storage.model.event import DELETE, INSERT, RAW_SCHEMA, UPDATE
from storage.tidb.binary import BinaryColumn, Offsets
from storage.tidb.datum import Datums, decode_datums, encode_key_datum
from storage.tidb.record import record_keys, record_prefix
from storage.tidb.row import Pairs, binary_column, encode_rows
from storage.tidb.row_layout import RowBlock
from storage.tidb.schema import TableInfo

INSERTED: Final = 0  # binlog.MutationType
UPDATED: Final = 1
DELETED: Final = 4
ROW_ID: Final = -1
"""The column id of `_tidb_rowid`, which binlogs of tables without clustered key have."""
_RUN_ROWS: Final = 8192
_Numbers = npt.NDArray[np.int64]


class MutationError(CorruptError):
    """A mutation cannot be read; going on would lose its rows."""

    code = "ErrBinlogMutation"


@dataclass(slots=True)
class _Rows:
    """Rows of one kind: their bytes, the transaction and the place among all mutations of each."""

    raw: list[bytes] = field(default_factory=list)
    txn: list[int] = field(default_factory=list)
    place: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Events:
    """Changes of records: `old` is null where there was none, `new` where there is none."""

    key: pa.Array
    old: pa.Array
    new: pa.Array
    txn: _Numbers
    place: _Numbers


class TableMutations:
    """Gathers the mutations of one table, transaction by transaction,
    and makes one batch of them.
    """

    def __init__(self, table: TableInfo) -> None:
        self._table = table
        self._commit_ts: list[int] = []
        self._start_ts: list[int] = []
        self._rows = {kind: _Rows() for kind in (INSERTED, UPDATED, DELETED)}
        self._places = 0
        self.size_bytes = 0

    def add(
        self,
        commit_ts: int,
        start_ts: int,
        *,
        inserted: Sequence[bytes],
        updated: Sequence[bytes],
        deleted: Sequence[bytes],
        sequence: Sequence[int],
    ) -> None:
        """Take one transaction's mutation of the table.

        Raises:
            MutationError: `sequence` does not tell the order of exactly these rows.
        """
        given = {INSERTED: inserted, UPDATED: updated, DELETED: deleted}
        for kind, raw in given.items():
            if sequence.count(kind) != len(raw):
                raise MutationError(
                    f"table {self._table.id}, commit_ts {commit_ts}: {len(raw)} rows of kind "
                    f"{kind}, but their sequence tells of {sequence.count(kind)}"
                )
            if not raw:
                continue
            rows = self._rows[kind]
            rows.raw += raw
            rows.place += [
                self._places + place for place, row_kind in enumerate(sequence) if row_kind == kind
            ]
            rows.txn += [len(self._commit_ts)] * len(raw)
            self.size_bytes += sum(map(len, raw))
        if sum(map(len, given.values())) != len(sequence):
            raise MutationError(
                f"table {self._table.id}, commit_ts {commit_ts}: rows of a kind that no TiDB writes"
            )
        self._places += len(sequence)
        self._commit_ts.append(commit_ts)
        self._start_ts.append(start_ts)

    def to_batch(self) -> pa.RecordBatch:
        """All changes, as a batch of RAW_SCHEMA.

        Raises:
            MutationError: a row is not of this table, or is damaged.
        """
        readers = ((INSERTED, self._inserted), (UPDATED, self._updated), (DELETED, self._deleted))
        parts = [part for kind, read in readers for part in self._read(self._rows[kind], read)]
        events = _folded(_joined(parts))
        has_old, has_new = (np.asarray(image.is_valid()) for image in (events.old, events.new))
        op = np.where(has_old & has_new, UPDATE, np.where(has_new, INSERT, DELETE)).astype(np.uint8)
        commit_ts, start_ts = (
            np.array(values, np.uint64)[events.txn] for values in (self._commit_ts, self._start_ts)
        )
        columns = [
            pa.array(commit_ts),
            pa.array(start_ts),
            pa.array(op),
            events.key,
            events.new,
            events.old,
        ]
        return pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)

    def _read(
        self, rows: _Rows, read: Callable[[BinaryColumn, _Numbers, _Numbers], Sequence[_Events]]
    ) -> Iterator[_Events]:
        for begin in range(0, len(rows.raw), _RUN_ROWS):
            run = slice(begin, begin + _RUN_ROWS)
            txn, place = np.array(rows.txn[run], np.int64), np.array(rows.place[run], np.int64)
            try:
                yield from read(binary_column(rows.raw[run]), txn, place)
            except MutationError:
                raise
            except CorruptError as err:
                first, last = self._commit_ts[int(txn[0])], self._commit_ts[int(txn[-1])]
                raise MutationError(
                    f"table {self._table.id} ({self._table.name}), commit_ts {first} to {last}: "
                    f"{err.message}"
                ) from err

    def _inserted(self, column: BinaryColumn, txn: _Numbers, place: _Numbers) -> Sequence[_Events]:
        columns = self._table.common_handle_columns
        handle, at = self._handle(column)
        pairs = Pairs.scan(
            column, at, {each.id: datums for each, datums in zip(columns, handle, strict=False)}
        )
        rows = self._encoded(pairs)
        keys = self._common_keys(rows) if columns else record_keys(self._table.id, handle[0].number)
        return (_Events(keys, _nulls(len(rows)), rows, txn, place),)

    def _deleted(self, column: BinaryColumn, txn: _Numbers, place: _Numbers) -> Sequence[_Events]:
        pairs = Pairs.scan(column)
        rows = self._encoded(pairs)
        return (_Events(self._keys(pairs, rows), rows, _nulls(len(rows)), txn, place),)

    def _updated(self, column: BinaryColumn, txn: _Numbers, place: _Numbers) -> Sequence[_Events]:
        """Updates of a record, and where the record key changes a delete and an insert."""
        both = Pairs.scan(column).old_and_new()
        old, new = (self._encoded(pairs) for pairs in both)
        old_key, new_key = (
            self._keys(pairs, rows) for pairs, rows in zip(both, (old, new), strict=True)
        )
        moved = np.asarray(pc.not_equal(old_key, new_key))
        if not bool(moved.any()):
            return (_Events(new_key, old, new, txn, place),)
        at, stays = np.flatnonzero(moved), np.flatnonzero(~moved)
        none = _nulls(len(at))
        return (
            _Events(
                new_key.take(stays), old.take(stays), new.take(stays), txn[stays], place[stays]
            ),
            _Events(old_key.take(at), old.take(at), none, txn[at], place[at]),
            _Events(new_key.take(at), none, new.take(at), txn[at], place[at]),
        )

    def _encoded(self, pairs: Pairs) -> pa.Array:
        """The rows' values as the store has them: without what the record key tells."""
        handle = self._table.handle_column
        return encode_rows(pairs, (ROW_ID, handle.id) if handle else (ROW_ID,))

    def _handle(self, column: BinaryColumn) -> tuple[list[Datums], Offsets]:
        """The datums of the handle that stand before inserted rows, and where the rows begin."""
        at, every, handle = column.begin, np.ones(len(column), np.bool_), []
        for _ in self._table.common_handle_columns or (None,):
            if bool(np.any(at >= column.end)):
                raise MutationError(f"table {self._table.id}: an inserted row without its handle")
            handle.append(decode_datums(column, at, every))
            at = handle[-1].end
        if not self._table.common_handle_columns and not bool(np.all(handle[0].is_number)):
            raise MutationError(
                f"table {self._table.id}: the handle of an inserted row is no integer"
            )
        return handle, at

    def _keys(self, pairs: Pairs, rows: pa.Array) -> pa.Array:
        """The record keys of rows that tell their handle by their columns."""
        if self._table.common_handle_columns:
            return self._common_keys(rows)
        handle = self._table.handle_column
        numbers, has_handle = pairs.numbers(handle.id if handle else ROW_ID)
        if not bool(has_handle.all()):
            raise MutationError(
                f"table {self._table.id}: a row without {handle.name if handle else '_tidb_rowid'}"
            )
        return record_keys(self._table.id, numbers)

    def _common_keys(self, rows: pa.Array) -> pa.Array:
        block, prefix = RowBlock(rows), record_prefix(self._table.id)
        columns = [
            [encode_key_datum(column, cell) for cell in block.cells(column.id).binary().to_pylist()]
            for column in self._table.common_handle_columns
        ]
        return pa.array(
            [prefix + b"".join(parts) for parts in zip(*columns, strict=True)], pa.binary()
        )


def _folded(events: _Events) -> _Events:
    """One event for each record of a transaction: the first one's old row,
    the last one's new row.
    """
    codes = np.asarray(events.key.dictionary_encode().indices).astype(np.int64)
    record = events.txn * (int(codes.max(initial=0)) + 1) + codes
    vanishes = ~np.asarray(events.new.is_valid())
    # a moved row leaves its old key before it takes the new one
    order = np.lexsort((~vanishes, events.place, record))
    begins = np.ones(len(order), np.bool_)
    begins[1:] = record[order][1:] != record[order][:-1]
    first, last = order[begins], order[np.append(begins[1:], True)[: len(order)]]
    remains = np.asarray(events.old.is_valid())[first] | np.asarray(events.new.is_valid())[last]
    first, last = first[remains], last[remains]
    return _Events(
        events.key.take(first),
        events.old.take(first),
        events.new.take(last),
        events.txn[first],
        events.place[first],
    )


def _joined(parts: Sequence[_Events]) -> _Events:
    def column(name: str) -> Any:
        return pa.concat_arrays(
            [getattr(part, name) for part in parts] or [pa.array([], pa.binary())]
        )

    def numbers(name: str) -> _Numbers:
        return np.concatenate([getattr(part, name) for part in parts] or [np.zeros(0, np.int64)])

    return _Events(column("key"), column("old"), column("new"), numbers("txn"), numbers("place"))


def _nulls(count: int) -> pa.Array:
    return pa.nulls(count, pa.binary())
