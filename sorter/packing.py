"""How the rows of a block are stored in fewer bytes than they take in memory: cheap to do, and exact. Pure.

Left out is what says nothing: an `old_value` column without values, an `op` that is the same everywhere. A start_ts is
stored as its distance to the commit_ts, where four bytes hold it. docs/format/sorter.md.
"""

from functools import cache
from typing import Final

import numpy as np
import pyarrow as pa

from sorter import order
from storage.model.event import RAW_SCHEMA

NEAR_START: Final = 1
ONE_OP: Final = 2
NO_OLD_VALUE: Final = 4

_FAR: Final = 1 << 32


def pack(batch: pa.RecordBatch) -> tuple[int, int, pa.RecordBatch]:
    """(flags, the one op or 0, what remains to be stored) of one row or more."""
    columns, flags, op = list(batch.columns), 0, 0
    if columns[5].null_count == batch.num_rows:
        flags |= NO_OLD_VALUE
        del columns[5]
    ops = columns[2].to_numpy(zero_copy_only=True)
    if (ops == ops[0]).all():
        flags, op = flags | ONE_OP, int(ops[0])
        del columns[2]
    distance = order.commit_ts(batch) - order.start_ts(batch)  # a start_ts above the commit_ts is far away
    if int(distance.max()) < _FAR:
        flags |= NEAR_START
        columns[1] = pa.array(distance.astype(np.uint32))
    return flags, op, pa.RecordBatch.from_arrays(columns, schema=schema(flags))


def unpack(flags: int, op: int, stored: pa.RecordBatch) -> pa.RecordBatch:
    """The rows of RAW_SCHEMA that `pack` was given."""
    columns, count = list(stored.columns), stored.num_rows
    if flags & NEAR_START:
        commit_ts, distance = (column.to_numpy(zero_copy_only=True) for column in columns[:2])
        columns[1] = pa.array(commit_ts - distance)
    if flags & ONE_OP:
        columns.insert(2, pa.array(np.full(count, op, np.uint8)))
    if flags & NO_OLD_VALUE:
        columns.append(pa.nulls(count, pa.binary()))
    return pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)


@cache
def schema(flags: int) -> pa.Schema:
    """The columns that are stored."""
    fields = list(RAW_SCHEMA)
    if flags & NO_OLD_VALUE:
        del fields[5]
    if flags & ONE_OP:
        del fields[2]
    if flags & NEAR_START:
        fields[1] = pa.field("start_ts", pa.uint32(), nullable=False)
    return pa.schema(fields)
