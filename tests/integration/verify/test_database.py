"""The whole way without Spark: a MariaDB under a writer, a capture, lakes in databases,
and `tidemark cli verify`.
"""

import asyncio
import json
import math
import subprocess
import time
from contextlib import closing, contextmanager

import pytest
from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.databases.manifest import DatabaseManifest
from pyspark_tidemark.lake.databases.target import DatabaseTarget
from pyspark_tidemark.lake.opening import database as database_of
from pyspark_tidemark.lake.schema import Policy
from pyspark_tidemark.options import parse
from pyspark_tidemark.sink_uri import SinkUri

from server.rpc.credentials import SecurityConfig
from server.spark.auditor import Auditor, AuditSettings
from server.verify.spans import KeySpans
from tests.integration.capture.processes import COMMAND, Reader, running_cluster
from tests.integration.spark.cluster import flight
from tests.integration.verify.writer import Writer, created
from tests.mariadb import running_mariadb

pytestmark = pytest.mark.timeout(600)
WRITTEN, WAIT_S = 60, 240
CURRENT = {
    "append": "(SELECT count(*) FROM {table} o WHERE o.id = t.id) = 1 AND _op = 'insert'",
    "scd2": "valid_to_ts IS NULL",
    "soft-delete": "NOT is_deleted",
}


