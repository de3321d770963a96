"""The sorter's benchmark: rows in per table in shuffled windows, then all of them out,
sorted and checked.

The rows are those of tests/bench/sorter_workload.py. `crc` is the sum over tables of crc32(be64
commit_ts | key ...), modulo 2^32. With `--path rows` they come as the bytes of cdcpb messages of
1000 COMMITTED rows, with `--path pairs` of 1000 PREWRITEs and their COMMITs, and go through parser
and matcher, as in the puller. With `--backlog-mb` tables are read, cleaned and still fed as soon as
so much lies in the sorter, two windows out for each that comes in. Making the rows is not counted;
checking every row that comes out is. `--one-transaction-bytes N` makes all rows one transaction of
one table, of about N bytes of keys and values: nothing is resolved before the last of them.
"""

import argparse
import itertools
import json
import resource
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from kvproto import cdcpb_pb2 as cdcpb

from server.puller.tikv.changes import Changes
from server.puller.tikv.matcher import INITIALIZED, Matcher
from sorter import Sorter, SorterSettings, SorterStats
from storage.model.event import Position
from storage.model.span import Span
from storage.spill_codec import COMPRESSIONS, NO_COMPRESSION, SpillCodec
from tests.bench.sorter_workload import (
    BASE_TS,
    FIRST_TABLE_ID,
    KEY_BYTES,
    WINDOW_ROWS,
    Workload,
    messages,
)


class Stopwatch:
    """Wall and CPU seconds of what happens in `with` blocks."""

    def __init__(self) -> None:
        self.seconds = self.cpu_s = 0.0

    def __enter__(self) -> None:
        self._begin = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._begin[0]
        self.cpu_s += time.process_time() - self._begin[1]


class Reader:
    """Fetches the tables, in one or many steps; looks at every row's order and bytes."""

    def __init__(self, sorter: Sorter, workload: Workload) -> None:
        self._sorter = sorter
        self._distinct = workload.transaction_rows == 1
        self._last_ts = np.full(
            workload.tables, BASE_TS, np.uint64
        )  # the sorter's memory is measured, not the reader's
        self._crc = np.zeros(workload.tables, np.uint64)
        self.rows = 0

    @property
    def crc(self) -> int:
        """The sum of the tables' crcs."""
        return int(self._crc.sum()) % (1 << 32)

    def read(self, span: Span, upper_ts: int) -> None:
        """Read on, up to `upper_ts`."""
        table = span.table_id - FIRST_TABLE_ID
        crc, last_ts = int(self._crc[table]), int(self._last_ts[table])
        lower, upper = Position(last_ts + 1, 0), Position.fence(upper_ts)
        for batch in self._sorter.fetch(span, lower, upper):
            commit_ts = batch.column(0).to_numpy()
            assert int(commit_ts[0]) >= last_ts + self._distinct
            assert np.all(commit_ts[1:] >= commit_ts[:-1] + np.uint64(self._distinct))
            last_ts = int(commit_ts[-1])
            image = np.empty((batch.num_rows, 8 + KEY_BYTES), np.uint8)
            image[:, :8] = commit_ts.astype(">u8").view(np.uint8).reshape(-1, 8)
            image[:, 8:] = _bytes(batch.column(3)).reshape(-1, KEY_BYTES)
            crc = zlib.crc32(image, crc)
            zlib.adler32(_bytes(batch.column(4)))
            self.rows += batch.num_rows
        self._crc[table], self._last_ts[table] = crc, upper_ts

    def read_windows(self, span: Span, count: int) -> bool:
        """Read on for at most `count` windows of rows, and clean them;
        returns whether there were any.
        """
        table = span.table_id - FIRST_TABLE_ID
        done, resolved_ts = int(self._last_ts[table]), self._sorter.resolved_ts(span)
        if done >= resolved_ts:
            return False
        self.read(span, min(done + 10 * WINDOW_ROWS * count, resolved_ts))
        self._sorter.clean(span, Position.fence(int(self._last_ts[table])))
        return True


def _bytes(column: pa.Array) -> np.ndarray:
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]]


class Feed:
    """Brings the windows into the sorter; `stopwatch` counts that, and not how they are made."""

    def __init__(self, sorter: Sorter, workload: Workload, path: str) -> None:
        self._sorter = sorter
        self._windows = workload.windows()
        self._path = path
        self._matchers = (
            {span: Matcher(BASE_TS) for span in workload.spans} if path != "arrow" else {}
        )
        for matcher in self._matchers.values():
            matcher.apply([cdcpb.Event.Row(type=INITIALIZED)], Changes())
        self.stopwatch = Stopwatch()

    def __iter__(self) -> Iterator[tuple[Span, int]]:
        """(table, bytes) of each window, once it is in."""
        for window in self._windows:
            span, batch, resolved_ts = window.span, window.batch, window.resolved_ts
            message = (
                b"" if self._path == "arrow" else messages(batch, scanned=self._path == "rows")
            )
            size = batch.nbytes
            del window
            with self.stopwatch:
                if message:
                    batch = self._decode(self._matchers[span], message)
                self._sorter.add(span, batch)
                self._sorter.resolve(span, resolved_ts)
            yield span, size

    def _decode(self, matcher: Matcher, message: bytes) -> pa.RecordBatch:
        changes = Changes()
        for event in cdcpb.ChangeDataEvent.FromString(message).events:
            matcher.apply(event.entries.entries, changes)
        return changes.to_batch()


