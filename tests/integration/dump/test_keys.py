"""Tables whose rows are told apart by a unique key, or by several columns,
partitioned or not: dumped under churn.
"""

import pytest
from pymysql.cursors import Cursor

from server.dump.progress import TableState
from storage.meta.client import EtcdMeta
from tests.integration.dump.dumping import dumped_while, over, start, until
from tests.integration.mysql.replica import Feed, following
from tests.mariadb import MariaDb

KEYS = {
    "unique_key": "a INT NOT NULL, b INT NOT NULL, free INT UNIQUE, UNIQUE (b, a))",
    "composite": "a INT, b INT, free INT, PRIMARY KEY (b, a))",
    "partitioned": "a INT, b INT, free INT, PRIMARY KEY (b, a)) PARTITION BY HASH (a) PARTITIONS 5",
    "several_unique": "a INT, b INT NOT NULL, free INT NOT NULL, UNIQUE (a), UNIQUE (b, free))",
}
ROWS = 3000


def held(feed: Feed, name: str) -> set[tuple[int, int, int, int]]:
    span = next(
        span for span, versions in feed.target.versions.items() if versions[-1][1].name == name
    )
    key = feed.target.versions[span][-1][1].mounter.key_columns
    rows = {}
    for change in feed.target.changes_of(span):
        place = tuple(change[column] for column in key)
        rows.pop(place, None)
        if change["_op"] != "delete":
            rows[place] = change["a"], change["b"], change["free"], change["version"]
    return set(rows.values())


async def test_unique_and_composite_keys_make_whole_dumps_under_churn(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    database = mariadb.database()
    for name, columns in KEYS.items():
        mariadb.execute(
            f"USE {database}",
            f"CREATE TABLE {name} (version INT, {columns}",
            f"INSERT INTO {name} (version, a, b, free) SELECT 0, seq, seq % 50, seq FROM "
            f"seq_1_to_{ROWS}",
        )

    def change(cursor: Cursor) -> None:
        for number in range(1, 60):
            for name in KEYS:
                cursor.execute(f"UPDATE {name} SET version = {number} WHERE a % 61 = {number}")
                cursor.execute(f"UPDATE IGNORE {name} SET b = b + 7 WHERE a % 67 = {number}")
                cursor.execute(f"DELETE FROM {name} WHERE a = {number * 37}")

    async with dumped_while(change, mariadb, meta, database) as feed:
        for name in KEYS:
            wanted = set(mariadb.execute(f"SELECT a, b, free, version FROM {database}.{name}"))
            await feed.until(
                lambda name=name, wanted=wanted: held(feed, f"{database}.{name}") == wanted
            )


ALTERED = {
    "another type": ("id INT", "MODIFY id VARCHAR(20)"),
    "another collation": (
        "id VARCHAR(20) COLLATE utf8mb4_bin",
        "CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci",
    ),
    "another column": (
        "id VARCHAR(20), other INT DEFAULT 0",
        "DROP PRIMARY KEY, ADD PRIMARY KEY (other, id)",
    ),
}


@pytest.mark.parametrize("case", ALTERED)
async def test_a_key_in_another_order_leaves_out_no_row_that_was_still_to_be_read(
    mariadb: MariaDb, meta: EtcdMeta, case: str
) -> None:
    columns, altered = ALTERED[case]
    database = mariadb.database()
    ids = (
        [f"{'ABCabc'[number % 6]}{number}" for number in range(ROWS)]
        if "VARCHAR" in columns
        else range(ROWS)
    )
    mariadb.execute(
        f"CREATE TABLE {database}.t ({columns}, PRIMARY KEY (id)) DEFAULT CHARSET utf8mb4",
        f"INSERT INTO {database}.t (id) VALUES {', '.join(f'({each!r})' for each in ids)}",
    )
    name = f"{database}.t"
    async with following(mariadb.uri, meta, name) as feed:
        await start(meta, rows_per_s=1200, parallel=1)
        await until(meta, feed, lambda found: name in found and found[name].chunks > 0)
        mariadb.execute(f"ALTER TABLE {name} {altered}")
        await until(meta, feed, lambda found: found[name].state is TableState.DONE)
        span = next(iter(feed.target.versions))
        assert {str(row["id"]) for row in feed.target.changes_of(span)} == set(map(str, ids))


SHOWN_AS_TEXT = {
    "uuid": (
        "UUID",
        (
            "CONCAT(LPAD(HEX(seq), 8, '0'), '-0000-', seq % 8, '000-8000-0000000000', LPAD(HEX(seq % "
            "256), 2, '0'))"
        ),
    ),
    "odd_uuid": ("UUID", "CAST(UNHEX(MD5(seq)) AS UUID)"),
    "inet6": ("INET6", "CAST(UNHEX(MD5(seq)) AS INET6)"),
    "inet4": ("INET4", "CAST(UNHEX(LEFT(MD5(seq), 8)) AS INET4)"),
}


async def test_uuids_and_addresses_have_one_key_from_the_dump_and_from_the_log(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    database, rows = mariadb.database(), 1500
    for name, (kind, value) in SHOWN_AS_TEXT.items():
        mariadb.execute(
            f"USE {database}",
            f"CREATE TABLE {name} (id {kind} PRIMARY KEY, other {kind}, v INT)",
            f"INSERT INTO {name} SELECT {value}, {value}, seq FROM seq_1_to_{rows}",
        )
    mariadb.execute(
        f"CREATE TABLE {database}.pair (a INET4, b UUID, v INT, PRIMARY KEY (a, b))",
        f"INSERT INTO {database}.pair SELECT CAST(UNHEX('0A00000A') AS INET4), id, v FROM "
        f"{database}.uuid",
    )
    spans = {}
    async with following(mariadb.uri, meta, f"{database}.*") as feed:
        await start(meta, verify=True)
        found = await until(meta, feed, over)
        assert {each.state for each in found.values()} == {TableState.DONE}, found
        spans = {
            versions[-1][1].name.split(".")[1]: span
            for span, versions in feed.target.versions.items()
        }

        def stored(name: str) -> set[tuple[object, ...]]:
            columns = "CAST(a AS BINARY(4)), CAST(b AS BINARY(16)), v"
            if name != "pair":
                size = 4 if name == "inet4" else 16
                columns = f"CAST(id AS BINARY({size})), CAST(other AS BINARY({size})), v"
            return set(mariadb.execute(f"SELECT {columns} FROM {database}.{name}"))

        def present(name: str) -> set[tuple[object, ...]]:
            key = ("a", "b") if name == "pair" else ("id",)
            rows: dict[tuple[object, ...], dict[str, object]] = {}
            for change in feed.target.changes_of(spans[name]):
                rows.pop(tuple(change[column] for column in key), None)
                if change["_op"] != "delete":
                    rows[tuple(change[column] for column in key)] = change
            return {
                tuple(value for column, value in row.items() if column[0] != "_")
                for row in rows.values()
            }

        for name in spans:
            assert len(stored(name)) == rows
            assert present(name) == stored(name), name
        for name in spans:
            mariadb.execute(f"UPDATE {database}.{name} SET v = v + 10000 WHERE v % 3 = 0")
            mariadb.execute(f"DELETE FROM {database}.{name} WHERE v % 3 = 1")
            await feed.until(lambda name=name: present(name) == stored(name))
