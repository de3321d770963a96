"""A dump of a real MariaDB into a followed log: rows per CPU-second to typed Arrow, and what it does to the log's lag.

The table has ten typed columns. Beside it a row of another table is written every 10 ms; its lag is taken from the
answer of its commit to its row at the sorter's door, before the dump and during it. CPU is that of this process: the
log's reader, watermarks, chunks, keys, windows, and mounting each row, which is done after the dump; nothing is sorted.
"""

import argparse
import asyncio
import json
import resource
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from server.capture import keys
from server.capture.changefeed import status_json
from server.dump.job import DumpRecords, Job
from server.puller.mysql.options import MySqlOptions
from server.puller.mysql.source import MySqlSource
from server.puller.table import SourceTable
from server.puller.uri import SourceUri
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.model.span import Span
from tests.bench.mysql_log import ROW, TABLE, Counting
from tests.mariadb import MariaDb, running_mariadb

_BEAT_S = 0.01


class Arriving(Counting):
    """Counts and mounts the rows of the dumped table, and notes when beats come."""

    def __init__(self, source: MySqlSource) -> None:
        super().__init__(source)
        self.tables: dict[Span, SourceTable] = {}
        self.batches: list[tuple[SourceTable, pa.RecordBatch]] = []
        self.resolved_ts = 0

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """Count or note."""
        table = self.tables[span]
        if table.name == "shop.beat":
            now = time.monotonic()
            for key in batch.column("key").to_pylist():
                self.arrived.setdefault(key, now)
            return
        self.batches.append((table, batch))
        super().add(span, batch)

    def mount(self) -> None:
        """Make typed rows of all that came, as readers have it done later."""
        for table, batch in self.batches:
            table.mounter.mount(batch)

    def resolve(self, *arguments: object) -> None:
        """How far the log is."""
        self.resolved_ts = max(self.resolved_ts, int(str(arguments[1])))

    def wants(self, schema_name: str, table_name: str) -> bool:
        """Both tables."""
        return schema_name == "shop"


@dataclass
class Beats:
    """Rows written every 10 ms until told to stop; when each was committed."""

    server: MariaDb
    committed: list[float] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Write."""
        connection = self.server.connect("shop")
        with connection.cursor() as cursor:
            while not self.ended.wait(_BEAT_S):
                cursor.execute(f"INSERT INTO beat VALUES ({len(self.committed)})")
                self.committed.append(time.monotonic())
        connection.close()

    def lags_ms(self, arrived: dict[bytes, float], begin: int, end: int) -> dict[str, float]:
        """Of the beats from `begin` to `end`."""
        keyed = [(self.committed[number], arrived.get(number.to_bytes(4, "little"))) for number in range(begin, end)]
        lags = sorted(1000 * max(came - committed, 0.0) for committed, came in keyed if came is not None)
        return {"p50_ms": round(statistics.median(lags), 2), "p99_ms": round(lags[int(len(lags) * 0.99)], 2)}


async def measured(server: MariaDb, directory: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """Beats alone, then beside a dump."""
    async with EmbeddedEtcd.open(directory) as etcd:
        meta = EtcdMeta(etcd)
        source = MySqlSource("bench", MySqlOptions.of(SourceUri.parse(f"{server.uri}?idle-row-ms=0")), meta)
        start_ts = await source.now()
        arriving = Arriving(source)
        tables = [source.table(each) for each in await source.snapshot(start_ts) if each.schema_name == "shop"]
        arriving.tables = {table.span: table for table in tables}
        (puller,) = source.pullers(tables, start_ts, arriving, arriving)
        beats = Beats(server)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(puller.run())
            beating = tasks.create_task(asyncio.to_thread(beats.run))
            await asyncio.sleep(arguments.before_s)
            began, cpu, before = time.monotonic(), time.process_time(), len(beats.committed)
            await DumpRecords(meta, "bench").put_job(
                None, Job("bench", tables=("shop.orders",), parallel=arguments.parallel)
            )
            await asyncio.to_thread(arriving.wait, arguments.rows)
            wall, used, during = time.monotonic() - began, time.process_time() - cpu, len(beats.committed)
            mounted = time.process_time()
            await asyncio.to_thread(arriving.mount)
            used += time.process_time() - mounted
            beats.ended.set()
            await beating
            await asyncio.sleep(0.5)
            await meta.put(keys.status("bench"), status_json(arriving.resolved_ts))
            await asyncio.sleep(1.0)
            [progress] = await DumpRecords(meta, "bench").tables(Job("bench"))
            task.cancel()
        arriving.executor.shutdown()
    return {
        "rows": arriving.rows,
        "rows_per_cpu_s": round(arriving.rows / used),
        "rows_per_s": round(arriving.rows / wall),
        "mb_per_s": round(arriving.bytes / wall / 1e6, 1),
        "chunks": progress.chunks,
        "lag_before": beats.lags_ms(arriving.arrived, before // 4, before),
        "lag_during": beats.lags_ms(arriving.arrived, before, during),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    """Fill the table, then dump it; prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--before-s", type=float, default=3.0, help="how long the lag is measured before the dump")
    arguments = parser.parse_args()
    with running_mariadb("--innodb-buffer-pool-size=256M") as server, tempfile.TemporaryDirectory() as directory:
        server.execute("CREATE DATABASE shop", TABLE, "CREATE TABLE shop.beat (id INT PRIMARY KEY)")
        server.execute(
            "USE shop",
            f"INSERT INTO orders SELECT {ROW.format(key='seq')} FROM seq_1_to_{arguments.rows}",
            "ANALYZE TABLE orders",
        )
        result = asyncio.run(measured(server, Path(directory), arguments))
    print(json.dumps({"bench": "mysql_dump", "parallel": arguments.parallel, **result}))


if __name__ == "__main__":
    main()
