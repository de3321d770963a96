"""Tables without a key, by --force-replicate: what a changelog of a real MariaDB comes to is what
SELECT shows, equal rows included.
"""

import contextlib
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pymysql.err import OperationalError as DeadlockError

from tests.integration.capture.processes import Cluster, Reader, running_cluster
from tests.mariadb import MariaDb, running_mariadb

SEED = 20261128


class Bag:
    """How often each row is there, by the changes of one table."""

    def __init__(self, cluster: Cluster, feed: str, table: str, start_ts: int) -> None:
        self.rows: Counter[tuple[Any, ...]] = Counter()
        self.ops: Counter[str] = Counter()
        self._reader, self._table, self._at_ts = Reader(cluster, feed), table, start_ts

    def follow(self, ts: int) -> None:
        """Read and acknowledge cuts up to one that ends at `ts` or later."""
        while self._at_ts < ts:
            end = self._reader.ask("latest", start=self._at_ts, wait_ms=500)["ts"]
            if end > self._at_ts:
                self._apply(end)

    def _apply(self, end: int) -> None:
        for part in self._reader.ask("plan", start=self._at_ts, end=end)["slices"]:
            if part["table"] != self._table:
                continue
            last = (0, 0, -1)
            for row in self._reader.read(self._at_ts, end, self._table).to_pylist():
                place = (row["_commit_ts"], row["_start_ts"], row["_seq"])
                assert place > last
                last = place
                values = tuple(value for name, value in row.items() if not name.startswith("_"))
                self.ops[row["_op"]] += 1
                self.rows[values] += 1 if row["_op"] == "insert" else -1
        # Within a transaction deletes come first.
        assert min(self.rows.values(), default=0) >= 0, f"deleted, but not inserted before {end}"
        for ddl in self._reader.ask("describe", ts=end)["ddls"]:
            if ddl["ts"] == end and "ADD d" in ddl["query"]:
                self.rows = Counter({(*row, 5): count for row, count in self.rows.items()})
            assert self._table not in ddl["truncated"], ddl
        self._reader.ask("ack", ts=end)
        self._at_ts = end


def statements(dice: random.Random, count: int) -> list[str]:
    """Changes of some of many equal rows."""
    made = []
    for _ in range(count):
        a, b = dice.randrange(4), dice.choice(("'x'", "'é'", "NULL"))
        made.append(
            dice.choice(
                (
                    f"INSERT INTO shop.k (a, b) VALUES ({a}, {b}), ({a}, {b})",
                    f"UPDATE shop.k SET b = {b} WHERE a = {a} LIMIT 2",
                    f"UPDATE shop.k SET a = a + 1 WHERE a = {a}",
                    f"DELETE FROM shop.k WHERE a = {a} LIMIT 1",
                    "INSERT INTO shop.k (a, b) SELECT a, b FROM shop.k LIMIT 3",
                )
            )
        )
    return made


def write(server: MariaDb, seed: int) -> None:
    """Transactions, some of which are rolled back, and some of which undo what they did."""
    dice = random.Random(seed)
    for _ in range(25):
        ending = dice.choice(("COMMIT", "COMMIT", "ROLLBACK"))
        with contextlib.suppress(DeadlockError):
            server.execute("BEGIN", *statements(dice, dice.randint(1, 4)), ending)


@pytest.mark.timeout(240)
def test_a_changelog_of_a_table_without_a_key_comes_to_its_rows(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute(
            "CREATE USER cdc IDENTIFIED BY ''",
            "GRANT ALL ON *.* TO cdc",
            "CREATE DATABASE shop",
            "CREATE TABLE shop.k (a INT, b VARCHAR(20))",
            "CREATE TABLE shop.p (id INT PRIMARY KEY, v INT)",
        )
        uri = f"mysql://cdc@127.0.0.1:{server.port}?idle-row-ms=500"
        create = ["changefeed", "create", "--source-uri", uri, "--filter", "shop.*"]
        refused = cluster.cli(*create, "-c", "no", "--sink-uri", "flight://")
        assert "--force-replicate" in refused, refused
        forced = [*create, "--force-replicate"]
        refused = cluster.cli(*forced, "-c", "no", "--sink-uri", "delta:///lake")
        assert "write ?mode=append into the sink URI" in refused, refused
        dry = cluster.cli(
            *forced, "-c", "no", "--sink-uri", "delta:///lake?mode=append", "--dry-run"
        )
        assert {each["table"] for each in dry["eligible_tables"]} == {"shop.k", "shop.p"}
        made = cluster.cli(*forced, "-c", "shop", "--sink-uri", "parquet:///lake")
        assert made["state"] == "normal", made

        bag = Bag(cluster, "shop", "shop.k", int(made["start_ts"]))
        writers = [threading.Thread(target=write, args=(server, SEED + each)) for each in range(2)]
        for writer in writers:
            writer.start()
        bag.follow(cluster.now())
        cluster.capture.kill()
        cluster.capture.start()
        for writer in writers:
            writer.join()
        # One transaction of several parts.
        server.execute(
            "BEGIN",
            "INSERT INTO shop.k (a, b) SELECT seq % 7, REPEAT('y', 20) FROM shop.seq_1_to_30000",
            "UPDATE shop.k SET a = a + 1 WHERE b LIKE 'y%' LIMIT 10000",
            "COMMIT",
        )
        server.execute("ALTER TABLE shop.k ADD d INT DEFAULT 5")
        write(server, SEED + 2)
        server.execute(
            "ALTER TABLE shop.p DROP PRIMARY KEY", "INSERT INTO shop.p VALUES (1, 1), (1, 1)"
        )
        bag.follow(cluster.now())
        assert +bag.rows == Counter(server.execute("SELECT * FROM shop.k"))
        assert set(bag.ops) == {"insert", "delete"}, "without a key no change is an update"
        assert bag.ops.total() > 100

        refused = cluster.cli("changefeed", "dumpstart", "-c", "shop", "--table", "shop.k")
        assert "it has no key" in refused, refused
        checked = cluster.cli(
            *("source", "check", "--source-uri", f"{uri}&force-replicate=true"),
            *("--filter", "shop.*", "--no-write"),
        )
        assert not [each for each in checked["checks"] if "shop.k" in each["found"]], checked
        state = cluster.cli("changefeed", "query", "-c", "shop")
        assert state["state"] == "normal", state
