"""Committed row changes on their way from a store's messages to a batch, column by column. Pure.

Rows of a message are read a column at a time and appended in runs: a row object for each would cost
as much as the sorter does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress
from typing import Final

import pyarrow as pa

from storage.model.event import DELETE, INSERT, UPDATE, raw_batch

OP_DELETE: Final = 2  # cdcpb.Event.Row.OpType


@dataclass(frozen=True, slots=True)
class Columns:
    """Committed rows column by column, as the messages tell them."""

    commit_ts: list[int]
    start_ts: list[int]
    op_type: list[int]
    key: list[bytes]
    value: list[bytes]
    old_value: list[bytes]

    def above(self, ts: int) -> "Columns":
        """The rows committed after `ts`."""
        is_above = [commit_ts > ts for commit_ts in self.commit_ts]
        return Columns(
            list(compress(self.commit_ts, is_above)),
            list(compress(self.start_ts, is_above)),
            list(compress(self.op_type, is_above)),
            list(compress(self.key, is_above)),
            list(compress(self.value, is_above)),
            list(compress(self.old_value, is_above)),
        )


@dataclass(slots=True)
class Changes:
    """Committed row changes as the columns of RAW_SCHEMA, in order of arrival.

    When their images have `full_bytes` or more, `on_full` takes them, and they begin anew.
    """

    full_bytes: int = 1 << 62
    on_full: Callable[[pa.RecordBatch], None] | None = None
    commit_ts: list[int] = field(default_factory=list)
    start_ts: list[int] = field(default_factory=list)
    op: list[int] = field(default_factory=list)
    key: list[bytes] = field(default_factory=list)
    value: list[bytes | None] = field(default_factory=list)
    old_value: list[bytes | None] = field(default_factory=list)
    _bytes: int = 0

    def __len__(self) -> int:
        return len(self.key)

    def extend(self, rows: Columns) -> None:
        """Append rows: a delete has no value, and what had no old value is an insert."""
        self.commit_ts += rows.commit_ts
        self.start_ts += rows.start_ts
        self.key += rows.key
        # A run of inserts, as most scans and imports are, needs no step for each row.
        if OP_DELETE not in rows.op_type and not any(rows.old_value):
            self.op += [INSERT] * len(rows.key)
            self.value += rows.value
            self.old_value += [None] * len(rows.key)
            self._grew(sum(map(len, rows.value)))
            return
        for op_type, value, old_value in zip(rows.op_type, rows.value, rows.old_value, strict=True):
            deleted = op_type == OP_DELETE
            self.op.append(DELETE if deleted else UPDATE if old_value else INSERT)
            self.value.append(None if deleted else value)
            self.old_value.append(old_value or None)
        self._grew(sum(map(len, rows.value)) + sum(map(len, rows.old_value)))

    def _grew(self, size: int) -> None:
        self._bytes += size
        if self.on_full is not None and self._bytes >= self.full_bytes:
            batch = self.to_batch()
            # Emptied first: `on_full` may wait for a disk, and raise.
            for column in (
                self.commit_ts,
                self.start_ts,
                self.op,
                self.key,
                self.value,
                self.old_value,
            ):
                column.clear()
            self._bytes = 0
            self.on_full(batch)

    def to_batch(self) -> pa.RecordBatch:
        """All changes as one batch of RAW_SCHEMA."""
        return raw_batch(
            self.commit_ts, self.start_ts, self.op, self.key, self.value, self.old_value
        )
