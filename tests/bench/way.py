"""The whole way of a row, with all its daemons on this machine: a MariaDB, coordinator, capture and
the lake job: `python -m tests.bench.way --target T --rate N --seconds S`.

First a dump loads `--keys` rows, then a writer commits `--rate` rows a second in transactions of
`--txn-rows`: half of them insert, some update, some delete. With `--source store` they are inserts
into our store, in TiDB's encoding, of one table and without a dump. p50, p90 and p99 are the time
from a commit's answer until the job said that its cut is visible; `first_minute_p99_s` is that of
the first 60 s. With `--backlog R`, R rows are committed while no job runs; then a job catches up.

CPU and memory are told by process: MariaDB and the writer are not ours, and stand beside.
The rows that became visible are counted in the cuts, in commit order; a run in which their number
is another one than what was committed is an error.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server.demo import bank
from server.demo.bank import Bank
from server.demo.client import connect, default_client
from tests.bench.lake_processes import Spent, cpu_s, rss_mb
from tests.integration.capture.processes import Cluster, running_cluster
from tests.mariadb import MariaDb, running_mariadb

FEED = "way"
UPSTREAM = "upstream"
"""Not ours to count: the database, or the store in its place."""
LOAD_STATEMENT_ROWS = 10_000
PATIENCE_S = 600.0
COLUMNS = (
    "id BIGINT PRIMARY KEY, customer INT NOT NULL, amount DECIMAL(12,2), price DOUBLE, "
    "status VARCHAR(16), note VARCHAR(200), placed DATETIME(6), changed TIMESTAMP NULL, "
    "day DATE, flags TINYINT, weight FLOAT, data BLOB"
)
ROW = (
    "({0}, {0} % 977, {0} % 10000 / 7, {0} * 0.25, 'open', REPEAT('n', 60), NOW(6), NOW(), "
    "CURDATE(), {0} % 3, {0} / 3, UNHEX(MD5({0})))"
)


@dataclass
class Visible:
    """What a job's lines say: how many rows are visible, and since when."""

    counts: list[tuple[float, int]] = field(default_factory=list)
    """(time of day in seconds, rows so far), of each cut."""
    maintenance_s: list[float] = field(default_factory=list)
    ready: bool = False
    ended: bool = False
    """The job has; nothing more becomes visible."""

    @property
    def rows(self) -> int:
        """Rows that are visible by now."""
        return self.counts[-1][1] if self.counts else 0

    def take(self, line: dict[str, Any]) -> None:
        """A line of the job."""
        self.ready |= line.get("ready", False)
        if waited := line.get("maintenance", {}).get("seconds"):
            self.maintenance_s.append(waited)
        if "end_ts" in line:
            self.counts.append((time.time(), self.rows + sum(line["rows"].values())))

    def wait(self, rows: int) -> None:
        """Until so many rows are visible."""
        deadline = time.monotonic() + PATIENCE_S
        while self.rows < rows or not self.ready:
            if self.ended or time.monotonic() > deadline:
                raise SystemExit(f"{self.rows} of {rows} rows are visible, and no more come")
            time.sleep(0.02)

    def latencies_s(self, committed: list[tuple[float, int]]) -> list[float]:
        """For each commit (when, rows by then) how long it took until its cut was visible."""
        found, cuts = [], iter(self.counts)
        seen_s, seen_rows = next(cuts)
        for at_s, rows in committed:
            while seen_rows < rows:
                seen_s, seen_rows = next(cuts)
            found.append(max(0.0, seen_s - at_s))
        return found


