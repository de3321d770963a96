"""A dump of a real MariaDB into a followed log: rows per CPU-second to typed Arrow,
and what it does to the log's lag.

The table has ten typed columns, or `--columns` of them of `--row-bytes` in all. Beside it a row of
another table is written every 10 ms (`--beat-ms 0`: none); its lag is taken from the answer of its
commit to its row at the sorter's door, before each of `--rounds` dumps and during it; the lags are
medians over the rounds, with their least and greatest, and so is the ratio of those of one round.
CPU is that of this process: the log's reader, watermarks, chunks, keys, windows, and mounting each
row, which is done after the dumps; nothing is sorted. What it takes while nothing is dumped, beats
and all, is taken off in proportion to the time.
"""

import argparse
import asyncio
import json
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from server.capture.source.mysql import MySqlSource
from server.changefeed.source import SourceUri
from server.changefeed.table import SourceTable
from server.dump.job import DumpRecords, Job
from server.dump.mysql import chunk, pace
from server.puller.mysql.session.options import MySqlOptions
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.model.span import Span
from tests.bench.mysql_log import ROW, TABLE, Counting
from tests.mariadb import MariaDb, running_mariadb

_MOUNTED_ROWS = 500_000
"""More are counted only: mounting them takes as long for each."""


class Arriving(Counting):
    """Counts and keeps the rows of the dumped table, and notes when beats come."""

    def __init__(self, source: MySqlSource) -> None:
        super().__init__(source)
        self.tables: dict[Span, SourceTable] = {}
        self.batches: list[tuple[SourceTable, pa.RecordBatch]] = []

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """Count or note."""
        table = self.tables[span]
        if table.name == "shop.beat":
            now = time.monotonic()
            for key in batch.column("key").to_pylist():
                self.arrived.setdefault(key, now)
            return
        if self.rows < _MOUNTED_ROWS:
            self.batches.append((table, batch))
        super().add(span, batch)

    def mount(self) -> float:
        """Make typed rows of those that came, as readers have it done later; CPU-seconds a row."""
        began = time.process_time()
        for table, batch in self.batches:
            table.mounter.mount(batch)
        return (time.process_time() - began) / max(
            sum(int(batch.num_rows) for _, batch in self.batches), 1
        )

    def wants(self, schema_name: str, table_name: str) -> bool:
        """Both tables."""
        return schema_name == "shop"

    def wants_any_of(self, schema_name: str) -> bool:
        """The one database."""
        return schema_name == "shop"


