"""Each way out that an error prints is followed, from MariaDB by a capture to a lake in PostgreSQL.

What is followed is the text itself: the command's value is taken out of the message, as an operator
would. The lake is kept by the job's own steps, in a thread and without Spark's query, which a
database does not need.
"""

import contextlib
import json
import re
import shlex
import subprocess
import sys
import threading

import pyarrow.parquet as pq
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters, skip
from pyspark_tidemark.lake.databases.manifest import DatabaseManifest
from pyspark_tidemark.lake.databases.postgres import Postgres
from pyspark_tidemark.lake.databases.target import DatabaseTarget
from pyspark_tidemark.lake.format import APPEND, UPSERT
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.parquet.target import ChangelogTarget
from pyspark_tidemark.lake.reporter import Reporter
from pyspark_tidemark.lake.schema import Policy
from pyspark_tidemark.options import parse
from pyspark_tidemark.sink_uri import SinkUri

from tests.integration.capture.processes import COMMAND, Reader, running_cluster
from tests.integration.lake.test_databases import rows
from tests.integration.lake.test_job_errors import until
from tests.mariadb import running_mariadb

pytestmark = pytest.mark.timeout(500)
OVERWRITE = re.compile(r"--overwrite-checkpoint-ts (\d+|now)")


class Shop:
    """One changefeed of its own database, its lake in PostgreSQL,
    and what an operator does with both.
    """

    def __init__(self, name, server, cluster, target, secret):
        self.name, self.server, self.cluster, self.target = name, server, cluster, target
        self.source = f"mysql://cdc@127.0.0.1:{server.port}?password-file={secret}&idle-row-ms=300"
        server.execute(f"CREATE DATABASE {name}")
        self.execute(
            "CREATE TABLE a (id INT PRIMARY KEY, v INT, x INT)",
            "CREATE TABLE b (id INT PRIMARY KEY)",
        )

    def execute(self, *statements):
        return self.server.execute(*statements, database=self.name)

    def create(self, *flags, tables=("*",)):
        flags = ["-c", self.name, "--sink-uri", self.target, "--source-uri", self.source, *flags]
        rules = [part for table in tables for part in ("--filter", f"{self.name}.{table}")]
        assert self.cluster.cli("changefeed", "create", *flags, *rules)["state"] == "normal"

    def keeper(self):
        """A lake job, for the block."""
        return LakeJobLoop(self)

    def refused(self, *flags):
        """The line that the command line prints instead of making the changefeed."""
        flags = ["-c", self.name, "--sink-uri", self.target, "--source-uri", self.source, *flags]
        return self.cluster.cli("changefeed", "create", *flags, "--filter", f"{self.name}.*")

    def cli(self, verb, *flags):
        return self.cluster.cli("changefeed", verb, "-c", self.name, *flags)

    def resume(self, ts):
        return self.cli("resume", "--overwrite-checkpoint-ts", str(ts), "--yes")

    def lake(self, table="a"):
        with contextlib.suppress(Exception):  # it may not be there yet
            found = rows(self.target, f"{self.name}.{table}")
            return sorted(
                tuple(value for name, value in row.items() if name != "_commit_ts") for row in found
            )

    def state(self):
        document = self.cli("query")
        return document["state"], (document["error"] or {}).get("code")

    def fails_with(self, code):
        """Wait for it; returns the message."""
        until(self.state, ("failed", f"TM:{code}"))
        return self.cli("query")["error"]["message"]

    def skipped(self):
        """By `changefeed query`, and by the lake's newest cut."""
        shown = [(each["start_tso"], each["end_tso"]) for each in self.cli("query")["skipped"]]
        kept = [json.loads(row["document"]) for row in rows(self.target, "_tidemark_cuts")]
        newest = max(
            (each for each in kept if each["changefeed"] == self.name),
            key=lambda each: each["end_ts"],
        )
        return shown, [tuple(each) for each in newest.get("skipped", [])]


class LakeJobLoop:
    """Keeps one lake as the job does: skip, cuts, acknowledgements, reports;
    started again after each error.
    """

    def __init__(self, shop, mode=UPSERT):
        self._shop, self._mode = shop, mode
        endpoint = f"grpc://{shop.cluster.capture.endpoints['flight']}"
        self._options = {
            "endpoint": endpoint,
            "changefeed": shop.name,
            "cuts": "true",
            "ack": "false",
        }
        self._changefeed = Changefeed(parse(self._options))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _run(self):
        while not self._stop.wait(0.1):
            try:
                self._live()
            except SourceError as err:
                Reporter(self._changefeed).failed(err)

    @contextlib.contextmanager
    def _opened(self):
        """The target and its manifest."""
        database = Postgres(SinkUri.parse(self._shop.target))
        with DatabaseManifest.opened(database, self._shop.name) as manifest:
            yield DatabaseTarget(database, self._shop.name, mode=self._mode), manifest

    def _live(self):
        with self._opened() as (target, manifest):
            described = self._changefeed.describe()
            skip(manifest, described, self._mode)
            cuts = CutApplier(
                self._changefeed,
                self._shop.name,
                target,
                manifest,
                policy=Policy(self._mode),
                writers=TableWriters(source_options=self._options, spark=None, parallel=2),
            )
            at_ts = described.checkpoint_ts if manifest.last is None else manifest.last.end_ts
            while not self._stop.is_set():
                end_ts = self._changefeed.latest(at_ts, wait_ms=300)
                if end_ts > at_ts:
                    cuts.apply(Cut(0, at_ts, end_ts))
                    cuts.acknowledge()
                    self._changefeed.report("ready", end_ts)
                    at_ts = end_ts


