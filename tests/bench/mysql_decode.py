"""How fast a binlog becomes typed rows: `python -m tests.bench.mysql_decode --rows N`;
prints one JSON line.

A MariaDB of its own makes the log (not counted): a table of ten typed columns with rows in it, then
N changes, half of them one-row transactions, half transactions of 100 changes (40 inserts, 40
updates, 20 deletes). Counted is the time from the file's bytes to Arrow columns, through the events
of RAW_SCHEMA that the sorter would store in between.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from sink.mysql_mounter import MysqlMounter
from storage.mysql.buffer import PAD_BYTES
from storage.mysql.changes import Plan, read_changes
from storage.mysql.compressed import expanded
from storage.mysql.event import Events, EventType, check_events, split_events
from storage.mysql.rows import TableMaps
from tests.mariadb import MariaDb, running_mariadb

BATCH_BYTES = 4 << 20
TABLE = """CREATE TABLE shop.orders (
    id BIGINT UNSIGNED PRIMARY KEY, customer INT, kind SMALLINT, amount DECIMAL(12,2), weight DOUBLE, state VARCHAR(16),
    note VARCHAR(120), ordered_at DATETIME(3), changed_at TIMESTAMP(6) NOT NULL, token VARBINARY(64))"""
ROW = """{id}, {id} % 100000, {id} % 300, {id} / 7, {id} / 3, CONCAT('state ', {id} % 9),
    IF({id} % 5 = 0, NULL, REPEAT('n', {id} % 120)), '2024-02-03 04:05:06.789' + INTERVAL {id} SECOND,
    '2024-02-03 04:05:06.789012', UNHEX(CONCAT(MD5({id}), MD5({id} + 1)))"""
PROCEDURE = """CREATE PROCEDURE shop.change_one_by_one(IN times INT) BEGIN
    DECLARE n INT DEFAULT 0;
    WHILE n < times DO
        IF n % 5 < 2 THEN INSERT INTO shop.orders VALUES ({insert});
        ELSEIF n % 5 < 4 THEN UPDATE shop.orders SET amount = amount + 1, state = 'changed' WHERE id = n;
        ELSE DELETE FROM shop.orders WHERE id = n;
        END IF;
        SET n = n + 1;
    END WHILE; END"""


def _log(server: MariaDb, rows: int) -> bytes:
    """The log of the changes alone."""
    base = rows + rows // 2
    fresh = 10 * base
    server.execute(
        "CREATE DATABASE shop", TABLE, PROCEDURE.format(insert=ROW.format(id=f"({fresh} + n)"))
    )
    server.execute(
        f"INSERT INTO orders SELECT {ROW.format(id='seq')} FROM seq_0_to_{base}", database="shop"
    )
    server.execute("FLUSH BINARY LOGS")
    ((file, *_),) = server.execute("SHOW MASTER STATUS")
    server.execute(f"CALL shop.change_one_by_one({rows // 2})")
    statements: list[str] = []
    for number in range(rows // 200):
        begin, new = rows // 2 + number * 100, 2 * fresh + number * 40
        statements += [
            "BEGIN",
            f"INSERT INTO orders SELECT {ROW.format(id='seq')} FROM seq_{new}_to_{new + 39}",
            (
                f"UPDATE orders SET amount = amount + 1, state = 'changed' WHERE id BETWEEN {begin} "
                f"AND {begin + 39}"
            ),
            f"DELETE FROM orders WHERE id BETWEEN {begin + 50} AND {begin + 69}",
            "COMMIT",
        ]
    server.execute(*statements, database="shop")
    server.execute("FLUSH BINARY LOGS")
    return (server.directory / "data" / Path(file).name).read_bytes()


def _decode(log: bytes, *, checks: bool) -> tuple[int, int, int]:
    """How many events, changes, and mounted bytes."""
    maps, plans = TableMaps(mariadb=True), {}
    data = log + bytes(PAD_BYTES)
    at, seen, changes, size, transactions = 4, 0, 0, 0, 0
    while at < len(log):
        events, at = split_events(
            data, checksums=True, begin=at, end=min(at + BATCH_BYTES, len(log))
        )
        if checks:
            check_events(events)
        seen += len(events)
        (events,) = expanded(events, 1 << 40)
        commit_ts = _commit_ts(events, transactions)
        transactions = int(commit_ts[-1])
        for rows in maps.group(events):
            if rows.table.name not in plans:
                plan = Plan.of(rows.table.to_table(1))
                plans[rows.table.name] = plan, MysqlMounter(plan.table, rows.table.schema)
            plan, mounter = plans[rows.table.name]
            raw: pa.RecordBatch = read_changes(events, rows, plan, commit_ts).batch
            mounted = mounter.mount(raw)
            changes, size = changes + mounted.num_rows, size + mounted.nbytes
    return seen, changes, size


def _commit_ts(events: Events, before: int) -> np.ndarray:
    return np.cumsum(events.types == EventType.MARIADB_GTID).astype(np.uint64) + np.uint64(
        before + 1
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument(
        "--repeat", type=int, default=3, help="best of so many passes over the same log"
    )
    parser.add_argument("--checks", action="store_true", help="compare each event's CRC32")
    options = parser.parse_args()
    with running_mariadb(
        "--sync-binlog=0", "--innodb-buffer-pool-size=256M", "--max-binlog-size=1G"
    ) as server:
        log = _log(server, options.rows)
    passes = []
    for _ in range(options.repeat):
        began, cpu = time.perf_counter(), time.process_time()
        events, changes, size = _decode(log, checks=options.checks)
        passes.append((time.process_time() - cpu, time.perf_counter() - began))
    cpu_s, seconds = min(passes)
    print(
        json.dumps(
            {
                "name": "mysql_decode" + ("_checked" if options.checks else ""),
                "rows": changes,
                "events": events,
                "log_mb": round(len(log) / 1e6, 1),
                "arrow_mb": round(size / 1e6, 1),
                "seconds": round(seconds, 4),
                "per_s": round(changes / seconds),
                "per_cpu_s": round(changes / cpu_s),
                "cpu_us_per_op": round(cpu_s / changes * 1e6, 4),
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
