"""Sorter and sink in one process and in several: what `capture --workers N` can gain,
without a source or Spark.

Tables are dealt to the processes by the hash that the capture uses. Each has made its rows
(tests/bench/ sorter_workload.py) before the clock starts; then all sort theirs, read them from the
sorter as Flight does where nothing is staged, and acknowledge them, at the same time. Prints for 1,
2, ... processes, which take turns, the medians of the rounds: rows/s by the clock; `cores`, how
many the processes got; `per_s_undisturbed`, rows/s by the CPU of the process that needs most, which
is the clock's rate when each has a core; CPU µs a row over all, and what of it is sorting and
reading. `speed_up` compares rates with those of one process: by the clock it says nothing where
`cores` is much below the number of processes, as others use the machine. No more than rows /
`most_rows` can be had: that is how even the hash deals.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from sink.manager import SinkManager
from sorter import Sorter, SorterSettings
from sorter.store import shard_of
from storage.model.span import Span
from tests.bench.sink import mount
from tests.bench.sorter_workload import BASE_TS, Window, Workload

_ROUND_WINDOWS = 64
_MEMORY_BYTES = 64 << 20  # of all processes together, as the capture divides its quota
_SHARDS = 4  # of a worker's sorter


class Told(NamedTuple):
    """What one process did."""

    rows: int
    sort_cpu_s: float
    read_cpu_s: float


class Worker:
    """The share of one process."""

    def __init__(self, directory: Path, spans: list[Span], memory_bytes: int) -> None:
        self._sorter = Sorter(directory, SorterSettings(memory_bytes=memory_bytes))
        self._manager = SinkManager(self._sorter)
        for span in spans:
            self._sorter.add_table(span, BASE_TS)
            self._manager.add_table(span, BASE_TS, mount)
        self._acked: dict[Span, int] = dict.fromkeys(spans, BASE_TS)
        self._rows, self._sort_cpu_s, self._read_cpu_s = 0, 0.0, 0.0

    def run(self, windows: list[Window]) -> Told:
        """Bring all rows in, and read and acknowledge them now and then."""
        for first in range(0, len(windows), _ROUND_WINDOWS):
            begin = time.process_time()
            for window in windows[first : first + _ROUND_WINDOWS]:
                self._sorter.add(window.span, window.batch)
                self._sorter.resolve(window.span, window.resolved_ts)
            sorted_at = time.process_time()
            self._read_all()
            self._sort_cpu_s += sorted_at - begin
            self._read_cpu_s += time.process_time() - sorted_at
        return Told(self._rows, self._sort_cpu_s, self._read_cpu_s)

    def close(self) -> None:
        """End all threads."""
        self._manager.stop()
        self._sorter.close()

    def _read_all(self) -> None:
        for span, start_ts in self._acked.items():
            end_ts = self._manager.resolved_ts(span)
            if end_ts > start_ts:
                self._rows += sum(
                    batch.num_rows for batch in self._manager.read(span, start_ts, end_ts)
                )
                self._manager.ack(end_ts, span)
                self._acked[span] = end_ts


def work(pipe: Connection, directory: str, args: argparse.Namespace, number: int, of: int) -> None:
    """One process: make the rows, say so, wait for the start, run, tell what it took."""
    workload = Workload(args.rows, args.tables, args.value_bytes, 1, args.seed)
    mine = {
        span for span in workload.spans if shard_of(span, of * _SHARDS) // _SHARDS == number
    }  # as the capture does
    windows = [window for window in workload.windows() if window.span in mine]
    with tempfile.TemporaryDirectory(dir=directory) as place:
        worker = Worker(Path(place), sorted(mine), _MEMORY_BYTES // of)
        pipe.send(None)
        pipe.recv()
        pipe.send(worker.run(windows))
        worker.close()


def run(args: argparse.Namespace, processes: int, directory: str) -> tuple[float, list[Told]]:
    """(wall seconds, what each process did)."""
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
    assert sum(one.rows for one in told) == args.rows
    return seconds, told


def figures(rows: int, rounds: list[tuple[float, list[Told]]]) -> dict[str, Any]:
    """The medians of the rounds with one number of processes, and the least and most rows/s."""
    rates = [rows / seconds for seconds, _ in rounds]
    sort_cpu_s = [sum(one.sort_cpu_s for one in told) for _, told in rounds]
    read_cpu_s = [sum(one.read_cpu_s for one in told) for _, told in rounds]
    most_cpu_s = [max(one.sort_cpu_s + one.read_cpu_s for one in told) for _, told in rounds]
    cores = [
        (sort + read) / it[0] for sort, read, it in zip(sort_cpu_s, read_cpu_s, rounds, strict=True)
    ]
    return {
        "per_s": round(median(rates)),
        "per_s_from_to": [round(min(rates)), round(max(rates))],
        "per_s_undisturbed": round(rows / median(most_cpu_s)),
        "cpu_us_per_op": round((median(sort_cpu_s) + median(read_cpu_s)) / rows * 1e6, 3),
        "sort_cpu_us": round(median(sort_cpu_s) / rows * 1e6, 3),
        "read_cpu_us": round(median(read_cpu_s) / rows * 1e6, 3),
        "cores": round(median(cores), 2),
        "most_rows": max(one.rows for one in rounds[0][1]),
    }


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
    rounds: dict[int, list[tuple[float, list[Told]]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for processes in args.workers * args.rounds:
            rounds.setdefault(processes, []).append(run(args, processes, directory))
    found = {processes: figures(args.rows, those) for processes, those in rounds.items()}
    one = found[min(found)]
    for each in found.values():
        each["speed_up"] = {
            name: round(each[name] / one[name], 2) for name in ("per_s", "per_s_undisturbed")
        }
    print(
        json.dumps(
            {"name": "workers", "rows": args.rows, "tables": args.tables, "by_workers": found}
        )
    )


if __name__ == "__main__":
    main()
