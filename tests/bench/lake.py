"""The lake's benchmark: `python -m tests.bench.lake --target T --batch-rows N`,
the real job against computed rows.

Without `--rate` all rows are there at once and each cut takes N of them: `per_s` is what the target
can take, p50 and p99 are the time of a cut. With `--rate R` rows commit at that pace and p50 and
p99 are commit to visible. Each busy table has `--keys` rows before; the cut that brings these, and
the first few after it (a cold JVM's), are not counted. With `--load` there is nothing before: the
cuts are a dump's, updates in the order of their keys, each key once. CPU is that of the job with
its JVM and Python workers; `cpu_ms_early` and `cpu_ms_late` are medians over the first and the last
third of the cuts, so that growth shows. `steps_ms` are medians over the counted cuts. `cpu_us_of`
says whose CPU it was, per row: the job's Python process, its JVM, Python workers under it.
`--workers N` gives the job a standalone cluster of N one-core workers, whose CPU is `executors`.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyspark_tidemark.lake.kafka.settings import PROTOCOLS

from tests.bench.lake_feed import BenchFeed
from tests.bench.lake_processes import Spent, cpu_s, rss_mb
from tests.kafka import running_broker
from tests.mariadb import running_mariadb
from tests.postgres import running_postgres
from tests.spark_cluster import LIGHT, StandaloneCluster, running_cluster

TARGETS = ("noop", "parquet", "delta", "iceberg", "jdbc", "mysql", "canal-json", "debezium-json")
"""The last two are topics of a Kafka broker, in these protocols."""
_TICK_S = 0.05


@contextlib.contextmanager
def target_uri(target: str, directory: Path) -> Iterator[str]:
    """An empty target of that kind."""
    if target == "jdbc":
        with running_postgres() as server:
            yield server.create("lake")
    elif target == "mysql":
        with running_mariadb() as maria:
            yield f"{maria.uri}/{maria.database('lake')}"
    elif target in PROTOCOLS:
        with running_broker(directory / "kafka") as broker:
            yield f"kafka://{broker.address}/lake?protocol={target}"
    else:
        yield f"{target}://{directory}/lake"


class Run:
    """One run of the job: what it told, and what it had cost by then."""

    def __init__(
        self, feed: BenchFeed, arguments: argparse.Namespace, workers: Sequence[int] = ()
    ) -> None:
        rows = (
            arguments.rate * arguments.seconds
            if arguments.rate
            else arguments.batches * arguments.batch_rows
        )
        warming = (
            arguments.rate * arguments.warm_up
            if arguments.rate
            else arguments.warm_up * arguments.batch_rows
        )
        self.feed = feed
        self.rate = arguments.rate
        self.warm = feed.loaded + int(warming) // feed.txn_rows
        self.last = self.warm + int(rows) // feed.txn_rows
        self.cuts: list[dict[str, Any]] = []
        self.spark: list[dict[str, Any]] = []
        self.cpu_s = 0.0
        self.cpu_s_of: dict[str, float] = {}
        self._workers = workers
        self.rss_mb = 0.0

    def follow(self, process: "subprocess.Popen[str]") -> None:
        """Take the job's lines to their end."""
        assert process.stdout is not None
        with Spent(process.pid) as spent:
            for line in process.stdout:
                self._take(json.loads(line), spent)
                self.rss_mb = max(self.rss_mb, rss_mb(process.pid) if self.cuts else 0.0)

    def _take(self, found: dict[str, Any], spent: Spent) -> None:
        feed = self.feed
        if "progress" in found and found["progress"]["end_ts"] > feed.ts(self.warm):
            self.spark.append(found["progress"]["ms"])
        if "end_ts" not in found:
            return
        found["at"] = time.time()
        if self.rate and found["end_ts"] == feed.ts(feed.loaded):
            threading.Thread(target=self._pace, daemon=True).start()
        if found["start_ts"] < feed.ts(self.warm):
            self.cpu_s, self._cpu_before = -spent.cpu_s, self._cpu_of(spent)
            self.began = found["at"]
            return
        self.cuts.append(found | {"cpu_s": spent.cpu_s})
        if found["end_ts"] >= feed.ts(self.last):
            self.cpu_s += spent.cpu_s
            before = self._cpu_before
            self.cpu_s_of = {name: now - before[name] for name, now in self._cpu_of(spent).items()}

    def _cpu_of(self, spent: Spent) -> dict[str, float]:
        """CPU seconds so far, by whose they are."""
        return spent.by_part() | {"executors": sum(map(cpu_s, self._workers))}

    def _pace(self) -> None:
        """Commit transactions at a pace, and note when: their commit_ts are a history's,
        not the time of day.
        """
        began, done = time.time(), self.feed.loaded
        while done < self.last:
            time.sleep(_TICK_S)
            done = min(
                self.last,
                self.feed.loaded + int((time.time() - began) * self.rate / self.feed.txn_rows),
            )
            self.feed.committed[done] = time.time()
            self.feed.resolve(done)

    def figures(self) -> dict[str, Any]:
        """The line's numbers; raises IndexError when nothing was counted."""
        rows = sum(sum(cut["rows"].values()) for cut in self.cuts)
        seconds = self.cuts[-1]["at"] - self.began
        times = sorted(self._latencies() if self.rate else [cut["seconds"] for cut in self.cuts])
        return {
            "rows": rows,
            "cuts": len(self.cuts),
            "seconds": round(seconds, 3),
            "per_s": round(rows / seconds),
            "cpu_us_per_op": round(self.cpu_s / rows * 1e6, 1),
            "cpu_us_of": {name: round(s / rows * 1e6, 2) for name, s in self.cpu_s_of.items()},
            "cpu_ms_per_cut": round(self.cpu_s / len(self.cuts) * 1e3),
            **self._growth(),
            "peak_rss_mb": round(self.rss_mb),
            "p50_ms": round(1000 * times[len(times) // 2]),
            "p99_ms": round(1000 * times[min(len(times) - 1, len(times) * 99 // 100)]),
            "steps_ms": _medians([cut.get("ms", {}) for cut in self.cuts] + self.spark),
        }

    def _growth(self) -> dict[str, int]:
        """CPU ms of a cut among the first and among the last."""
        ends = [cut["cpu_s"] for cut in self.cuts]
        costs = [1000 * (after - before) for before, after in itertools.pairwise(ends)]
        third = max(1, len(costs) // 3)
        parts = {"cpu_ms_early": costs[:third], "cpu_ms_late": costs[-third:]}
        return {name: round(statistics.median(part)) for name, part in parts.items() if part}

    def _latencies(self) -> list[float]:
        """Seconds from commit to visible, of each group of transactions that committed together."""
        found = []
        for transaction, committed in sorted(self.feed.committed.items()):
            ts = self.feed.ts(transaction)
            seen = next(
                (cut["at"] for cut in self.cuts if cut["start_ts"] < ts <= cut["end_ts"]), None
            )
            found += [max(0.0, seen - committed)] if seen is not None else []
        return found


def _medians(lines: list[dict[str, Any]]) -> dict[str, int]:
    names = sorted({name for line in lines for name in line})
    return {
        name: round(statistics.median(line[name] for line in lines if name in line))
        for name in names
    }


def measured(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run the job; returns its figures."""
    tables, busy = arguments.tables, arguments.busy or arguments.tables
    keys = arguments.keys
    if arguments.load:
        keys = (arguments.warm_up + arguments.batches) * arguments.batch_rows // busy
    feed = BenchFeed(
        keys,
        tables=tables,
        busy=busy,
        txn_rows=arguments.txn_rows,
        dumped=arguments.load,
        inserts=arguments.inserts,
    )
    with (
        target_uri(arguments.target, directory) as uri,
        feed,
        _cluster(arguments, directory) as cluster,
    ):
        run = Run(feed, arguments, cluster.workers if cluster else ())
        feed.resolve(feed.loaded if arguments.rate else run.last)
        command = [*_command(arguments, feed, uri, directory), "--endpoint", feed.uri]
        command += _on(cluster) if cluster else []
        command += ["--until-ts", str(feed.ts(run.last))]
        with (
            (directory / "log").open("w+", encoding="utf-8") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
        ):
            run.follow(process)
            if process.wait():
                log.seek(0)
                sys.stderr.write("".join(log.readlines()[-20:]))
                raise SystemExit(f"the job ended with status {process.returncode}")
        return run.figures()


@contextlib.contextmanager
def _cluster(arguments: argparse.Namespace, directory: Path) -> Iterator[StandaloneCluster | None]:
    if not arguments.workers:
        yield None
        return
    with running_cluster(directory, arguments.workers) as cluster:
        yield cluster


def _on(cluster: StandaloneCluster) -> list[str]:
    """The job's options for a cluster on this machine."""
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": LIGHT,
        "spark.locality.wait": "0s",
    }
    given = [f"--conf={name}={value}" for name, value in settings.items()]
    return ["--master", cluster.url, *given]


def _command(
    arguments: argparse.Namespace, feed: BenchFeed, uri: str, directory: Path
) -> list[str]:
    rows = str(arguments.batch_rows)
    if arguments.target == "noop":
        of = ["--table", feed.names[0], "--directory", str(directory), "--batch-rows", rows]
        return [sys.executable, "-m", "tests.bench.lake_noop", *of]
    command = [
        sys.executable,
        "-m",
        "pyspark_tidemark.job",
        "--changefeed",
        "bench",
        "--target",
        uri,
    ]
    command += ["--max-rows-per-trigger", rows, "--mode", arguments.mode, "--trigger", "0 seconds"]
    return [*command, "--checkpoint-dir", str(directory / "checkpoint"), *arguments.job.split()]


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--mode", default="", help="the lake's (default: the target's)")
    parser.add_argument(
        "--batch-rows", type=int, default=50_000, help="rows of a cut; with --rate at most"
    )
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument(
        "--warm-up", type=int, default=3, help="batches, with --rate seconds, that are not counted"
    )
    parser.add_argument("--keys", type=int, default=100_000, help="rows of a busy table")
    parser.add_argument(
        "--load",
        action="store_true",
        help="an initial load instead, of as many keys as there are rows",
    )
    parser.add_argument(
        "--inserts",
        choices=("ascending", "random"),
        default="",
        help="inserts of such keys instead of updates",
    )
    parser.add_argument("--tables", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0, help="tables that have rows (default: all)")
    parser.add_argument(
        "--txn-rows", type=int, default=100, help="rows of a transaction, all of one table"
    )
    parser.add_argument(
        "--rate", type=float, default=0.0, help="rows a second; 0: as fast as the target takes them"
    )
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="how long rows come with --rate"
    )
    parser.add_argument(
        "--workers", type=int, default=0, help="of a standalone cluster; 0: a local master"
    )
    parser.add_argument("--job", default="", help="more options for the job")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidemark-bench-") as directory:
        found = measured(arguments, Path(directory))
    shown = {
        name: getattr(arguments, name)
        for name in (
            *("target", "mode", "batch_rows", "keys", "load", "inserts", "tables", "busy"),
            *("workers", "job"),
        )
    }
    print(json.dumps({"name": "lake", **shown, "rate": arguments.rate, **found}))


if __name__ == "__main__":
    main()
