"""Sorter and sink in one process and in several: what `capture --workers N` can gain, without Spark or a source.

Tables are dealt to the processes by the hash that the capture uses. Each has made its rows (tests/bench/
sorter_workload.py) before the clock starts, then all sort, stage, read and acknowledge theirs at the same time. Prints
wall and CPU seconds of 1, 2, ... processes in turn, several times; `cpu_s` is the sum over the processes. On a machine
that is busy with other things compare `cpu_s`, and read `cores`: how many cores the run got.
"""

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa

from sink.manager import SinkManager
from sorter import Sorter
from sorter.shard import get_db
from storage.model.span import Span
from tests.bench.sink import mount
from tests.bench.sorter_workload import BASE_TS, Window, Workload

_ROUND_WINDOWS = 64


class Worker:
    """The share of one process."""

    def __init__(self, directory: Path, spans: list[Span]) -> None:
        self._sorter = Sorter(directory, memory_bytes=64 << 20)
        self._manager = SinkManager(self._sorter)
        for span in spans:
            self._sorter.add_table(span, BASE_TS)
            self._manager.add_table(span, BASE_TS, mount)
        self._acked: dict[Span, int] = dict.fromkeys(spans, BASE_TS)
        self.rows = 0

    def run(self, windows: list[Window]) -> None:
        """Bring all rows in, and read and acknowledge them now and then."""
        for number, window in enumerate(windows, 1):
            self._sorter.add(window.span, window.batch)
            self._sorter.resolve(window.span, window.resolved_ts)
            if not number % _ROUND_WINDOWS:
                self._read_all()
        self._read_all()

    def close(self) -> None:
        """End all threads."""
        self._manager.stop()
        self._sorter.close()

    def _read_all(self) -> None:
        for span, start_ts in self._acked.items():
            end_ts = self._manager.resolved_ts(span)
            if end_ts > start_ts:
                self.rows += sum(batch.num_rows for batch in self._manager.read(span, start_ts, end_ts))
                self._manager.ack(end_ts, span)
                self._acked[span] = end_ts


def work(pipe: Connection, directory: str, args: argparse.Namespace, number: int, of: int) -> None:
    """One process: make the rows, say so, wait for the start, run, tell what it took."""
    workload = Workload(args.rows, args.tables, args.value_bytes, 1, args.seed)
    mine = {span for span in workload.spans if get_db(span, of) == number}
    windows = [window for window in workload.windows() if window.span in mine]
    with tempfile.TemporaryDirectory(dir=directory) as place:
        worker = Worker(Path(place), sorted(mine))
        pa.set_cpu_count(1)
        pipe.send(None)
        pipe.recv()
        begin = time.process_time()
        worker.run(windows)
        cpu_s = time.process_time() - begin
        rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        pipe.send((worker.rows, cpu_s, rss_mb))
        worker.close()


def run(args: argparse.Namespace, processes: int, directory: str) -> tuple[float, float, list[int]]:
    """(wall seconds, CPU seconds, rows of each process)."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(processes)]
    children = [
        context.Process(target=work, args=(theirs, directory, args, number, processes))
        for number, (_, theirs) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    for ours, _ in pipes:
        ours.recv()
    begin = time.perf_counter()
    for ours, _ in pipes:
        ours.send(None)
    told = [ours.recv() for ours, _ in pipes]
    seconds = time.perf_counter() - begin
    for child in children:
        child.join()
    assert sum(rows for rows, _, _ in told) == args.rows
    return seconds, sum(cpu_s for _, cpu_s, _ in told), [rows for rows, _, _ in told]


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--tables", type=int, default=64)
    parser.add_argument("--value-bytes", type=int, default=200)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    found: dict[str, list[dict[str, object]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for processes in args.workers * args.rounds:
            seconds, cpu_s, rows = run(args, processes, directory)
            found.setdefault(str(processes), []).append(
                {
                    "seconds": round(seconds, 2),
                    "cpu_s": round(cpu_s, 2),
                    "cores": round(cpu_s / seconds, 2),
                    "rows": rows,
                }
            )
    print(json.dumps({"name": "workers", "rows": args.rows, "tables": args.tables, "by_workers": found}))


if __name__ == "__main__":
    main()
