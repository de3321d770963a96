"""A repair of a database's table is one transaction: it happens as a whole, or not at all."""

from contextlib import closing

import pyarrow as pa
import pytest
from pyspark_tidemark.digest import Ranges
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.databases import manifest
from pyspark_tidemark.lake.opening import database as database_of
from pyspark_tidemark.sink_uri import SinkUri

from server.verify.lake.database_lake import repair_table
from server.verify.lake.question import Question

FEED, CUT = "feed", 50
SCHEMA = pa.schema([("id", pa.int64()), ("n", pa.int64())])
GONE = pa.table({"id": [1, 2]})


@pytest.fixture(params=["postgresql", "mysql"])
def uri(request, mariadb):
    name = mariadb.database("repaired")
    if request.param == "mysql":
        return SinkUri.parse(f"{mariadb.uri}/{name}")
    return SinkUri.parse(request.getfixturevalue("postgres").create(name))


def execute(uri, *statements):
    with closing(database_of(uri).connect()) as connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        rows = list(cursor.fetchall()) if cursor.description else []
        connection.commit()
    return rows


def test_a_repair_that_fails_in_the_middle_has_changed_nothing(uri):
    database, name = database_of(uri), f"{uri.path}.t"
    table = database.quoted_table(name)
    with closing(database.connect()) as connection, connection.cursor() as cursor:
        manifest.create_tables(database, cursor)
        manifest.insert_row(cursor, FEED, name, SCHEMA)
        manifest.set_end_ts(cursor, FEED, name, CUT)
        connection.commit()
    execute(
        uri,
        database.namespace(name),
        f"CREATE TABLE {table} (id bigint PRIMARY KEY, n bigint, _commit_ts bigint)",
        f"INSERT INTO {table} VALUES (1, 1, 40), (2, 2, 40), (3, 3, 40)",
    )
    asked = Question(name, CUT, 0, ("id",), SCHEMA, Ranges())
    everything = f"SELECT * FROM {table} ORDER BY id"
    with pytest.raises(SourceError, match="ErrTarget"):
        repair_table(uri, FEED, asked, GONE, pa.table({"id": [1], "no such column": [9]}))
    assert execute(uri, everything) == [(1, 1, 40), (2, 2, 40), (3, 3, 40)]
    assert repair_table(uri, FEED, asked, GONE, pa.table({"id": [1], "n": [9]})) == CUT
    assert execute(uri, everything) == [(1, 9, CUT), (3, 3, 40)]