class Lake:
    """A lake in a database, kept by the lake job's own steps."""

    def __init__(self, cluster, name, uri, mode):
        self._database = database_of(SinkUri.parse(uri))
        self._options = parse({"endpoint": flight(cluster), "changefeed": name, "cuts": "true"})
        self._name = name
        self._mode = mode
        self._reader = Reader(cluster, name)

    def follow(self, start_ts, until):
        """Apply cuts until it says so; returns the end of the last one."""
        deadline = time.monotonic() + WAIT_S
        with DatabaseManifest.opened(self._database, self._name) as manifest:
            target = DatabaseTarget(self._database, self._name, mode=self._mode)
            cuts = CutApplier(
                Changefeed(self._options),
                self._name,
                target,
                manifest,
                policy=Policy(self._mode),
                writers=TableWriters(source_options={}, spark=None, parallel=1),
            )
            end = start_ts
            for number in range(1000):
                assert time.monotonic() < deadline
                start, end = end, self._reader.ask("latest", start=end, wait_ms=500)["ts"]
                if end > start:
                    cuts.apply(Cut(number, start, end))
                    cuts.acknowledge()
                if until():
                    return end
        raise AssertionError("never")

    def execute(self, *statements):
        with closing(self._database.connect()) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            connection.commit()

    def rows(self, query):
        with closing(self._database.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchall()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def other_mariadb():
    """The lake's server: a database of a lake has the name of its source's."""
    with running_mariadb("--skip-log-bin") as server:
        yield server


@pytest.fixture
def new_lake(request, postgres, other_mariadb):
    """Makes a lake's URI."""
    if request.param == "postgresql":
        return postgres.create
    return lambda name: f"{other_mariadb.uri}/{other_mariadb.database(name)}"


def verify(cluster, *arguments):
    """Exit status, the document, and what was told beside it."""
    flags = [
        "cli",
        "--server",
        cluster.capture.endpoints["capture"],
        "--pd",
        cluster.pd,
        "--json",
        "verify",
    ]
    done = subprocess.run(
        [*COMMAND, *flags, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, json.loads(done.stdout or "null"), done.stderr


def kinds(document):
    [table] = document["tables"]
    return {each["key"]["id"]: (each["kind"], each["columns"]) for each in table["differences"]}


@contextmanager
def kept(cluster, mariadb, uri, name, mode):
    """A changefeed of the table with a dump, under a writer, and its lake, until all is dumped."""
    feed = name.replace("_", "-")
    create = [
        "-c",
        feed,
        "--sink-uri",
        uri,
        "--source-uri",
        f"{mariadb.uri}?idle-row-ms=300",
        "--filter",
        f"{name}.t",
    ]
    made = cluster.cli("changefeed", "create", *create)
    assert isinstance(made, dict), made
    lake = Lake(cluster, feed, uri, mode)
    with Writer(mariadb, name, 0.02) as writer:
        assert cluster.cli("changefeed", "dumpstart", "-c", feed)["state"] == "running"
        lake.follow(
            int(made["start_ts"]),
            lambda: (
                writer.written > WRITTEN
                and cluster.cli("changefeed", "dumpstatus", "-c", feed)["state"] == "finished"
            ),
        )
        yield feed, lake
    cluster.cli("changefeed", "remove", "-c", feed, "--no-confirm")


@pytest.mark.parametrize("new_lake", ["postgresql", "mysql"], indirect=True)
def test_a_database_under_a_writer_is_compared_exactly_and_repaired(cluster, mariadb, new_lake):
    name = created(mariadb)
    with kept(cluster, mariadb, new_lake(name), name, "upsert") as (feed, lake):
        status, document, told = verify(cluster, "-c", feed)
        assert (status, document["equal"], document["mode"]) == (0, True, "upsert"), (
            document,
            told,
        )
        ids = [row[0] for row in lake.rows(f"SELECT id FROM {name}.t ORDER BY id LIMIT 3")]
        lake.execute(
            f"DELETE FROM {name}.t WHERE id = {ids[0]}",
            f"UPDATE {name}.t SET amount = -1 WHERE id = {ids[1]}",
            f"INSERT INTO {name}.t (id, _commit_ts) VALUES (-5, 1)",
        )
        wanted = {
            ids[0]: ("only upstream", []),
            ids[1]: ("differs", ["amount"]),
            -5: ("only in the lake", []),
        }
        status, document, told = verify(cluster, "-c", feed, "--sample", "100%", "--seed", "7")
        assert (status, kinds(document), document["seed"]) == (1, wanted, 7), told
        everything = document["tables"][0]["sample"]["spans"]
        differing = [tuple(span) for span in document["tables"][0]["differing_spans"]]
        assert {KeySpans("id", tuple(map(tuple, everything))).of(key) for key in wanted} == set(
            differing
        )
        status, document, told = verify(cluster, "-c", feed, "--sample", "3")
        [table] = document["tables"]
        again = verify(cluster, "-c", feed, "--sample", "3", "--seed", str(document["seed"]))[1][
            "tables"
        ][0]
        assert len(table["sample"]["spans"]) == 3, told
        assert table["sample"] == again["sample"]
        assert all(span in everything for span in table["sample"]["spans"])
        chosen = KeySpans("id", tuple(map(tuple, table["sample"]["spans"])))
        assert kinds(document) == {key: kind for key, kind in wanted.items() if chosen.of(key)}
        status, document, told = verify(cluster, "-c", feed, "--repair", "--dry-run")
        assert (status, kinds(document)) == (1, wanted), told
        assert document["tables"][0]["repaired"] == {"removed": 2, "written": 2, "version": None}
        status, document, told = verify(cluster, "-c", feed, "--repair")
        assert (status, kinds(document)) == (1, wanted), told
        lake.follow(document["cut"], lambda: True)  # later cuts go on from there
        status, document, told = verify(cluster, "-c", feed)
        assert (status, document["equal"]) == (0, True), (document, told)


async def audited(cluster, feed, table, seen):
    """Audit a lake, of which a table was altered just now, until something is seen;
    returns that.
    """
    settings = AuditSettings(
        coordinator=cluster.pd,
        rows_per_s=100_000,
        max_lag_s=math.inf,
        security=SecurityConfig(),
        turns=asyncio.Lock(),
    )
    auditor = Auditor(feed, settings)
    auditor.take({"altered": [table]})
    async with auditor.running(), asyncio.timeout(WAIT_S):
        while True:
            answer = await asyncio.to_thread(cluster.cli, "changefeed", "query", "-c", feed)
            if isinstance(answer, dict) and seen(
                answer
            ):  # else the owner has lost its lease for a moment
                return answer


@pytest.mark.parametrize("new_lake", ["postgresql"], indirect=True)
def test_an_audit_tells_what_differs_until_it_is_mended(cluster, mariadb, new_lake):
    name = created(mariadb)
    with kept(cluster, mariadb, new_lake(name), name, "upsert") as (feed, lake):
        assert (
            cluster.cli("changefeed", "update", "-c", feed, "--audit", "1h")["audit_seconds"]
            == 3600
        )
        [(wrong,)] = lake.rows(f"SELECT min(id) FROM {name}.t")
        lake.execute(f"UPDATE {name}.t SET amount = -1 WHERE id = {wrong}")
        shown = asyncio.run(
            audited(cluster, feed, f"{name}.t", lambda answer: answer["state"] == "warning")
        )
        assert shown["error"]["code"] == "TM:ErrAuditDiffers"
        command = f"verify -c {feed} --table {name}.t --repair"
        assert f"{name}.t: `tidemark cli {command}` mends it" in shown["error"]["message"]
        status, document, told = verify(cluster, *command.split()[1:])
        assert (status, kinds(document)) == (1, {wrong: ("differs", ["amount"])}), told
        shown = asyncio.run(
            audited(cluster, feed, f"{name}.t", lambda answer: answer["state"] == "normal")
        )
        assert shown["error"] is None


@pytest.mark.parametrize(
    ("new_lake", "mode"),
    [("mysql", "append"), ("postgresql", "scd2"), ("mysql", "soft-delete")],
    indirect=["new_lake"],
)
def test_the_current_rows_of_histories_are_compared_and_not_repaired(
    cluster, mariadb, new_lake, mode
):
    name = created(mariadb)
    with kept(cluster, mariadb, new_lake(name), name, mode) as (feed, lake):
        [(lost,)] = lake.rows(
            f"SELECT min(id) FROM {name}.t t WHERE {CURRENT[mode]}".format(table=f"{name}.t")
        )
        lake.execute(f"DELETE FROM {name}.t WHERE id = {lost}")
        status, document, told = verify(cluster, "-c", feed)
        assert status == 1, told
        assert (document["mode"], kinds(document)) == (mode, {lost: ("only upstream", [])})
        status, _, told = verify(cluster, "-c", feed, "--repair", "--dry-run")
        assert (status, "ErrRepairUnsupported" in told) == (2, True)