@dataclass
class Beats:
    """Rows written again and again until told to stop; when each was committed."""

    server: MariaDb
    every_s: float
    committed: list[float] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Write."""
        connection = self.server.connect("shop")
        with connection.cursor() as cursor:
            while self.every_s and not self.ended.wait(self.every_s):
                cursor.execute(f"INSERT INTO beat VALUES ({len(self.committed)})")
                self.committed.append(time.monotonic())
        connection.close()

    def lags_ms(self, arrived: dict[bytes, float], begin: int, end: int) -> tuple[float, float]:
        """Half and 99 of 100 of the beats from `begin` to `end`."""
        keyed = [
            (self.committed[number], arrived.get(number.to_bytes(4, "little")))
            for number in range(begin, end)
        ]
        lags = sorted(
            1000 * max(came - committed, 0.0) for committed, came in keyed if came is not None
        )
        return (statistics.median(lags), lags[int(len(lags) * 0.99)]) if lags else (0.0, 0.0)


@dataclass(frozen=True)
class Dumped:
    """One round."""

    wall_s: float
    cpu_s: float
    idle_cpu: float
    """CPU-seconds a second before it."""
    beats: tuple[int, int, int]
    """The first before it, the first in it, the first after it."""


async def dumped(
    records: DumpRecords, job: Job, arriving: Arriving, beats: Beats, arguments: argparse.Namespace
) -> Dumped:
    """One round: beats alone, then beside a dump."""
    first, cpu = len(beats.committed), time.process_time()
    await asyncio.sleep(arguments.before_s)
    began, idle_cpu = time.monotonic(), (time.process_time() - cpu) / arguments.before_s
    cpu, before, wanted = time.process_time(), len(beats.committed), arriving.rows + arguments.rows
    await records.put_job(await records.job(), job)
    await asyncio.to_thread(arriving.wait, wanted)
    used, wall_s, during = time.process_time() - cpu, time.monotonic() - began, len(beats.committed)
    await asyncio.sleep(0.5)
    return Dumped(wall_s, used, idle_cpu, (first, before, during))


async def measured(
    server: MariaDb, directory: Path, arguments: argparse.Namespace
) -> dict[str, object]:
    """All rounds."""
    async with EmbeddedEtcd.open(directory) as etcd:
        meta = EtcdMeta(etcd)
        source = MySqlSource(
            "bench", MySqlOptions.of(SourceUri.parse(f"{server.uri}?idle-row-ms=0")), meta
        )
        start_ts = await source.now()
        arriving = Arriving(source)
        tables = [
            source.table(each)
            for each in await source.snapshot(start_ts)
            if each.schema_name == "shop"
        ]
        arriving.tables = {table.span: table for table in tables}
        (puller,) = source.pullers(tables, start_ts, arriving, arriving)
        beats = Beats(server, arguments.beat_ms / 1000)
        job = Job(
            "0", tables=("shop.orders",), parallel=arguments.parallel, verify=arguments.verify
        )
        rounds = []
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(puller.run())
            beating = tasks.create_task(asyncio.to_thread(beats.run))
            await asyncio.sleep(0.5)
            for number in range(arguments.rounds):
                again = replace(job, id=str(number))
                rounds.append(
                    await dumped(DumpRecords(meta, "bench"), again, arriving, beats, arguments)
                )
            beats.ended.set()
            await beating
            task.cancel()
        mount_s = await asyncio.to_thread(arriving.mount)
        arriving.executor.shutdown()
    return result(arriving, beats, rounds, mount_s)


def result(
    arriving: Arriving, beats: Beats, rounds: Sequence[Dumped], mount_s: float
) -> dict[str, object]:
    """What to print."""
    rows = arriving.rows / len(rounds)
    own_s = [
        max(each.cpu_s - each.idle_cpu * each.wall_s, 1e-9) + mount_s * rows for each in rounds
    ]
    lags = [
        (
            beats.lags_ms(arriving.arrived, first, before),
            beats.lags_ms(arriving.arrived, before, during),
        )
        for first, before, during in (each.beats for each in rounds)
    ]
    found: dict[str, object] = {
        "rows": int(rows),
        "rows_per_cpu_s": round(rows / statistics.median(own_s)),
        "rows_per_cpu_s_with_idle": round(
            rows / statistics.median(each.cpu_s + mount_s * rows for each in rounds)
        ),
        "rows_per_s": round(rows / statistics.median(each.wall_s for each in rounds)),
        "mb_per_s": round(arriving.bytes / sum(each.wall_s for each in rounds) / 1e6, 1),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    if beats.committed:
        for place, name in enumerate(("p50", "p99")):
            found[f"lag_before_{name}_ms"] = spread([before[place] for before, _ in lags])
            found[f"lag_during_{name}_ms"] = spread([during[place] for _, during in lags])
            found[f"lag_ratio_{name}"] = spread(
                [during[place] / max(before[place], 0.1) for before, during in lags]
            )
    return found


def spread(values: Sequence[float]) -> list[float]:
    """Least, median, greatest."""
    return [round(each, 2) for each in (min(values), statistics.median(values), max(values))]


def table_of(arguments: argparse.Namespace) -> tuple[str, str]:
    """How the table is made, and what a row of it is."""
    if not arguments.columns:
        return TABLE, ROW
    each = max((arguments.row_bytes - 8) // (arguments.columns - 1) - 1, 1)
    columns = ", ".join(f"c{number} VARCHAR({each})" for number in range(1, arguments.columns))
    made = (
        f"CREATE TABLE shop.orders (id BIGINT UNSIGNED PRIMARY KEY, {columns}) CHARACTER SET ascii"
    )
    return made, ", ".join(
        [
            "{key}",
            *(f"REPEAT(CHAR(97 + {{key}} % 26), {each})" for _ in range(1, arguments.columns)),
        ]
    )


def main() -> None:
    """Fill the table, then dump it; prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument(
        "--columns", type=int, default=0, help="of text, but for the key; 0: ten of several types"
    )
    parser.add_argument("--row-bytes", type=int, default=100, help="with --columns")
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument(
        "--chunk-kib", type=int, default=0, help="what chunks aim at; 0: what is built in"
    )
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--full-pace", action="store_true", help="give no way to the log")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--beat-ms", type=float, default=10)
    parser.add_argument(
        "--before-s", type=float, default=3.0, help="how long the lag is measured before each dump"
    )
    arguments = parser.parse_args()
    if arguments.chunk_kib:
        chunk.TARGET_BYTES = arguments.chunk_kib << 10
    if arguments.full_pace:
        pace.EASE_MIN = pace.EASE_FIRST = 1.0
    with (
        running_mariadb("--innodb-buffer-pool-size=256M") as server,
        tempfile.TemporaryDirectory() as directory,
    ):
        made, row = table_of(arguments)
        server.execute("CREATE DATABASE shop", made, "CREATE TABLE shop.beat (id INT PRIMARY KEY)")
        server.execute(
            "USE shop",
            f"INSERT INTO orders SELECT {row.format(key='seq')} FROM seq_1_to_{arguments.rows}",
            "ANALYZE TABLE orders",
        )
        found = asyncio.run(measured(server, Path(directory), arguments))
    shown = {
        name: getattr(arguments, name)
        for name in ("columns", "row_bytes", "parallel", "chunk_kib", "verify", "full_pace")
    }
    sys.stdout.write(
        json.dumps({"bench": "mysql_dump", **shown, "rounds": arguments.rounds, **found}) + "\n"
    )


if __name__ == "__main__":
    main()
