"""Memory of a whole capture while transactions of a MariaDB are open:
`python -m tests.bench.capture_memory`.

A real server, coordinator and capture; nobody reads or acknowledges. Prints one JSON line with the
capture's resident memory in MiB: before, the most until the log was read up to the last XA PREPARE,
and the most from there until it was read up to the last XA COMMIT. With `--tables N` so many other
tables get rows at the same time, and a reader takes all afterwards, with a pause after each batch:
the most while it does. `anon` is memory of its own; RSS also counts mapped files, which the system
takes back when it needs to.
"""

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.integration.capture.processes import Cluster, Reader, running_cluster
from tests.mariadb import MariaDb, running_mariadb

TABLE = "CREATE TABLE shop.t (id BIGINT PRIMARY KEY, v VARBINARY(60000)) ROW_FORMAT=DYNAMIC"
STATEMENT_MB = 4
POLL_S = 0.05
PATIENCE_S = 900
SLOW_S = 0.02
ROWS_A_TABLE = 100


class Memory:
    """The resident memory of a process, sampled by a thread of ours."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._most: dict[str, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def now(self) -> dict[str, float]:
        """In MiB."""
        fields = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
        return {
            name: round(int(fields[field].split()[0]) / 1024)
            for name, field in (("rss", "VmRSS"), ("anon", "RssAnon"))
        }

    def most(self) -> dict[str, float]:
        """The most since this was asked last, in MiB."""
        self._look()
        most, self._most = self._most, {}
        return most

    def close(self) -> None:
        """Sample no more."""
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        for name, value in self.now().items():
            self._most[name] = max(self._most.get(name, 0), value)


def write(server: MariaDb, options: argparse.Namespace, number: int) -> None:
    """Write one transaction, and prepare it, or commit it."""
    rows = (options.transaction_mb << 20) // options.value_bytes
    step = (STATEMENT_MB << 20) // options.value_bytes
    first = number * rows
    insert = "INSERT INTO shop.t SELECT seq, RANDOM_BYTES({size}) FROM seq_{first}_to_{last}"
    inserts = [
        insert.format(
            size=options.value_bytes, first=first + at, last=first + min(at + step, rows) - 1
        )
        for at in range(0, rows, step)
    ]
    if options.plain:
        server.execute("BEGIN", *inserts, "COMMIT", database="shop")
    else:
        prepare = (f"XA END 'x{number}'", f"XA PREPARE 'x{number}'")
        server.execute(f"XA START 'x{number}'", *inserts, *prepare, database="shop")


def run(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    flags = ("--memory-quota-bytes", str(options.quota_mb << 20))
    log = (
        "--innodb-log-file-size=256M",
        "--innodb-buffer-pool-size=256M",
        "--innodb-flush-log-at-trx-commit=0",
    )
    with running_mariadb(*log) as server, running_cluster(directory, *flags) as cluster:
        server.execute("CREATE DATABASE shop", TABLE)
        create = [
            "changefeed",
            "create",
            "-c",
            "shop",
            "--sink-uri",
            "parquet:///lake",
            "--filter",
            "shop.*",
        ]
        cluster.cli(*create, "--source-uri", f"{server.uri}?idle-row-ms=500")
        reader = Reader(cluster, "shop")
        read(cluster, reader)
        memory = Memory(cluster.capture.process.pid)
        found = {"before_mb": memory.most()}
        start = cluster.now()
        fill(server, options.tables)
        for number in range(options.transactions):
            write(server, options, number)
        read(cluster, reader)
        found["open_mb"] = memory.most()
        if not options.plain:
            server.execute(*(f"XA COMMIT 'x{number}'" for number in range(options.transactions)))
            read(cluster, reader)
            found["committed_mb"] = memory.most()
        if options.tables:
            found["rows"] = read_slowly(reader, start, cluster.now())
            found["read_mb"] = memory.most()
        memory.close()
    return {"name": "capture_memory", **vars(options), **found}


def fill(server: MariaDb, tables: int) -> None:
    """Make further tables, each with rows of a kilobyte."""
    rows = f"SELECT seq, RANDOM_BYTES(1024) FROM seq_1_to_{ROWS_A_TABLE}"
    for number in range(tables):
        create = f"CREATE TABLE shop.t{number} (id BIGINT PRIMARY KEY, v VARBINARY(1100))"
        server.execute(create, f"INSERT INTO shop.t{number} {rows}")


def read_slowly(reader: Reader, start: int, now: int) -> int:
    """Take all rows cut by cut, with a pause after each batch; returns how many."""
    rows = 0
    while start < now:
        end = reader.ask("latest", start=start, wait_ms=1000)["ts"]
        for part in reader.ask("plan", start=start, end=end)["slices"] if end > start else ():
            for batch in reader.batches(start, end, part["table"]):
                rows += batch.num_rows
                time.sleep(SLOW_S)
        reader.ask("ack", ts=end)
        start = end
    return rows


def read(cluster: Cluster, reader: Reader) -> None:
    """Wait until the log is read up to now."""
    reader.wait_resolved(cluster.now(), PATIENCE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=1)
    parser.add_argument("--transaction-mb", type=int, default=300)
    parser.add_argument(
        "--value-bytes", type=int, default=1024, help="of each row, at most 1024; random"
    )
    parser.add_argument("--quota-mb", type=int, default=64)
    parser.add_argument("--tables", type=int, default=0, help="further ones, of 100 KB each")
    parser.add_argument(
        "--plain", action="store_true", help="commit, instead of prepare and then commit"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(run(options, Path(directory))))


if __name__ == "__main__":
    main()