class Writer(ABC):
    """Commits transactions; runs in this process, which costs a few per cent."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.committed: list[tuple[float, int]] = []

    @abstractmethod
    def commit(self) -> None:
        """One transaction."""

    def pace(self, rate: float, seconds: float) -> None:
        """Commit at that rate for so long."""
        began, before = time.time(), self.rows
        while (passed := time.time() - began) < seconds:
            while self.rows - before < passed * rate:
                self.commit()
            time.sleep(0.002)

    def note(self, changed: int) -> None:
        """So many rows were committed now."""
        if changed:
            self.rows += changed
            self.committed.append((time.time(), self.rows))


class MariaDbWriter(Writer):
    """Goes from table to table."""

    def __init__(self, server: MariaDb, tables: int, keys: int, txn_rows: int) -> None:
        super().__init__(keys)
        self._session = server.connect("way")
        self._tables = tables
        self._txn_rows = txn_rows
        self._next_id = keys // tables
        self._turn = 0

    def commit(self) -> None:
        """One transaction; what it was is decided by its turn."""
        table = f"t{self._turn % self._tables}"
        kind = self._turn // self._tables % 10
        self._turn += 1
        first = self._next_id
        with self._session.cursor() as cursor:
            if kind < 5:
                values = ", ".join(ROW.format(first + n) for n in range(self._txn_rows))
                changed = cursor.execute(f"INSERT INTO {table} VALUES {values}")
                if self._turn % self._tables == 0:
                    self._next_id += self._txn_rows
            else:
                ids = ", ".join(str(self._turn * 7919 % first + n) for n in range(self._txn_rows))
                changed = cursor.execute(
                    f"DELETE FROM {table} WHERE id IN ({ids})"
                    if kind == 9
                    else f"UPDATE {table} SET amount = amount + 1, note = CONCAT('c{self._turn}', "
                    f"REPEAT('u', 50)) WHERE id IN ({ids})"
                )
        self.note(changed)


class StoreWriter(Writer):
    """Inserts transfers of the demo's bank."""

    def __init__(self, cluster: Cluster, txn_rows: int) -> None:
        super().__init__(0)
        self._txn_rows = txn_rows
        self._bank = Bank(2)
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        connecting = connect(default_client(), cluster.pd)
        self._client = self._loop.run_until_complete(self._stack.enter_async_context(connecting))

    def commit(self) -> None:
        """One transaction."""
        self._loop.run_until_complete(self._commit())
        self.note(self._txn_rows)

    async def _commit(self) -> None:
        transaction = await self._client.begin(pessimistic=False)
        for number in range(self.rows, self.rows + self._txn_rows):
            key = self._bank.transfer_key(number)
            await transaction.put(key, self._bank.new_transfer(number, 0, 1, 5))
        await transaction.commit()


@contextmanager
def running_job(
    cluster: Cluster, visible: Visible, arguments: argparse.Namespace
) -> Iterator[Spent]:
    """A lake job of the changefeed, whose lines go to `visible`; what it costs."""
    command = [sys.executable, "-m", "pyspark_tidemark.job", "--changefeed", FEED]
    command += ["--endpoint", f"grpc://{cluster.capture.endpoints['flight']}"]
    command += ["--target", _target(arguments, cluster.directory), *arguments.job.split()]
    log = cluster.directory / "job.log"
    visible.ready = visible.ended = False
    with (
        log.open("a", encoding="utf-8") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):

        def follow() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                visible.take(json.loads(line))
            visible.ended = True

        reader = threading.Thread(target=follow)
        reader.start()
        try:
            with Spent(process.pid) as spent:
                yield spent
        finally:
            if visible.ended:
                sys.stderr.write(log.read_text(encoding="utf-8")[-3000:])
            process.terminate()
            reader.join()


def _target(arguments: argparse.Namespace, directory: Path) -> str:
    return f"{arguments.target}://{directory}/lake"


