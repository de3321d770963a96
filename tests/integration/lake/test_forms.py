"""From MariaDB to lakes of every kind: whatever statement people wrote,
each table equals SELECT, row by row.

One server, one capture, and one changefeed for each kind, of which each form of a statement has its
own table. All is written while the changefeeds are paused, so that the catalogue is further than
the log when they read it. All of them take minutes, and run with TIDEMARK_TEST_EXPLORE=1 only; else
Delta and Iceberg meet one form of each kind, and `test_mysql_columns.py` has more in PostgreSQL.
"""

import contextlib
import os
from dataclasses import dataclass

import pyarrow as pa
import pymysql
import pytest
from tidemarkpb.v1 import changefeed_pb2 as feedpb

from tests.integration.capture.processes import Cluster, running_cluster
from tests.integration.lake.forms import COMMON, FEW, FORMS, MOVED, OF_MYSQL, READ_AGAIN
from tests.integration.lake.kept import KeptLake, fitted, has_rows
from tests.integration.mysql.selected import columns_of, difference, rows_now, tables_now
from tests.mariadb import MYSQLD, MariaDb, running_mariadb

pytestmark = pytest.mark.timeout(1800)

EXPLORES = "TIDEMARK_TEST_EXPLORE" in os.environ
WRITTEN = FORMS if EXPLORES else {name: FORMS[name] for name in FEW}
if MYSQLD:
    WRITTEN = {**{name: FORMS[name] for name in COMMON}, **OF_MYSQL}
OF_SPARK = ("delta", "iceberg")
KINDS = ("postgresql", "mysql", "parquet", *OF_SPARK) if EXPLORES or MYSQLD else OF_SPARK
SCHEMAS = ("shop", "gone", MOVED)
END = "shop.the_end"


@dataclass(frozen=True)
class World:
    """A source on which all forms were run, and changefeeds by the kind of their target."""

    server: MariaDb
    cluster: Cluster
    targets: dict[str, str]

    @property
    def endpoint(self) -> str:
        return f"grpc://{self.cluster.capture.endpoints['flight']}"


@pytest.fixture(scope="module")
def world(tmp_path_factory, postgres, mariadb):
    directory = tmp_path_factory.mktemp("forms")
    for schema in SCHEMAS:
        mariadb.execute(f"DROP DATABASE IF EXISTS {schema}")
    databases = {
        "postgresql": postgres.create("forms"),
        "mysql": f"{mariadb.uri}/{mariadb.database('forms')}",
    }
    targets = {kind: databases.get(kind, f"{kind}://{directory / kind}") for kind in KINDS}
    with running_mariadb() as server, running_cluster(directory) as cluster:
        prepare(server)
        for kind, target in targets.items():
            create(cluster, kind, target, f"{server.uri}?idle-row-ms=300")
            cluster.api("PauseChangefeed", feedpb.PauseChangefeedRequest(id=kind))
        run_all(server)
        yield World(server, cluster, targets)
    for schema in SCHEMAS:
        mariadb.execute(f"DROP DATABASE IF EXISTS {schema}")


def prepare(server):
    """Empty tables."""
    server.execute(*(f"CREATE DATABASE {schema}" for schema in (*SCHEMAS, "away")))
    server.execute(
        "CREATE TABLE away.other (k VARCHAR(9) PRIMARY KEY, d DECIMAL(10,2) DEFAULT 1.5)",
        "CREATE TABLE away.my (a INT) ENGINE=MyISAM",
        "CREATE TABLE away.aria (a INT) ENGINE=Aria",
        f"CREATE TABLE {END} (id INT PRIMARY KEY)",
    )
    for name, form in WRITTEN.items():
        table = f"{form.schema}.{name}"
        server.execute(
            f"CREATE TABLE {table} ({form.columns})",
            *(each.replace("{t}", table) for each in form.before),
        )


def create(cluster, kind, target, source):
    """Iceberg's tables cannot be renamed, so its changefeed has none that are."""
    taken = [f"{schema}.*" for schema in SCHEMAS if (kind, schema) != ("iceberg", MOVED)]
    request = feedpb.CreateChangefeedRequest(
        id=kind, sink_uri=target, source_uri=source, filter=taken
    )
    assert (
        cluster.api("CreateChangefeed", request).changefeed.state == feedpb.CHANGEFEED_STATE_NORMAL
    )


def run_all(server):
    """Rows, each form in a session of its own, and what is written after them."""
    for name, form in WRITTEN.items():
        table = f"{form.schema}.{name}"
        server.execute(f"INSERT INTO {table} VALUES {form.rows}")
        with contextlib.closing(server.connect()) as session, session.cursor() as cursor:
            for statement in form.statements:
                refused = (
                    pytest.raises(pymysql.Error)
                    if statement == form.fails
                    else contextlib.nullcontext()
                )
                with refused:
                    cursor.execute(statement.replace("{t}", table))
        server.execute("SET sql_mode=''", *(each.replace("{t}", table) for each in form.later))
    server.execute(f"INSERT INTO {END} VALUES (1)")


@pytest.mark.parametrize("kind", KINDS)
def test_every_table_equals_select_whatever_was_written(request, world, tmp_path, kind):
    cluster, spark = world.cluster, request.getfixturevalue("spark") if kind in OF_SPARK else None
    cluster.api("ResumeChangefeed", feedpb.ResumeChangefeedRequest(id=kind))
    lake = KeptLake(world.endpoint, kind, world.targets[kind], spark, tmp_path)
    lake.keep(lambda cut: has_rows(cut, END))
    found, wrong, names = lake.tables(), {}, set()
    with contextlib.closing(world.server.connect()) as connection:
        for schema in SCHEMAS[:2] if kind == "iceberg" else SCHEMAS:
            for name, table in tables_now(connection, world.server.port, schema).items():
                names.add(name)
                columns = pa.schema(list(columns_of(table.mounter.schema).items()))
                mine = fitted(found.pop(f"{schema}.{name}", []), columns)
                if why := difference(
                    mine, rows_now(connection, table), tuple(table.mounter.key_columns)
                ):
                    wrong[name] = why
    assert (wrong, found) == ({}, {})
    assert read_again(cluster, kind) == READ_AGAIN & names
    assert (
        cluster.api("QueryChangefeed", feedpb.QueryChangefeedRequest(id=kind)).changefeed.state
        == feedpb.CHANGEFEED_STATE_NORMAL
    )


def read_again(cluster, kind):
    """The tables of which events did not tell all."""
    status = cluster.cli("changefeed", "dumpstatus", "-c", kind)["status"]
    return {each["table"].partition(".")[2] for each in status if each.get("reason")}
