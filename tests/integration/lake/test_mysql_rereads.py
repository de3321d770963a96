"""From MariaDB by a capture to PostgreSQL: tables that are read again become visible whole,
whoever dies meanwhile.

The lake's cuts and target are the real ones. What would be Spark's stream is a loop over the same
calls, so that the database can be looked at behind every cut.
"""

import contextlib
import threading
import time

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.databases.manifest import DatabaseManifest
from pyspark_tidemark.lake.databases.target import DatabaseTarget
from pyspark_tidemark.lake.opening import database as database_of
from pyspark_tidemark.lake.schema import Policy
from pyspark_tidemark.options import parse
from pyspark_tidemark.sink_uri import SinkUri

from tests.integration.capture.processes import running_cluster
from tests.integration.lake.test_databases import rows
from tests.integration.lake.test_job_errors import PATIENCE_S, sample, until
from tests.mariadb import running_mariadb

pytestmark = pytest.mark.timeout(500)
ROWS = 5000
SLOWLY = 400
"""Rows a second: a dump takes half a minute, in which there are DDLs and deaths;
then it hurries.
"""
LIMIT_ROWS = 700
"""Of a cut, which a table that is read again is far beyond."""
LOOKS = {
    "t": "SELECT count(*), count(v) FROM shop.t WHERE id <= %s",
    "u": "SELECT count(*), sum((length(c) > 3)::int) FROM shop.u WHERE id <= %s",
    "p": "SELECT count(*), min(id) FROM shop.p WHERE id <= %s",
}


def asking(cluster):
    """The captures, as the lake's job asks them."""
    endpoint = f"grpc://{cluster.capture.endpoints['flight']}"
    return Changefeed(parse({"endpoint": endpoint, "changefeed": "shop", "cuts": "true"}))


class DiedError(Exception):
    """The lake's job was killed."""


class DyingTarget(DatabaseTarget):
    """Dies once before, and once right behind, it has applied the rows of a table that is read
    again.
    """

    deaths = 0

    def apply(self, changes):
        if changes.emptied and DyingTarget.deaths == 2:
            DyingTarget.deaths -= 1
            raise DiedError
        applied = super().apply(changes)
        if changes.emptied and DyingTarget.deaths == 1:
            DyingTarget.deaths -= 1
            raise DiedError
        return applied


class Job(threading.Thread):
    """Keeps the lake, and looks at it all the time; each look is one statement, so one state."""

    def __init__(self, cluster, uri, server, name):
        super().__init__(daemon=True)
        self.changefeed = asking(cluster)
        self.uri, self.server, self.database = uri, server, name
        self.ended = threading.Event()
        self.seen = {table: [] for table in LOOKS}
        self.cuts, self.lives, self.failure = 0, 0, None
        self.watched = False

    def run(self):
        looking = threading.Thread(target=self.look, daemon=True)
        looking.start()
        while not self.ended.is_set():
            self.lives += 1
            try:
                self.live()
            except DiedError:
                continue
            except SourceError as err:
                if not err.retryable:
                    self.failure = err
                    raise
                time.sleep(0.2)
        looking.join()

    def live(self):
        database = database_of(SinkUri.parse(self.uri))
        with DatabaseManifest.opened(database, "shop") as manifest:
            target = DyingTarget(database, "shop")
            policy = Policy("upsert")
            cuts = CutApplier(
                self.changefeed,
                "shop",
                target,
                manifest,
                policy=policy,
                writers=TableWriters(source_options={}, spark=None, parallel=2),
            )
            while not self.ended.is_set():
                start = (
                    self.changefeed.describe().checkpoint_ts
                    if manifest.last is None
                    else manifest.last.end_ts
                )
                end = self.changefeed.latest(start, max_rows=LIMIT_ROWS, wait_ms=500)
                if end > start:
                    cuts.apply(Cut(0, start, end))
                    cuts.acknowledge()
                    self.cuts += 1

    def look(self):
        with self.server.connect(self.database) as connection:
            while not self.ended.wait(0.005):
                for table, statement in LOOKS.items() if self.watched else ():
                    found = connection.execute(statement, (ROWS,)).fetchone()
                    if self.seen[table][-1:] != [found]:
                        self.seen[table].append(found)


