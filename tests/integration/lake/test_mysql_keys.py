"""From MariaDB to lakes by a job: rows whose keys are odd stay rows of their own,
by dump and by log, or stop by name.

Each row has a number of its own beside the key: a row that is lost, doubled or taken for another
one shows in them.
"""

import contextlib

import psycopg
import pymysql
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
from tests.integration.lake.test_job_errors import until
from tests.integration.mysql.key_types import KEYS
from tests.mariadb import running_mariadb

pytestmark = pytest.mark.timeout(600)

ODD = KEYS | {
    "nopad": ("k VARCHAR(9) COLLATE utf8mb4_nopad_bin", ["'b'", "'b '", "'B'", "''", "' '"]),
    "case": ("k VARCHAR(9) COLLATE utf8mb4_general_ci", ["'a'", "'b'", "'C'", "'d'"]),
    "impossible": (
        "k DATE",
        ["'0000-00-00'", "'0000-01-01'", "'0000-01-02'", "'2024-02-31'", "'2024-03-02'"],
    ),
    "zero_stamp": (
        "k TIMESTAMP(6)",
        ["0", "'1970-01-01 00:00:01'", "'2038-01-19 03:14:07.999999'"],
    ),
    "long_decimal": (
        "k DECIMAL(65,30)",
        ["0", "-0.000000000000000000000000000001", "'-9e34'", "'9e34'"],
    ),
    "enum_with_empty": ("k ENUM('a','')", ["'a'", "''"]),
    "enum_invalid": ("k ENUM('a','b')", ["'a'", "''"]),
}
MODE = "SET SESSION sql_mode = 'ALLOW_INVALID_DATES'"


@contextlib.contextmanager
def applying(cluster, name, uri):
    """What applies the next cut of a changefeed to a database, as the lake job does;
    that needs no Spark.
    """
    endpoint = f"grpc://{cluster.capture.endpoints['flight']}"
    changefeed = Changefeed(
        parse({"endpoint": endpoint, "changefeed": name, "cuts": "true", "ack": "false"})
    )
    database = database_of(SinkUri.parse(uri))
    with DatabaseManifest.opened(database, name) as manifest:
        target, policy = DatabaseTarget(database, name), Policy("upsert")
        cuts = CutApplier(
            changefeed,
            name,
            target,
            manifest,
            policy=policy,
            writers=TableWriters(source_options={}, spark=None, parallel=2),
        )

        def apply():
            start_ts = (
                changefeed.describe().checkpoint_ts
                if manifest.last is None
                else manifest.last.end_ts
            )
            end_ts = changefeed.latest(start_ts)
            if end_ts > start_ts:
                cuts.apply(Cut(0, start_ts, end_ts))
                cuts.acknowledge()

        yield apply


@contextlib.contextmanager
def source(tmp_path):
    """A MariaDB with the empty schema `shop`, a cluster, and the source's URI."""
    secret = tmp_path / "password"
    secret.write_text("s3cret")
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute(
            "CREATE USER cdc IDENTIFIED BY 's3cret'",
            "GRANT ALL ON *.* TO cdc",
            "CREATE DATABASE shop",
        )
        yield (
            server,
            cluster,
            f"mysql://cdc@127.0.0.1:{server.port}?password-file={secret}&idle-row-ms=500",
        )


