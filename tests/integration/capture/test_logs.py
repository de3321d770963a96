"""Changefeeds of MariaDB run on different captures, and each lake equals its source in the end:
dumps go on, schemas change, and captures are killed, hang, and are drained meanwhile.
"""

import signal
import threading
import time
from collections import Counter

import pytest

from tests.integration.capture.processes import patiently, running_cluster
from tests.integration.mysql.lake import Lake
from tests.mariadb import running_mariadb

FEEDS = ("ann", "ben", "cat", "dan")
PATIENCE_S = 120
ROWS = 3000


class Sources:
    """A database for each changefeed, and what is written to all of them."""

    def __init__(self, server):
        self.server = server
        self._ends = threading.Event()
        self._writing = threading.Thread(target=self._write)
        server.execute("CREATE USER cdc", "GRANT ALL ON *.* TO cdc")
        values = ", ".join(f"({number}, 'old{number}')" for number in range(ROWS))
        for name in FEEDS:
            server.execute(
                f"CREATE DATABASE {name}",
                f"CREATE TABLE {name}.t (id INT PRIMARY KEY, v VARCHAR(40))",
                f"INSERT INTO {name}.t VALUES {values}",
            )

    def __enter__(self):
        self._writing.start()
        return self

    def __exit__(self, *_):
        self._ends.set()
        self._writing.join()

    def rows(self, name):
        columns = [row[0] for row in self.server.execute(f"SHOW COLUMNS FROM {name}.t")]
        rows = self.server.execute(f"SELECT * FROM {name}.t")
        return {row[0]: dict(zip(columns, row, strict=True)) for row in rows}

    def _write(self):
        number = 0
        # Each changefeed reads the log of all four: more of it costs CPU and shows nothing more.
        while not self._ends.wait(0.1):
            number += 1
            for name in FEEDS:
                self.server.execute(
                    f"UPDATE {name}.t SET v = 'new{number}' WHERE id % 97 = {number % 97}",
                    f"DELETE FROM {name}.t WHERE id = {number * 7 % ROWS}",
                    f"INSERT INTO {name}.t (id, v) VALUES ({ROWS + number}, 'made')",
                )
            if number % 25 == 0:
                self.server.execute(f"ALTER TABLE ann.t ADD c{number} INT")


class Target:
    """A lake that follows a changefeed in a thread, whatever happens to captures; it asks the
    cluster's first capture, which passes its calls on to the one that runs the changefeed.
    """

    def __init__(self, cluster, name, start_ts):
        self.lake = Lake(cluster, name, start_ts)
        self.name = f"{name}.t"
        self._until = None
        self._following = threading.Thread(target=self._follow, daemon=True)
        self._following.start()

    def rows(self):
        columns = {column for row in self.lake.tables[self.name].values() for column in row}
        return {
            key: dict.fromkeys(columns) | row for key, row in self.lake.tables[self.name].items()
        }

    def end(self, rows):
        """Wait until it has these rows."""
        self._until = rows
        self._following.join(2 * PATIENCE_S)
        assert self.rows() == rows

    def _follow(self):
        # A cut that a capture's end interrupts is applied again, as rows have keys.
        patiently(self.lake.follow, self._is_complete, 10 * PATIENCE_S)

    def _is_complete(self, tables):
        return self._until is not None and self.name in tables and self.rows() == self._until


def maintainers(cluster, captures):
    """The capture of each changefeed, once all run, on so many captures."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        listed = cluster.http("GET", "/api/v2/processors")[1].get("items", ())
        where = {each["changefeed_id"]: each["capture_id"] for each in listed}
        if (
            where.keys() == set(FEEDS)
            and all(where.values())
            and len(set(where.values())) == captures
        ):
            return where
        time.sleep(0.2)
    raise TimeoutError(f"the changefeeds do not run on {captures} captures: {listed}")


def create(cluster, server, name):
    made = cluster.cli(
        *("changefeed", "create", "-c", name, "--sink-uri", f"parquet:///lake/{name}"),
        *("--source-uri", f"mysql://cdc@127.0.0.1:{server.port}?idle-row-ms=200"),
        *("--filter", f"{name}.*"),
    )
    assert made["state"] == "normal", made
    return int(made["checkpoint_tso"])


def finish_dumps(cluster):
    deadline = time.monotonic() + PATIENCE_S
    for name in FEEDS:
        while True:
            status = cluster.cli("changefeed", "dumpstatus", "-c", name)
            if isinstance(status, dict) and status["state"] == "finished":
                break
            assert time.monotonic() < deadline, status
            time.sleep(0.2)


@pytest.mark.timeout(500)
def test_logs_run_on_different_captures_and_whatever_ends_no_row_is_missing(tmp_path, request):
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        source = Sources(server)
        first = cluster.capture
        shared = ("--coordinator", cluster.pd, "--data-dir")
        second, third = (
            cluster.start("capture", *shared, str(tmp_path / name)) for name in ("second", "third")
        )
        starts = {name: create(cluster, server, name) for name in FEEDS}
        where = maintainers(cluster, captures=3)
        assert sorted(Counter(where.values()).values()) == [1, 1, 2]
        with source:
            targets = {name: Target(cluster, name, ts) for name, ts in starts.items()}
            for name, capture in zip(FEEDS, (first, second, third, first), strict=True):
                # any capture takes calls for any changefeed
                assert cluster.http("GET", f"/api/v2/changefeeds/{name}", capture=capture)[0] == 200
                listed = cluster.http("GET", "/api/v2/changefeeds", capture=capture)[1]
                assert [each["id"] for each in listed["items"]] == list(FEEDS)
                cluster.cli("changefeed", "dumpstart", "-c", name, "--verify")

            third.kill()
            maintainers(cluster, captures=2)
            third.start()
            maintainers(cluster, captures=3)

            second.process.send_signal(signal.SIGSTOP)  # for longer than its lease
            request.addfinalizer(lambda: second.process.send_signal(signal.SIGCONT))
            maintainers(cluster, captures=2)
            second.process.send_signal(signal.SIGCONT)  # it still believes to run its changefeeds
            maintainers(cluster, captures=3)

            [drained] = (
                each["id"]
                for each in cluster.cli("capture", "list")
                if each["address"] == first.endpoints["capture"]
            )
            assert cluster.cli("capture", "drain", drained, "--wait", "60s")["tables"] == 0
            assert drained not in maintainers(cluster, captures=2).values()
            for name in FEEDS:
                assert cluster.cli("changefeed", "pause", "-c", name)["state"] == "stopped"
                assert cluster.cli("changefeed", "resume", "-c", name)["state"] == "normal"
            finish_dumps(cluster)
        for name, target in targets.items():
            target.end(source.rows(name))
        for name in FEEDS:
            assert cluster.cli("changefeed", "query", "-c", name)["state"] == "normal"
            # Those that stay are spread again meanwhile: a removal is not broken off by that.
            assert cluster.cli("changefeed", "remove", "-c", name, "--no-confirm")["removed"]
        assert cluster.cli("changefeed", "list") == []
