"""Columns that a server keeps in its rows and shows to nobody: they are in the log,
and reach no reader.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from storage.meta.client import EtcdMeta
from tests.integration.capture.processes import running_cluster
from tests.integration.mysql.lake import Lake
from tests.integration.mysql.replica import Feed, Row, following
from tests.mariadb import MariaDb, running_mariadb

WIDE = "CREATE TABLE t (id INT PRIMARY KEY, b LONGTEXT, c1 INT, c2 INT, c3 INT, c4 INT, c5 BLOB"
TABLES = {
    "one key": ("CREATE TABLE t (id INT PRIMARY KEY, b LONGTEXT, UNIQUE (b))", "id, b"),
    "a bitmap of two bytes": (
        f"{WIDE}, c6 INT, UNIQUE (b), UNIQUE k (c5), UNIQUE both_columns (b, c5))",
        "id, b, c1, c2, c3, c4, c5, c6",
    ),
    "a bitmap that ends at seven": (
        f"{WIDE}, UNIQUE (b), UNIQUE k (c5))",
        "id, b, c1, c2, c3, c4, c5",
    ),
    "a column of such a name": (
        (
            "CREATE TABLE t (id INT PRIMARY KEY, DB_ROW_HASH_1 BIGINT UNSIGNED, b LONGTEXT, UNIQUE "
            "(b))"
        ),
        "id, DB_ROW_HASH_1, b",
    ),
    "the key itself": ("CREATE TABLE t (id LONGTEXT NOT NULL, b LONGTEXT, UNIQUE (id))", "id, b"),
}
CHANGES = (
    "INSERT INTO t (id, b) VALUES (1, 'one'), (2, NULL), (3, 'three')",
    "UPDATE t SET b = 'two' WHERE id = 2",
    "UPDATE t SET b = NULL WHERE id = 1",
    "DELETE FROM t WHERE id = 3",
    "INSERT INTO t (id, b) VALUES (4, 'four')",
)


def rows_of(changes: Sequence[Row]) -> dict[object, Row]:
    rows: dict[object, Row] = {}
    for change in changes:
        if change["_op"] == "delete":
            rows.pop(change["id"])
        else:
            rows[change["id"]] = {
                name: value for name, value in change.items() if not name.startswith("_")
            }
    return rows


async def compare(server: MariaDb, feed: Feed, database: str, count: int, columns: str) -> None:
    changes = await feed.seen(f"{database}.t", count)
    names = columns.split(", ")
    selected = server.execute(f"SELECT {columns} FROM t", database=database)
    assert rows_of(changes) == {row[0]: dict(zip(names, row, strict=True)) for row in selected}


@pytest.mark.parametrize("case", TABLES)
async def test_the_hash_of_a_long_unique_key_is_no_column(
    mariadb: MariaDb, meta: EtcdMeta, case: str
) -> None:
    name, (create, columns) = mariadb.database(), TABLES[case]
    mariadb.execute(create, database=name)
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        mariadb.execute(*CHANGES, database=name)
        await compare(mariadb, feed, name, 7, columns)
        assert not feed.target.changes, "no rows bring another schema"


async def test_it_comes_and_goes_with_its_key_and_the_table_stays_as_it_is(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    name = mariadb.database()
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        mariadb.execute(TABLES["one key"][0], "INSERT INTO t VALUES (1, 'x')", database=name)
        await compare(mariadb, feed, name, 1, "id, b")
        mariadb.execute(
            "ALTER TABLE t ADD z INT", "INSERT INTO t VALUES (2, 'y', 5)", database=name
        )
        await feed.seen(f"{name}.t", 2)
        mariadb.execute(
            "ALTER TABLE t DROP INDEX b", "INSERT INTO t VALUES (3, 'y', 6)", database=name
        )
        mariadb.execute(
            "ALTER TABLE t ADD UNIQUE k (b, id)", "INSERT INTO t VALUES (4, 'y', 7)", database=name
        )
        changes = await feed.seen(f"{name}.t", 4)
        (versions,) = feed.target.versions.values()
        shown = [
            [column["name"] for column in table.record.table_info["columns"]]
            for _, table in versions
        ]
    assert all(names in (["id", "b"], ["id", "b", "z"]) for names in shown)
    assert [(row["id"], row["b"], row.get("z")) for row in changes] == [
        *((1, "x", None), (2, "y", 5), (3, "y", 6), (4, "y", 7))
    ]


@pytest.mark.timeout(240)
def test_a_dump_reads_a_table_with_hidden_columns(tmp_path: Path) -> None:
    """Before and after the log has told of them."""
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute(
            "CREATE DATABASE a",
            f"CREATE {TABLES['one key'][0][7:].replace('TABLE t', 'TABLE a.t')}",
        )
        server.execute("INSERT INTO a.t VALUES (1, 'one'), (2, NULL)")
        create = [
            "changefeed",
            "create",
            "-c",
            "f",
            "--sink-uri",
            "parquet:///lake",
            "--filter",
            "a.*",
        ]
        made = cluster.cli(*create, "--source-uri", server.uri)
        lake = Lake(cluster, "f", made["start_ts"])
        server.execute(
            "INSERT INTO a.t VALUES (3, 'three')", "UPDATE a.t SET b = 'two' WHERE id = 2"
        )
        lake.follow(lambda tables: 3 in tables.get("a.t", {}))
        cluster.cli("changefeed", "dumpstart", "-c", "f", "--verify")
        lake.follow(lambda tables: 1 in tables["a.t"])
        wanted = {
            row[0]: {"id": row[0], "b": row[1]} for row in server.execute("SELECT id, b FROM a.t")
        }
        assert lake.tables["a.t"] == wanted
