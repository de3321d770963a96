"""The log of a real MariaDB through the whole puller: rows per CPU-second,
and the lag of single rows.

The workload: half the changes in transactions of one row, half in transactions of 40 inserts, 40
updates and 20 deletes, over a table of ten typed columns. Rows are counted as the sorter gets them;
nothing is sorted or mounted. CPU is that of this process, without the server's.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from server.capture.source.mysql import MySqlSource
from server.changefeed.source import SourceUri
from server.changefeed.table import SourceTable, TableRecord
from server.puller.mysql.session.options import MySqlOptions
from server.puller.open_transactions import OpenTransactions
from server.puller.source import TableChange
from sink.holds import Holds
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.model.span import Span
from tests.mariadb import MariaDb, running_mariadb

TABLE = """CREATE TABLE shop.orders (id BIGINT UNSIGNED PRIMARY KEY, customer INT NOT NULL, state SMALLINT NOT NULL,
amount DECIMAL(12,2), weight DOUBLE, code VARCHAR(16) NOT NULL, note VARCHAR(120), made DATETIME(3),
changed TIMESTAMP(6), token VARBINARY(64))"""
ROW = """{key}, {key} % 1000, {key} % 7, {key} / 100, {key} / 3, CONCAT('c', {key}),
IF({key} % 5, REPEAT('n', {key} % 100), NULL), '2026-11-21 12:00:00.123', '2026-11-21 12:00:00.123456', MD5({key})"""


class Counting:
    """Implements `Rows` and `Catalog`: counts."""

    def __init__(self, source: MySqlSource) -> None:
        self.executor = ThreadPoolExecutor(2)
        self.open_transactions = OpenTransactions()
        self.holds = Holds()
        self.rows = 0
        self.bytes = 0
        self.arrived: dict[bytes, float] = {}
        self.keys = False
        self._source = source
        self._changed = threading.Condition()

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """Count; remember when which key came, if that is asked for."""
        with self._changed:
            self.rows += batch.num_rows
            self.bytes += batch.nbytes
            self._changed.notify_all()
        if self.keys:
            now = time.monotonic()
            self.arrived |= dict.fromkeys(batch.column("key").to_pylist(), now)

    def wait(self, rows: int) -> None:
        """Until so many have come."""
        with self._changed:
            self._changed.wait_for(lambda: self.rows >= rows)

    def resolve(self, *_: object) -> None:
        """Nothing waits."""

    def wants(self, schema_name: str, table_name: str) -> bool:
        """The one table."""
        return (schema_name, table_name) == ("shop", "orders")

    def wants_any_of(self, schema_name: str) -> bool:
        """The one database."""
        return schema_name == "shop"

    def known(self, commit_ts: int) -> None:
        """Every change is news here."""
        del commit_ts

    def table(self, record: TableRecord, commit_ts: int | None = None) -> SourceTable | None:
        """As the source reads it."""
        del commit_ts
        return self._source.table(record)

    async def change(self, change: TableChange) -> None:
        """There is none."""


def main() -> None:
    """Write the log, then read it; prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="row changes in the log")
    parser.add_argument(
        "--lag-rows", type=int, default=300, help="single rows whose lag is measured"
    )
    parser.add_argument(
        "--checksum", choices=("verify", "trust"), default="verify", help="the source's option"
    )
    parser.add_argument("--compress", action="store_true", help="with log_bin_compress=ON")
    arguments = parser.parse_args()
    flags = ["--log-bin-compress=ON"] if arguments.compress else []
    with running_mariadb(*flags) as server, tempfile.TemporaryDirectory() as directory:
        server.execute("CREATE DATABASE shop", TABLE)
        result = asyncio.run(measured(server, Path(directory), arguments))
    print(
        json.dumps(
            {
                "bench": "mysql_log",
                "compress": arguments.compress,
                "checksum": arguments.checksum,
                **result,
            }
        )
    )


async def measured(
    server: MariaDb, directory: Path, arguments: argparse.Namespace
) -> dict[str, object]:
    """Throughput of a log that is there already, then lag of what is written while it is
    followed.
    """
    async with EmbeddedEtcd.open(directory) as etcd:
        source = MySqlSource(
            "bench",
            MySqlOptions.of(
                SourceUri.parse(f"{server.uri}?idle-row-ms=0&checksum={arguments.checksum}")
            ),
            EtcdMeta(etcd),
        )
        start_ts = await source.now()
        records = [each for each in await source.snapshot(start_ts) if each.name == "shop.orders"]
        total = await asyncio.to_thread(write, server, arguments.rows)
        counting = Counting(source)
        (puller,) = source.pullers(
            [source.table(each) for each in records], start_ts, counting, counting
        )
        began, cpu = time.monotonic(), cpu_s()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(puller.run())
            await asyncio.to_thread(counting.wait, total)
            wall, used = time.monotonic() - began, cpu_s() - cpu
            lags = await lag(server, counting, arguments.lag_rows)
            task.cancel()
        counting.executor.shutdown()
    return {
        "rows": counting.rows - len(lags),
        "rows_per_cpu_s": round(total / used),
        "rows_per_s": round(total / wall),
        "mb_per_s": round(counting.bytes / wall / 1e6, 1),
        "lag_p50_ms": round(statistics.median(lags) * 1000, 2),
        "lag_p99_ms": round(sorted(lags)[int(len(lags) * 0.99)] * 1000, 2),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "python": sys.version.split()[0],
    }


def write(server: MariaDb, rows: int) -> int:
    """The workload; returns how many row changes it made."""
    connection = server.connect("shop")
    connection.autocommit(True)
    half, changes = rows // 2, 0
    with connection.cursor() as cursor:
        for key in range(half):
            changes += cursor.execute(f"INSERT INTO orders VALUES ({ROW.format(key=key)})")
        for group in range(half // 100):
            first = (
                half + group * 40
            )  # what is updated or deleted is of earlier groups, so that nothing is folded
            cursor.execute("BEGIN")
            changes += cursor.execute(
                f"INSERT INTO orders SELECT {ROW.format(key='seq')} FROM "
                f"seq_{first}_to_{first + 39}"
            )
            changes += cursor.execute(
                f"UPDATE orders SET state = state + 1 WHERE id BETWEEN {first - 40} AND {first - 1}"
            )
            changes += cursor.execute(
                f"DELETE FROM orders WHERE id BETWEEN {first - 80} AND {first - 61}"
            )
            cursor.execute("COMMIT")
    connection.close()
    return changes


async def lag(server: MariaDb, counting: Counting, rows: int) -> list[float]:
    """From the answer of each single-row commit to its row at the sorter's door, in seconds."""
    counting.keys = True
    seen = counting.rows
    committed: list[float] = []

    def one_by_one() -> None:
        connection = server.connect("shop")
        pause = threading.Event()
        with connection.cursor() as cursor:
            for key in range(rows):
                cursor.execute(f"INSERT INTO orders VALUES ({ROW.format(key=(1 << 30) + key)})")
                committed.append(time.monotonic())
                pause.wait(0.01)
        connection.close()

    await asyncio.to_thread(one_by_one)
    await asyncio.to_thread(counting.wait, seen + rows)
    arrived = list(counting.arrived.values())
    return [max(0.0, there - done) for done, there in zip(committed, arrived, strict=True)]


def cpu_s() -> float:
    """CPU of this process so far, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