class ChangelogJobLoop(LakeJobLoop):
    """Keeps a Parquet changelog."""

    def __init__(self, shop):
        super().__init__(shop, APPEND)

    @contextlib.contextmanager
    def _opened(self):
        path = SinkUri.parse(self._shop.target).path
        with FileManifest.opened(path, self._shop.name) as manifest:
            yield ChangelogTarget(None, path), manifest


def job(shop, *flags):
    """What the job's process says that ends before it starts a JVM."""
    feed = [
        "--endpoint",
        f"grpc://{shop.cluster.capture.endpoints['flight']}",
        "--changefeed",
        shop.name,
    ]
    feed += ["--target", shop.target, "--checkpoint-dir", "/nowhere"]
    command = [sys.executable, "-m", "pyspark_tidemark.job", *feed, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@contextlib.contextmanager
def running_services(directory, target):
    """What a `Shop` is made of: a database with the user `cdc`, a cluster, a target, a password."""
    secret = directory / "password"
    secret.write_text("s3cret")
    with running_mariadb() as server, running_cluster(directory) as cluster:
        server.execute("CREATE USER cdc IDENTIFIED BY 's3cret'", "GRANT ALL ON *.* TO cdc")
        yield server, cluster, target, secret


@pytest.fixture(scope="module")
def services(tmp_path_factory, postgres):
    directory = tmp_path_factory.mktemp("ways-out")
    with running_services(directory, postgres.create("waysout")) as running:
        yield running


@pytest.fixture
def shop(services, request):
    name = "w" + re.sub(r"[\W_]", "", request.node.name)[-20:]
    made = Shop(name, *services)
    with made.keeper():
        yield made
    made.cli("remove", "--no-confirm")


def test_a_statement_in_the_log_is_passed_over_by_the_printed_resume(shop):
    shop.create()
    shop.execute("INSERT INTO a VALUES (1, 10, 100)")
    until(shop.lake, [(1, 10, 100)])
    shop.execute("SET binlog_format=STATEMENT", "UPDATE a SET v = 11", "SET binlog_format=ROW")
    shop.execute("INSERT INTO a VALUES (2, 20, 200)")
    message = shop.fails_with("ErrMySQLStatementLogged")
    assert shop.lake() == [(1, 10, 100)]

    before = shop.cli("query")["checkpoint_tso"]
    (ts,) = OVERWRITE.findall(message)
    assert shop.resume(ts)["state"] == "normal"
    until(shop.lake, [(1, 10, 100), (2, 20, 200)])  # what was skipped, and what came after it
    assert shop.state() == ("normal", None)
    assert shop.skipped() == ([(before, int(ts))], [(before, int(ts))])


def test_a_statement_in_the_log_does_not_wait_for_a_table_that_is_read_again_beyond_it(shop):
    shop.create()
    shop.execute("INSERT INTO a VALUES (1, NULL, 100)")
    until(shop.lake, [(1, None, 100)])
    shop.cli("pause")
    shop.execute("SET sql_mode=''", "ALTER TABLE a MODIFY v INT NOT NULL")
    shop.execute("SET binlog_format=STATEMENT", "INSERT INTO b VALUES (7)")
    shop.execute("INSERT INTO a VALUES (2, 20, 200)")
    shop.cli("resume")
    (ts,) = OVERWRITE.findall(shop.fails_with("ErrMySQLStatementLogged"))
    assert shop.lake() == [(1, None, 100)], "as it was before the ALTER"
    assert shop.resume(ts)["state"] == "normal"
    until(shop.lake, [(1, 0, 100), (2, 20, 200)])
    assert shop.state() == ("normal", None)


def test_columns_keep_their_identities_in_a_lake_that_goes_on_elsewhere(shop):
    shop.execute("ALTER TABLE a DROP v")
    shop.create()
    shop.execute("INSERT INTO a VALUES (1, 100)", "ALTER TABLE a DROP x, ADD y INT, ADD z INT")
    shop.execute("UPDATE a SET y = 5, z = 6")
    until(shop.lake, [(1, 5, 6)])
    shop.cli("pause")
    shop.execute(
        "ALTER TABLE a ADD late INT FIRST", "CREATE TABLE c (id INT PRIMARY KEY)", "DROP TABLE b"
    )
    assert shop.resume("now")["state"] == "normal"
    shop.execute("INSERT INTO a (id, y, z, late) VALUES (2, 7, 8, 9)", "INSERT INTO c VALUES (1)")
    until(lambda: {row["id"]: (row["y"], row["z"], row.get("late")) for row in rows(shop.target, f"{shop.name}.a")},
          {1: (5, 6, None), 2: (7, 8, 9)})  # fmt: skip
    until(lambda: shop.lake("c"), [(1,)])


def test_an_unknown_xa_transaction_is_passed_over_and_the_dump_brings_its_rows(shop):
    shop.execute("XA START 'w'", "INSERT INTO a VALUES (1, 1, 1)", "XA END 'w'", "XA PREPARE 'w'")
    shop.create()
    shop.execute("INSERT INTO a VALUES (2, 2, 2)")
    shop.execute("XA COMMIT 'w'", "INSERT INTO a VALUES (3, 3, 3)")
    message = shop.fails_with("ErrMySQLXAUnknown")
    until(shop.lake, [(2, 2, 2)])
    (ts,) = OVERWRITE.findall(message)
    assert "dumpstart" in message
    assert shop.resume(ts)["state"] == "normal"
    until(shop.lake, [(2, 2, 2), (3, 3, 3)])
    shop.cli("dumpstart")
    until(shop.lake, [(1, 1, 1), (2, 2, 2), (3, 3, 3)])


def test_a_table_that_lost_its_key_goes_on_once_that_is_undone(shop):
    shop.create()
    shop.execute("INSERT INTO a VALUES (1, 10, 100)")
    until(shop.lake, [(1, 10, 100)])
    shop.execute("ALTER TABLE a DROP PRIMARY KEY")
    shop.execute("INSERT INTO a VALUES (2, 20, 200)")
    message = shop.fails_with("ErrTableIneligible")
    shop.execute("ALTER TABLE a ADD PRIMARY KEY (id)")
    (ts,) = OVERWRITE.findall(message)
    assert shop.resume(ts)["state"] == "normal"
    assert "dumpstart" in message
    shop.cli("dumpstart")
    until(shop.lake, [(1, 10, 100), (2, 20, 200)])


def test_a_purged_log_is_passed_over_by_the_printed_resume_and_a_dump(shop):
    shop.create()
    shop.execute("INSERT INTO a VALUES (1, 10, 100), (2, 20, 200)")
    until(shop.lake, [(1, 10, 100), (2, 20, 200)])
    shop.cli("pause")
    shop.execute("UPDATE a SET v = 11 WHERE id = 1", "FLUSH LOGS", "FLUSH LOGS")
    newest = shop.execute("SHOW BINARY LOGS")[-1][0]
    until(
        lambda: shop.execute(f"PURGE BINARY LOGS TO '{newest}'", "SHOW BINARY LOGS")[0][0], newest
    )
    shop.cli("resume")
    message = shop.fails_with("ErrMySQLLogPurged")
    (ts,) = OVERWRITE.findall(message)
    assert shop.resume(ts)["state"] == "normal"
    assert "dumpstart" in message
    shop.cli("dumpstart")
    until(shop.lake, [(1, 11, 100), (2, 20, 200)])


def test_a_lake_behind_another_readers_acknowledgement_is_given_the_changes_again(services):
    shop = Shop("behind", *services)
    shop.create()
    with shop.keeper():
        shop.execute("INSERT INTO a VALUES (1, 10, 100)")
        until(shop.lake, [(1, 10, 100)])
    shop.execute("INSERT INTO a VALUES (2, 20, 200)")
    reader, start_ts = Reader(shop.cluster, shop.name), shop.cli("query")["checkpoint_tso"]
    end_ts = reader.wait_resolved(start_ts + 1)
    assert reader.ask("ack", ts=end_ts)["checkpoint_ts"] > start_ts
    with shop.keeper():
        message = shop.fails_with("ErrCutGap")
        (ts,) = OVERWRITE.findall(message)
        shop.cli("pause")
        assert shop.resume(ts)["state"] == "normal"
        until(shop.lake, [(1, 10, 100), (2, 20, 200)])
        assert shop.skipped() == ([], [])
    shop.cli("remove", "--no-confirm")


def test_a_second_job_goes_on_once_the_first_is_stopped(services):
    shop = Shop("busy", *services)
    shop.create()
    with contextlib.ExitStack() as first:
        first.enter_context(shop.keeper())
        shop.execute("INSERT INTO a VALUES (1, 10, 100)")
        until(shop.lake, [(1, 10, 100)])
        with shop.keeper():
            said = "another job writes the changefeed 'busy' there; stop it first"
            until(lambda: said in str(shop.cli("query")["error"]), True)
            first.close()
            shop.execute("INSERT INTO a VALUES (2, 20, 200)")
            until(shop.lake, [(1, 10, 100), (2, 20, 200)])
            until(shop.state, ("normal", None))
    shop.cli("remove", "--no-confirm")


def test_a_lake_of_another_mode_goes_on_in_its_own_and_the_other_is_made_anew(services, postgres):
    shop = Shop("modes", *services)
    shop.create()
    with shop.keeper():
        shop.execute("INSERT INTO a VALUES (1, 10, 100)")
        until(shop.lake, [(1, 10, 100)])
    done = job(shop, "--mode", APPEND)
    assert (done.returncode, "[TM:ErrTargetMode]" in done.stderr) == (1, True)
    (mode,) = re.findall(r"start its job with --mode (\w+)", done.stderr)
    until(shop.state, ("failed", "TM:ErrTargetMode"))
    with LakeJobLoop(shop, mode):
        shop.execute("INSERT INTO a VALUES (2, 20, 200)")
        until(shop.lake, [(1, 10, 100), (2, 20, 200)])
        until(shop.state, ("normal", None))
    shop.cli("remove", "--no-confirm")

    assert "another --sink-uri" in done.stderr
    assert "dumpstart" in done.stderr
    shop.target = postgres.create("waysoutmodes")
    shop.create()
    with LakeJobLoop(shop, APPEND):
        shop.cli("dumpstart")
        until(lambda: sorted(row["id"] for row in rows_of(shop)), [1, 2])
        until(shop.state, ("normal", None))
    shop.cli("remove", "--no-confirm")


def rows_of(shop):
    """The lake's rows; none before there is a table."""
    with contextlib.suppress(Exception):
        return rows(shop.target, f"{shop.name}.a")
    return []


def test_a_table_whose_directory_an_earlier_version_named_goes_on_once_it_is_moved(
    services, tmp_path
):
    server, cluster, _, secret = services
    shop = Shop("moved", server, cluster, f"parquet://{tmp_path}", secret)
    shop.execute("CREATE TABLE `a%b` (id INT PRIMARY KEY)")
    shop.create()

    def lake():
        files = sorted(tmp_path.glob("moved/*/cut=*/*.parquet"))
        return sorted(
            row["id"]
            for file in files
            for row in pq.read_table(file, partitioning=None).to_pylist()
        )

    with ChangelogJobLoop(shop):
        shop.execute("INSERT INTO `a%b` VALUES (1)")
        until(lake, [1])
    before = tmp_path / "moved" / "a%b"
    (tmp_path / "moved" / "a~25b").rename(before)
    with ChangelogJobLoop(shop):
        shop.execute("INSERT INTO `a%b` VALUES (2)")
        message = shop.fails_with("ErrTableMoved")
        (place,) = re.findall(
            r"not at ([^,]+), where names like this lie since this version: move", message
        )
        before.rename(tmp_path / place)
        until(lake, [1, 2])
        until(shop.state, ("normal", None))
    shop.cli("remove", "--no-confirm")


def test_what_was_skipped_is_shown_and_mended_by_the_printed_verify(services):
    shop = Shop("gap", *services)
    shop.create()
    with shop.keeper():
        shop.execute("INSERT INTO a VALUES (1, 10, 100)")
        until(shop.lake, [(1, 10, 100)])
        shop.execute("SET binlog_format=STATEMENT", "UPDATE a SET v = 11", "SET binlog_format=ROW")
        (ts,) = OVERWRITE.findall(shop.fails_with("ErrMySQLStatementLogged"))
    assert shop.resume(ts)["state"] == "normal"
    warning = job(shop, "--mode", UPSERT, "--until-ts", "1").stderr
    (printed,) = re.findall(r"`tidemark (cli verify [^`]*)` shows", warning)
    with shop.keeper():
        shop.execute("INSERT INTO a VALUES (2, 20, 200)")
        until(shop.lake, [(1, 10, 100), (2, 20, 200)])

    def verify(*flags):
        where = [
            "cli",
            "--server",
            shop.cluster.capture.endpoints["capture"],
            "--pd",
            shop.cluster.pd,
        ]
        command = [*COMMAND, *where, *shlex.split(printed)[1:], *flags]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False
        ).returncode

    assert verify() == 1
    assert "and --repair mends them" in warning
    verify("--repair")
    assert verify() == 0
    with shop.keeper():
        shop.execute("INSERT INTO a VALUES (3, 30, 300)")
        until(shop.lake, [(1, 11, 100), (2, 20, 200), (3, 30, 300)])
        assert shop.state() == ("normal", None)
    shop.cli("remove", "--no-confirm")