@pytest.mark.parametrize("dies", ["nobody", "capture", "lake job"])
def test_tables_that_are_read_again_are_old_or_new_and_never_in_part(tmp_path, postgres, dies):
    name = f"rereads_{dies.replace(' ', '_')}"
    target = postgres.create(name)
    secret = tmp_path / "password"
    secret.write_text("s3cret")
    with (
        running_mariadb() as server,
        running_cluster(tmp_path) as cluster,
        contextlib.ExitStack() as stack,
    ):
        server.execute(
            "CREATE USER cdc IDENTIFIED BY 's3cret'",
            "GRANT ALL ON *.* TO cdc",
            "CREATE DATABASE shop",
        )
        server.execute(
            "CREATE TABLE shop.t (id INT PRIMARY KEY, v INT)",
            "CREATE TABLE shop.u (id INT PRIMARY KEY, c VARCHAR(9))",
            "CREATE TABLE shop.p (id INT PRIMARY KEY) PARTITION BY RANGE (id) "
            f"(PARTITION a VALUES LESS THAN ({ROWS // 2}), PARTITION b VALUES LESS THAN MAXVALUE)",
            "CREATE TABLE shop.other (id INT PRIMARY KEY, v INT)",
        )
        source = f"mysql://cdc@127.0.0.1:{server.port}?password-file={secret}&idle-row-ms=500"
        create = [
            "changefeed",
            "create",
            "-c",
            "shop",
            "--sink-uri",
            target,
            "--source-uri",
            source,
        ]
        cluster.cli(*create, "--filter", "shop.*")
        cluster.cli(
            "changefeed",
            "dumpstart",
            "-c",
            "shop",
            "--table",
            "shop.other",
            "--rows-per-second",
            str(SLOWLY),
        )
        server.execute(
            f"INSERT INTO shop.t SELECT seq, NULL FROM seq_1_to_{ROWS}",
            f"INSERT INTO shop.u SELECT seq, 'abcdefg' FROM seq_1_to_{ROWS}",
            f"INSERT INTO shop.p SELECT seq FROM seq_1_to_{ROWS}",
            "INSERT INTO shop.other VALUES (1, 1)",
            database="shop",
        )
        job = Job(cluster, target, postgres, name)
        job.start()
        stack.callback(job.ended.set)

        def count(table):
            with contextlib.suppress(Exception):  # it may not be there yet
                return len(rows(target, f"shop.{table}"))

        def differing():
            if job.failure is not None:
                raise job.failure
            with contextlib.closing(server.connect()) as connection, connection.cursor() as cursor:
                for table in ("t", "u", "p", "other"):
                    cursor.execute(f"SELECT * FROM shop.{table} ORDER BY 1")
                    columns = [each[0] for each in cursor.description]
                    upstream = [tuple(row) for row in cursor.fetchall()]
                    lake = sorted(
                        tuple(row.get(column) for column in columns)
                        for row in rows(target, f"shop.{table}")
                    )
                    if lake != upstream:
                        return table
            return None

        until(lambda: [count(table) for table in ("t", "u", "p", "other")], [ROWS, ROWS, ROWS, 1])
        job.watched = True
        until(lambda: all(job.seen.values()), True)
        server.execute(
            "SET sql_mode=''",
            "ALTER TABLE shop.t MODIFY v INT NOT NULL",
            "INSERT INTO shop.other VALUES (2, 2)",
            "ALTER TABLE shop.u MODIFY c VARCHAR(3)",
            "ALTER TABLE shop.other ADD z INT DEFAULT 4",
            "ALTER TABLE shop.p TRUNCATE PARTITION a",
            f"INSERT INTO shop.t VALUES ({ROWS + 1}, 8)",
            "UPDATE shop.other SET v = 3 WHERE id = 1",
        )
        status = reading(cluster)
        (t,) = [each for each in status["status"] if each["table"] == "shop.t"]
        assert "MODIFY v INT NOT NULL: column v: NULL becomes a value" in t["reason"]
        told = cluster.cli("changefeed", "query", "-c", "shop")
        assert {each["table"] for each in told["rereads"]["tables"]} == {
            "shop.t",
            "shop.u",
            "shop.p",
        }
        assert told["rereads"]["since_ts"] >= told["resolved_ts"] >= told["checkpoint_tso"]
        assert sample(cluster, 'tidemark_dump_tables_reading_again{changefeed="shop"}') == 3
        if dies == "capture":
            cluster.capture.kill()
            cluster.capture.start()
            job.changefeed = asking(cluster)
        cluster.cli("changefeed", "dumpupdate", "-c", "shop", "--rows-per-second", "0")
        DyingTarget.deaths = 2 if dies == "lake job" else 0
        server.execute("UPDATE shop.t SET v = 7 WHERE id = 1", "DELETE FROM shop.u WHERE id = 5")
        until(differing, None)
        assert DyingTarget.deaths == 0
        job.ended.set()
        job.join()
        assert set(job.seen["t"]) == {(ROWS, 0), (ROWS, ROWS)}, job.seen
        assert {(ROWS, ROWS)} < set(job.seen["u"]) <= {(ROWS, ROWS), (ROWS, 0), (ROWS - 1, 0)}, (
            job.seen
        )
        assert set(job.seen["p"]) == {(ROWS, 1), (ROWS - ROWS // 2 + 1, ROWS // 2)}, job.seen
        (feed,) = cluster.cli("changefeed", "list")
        assert (feed["summary"]["state"], feed["summary"].get("rereads")) == ("normal", None)


def reading(cluster):
    """The dump's status when some rows of the tables were read, and not all."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        status = cluster.cli("changefeed", "dumpstatus", "-c", "shop")
        again = [each for each in status["status"] if each.get("since_ts")]
        if len(again) == 3 and any(int(each["rows_read"]) for each in again):
            return status
        assert time.monotonic() < deadline, status
        time.sleep(0.1)
