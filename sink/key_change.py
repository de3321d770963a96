"""Updates that change what identifies a row, where the record key does not show it.

A table without clustered key stores its rows under a hidden number, and characters in a clustered key are stored as
their collation's sort key: so changing the key can be an update of the same record. A consumer that knows rows by their
key columns needs the old key's delete and the new key's insert.

Within a transaction of the batch all deletes come first, so that rows which exchange their keys both survive. A
transaction that crosses batches is reordered only within each of them.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.model.event import DELETE, INSERT, UPDATE
from storage.tidb.arrow import arrow_array
from storage.tidb.binary import Mask
from storage.tidb.cells import RowBlock
from storage.tidb.column import Column


def split_key_changes(raw: pa.RecordBatch, key_columns: Sequence[Column]) -> pa.RecordBatch:
    """Replace each update of `raw` that changes a key column by a delete and an insert."""
    changed = _changed(raw, key_columns)
    if not bool(changed.any()):
        return raw
    rows, second = _expanded(changed)
    split = changed[rows]
    op = np.asarray(raw["op"])[rows]
    op[split] = np.where(second[split], INSERT, DELETE)
    order = np.lexsort((op != DELETE, _transactions(raw)[rows]))  # stable
    at = pa.array(rows[order])
    columns = [raw[name].take(at) for name in ("commit_ts", "start_ts")]
    new, old = (pa.array((split & half)[order]) for half in (second, ~second))
    value = pc.if_else(old, None, raw["value"].take(at))
    old_value = pc.if_else(new, None, raw["old_value"].take(at))
    columns += [pa.array(op[order]), raw["key"].take(at), value, old_value]
    return pa.RecordBatch.from_arrays(columns, schema=raw.schema)


def _changed(raw: pa.RecordBatch, key_columns: Sequence[Column]) -> Mask:
    changed = np.zeros(raw.num_rows, np.bool_)
    updates = np.flatnonzero((np.asarray(raw["op"]) == UPDATE) & np.asarray(raw["old_value"].is_valid()))
    if not key_columns or not len(updates):
        return changed
    before, after = (RowBlock(raw[name].take(pa.array(updates))) for name in ("old_value", "value"))
    for column in key_columns:
        differs = pc.not_equal(*(arrow_array(column, block.cells(column.id)) for block in (before, after)))
        changed[updates] |= np.asarray(differs.fill_null(False))  # noqa: FBT003 - Arrow's only form
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