def test_rows_with_odd_keys_are_rows_of_their_own_in_every_database(tmp_path, postgres, mariadb):
    mariadb.execute("DROP DATABASE IF EXISTS shop")
    sinks = {"pg": postgres.create("keys"), "mysql": f"{mariadb.uri}/{mariadb.database('lake')}"}
    with source(tmp_path) as (server, cluster, uri), contextlib.ExitStack() as stack:
        for name, (column, values) in ODD.items():
            numbered = ", ".join(f"({value}, {number})" for number, value in enumerate(values))
            create = f"CREATE TABLE shop.{name} ({column} PRIMARY KEY, v INT)"
            server.execute(MODE, create, f"INSERT INTO shop.{name} VALUES {numbered}")
        jobs = []
        for name, sink in sinks.items():
            create = ["changefeed", "create", "-c", name, "--sink-uri", sink, "--source-uri", uri]
            made = cluster.cli(*create, "--filter", "shop.*", "--zero-dates", "key-text")
            assert made["zero_dates"] == "key-text", made
            cluster.cli("changefeed", "dumpstart", "-c", name, "--verify")
            jobs.append(stack.enter_context(applying(cluster, name, sink)))

        def numbers(sink, name):
            with contextlib.suppress(
                SourceError, pymysql.Error, psycopg.Error
            ):  # it may not be there yet
                return sorted(row["v"] for row in rows(sink, f"shop.{name}"))

        def differing():
            for job in jobs:
                job()
            expected = {
                name: sorted(v for (v,) in server.execute(f"SELECT v FROM shop.{name}"))
                for name in ODD
            }
            found = (
                (target, name, numbers(sink, name))
                for target, sink in sinks.items()
                for name in ODD
            )
            return [each for each in found if each[2] != expected[each[1]]]

        until(differing, [])
        server.execute(*(f"UPDATE shop.{name} SET v = v + 100" for name in ODD))
        server.execute(
            "UPDATE shop.case SET k = 'A' WHERE k = 'a'",
            "UPDATE shop.double SET k = 0.0 WHERE k = 0.1",
            "UPDATE shop.double SET k = -0.0 WHERE k = 0.0",
            "DELETE FROM shop.nopad WHERE k = 'b '",
            "INSERT INTO shop.nopad VALUES ('B ', 200)",
        )
        until(differing, [])
        for sink in sinks.values():
            assert {row["k"] for row in rows(sink, "shop.case")} == {"A", "b", "C", "d"}
            assert {row["k"] for row in rows(sink, "shop.nopad")} == {"b", "B", "", " ", "B "}
            dates = {text.strip("'") for text in ODD["impossible"][1]}
            assert {row["k"] for row in rows(sink, "shop.impossible")} == dates
        server.execute(*(f"DELETE FROM shop.{name} WHERE v % 2 = 0" for name in ODD))
        until(differing, [])
        assert {feed["summary"]["state"] for feed in cluster.cli("changefeed", "list")} == {
            "normal"
        }
    mariadb.execute("DROP DATABASE shop")


def test_a_row_whose_key_is_a_zero_date_stops_its_lake_by_name(tmp_path, postgres):
    target = postgres.create("zero")
    with source(tmp_path) as (server, cluster, uri):
        server.execute("CREATE TABLE shop.z (d DATE, id INT, v VARCHAR(9), PRIMARY KEY (d, id))")
        create = ["changefeed", "create", "-c", "shop", "--sink-uri", target, "--source-uri", uri]
        assert cluster.cli(*create, "--filter", "shop.*")["zero_dates"] == "null"
        with applying(cluster, "shop", target) as apply:

            def lake():
                apply()
                with contextlib.suppress(SourceError, psycopg.Error):
                    return sorted((row["id"], row["v"]) for row in rows(target, "shop.z"))

            server.execute("INSERT INTO shop.z VALUES ('2020-01-01', 1, 'kept')")
            until(lake, [(1, "kept")])
            server.execute(
                "INSERT INTO shop.z VALUES ('0000-00-00', 8, 'gone')",
                "UPDATE shop.z SET v = 'late' WHERE id = 1",
            )
            stopped = (
                r"ErrKeyValueUnsupported\] a row of shop\.z \(id = 8\) has a date in its key column d "
                r".*--zero-dates"
            )
            with pytest.raises(SourceError, match=stopped):
                until(lake, [(1, "late"), (8, "gone")])
        assert [(row["id"], row["v"]) for row in rows(target, "shop.z")] == [(1, "kept")]
