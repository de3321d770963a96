"""What mounters of all sources have in common: the columns that say of each row what happened to it and when."""

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.model.errors import CorruptError
from storage.model.event import DELETE, INSERT, UPDATE

META_FIELDS: Final = (
    pa.field("_op", pa.string()),
    pa.field("_commit_ts", pa.int64()),
    pa.field("_start_ts", pa.int64()),
    pa.field("_seq", pa.int64()),
)
_OP_NAMES = pa.array([{DELETE: "delete", UPDATE: "update", INSERT: "insert"}.get(op) for op in range(INSERT + 1)])


def told_rows(raw: pa.RecordBatch) -> pa.Array:
    """What each change of a batch of RAW_SCHEMA tells of its row: the new value, or a delete's old one.

    Raises:
        CorruptError: an insert or update has no new value.
    """
    deletes = pc.equal(raw["op"], pa.scalar(DELETE, pa.uint8()))
    if pc.any(pc.and_not(raw["value"].is_null(), deletes)).as_py():
        raise CorruptError("an insert or update without a row; a puller must give each change its value")
    return pc.if_else(deletes, raw["old_value"], raw["value"]) if pc.any(deletes).as_py() else raw["value"]


def meta_columns(raw: pa.RecordBatch) -> list[pa.Array]:
    """The columns of `META_FIELDS`, of a batch of RAW_SCHEMA."""
    commit_ts, start_ts = (np.asarray(raw[name]).astype(np.int64) for name in ("commit_ts", "start_ts"))
    ops = _OP_NAMES.take(raw["op"].cast(pa.int64()))
    return [ops, pa.array(commit_ts), pa.array(start_ts), pa.array(_seq(commit_ts, start_ts))]


def _seq(commit_ts: npt.NDArray[np.int64], start_ts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Each row's number within its transaction."""
    rows = np.arange(len(commit_ts), dtype=np.int64)
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = (commit_ts[1:] != commit_ts[:-1]) | (start_ts[1:] != start_ts[:-1])
    return rows - np.maximum.accumulate(np.where(begins, rows, 0))
