"""Updates that change what identifies a row, where the record key does not show it.

A table without clustered key stores its rows under a hidden number, and characters in a clustered
key are stored as their collation's sort key: so changing the key can be an update of the same
record. A consumer that knows rows by their key columns needs the old key's delete and the new key's
insert.

All deletes of a transaction come first, so that rows which exchange their keys both survive: within
a batch they are sorted (`split_key_changes`), and a transaction that crosses batches is read twice
(`deletes_first`): for its deletes, then for the rest. So nothing of it is held, and its order does
not depend on where batches end.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.model.event import DELETE, INSERT, UPDATE, Position
from storage.tidb.binary import Mask
from storage.tidb.cell import arrow_array
from storage.tidb.row_layout import RowBlock
from storage.tidb.schema import Column


def split_key_changes(raw: pa.RecordBatch, key_columns: Sequence[Column]) -> pa.RecordBatch:
    """Replace each update of `raw` that changes a key column by a delete and an insert."""
    changed = _changed(raw, key_columns)
    if not bool(changed.any()):
        return raw
    rows, second = _expanded(changed)
    split = changed[rows]
    op = np.asarray(raw["op"])[rows]
    op[split] = np.where(second[split], INSERT, DELETE)
    # Stable, so deletes stay in their order, and the others in theirs.
    order = np.lexsort((op != DELETE, _transactions(raw)[rows]))
    places = pa.array(rows[order])
    columns = [raw[name].take(places) for name in ("commit_ts", "start_ts")]
    new, old = (pa.array((split & half)[order]) for half in (second, ~second))
    value = pc.if_else(old, None, raw["value"].take(places))
    old_value = pc.if_else(new, None, raw["old_value"].take(places))
    columns += [pa.array(op[order]), raw["key"].take(places), value, old_value]
    return pa.RecordBatch.from_arrays(columns, schema=raw.schema)


def deletes_first(
    batches: Iterable[pa.RecordBatch],
    split: Callable[[pa.RecordBatch], pa.RecordBatch],
    again: Callable[[Position], Iterator[pa.RecordBatch]],
) -> Iterator[pa.RecordBatch]:
    """The consecutive `batches` of a range with all deletes of each transaction before its other
    changes.

    The sorter gives a transaction's deletes, then its updates, then its inserts; only updates
    become deletes (`split`). So what is to be reordered are updates that cross batches; `again`
    reads a transaction from its begin.
    """
    previous: pa.RecordBatch | None = None
    given: Position | None = None
    for each in batches:
        # A transaction that was read again, whole, may go on over any number of batches.
        batch = each if given is None else _behind(each, given)
        if not batch.num_rows:
            continue
        given = None
        if previous is not None and _cuts_updates(previous, batch):
            given = _position(previous, previous.num_rows - 1)
            yield from _not_empty(previous.slice(0, _updates_begin(previous, given)))
            yield from _whole(given, split, again)
            batch, previous = _behind(batch, given), None
            if not batch.num_rows:
                continue
            given = None
        if previous is not None:
            yield previous
        previous = batch
    if previous is not None:
        yield previous


def _whole(
    transaction: Position,
    split: Callable[[pa.RecordBatch], pa.RecordBatch],
    again: Callable[[Position], Iterator[pa.RecordBatch]],
) -> Iterator[pa.RecordBatch]:
    """The updates and inserts of a transaction, after the deletes that its updates become."""
    for raw in again(transaction):
        parts = split(raw.filter(pc.equal(raw["op"], UPDATE)))
        yield from _not_empty(parts.filter(pc.equal(parts["op"], DELETE)))
    for raw in again(transaction):
        parts = split(raw.filter(pc.not_equal(raw["op"], DELETE)))
        yield from _not_empty(parts.filter(pc.not_equal(parts["op"], DELETE)))


def _not_empty(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows:
        yield batch


def _cuts_updates(one: pa.RecordBatch, following: pa.RecordBatch) -> bool:
    last = one.num_rows - 1
    same = _position(one, last) == _position(following, 0)
    return same and one["op"][last].as_py() == UPDATE and following["op"][0].as_py() == UPDATE


def _updates_begin(batch: pa.RecordBatch, transaction: Position) -> int:
    """Where the updates of the last transaction of a batch begin, which end it."""
    commit_ts, start_ts, op = (np.asarray(batch[name]) for name in ("commit_ts", "start_ts", "op"))
    others = np.flatnonzero(
        (commit_ts != transaction.commit_ts) | (start_ts != transaction.start_ts) | (op != UPDATE)
    )
    return int(others[-1]) + 1 if len(others) else 0


def _behind(batch: pa.RecordBatch, transaction: Position) -> pa.RecordBatch:
    """The rows that are not of the transaction, with which the batch may begin."""
    commit_ts, start_ts = (np.asarray(batch[name]) for name in ("commit_ts", "start_ts"))
    others = np.flatnonzero(
        (commit_ts != transaction.commit_ts) | (start_ts != transaction.start_ts)
    )
    return batch.slice(int(others[0]) if len(others) else batch.num_rows)


def _position(batch: pa.RecordBatch, row: int) -> Position:
    return Position(batch["commit_ts"][row].as_py(), batch["start_ts"][row].as_py())


def _changed(raw: pa.RecordBatch, key_columns: Sequence[Column]) -> Mask:
    changed = np.zeros(raw.num_rows, np.bool_)
    updates = np.flatnonzero(
        (np.asarray(raw["op"]) == UPDATE) & np.asarray(raw["old_value"].is_valid())
    )
    if not key_columns or not len(updates):
        return changed
    before, after = (RowBlock(raw[name].take(pa.array(updates))) for name in ("old_value", "value"))
    for column in key_columns:
        old, new = (arrow_array(column, block.cells(column.id)) for block in (before, after))
        # as a zero date is, which no reader can hold
        one_is_null = pc.xor(pc.is_null(old), pc.is_null(new))
        changed[updates] |= np.asarray(pc.coalesce(pc.not_equal(old, new), one_is_null))
    return changed


def _expanded(changed: Mask) -> tuple[np.ndarray, Mask]:
    """Row numbers with changed rows twice, and which ones are a row's second appearance."""
    rows = np.repeat(np.arange(len(changed)), changed + 1)
    second = np.zeros(len(rows), np.bool_)
    second[1:] = rows[1:] == rows[:-1]
    return rows, second


def _transactions(raw: pa.RecordBatch) -> np.ndarray:
    """The number of each row's transaction."""
    commit_ts, start_ts = (np.asarray(raw[name]) for name in ("commit_ts", "start_ts"))
    begins = np.zeros(raw.num_rows, np.int64)
    begins[1:] = (commit_ts[1:] != commit_ts[:-1]) | (start_ts[1:] != start_ts[:-1])
    return np.cumsum(begins)