def run(workload: Workload, directory: Path, args: argparse.Namespace) -> dict[str, object]:
    """Ingest, fetch (meanwhile, or all at the end), and say what it took."""
    codec = SpillCodec(args.compression, encrypted=args.encryption)
    sorter = Sorter(directory, SorterSettings(memory_bytes=args.memory_mb << 20, codec=codec))
    for span in workload.spans:
        sorter.add_table(span, BASE_TS)
    feed, reader, reading = Feed(sorter, workload, args.path), Reader(sorter, workload), Stopwatch()
    fed_bytes, most_disk_bytes = 0, 0
    for fed, (span, size) in enumerate(feed):
        fed_bytes += size
        with reading:
            if args.backlog_mb and fed_bytes >= args.backlog_mb << 20:
                reader.read_windows(span, 2)
        if not fed % 256:
            most_disk_bytes = max(most_disk_bytes, sorter.stats().disk_bytes)
    ingested = sorter.stats()
    idle_s = resolve_idle(sorter, workload) if args.idle else None
    with reading:
        for span in workload.spans:
            if args.backlog_mb:
                any(not reader.read_windows(span, 64) for _ in itertools.count())
            else:
                reader.read(span, sorter.resolved_ts(span))
    stats = sorter.stats()
    sorter.close()
    assert reader.rows == workload.rows
    assert reader.crc
    return {
        "name": "sorter",
        "path": args.path,
        "rows": workload.rows,
        "tables": workload.tables,
        "value_bytes": workload.value_bytes,
        "transaction_rows": workload.transaction_rows,
        **({"scattered": True} if args.scattered else {}),
        **_figures(workload, feed.stopwatch, reading, ingested),
        **({"idle_resolve_us": idle_s} if args.idle else {}),
        "most_disk_mb": round(max(most_disk_bytes, ingested.disk_bytes) / (1 << 20), 1),
        "disk_mb_at_end": round(stats.disk_bytes / (1 << 20), 1),
        "crc": reader.crc,
    }


def resolve_idle(sorter: Sorter, workload: Workload) -> float:
    """CPU microseconds of a `resolve` that brings nothing new, each table once."""
    stopwatch = Stopwatch()
    with stopwatch:
        for span in workload.spans:
            sorter.resolve(span, sorter.resolved_ts(span))
    return round(stopwatch.cpu_s / workload.tables * 1e6, 3)


def _figures(
    workload: Workload, feeding: Stopwatch, reading: Stopwatch, ingested: SorterStats
) -> dict[str, object]:
    seconds, cpu_s = feeding.seconds + reading.seconds, feeding.cpu_s + reading.cpu_s
    row_bytes = workload.rows * (KEY_BYTES + workload.value_bytes)
    return {
        "seconds": round(seconds, 3),
        "per_s": round(workload.rows / seconds),
        "cpu_us_per_op": round(cpu_s / workload.rows * 1e6, 3),
        "ingest_cpu_us_per_op": round(feeding.cpu_s / workload.rows * 1e6, 3),
        "ingest_per_s": round(workload.rows / feeding.seconds),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "written_mb": round(ingested.bytes_written / (1 << 20), 1),
        "written_per_row_byte": round(ingested.bytes_written / row_bytes, 3),
        "blocks": ingested.blocks_written,
        "live_blocks": ingested.live_blocks,
    }


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--tables", type=int, default=16)
    parser.add_argument("--value-bytes", type=int, default=200)
    parser.add_argument("--transaction-rows", type=int, default=1)
    parser.add_argument(
        "--one-transaction-bytes",
        type=int,
        default=0,
        help="all rows are one transaction of that size",
    )
    parser.add_argument(
        "--scattered", action="store_true", help="that transaction's rows come in no order at all"
    )
    parser.add_argument("--path", choices=["arrow", "rows", "pairs"], default="arrow")
    parser.add_argument(
        "--backlog-mb", type=int, default=0, help="begin to read and clean when so much has come"
    )
    parser.add_argument(
        "--idle", action="store_true", help="also measure resolve() without anything new"
    )
    parser.add_argument("--compression", choices=COMPRESSIONS, default=NO_COMPRESSION)
    parser.add_argument("--encryption", action="store_true", help="as --spill-encryption")
    parser.add_argument("--memory-mb", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--directory", default=None, help="where the segments go (default: a temporary directory)"
    )
    args = parser.parse_args()
    if args.one_transaction_bytes:
        args.tables, args.rows = 1, args.one_transaction_bytes // (KEY_BYTES + args.value_bytes)
        args.transaction_rows = args.rows
    workload = Workload(
        args.rows,
        args.tables,
        args.value_bytes,
        args.transaction_rows,
        args.seed,
        scattered=bool(args.one_transaction_bytes) and args.scattered,
    )
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        print(json.dumps(run(workload, Path(directory), args)))


if __name__ == "__main__":
    main()