def load_rows(server: MariaDb, tables: int, keys: int) -> None:
    """Tables with `keys` rows in all, before there is a changefeed."""
    server.execute("CREATE DATABASE way")
    for table in range(tables):
        server.execute(f"CREATE TABLE way.t{table} ({COLUMNS})")
        for first in range(0, keys // tables, LOAD_STATEMENT_ROWS):
            last = min(first + LOAD_STATEMENT_ROWS, keys // tables) - 1
            server.execute(
                f"INSERT INTO way.t{table} SELECT {ROW.format('seq')[1:-1]} "
                f"FROM seq_{first}_to_{last}",
                database="way",
            )


class Costs:
    """CPU and memory by process, since the last look."""

    def __init__(self, cluster: Cluster, job: Spent, server: MariaDb | None) -> None:
        self._job = job
        upstream = cluster.store.process if server is None else server.running
        assert upstream is not None
        self._pids = {
            UPSTREAM: upstream.pid,
            "coordinator": cluster.coordinator.process.pid,
            "capture": cluster.capture.process.pid,
        }
        self._before: dict[str, float] = {}
        self.since()

    def since(self) -> dict[str, float]:
        """CPU seconds of each since this was asked last."""
        now = {name: cpu_s(pid) for name, pid in self._pids.items()}
        now |= self._job.by_part()
        spent = {name: round(now[name] - self._before.get(name, 0.0), 2) for name in now}
        self._before = now
        return spent

    def rss_mb(self) -> dict[str, int]:
        """Resident memory of each now."""
        found = {name: round(rss_mb(pid)) for name, pid in self._pids.items()}
        return found | {"job": round(rss_mb(self._job.pid))}


def measured(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One run; its figures."""
    with ExitStack() as running:
        server = None
        if arguments.source == "mariadb":
            server = running.enter_context(running_mariadb())
        cluster = running.enter_context(running_cluster(directory))
        keys = _created(server, cluster, arguments)
        visible = Visible()
        began = time.monotonic()
        with running_job(cluster, visible, arguments) as job:
            costs = Costs(cluster, job, server)
            found: dict[str, Any] = {}
            if keys:
                cluster.cli("changefeed", "dumpstart", "-c", FEED)
            visible.wait(keys)
            if keys:
                found["load"] = _phase(keys, time.monotonic() - began, costs)
            writer: Writer = (
                StoreWriter(cluster, arguments.txn_rows)
                if server is None
                else MariaDbWriter(server, arguments.tables, keys, arguments.txn_rows)
            )
            if arguments.rate:
                found["live"] = _live(writer, visible, costs, arguments)
        if arguments.backlog:
            found["catch_up"] = _catch_up(cluster, server, writer, visible, arguments)
    if visible.rows != writer.rows:
        raise SystemExit(f"{writer.rows} rows were committed, {visible.rows} became visible")
    return found


def _created(server: MariaDb | None, cluster: Cluster, arguments: argparse.Namespace) -> int:
    """Tables and a changefeed of them; returns how many rows a dump has to load."""
    create = ["changefeed", "create", "-c", FEED]
    create += ["--sink-uri", _target(arguments, cluster.directory)]
    if server is None:
        tables = cluster.directory / "tables.json"
        transfers = {"schema_name": bank.SCHEMA, "table_info": json.loads(bank.TRANSFERS.to_json())}
        tables.write_text(json.dumps([transfers]), encoding="utf-8")
        cluster.cli(*create, "--tables", str(tables))
        return 0
    keys: int = arguments.keys // arguments.tables * arguments.tables
    load_rows(server, arguments.tables, keys)
    cluster.cli(*create, "--filter", "way.*", "--source-uri", server.uri)
    return keys


def _live(
    writer: Writer, visible: Visible, costs: Costs, arguments: argparse.Namespace
) -> dict[str, Any]:
    costs.since()
    before, cuts, waits = writer.rows, len(visible.counts), len(visible.maintenance_s)
    began = time.time()
    writer.pace(arguments.rate, arguments.seconds)
    visible.wait(writer.rows)
    seconds = time.time() - began
    waited = visible.latencies_s(writer.committed)
    early = [
        after
        for after, (at_s, _) in zip(waited, writer.committed, strict=True)
        if at_s < began + 60
    ]
    return _phase(writer.rows - before, seconds, costs) | {
        "p50_s": _quantile(waited, 0.5),
        "p90_s": _quantile(waited, 0.9),
        "p99_s": _quantile(waited, 0.99),
        "max_s": round(max(waited), 3),
        "first_minute_p99_s": _quantile(early, 0.99),
        "cuts": len(visible.counts) - cuts,
        "longest_maintenance_s": max(visible.maintenance_s[waits:], default=0.0),
    }


def _catch_up(
    cluster: Cluster,
    server: MariaDb | None,
    writer: Writer,
    visible: Visible,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    before = writer.rows
    while writer.rows < before + arguments.backlog:
        writer.commit()
    began = time.monotonic()
    with running_job(cluster, visible, arguments) as job:
        costs = Costs(cluster, job, server)
        visible.wait(writer.rows)
        return _phase(writer.rows - before, time.monotonic() - began, costs)


def _phase(rows: int, seconds: float, costs: Costs) -> dict[str, Any]:
    spent = costs.since()
    ours = sum(cpu for name, cpu in spent.items() if name != UPSTREAM)
    return {
        "rows": rows,
        "seconds": round(seconds, 1),
        "per_s": round(rows / seconds),
        "rows_per_cpu_s": round(rows / ours) if ours else 0,
        "cpu_us_per_row": {name: round(cpu / max(rows, 1) * 1e6, 1) for name, cpu in spent.items()},
        "cpu_share": {name: round(cpu / seconds, 3) for name, cpu in spent.items()},
        "rss_mb": costs.rss_mb(),
    }


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3) if ordered else 0.0


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=("delta", "iceberg", "parquet"), default="delta")
    parser.add_argument("--source", choices=("mariadb", "store"), default="mariadb")
    parser.add_argument("--tables", type=int, default=1)
    parser.add_argument("--keys", type=int, default=100_000, help="rows that a dump loads first")
    parser.add_argument("--rate", type=float, default=1000.0, help="rows a second; 0: none")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long rows come")
    parser.add_argument("--txn-rows", type=int, default=10, help="rows of a transaction")
    parser.add_argument("--backlog", type=int, default=0, help="rows to catch up with at the end")
    parser.add_argument("--job", default="", help="more options for the job")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidemark-bench-") as directory:
        found = measured(arguments, Path(directory))
    shown = {name: getattr(arguments, name) for name in ("source", "target", "tables", "rate")}
    live = {name: found.get("live", {}).get(name) for name in ("p50_s", "p99_s")}
    print(json.dumps({"name": "way", **shown, **live, **found}))


if __name__ == "__main__":
    main()
