"""The sink manager's benchmark: many tables, of which few change; resolve all, cut,
read what changed, acknowledge.

A round does for all tables what a second does for a running changefeed: each table's resolved_ts
moves once, one cut is made, read and acknowledged. `idle_us` is the CPU of a round without rows by
the number of tables: what a table that does not change costs each second. `row_us` is what the rows
cost beyond that, from the sorter to the reader; making them is not counted. Every row that comes
out is counted, and its order looked at.
"""

import argparse
import json
import resource
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa

from sink.manager import SinkManager
from sorter import Sorter
from storage.model.event import INSERT, RAW_SCHEMA
from storage.model.span import Span

BASE_TS = 460_000_000 << 18
SECOND = 1000 << 18
VALUE = b"v" * 128


def mount(raw: pa.RecordBatch) -> pa.RecordBatch:
    """A mounter that costs nothing, so that what is measured is the sink."""
    ts, start_ts = (raw.column(name).cast(pa.int64()) for name in ("commit_ts", "start_ts"))
    return pa.RecordBatch.from_arrays(
        [ts, start_ts, raw.column("key"), raw.column("value")],
        names=["_commit_ts", "_start_ts", "key", "value"],
    )


class Feed:
    """A sorter and a sink manager, and the rounds that go through them."""

    def __init__(self, directory: Path, tables: int, *, staged: bool) -> None:
        self.sorter = Sorter(directory)
        self.manager = SinkManager(self.sorter)
        self.spans = [Span(number, b"t%08d" % number, b"") for number in range(tables)]
        for span in self.spans:
            self.sorter.add_table(span, BASE_TS)
            self.manager.add_table(span, BASE_TS, mount)
        if staged:
            self.manager.start()
        self.ts = BASE_TS
        self.rows = 0
        self.steps: dict[str, list[float]] = {}

    def round(self, changing: int, rows: int) -> float:
        """One round in which the first `changing` tables have `rows` rows each;
        returns its CPU seconds.
        """
        batches = [(span, changes(self.ts, rows)) for span in self.spans[:changing]]
        start_ts, self.ts = self.ts, self.ts + SECOND
        begin = time.process_time()
        for span, batch in batches:
            self.sorter.add(span, batch)
        self._step("resolve", self._resolve)
        end_ts: int = self._step("cut", lambda: self.manager.cut(start_ts, max_rows=1 << 30))
        assert end_ts == self.ts
        self._step("read", lambda: [self._read(span, start_ts, end_ts) for span, _ in batches])
        assert self._step("ack", lambda: self.manager.ack(end_ts)) == end_ts
        return time.process_time() - begin

    def _resolve(self) -> None:
        for span in self.spans:
            self.sorter.resolve(span, self.ts)
        assert self.manager.wait_resolved(self.ts - 1, 60) == self.ts

    def _read(self, span: Span, start_ts: int, end_ts: int) -> None:
        last = start_ts
        for batch in self.manager.read(span, start_ts, end_ts):
            ts = batch.column(0).to_numpy()
            assert ts[0] > last
            assert np.all(ts[1:] > ts[:-1])
            last = int(ts[-1])
            self.rows += batch.num_rows

    def _step(self, name: str, work):
        begin = time.perf_counter()
        result = work()
        self.steps.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    def close(self) -> None:
        """End all threads."""
        self.manager.stop()
        self.sorter.close()


def changes(after_ts: int, rows: int) -> pa.RecordBatch:
    """Single-row transactions within the second after `after_ts`."""
    ts = np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(SECOND // (rows + 1)) + np.uint64(
        after_ts
    )
    keys = pa.array([b"k%015d" % number for number in range(rows)], pa.binary())
    values = pa.array([VALUE] * rows, pa.binary())
    op = np.full(rows, INSERT, np.uint8)
    columns = [
        pa.array(ts),
        pa.array(ts - np.uint64(1)),
        pa.array(op),
        keys,
        values,
        pa.nulls(rows, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=10_000)
    parser.add_argument("--changing", type=int, default=10, help="tables that have rows")
    parser.add_argument("--rows", type=int, default=10_000, help="of each of them in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--waiting", type=int, default=1, help="readers that wait for news meanwhile"
    )
    parser.add_argument("--no-staging", action="store_true", help="read everything from the sorter")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        begin = time.process_time()
        feed = Feed(Path(directory) / "sorter", args.tables, staged=not args.no_staging)
        added_s = time.process_time() - begin
        stopping = threading.Event()
        waiters = [
            threading.Thread(target=wait, args=(feed.manager, stopping))
            for _ in range(args.waiting)
        ]
        for waiter in waiters:
            waiter.start()
        feed.round(0, 0)
        feed.steps.clear()
        idle_s = [feed.round(0, 0) for _ in range(args.rounds)]
        idle_steps, feed.steps = feed.steps, {}
        begin = time.perf_counter()
        busy_s = [feed.round(args.changing, args.rows) for _ in range(args.rounds)]
        seconds = time.perf_counter() - begin
        assert feed.rows == args.rounds * args.changing * args.rows
        stopping.set()
        for waiter in waiters:
            waiter.join()
        stats = feed.manager.stats()
        feed.close()
    idle, busy = median(idle_s), median(busy_s)
    print(
        json.dumps(
            {
                "bench": "sink",
                "tables": args.tables,
                "changing": args.changing,
                "rows": feed.rows,
                "rounds_per_s": round(args.rounds / seconds, 2),
                "add_table_us": round(added_s * 1e6 / args.tables, 1),
                "idle_us": round(idle * 1e6 / args.tables, 2),
                "idle_ms": {name: round(median(s) * 1e3, 2) for name, s in idle_steps.items()},
                "row_us": round((busy - idle) * 1e6 / max(args.changing * args.rows, 1), 3),
                "staged_share": round(
                    stats.reads_staged / max(stats.reads_staged + stats.reads_sorter, 1), 2
                ),
                "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            }
        )
    )


def wait(manager: SinkManager, stopping: threading.Event) -> None:
    """A reader that asks for news again and again."""
    ts = 0
    while not stopping.is_set():
        ts = manager.wait_resolved(ts, 0.5)


if __name__ == "__main__":
    main()
