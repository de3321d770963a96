"""The sorter's benchmark: rows in per table in shuffled windows, then all of them out, sorted and checked.

The workload is the one the peers were measured with: the N rows are dealt to T tables; row i of a table has commit_ts
= base + 10 (i + 1), start_ts = commit_ts - 5, a key of 19 bytes, an insert of half random and half constant bytes.
With `--transaction-rows M` each M rows of a table share a commit_ts, and the windows grow to hold a transaction.
Windows of 1000 rows of a table are shuffled and followed by a resolved_ts. `crc` is the sum over tables of
crc32(be64 commit_ts | key ...), modulo 2^32. Making the rows is not counted; checking every row that comes out is.
"""

import argparse
import json
import resource
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from sorter import Sorter
from storage.model.event import INSERT, RAW_SCHEMA, Position
from storage.model.span import Span

BASE_TS = 450_000_000_000_000_000
WINDOW_ROWS = 1000
KEY_BYTES = 19
FIRST_TABLE_ID = 100  # as in the run of the peers: part of the crc


class Workload:
    """The rows of one run, made a window at a time."""

    def __init__(self, rows: int, tables: int, value_bytes: int, transaction_rows: int, seed: int) -> None:
        self.rows, self.tables, self.value_bytes = rows, tables, value_bytes
        self.transaction_rows = transaction_rows
        self._rng = np.random.default_rng(seed)
        self.spans = [
            Span(table, b"t" + table.to_bytes(8, "big"), b"")
            for table in range(FIRST_TABLE_ID, FIRST_TABLE_ID + tables)
        ]

    def windows(self) -> Iterator[tuple[Span, pa.RecordBatch, int]]:
        """(table, shuffled batch, resolved_ts after it, the same as before inside of a transaction)."""
        for first in range(0, -(-self.rows // self.tables), WINDOW_ROWS):
            for table, span in enumerate(self.spans):
                count = len(range(table, self.rows, self.tables))
                numbers = np.arange(first, min(first + WINDOW_ROWS, count), dtype=np.uint64)
                if len(numbers):
                    ended = min(first + WINDOW_ROWS, count)
                    whole = ended if ended == count else ended // self.transaction_rows * self.transaction_rows
                    resolved_ts = BASE_TS + 10 * whole
                    yield span, self._batch(span.start_key, self._rng.permutation(numbers), count), resolved_ts

    def _batch(self, prefix: bytes, numbers: np.ndarray, of_table: int) -> pa.RecordBatch:
        count = len(numbers)
        last = np.uint64(self.transaction_rows - 1)
        ends = numbers // np.uint64(self.transaction_rows) * np.uint64(self.transaction_rows) + last
        commit_ts = np.minimum(ends, np.uint64(of_table - 1)) * np.uint64(10) + np.uint64(BASE_TS + 10)
        keys = np.empty((count, KEY_BYTES), np.uint8)
        keys[:, :9] = np.frombuffer(prefix, np.uint8)
        keys[:, 9:11] = np.frombuffer(b"_r", np.uint8)
        keys[:, 11:] = numbers.astype(">u8").view(np.uint8).reshape(count, 8)
        values = np.full((count, self.value_bytes), ord("x"), np.uint8)
        half = self.value_bytes // 2
        values[:, :half] = np.frombuffer(self._rng.bytes(count * half), np.uint8).reshape(count, half)
        columns = [
            pa.array(commit_ts),
            pa.array(commit_ts - np.uint64(5)),
            pa.array(np.full(count, INSERT, np.uint8)),
            _fixed(keys),
            _fixed(values),
            pa.nulls(count, pa.binary()),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)


def _fixed(rows: np.ndarray) -> pa.Array:
    count, width = rows.shape
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32) if width else np.zeros(count + 1, np.int32)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(rows)])


def check(sorter: Sorter, span: Span, upper_ts: int, *, distinct: bool) -> tuple[int, int]:
    """(rows, crc) of a table; every row's order and bytes are looked at, `distinct` says that no commit_ts repeats."""
    rows = crc = last_ts = 0
    for batch in sorter.fetch(span, Position(BASE_TS + 1, 0), Position.fence(upper_ts)):
        commit_ts = batch.column(0).to_numpy()
        assert int(commit_ts[0]) >= last_ts + distinct
        assert np.all(commit_ts[1:] >= commit_ts[:-1] + np.uint64(distinct))
        last_ts = int(commit_ts[-1])
        image = np.empty((batch.num_rows, 8 + KEY_BYTES), np.uint8)
        image[:, :8] = commit_ts.astype(">u8").view(np.uint8).reshape(-1, 8)
        image[:, 8:] = _bytes(batch.column(3)).reshape(-1, KEY_BYTES)
        crc = zlib.crc32(image, crc)
        zlib.adler32(_bytes(batch.column(4)))
        rows += batch.num_rows
    return rows, crc


def _bytes(column: pa.Array) -> np.ndarray:
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]]


def run(workload: Workload, directory: Path, memory_bytes: int) -> dict[str, object]:
    """Ingest everything, then fetch everything."""
    sorter = Sorter(directory, memory_bytes=memory_bytes)
    making_s = making_cpu_s = 0.0
    resolved: dict[Span, int] = {}
    for span in workload.spans:
        sorter.add_table(span, BASE_TS)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    windows = workload.windows()
    while True:
        made_s, made_cpu_s = time.perf_counter(), time.process_time()
        window = next(windows, None)
        making_s += time.perf_counter() - made_s
        making_cpu_s += time.process_time() - made_cpu_s
        if window is None:
            break
        span, batch, resolved_ts = window
        sorter.add(span, batch)
        sorter.resolve(span, resolved_ts)
        resolved[span] = resolved_ts
    ingest_s = time.perf_counter() - begin_s - making_s
    ingest_cpu_s = time.process_time() - begin_cpu_s - making_cpu_s
    totals = [
        check(sorter, span, resolved[span], distinct=workload.transaction_rows == 1)
        for span in workload.spans
        if span in resolved
    ]
    seconds = time.perf_counter() - begin_s - making_s
    cpu_s = time.process_time() - begin_cpu_s - making_cpu_s
    stats = sorter.stats()
    sorter.close()
    assert sum(rows for rows, _ in totals) == workload.rows
    row_bytes = workload.rows * (KEY_BYTES + workload.value_bytes)
    return {
        "name": "sorter",
        "rows": workload.rows,
        "tables": workload.tables,
        "value_bytes": workload.value_bytes,
        "transaction_rows": workload.transaction_rows,
        "seconds": round(seconds, 3),
        "per_s": round(workload.rows / seconds),
        "cpu_us_per_op": round(cpu_s / workload.rows * 1e6, 3),
        "ingest_cpu_us_per_op": round(ingest_cpu_s / workload.rows * 1e6, 3),
        "ingest_per_s": round(workload.rows / ingest_s),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "written_per_row_byte": round(stats.bytes_written / row_bytes, 3),
        "crc": sum(crc for _, crc in totals) % (1 << 32),
    }


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--tables", type=int, default=16)
    parser.add_argument("--value-bytes", type=int, default=200)
    parser.add_argument("--transaction-rows", type=int, default=1)
    parser.add_argument("--memory-mb", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", default=None, help="where the segments go (default: a temporary directory)")
    args = parser.parse_args()
    workload = Workload(args.rows, args.tables, args.value_bytes, args.transaction_rows, args.seed)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        print(json.dumps(run(workload, Path(directory), args.memory_mb << 20)))


if __name__ == "__main__":
    main()
