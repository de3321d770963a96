"""The event batch: the Arrow RecordBatch in which row changes move from puller to sink,
never a row object.

`op` values are the order of changes within one transaction (TiCDC's dmlOrder): delete, update,
insert. An update carries `old_value`, an insert does not; a delete has no `value`, and `old_value`
where upstream gives it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

DELETE: Final = 1
UPDATE: Final = 2
INSERT: Final = 3

RAW_SCHEMA: Final = pa.schema(
    [
        pa.field("commit_ts", pa.uint64(), nullable=False),
        pa.field("start_ts", pa.uint64(), nullable=False),
        pa.field("op", pa.uint8(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("value", pa.binary()),
        pa.field("old_value", pa.binary()),
    ]
)


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in a table's sorted changes, ordered by (commit_ts, start_ts)."""

    commit_ts: int
    start_ts: int

    @classmethod
    def fence(cls, commit_ts: int) -> "Position":
        """The last possible position with this commit_ts: nothing with it can follow."""
        return cls(commit_ts, commit_ts - 1)

    @property
    def is_commit_fence(self) -> bool:
        """Whether no other transaction with the same commit_ts can come after this one."""
        return self.commit_ts > 0 and self.start_ts + 1 >= self.commit_ts

    def next(self) -> "Position":
        """The smallest position after this one."""
        if self.is_commit_fence:
            return Position(self.commit_ts + 1, 0)
        return Position(self.commit_ts, self.start_ts + 1)


def raw_batch(
    commit_ts: Sequence[int],
    start_ts: Sequence[int],
    op: Sequence[int],
    key: Sequence[bytes],
    value: Sequence[bytes | None],
    old_value: Sequence[bytes | None],
) -> pa.RecordBatch:
    """Build a batch of RAW_SCHEMA from equally long columns."""
    columns = [
        pa.array(commit_ts, pa.uint64()),
        pa.array(start_ts, pa.uint64()),
        pa.array(op, pa.uint8()),
        pa.array(key, pa.binary()),
        pa.array(value, pa.binary()),
        pa.array(old_value, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)


def snapshot_rows(keys: pa.Array, values: pa.Array, commit_ts: int) -> pa.RecordBatch:
    """Rows as they are at one commit_ts, which nothing else has.

    Updates of which is not told what was before: whoever gets an insert may rely on it that its key
    was not there.
    """
    count = len(keys)
    columns = [
        pa.array(np.full(count, commit_ts, np.uint64)),
        pa.array(np.full(count, commit_ts - 1, np.uint64)),
        pa.array(np.full(count, UPDATE, np.uint8)),
        keys,
        values,
        pa.nulls(count, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)
