"""The rows of the sorter's benchmark, as Arrow batches and as the messages in which a store sends
them.

The workload is the one the peers were measured with: the N rows are dealt to T tables; row i of a
table has commit_ts = base + 10 (i + 1), start_ts = commit_ts - 5, a key of 19 bytes, an insert of
half random and half constant bytes. With `transaction_rows` M, each M rows of a table share a
commit_ts. Windows of 1000 rows of a table are shuffled and followed by a resolved_ts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from kvproto import cdcpb_pb2 as cdcpb

from storage.model.event import INSERT, RAW_SCHEMA
from storage.model.span import Span

BASE_TS = 450_000_000_000_000_000
WINDOW_ROWS = 1000
KEY_BYTES = 19
FIRST_TABLE_ID = 100  # as in the run of the peers: part of the crc


@dataclass(frozen=True, slots=True)
class Window:
    """Shuffled rows of one table, and the resolved_ts after them: the one before,
    inside of a transaction.
    """

    span: Span
    batch: pa.RecordBatch
    resolved_ts: int


class Workload:
    """The rows of one run, made a window at a time."""

    def __init__(
        self,
        rows: int,
        tables: int,
        value_bytes: int,
        transaction_rows: int,
        seed: int,
        *,
        scattered: bool = False,
    ) -> None:
        """`scattered`: rows of one transaction of one table come in any order,
        not only within a window.
        """
        self.rows, self.tables, self.value_bytes = rows, tables, value_bytes
        self.transaction_rows = transaction_rows
        self._scattered = scattered
        self._rng = np.random.default_rng(seed)
        self.spans = [
            Span(table, b"t" + table.to_bytes(8, "big"), b"")
            for table in range(FIRST_TABLE_ID, FIRST_TABLE_ID + tables)
        ]

    def windows(self) -> Iterator[Window]:
        """All rows, a window of each table in turn."""
        for first in range(0, -(-self.rows // self.tables), WINDOW_ROWS):
            for table, span in enumerate(self.spans):
                count = len(range(table, self.rows, self.tables))
                numbers = np.arange(first, min(first + WINDOW_ROWS, count), dtype=np.uint64)
                if self._scattered:
                    numbers = numbers * _far_apart(count) % np.uint64(count)
                if len(numbers):
                    ended = min(first + WINDOW_ROWS, count)
                    whole = (
                        ended
                        if ended == count
                        else ended // self.transaction_rows * self.transaction_rows
                    )
                    resolved_ts = BASE_TS + 10 * whole
                    batch = self._batch(span.start_key, self._rng.permutation(numbers), count)
                    yield Window(span, batch, resolved_ts)

    def _batch(self, prefix: bytes, numbers: np.ndarray, of_table: int) -> pa.RecordBatch:
        count = len(numbers)
        last = np.uint64(self.transaction_rows - 1)
        ends = numbers // np.uint64(self.transaction_rows) * np.uint64(self.transaction_rows) + last
        commit_ts = np.minimum(ends, np.uint64(of_table - 1)) * np.uint64(10) + np.uint64(
            BASE_TS + 10
        )
        keys = np.empty((count, KEY_BYTES), np.uint8)
        keys[:, :9] = np.frombuffer(prefix, np.uint8)
        keys[:, 9:11] = np.frombuffer(b"_r", np.uint8)
        keys[:, 11:] = numbers.astype(">u8").view(np.uint8).reshape(count, 8)
        values = np.full((count, self.value_bytes), ord("x"), np.uint8)
        half = self.value_bytes // 2
        values[:, :half] = np.frombuffer(self._rng.bytes(count * half), np.uint8).reshape(
            count, half
        )
        columns = [
            pa.array(commit_ts),
            pa.array(commit_ts - np.uint64(5)),
            pa.array(np.full(count, INSERT, np.uint8)),
            _fixed(keys),
            _fixed(values),
            pa.nulls(count, pa.binary()),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)


def _far_apart(count: int) -> np.uint64:
    """A step that visits all of `count` numbers, neighbours a golden section of them apart."""
    step = int(count * 0.618)
    while math.gcd(step, count) != 1:
        step += 1
    return np.uint64(step)


def _fixed(rows: np.ndarray) -> pa.Array:
    count, width = rows.shape
    offsets = (
        np.arange(0, (count + 1) * width, width, dtype=np.int32)
        if width
        else np.zeros(count + 1, np.int32)
    )
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(rows)]
    )


def messages(batch: pa.RecordBatch, *, scanned: bool) -> bytes:
    """The rows as a store sends them in one message: COMMITTED by a scan,
    or a PREWRITE and a COMMIT of each.
    """
    columns = [column.to_pylist() for column in batch.columns]
    rows = cdcpb.Event.Entries()
    put = cdcpb.Event.Row.PUT
    for commit_ts, start_ts, _, key, value, _ in zip(*columns, strict=True):
        if scanned:
            rows.entries.add(
                type=cdcpb.Event.COMMITTED,
                op_type=put,
                start_ts=start_ts,
                commit_ts=commit_ts,
                key=key,
                value=value,
            )
        else:
            rows.entries.add(
                type=cdcpb.Event.PREWRITE, op_type=put, start_ts=start_ts, key=key, value=value
            )
    for commit_ts, start_ts, _, key, _, _ in () if scanned else zip(*columns, strict=True):
        rows.entries.add(
            type=cdcpb.Event.COMMIT, op_type=put, start_ts=start_ts, commit_ts=commit_ts, key=key
        )
    return cdcpb.ChangeDataEvent(events=[cdcpb.Event(entries=rows)]).SerializeToString()
