"""What only a MySQL of Oracle's does, where TIDEMARK_TEST_MYSQLD names one; else left out.

CI has no such server: what its events look like is in tests/golden/mysql_events.json.
"""

import asyncio
import json
from typing import Any

import pytest

from server.changefeed.source import SourceUri
from server.changefeed.table import SourceTable
from server.cli.main import main
from server.puller.mysql.log.opening import open_log, present
from server.puller.mysql.log.position import SavedPosition
from server.puller.mysql.session.errors import LogBehindError
from server.puller.mysql.session.options import MySqlOptions
from storage.meta.client import EtcdMeta
from storage.mysql.event import EventUnsupportedError
from tests.integration.mysql.replica import Row, following
from tests.mariadb import MYSQLD, MariaDb

pytestmark = pytest.mark.skipif(not MYSQLD, reason="TIDEMARK_TEST_MYSQLD names no server")


@pytest.fixture
def mysql(mariadb: MariaDb) -> MariaDb:
    return mariadb


def brief(changes: list[Row]) -> list[tuple[str, int, Any]]:
    return [(change["_op"], change["id"], change.get("v")) for change in changes]


def test_it_passes_the_preflight(mysql: MariaDb, capsys: pytest.CaptureFixture[str]) -> None:
    name = mysql.database()
    mysql.execute(f"CREATE TABLE {name}.t (id INT PRIMARY KEY)")
    status = main(
        ["cli", "--json", "source", "check", "--source-uri", mysql.uri, "--filter", f"{name}.*"]
    )
    found = json.loads(capsys.readouterr().out)
    assert (status, found["ok"]) == (0, True), found
    told = {check["name"]: check["found"] for check in found["checks"]}
    assert told["watermark"].startswith("came back through the log")


async def test_what_only_mysql_does_is_read(mysql: MariaDb, meta: EtcdMeta) -> None:
    """Compressed transactions, CREATE … SELECT in one, instant DDL, temporary tables,
    hidden columns, XA.
    """
    name = mysql.database()
    mysql.execute(
        f"USE {name}",
        "CREATE TABLE t (id INT PRIMARY KEY, v INT, y YEAR, u INT UNSIGNED, j JSON, h INT "
        "INVISIBLE DEFAULT 7,"
        " g INT AS (v + 1), INDEX ((v * 2)), INDEX ((CAST(j->'$.a' AS UNSIGNED ARRAY))))",
    )
    async with following(mysql.uri, meta, f"{name}.*") as feed:
        mysql.execute(
            f"USE {name}",
            """INSERT INTO t (id, v, y, u, j) VALUES (1, -1, 2000, 4294967295, '{"a": [1, 2]}')""",
            *(
                "SET binlog_transaction_compression = ON",
                "INSERT INTO t (id, v) VALUES (2, 2)",
                "UPDATE t SET v = 3",
            ),
            *(
                "CREATE TEMPORARY TABLE x (id INT)",
                "INSERT INTO x VALUES (1)",
                "DROP TEMPORARY TABLE x",
            ),
            *(
                "ALTER TABLE t ADD COLUMN z INT DEFAULT 5, ALGORITHM = INSTANT",
                "DELETE FROM t WHERE id = 2",
            ),
            *(
                "XA START 'a'",
                "INSERT INTO t (id, v) VALUES (4, 4)",
                "XA END 'a'",
                "XA PREPARE 'a'",
                "XA COMMIT 'a'",
            ),
            "CREATE TABLE s (PRIMARY KEY (id)) SELECT id, v FROM t",
        )
        changes = await feed.seen(f"{name}.t", 6)
        copied = await feed.seen(f"{name}.s", 2)
    assert brief(changes) == [
        *(
            ("insert", 1, -1),
            ("insert", 2, 2),
            ("update", 1, 3),
            ("update", 2, 3),
            ("delete", 2, 3),
            ("insert", 4, 4),
        )
    ]
    first = changes[0]
    assert (first["y"], first["u"], first["h"], first["g"]) == (2000, 4294967295, 7, 0)
    assert (json.loads(first["j"]), changes[-1]["z"]) == ({"a": [1, 2]}, 5)
    assert brief(copied) == [("insert", 1, 3), ("insert", 4, 4)]


async def test_a_restart_at_any_checkpoint_gives_the_same_commit_ts(
    mysql: MariaDb, meta: EtcdMeta
) -> None:
    name = mysql.database()
    mysql.execute(f"CREATE TABLE {name}.t (id INT PRIMARY KEY, v INT)")
    (version,) = mysql.execute("SELECT VERSION()")[0]
    tagged = (
        ["SET gtid_next = 'AUTOMATIC:blue'"]
        if tuple(map(int, version.split(".")[:2])) >= (8, 3)
        else []
    )
    async with following(mysql.uri, meta, f"{name}.*") as feed:
        tables: list[SourceTable] = [versions[0][1] for versions in feed.target.versions.values()]
        for number in range(4):
            mysql.execute(*tagged, f"INSERT INTO {name}.t VALUES ({number}, 1)")
            mysql.execute("BEGIN", f"UPDATE {name}.t SET v = v + 1", "DO SLEEP(0.1)", "COMMIT")
        whole = await feed.seen(f"{name}.t", 14)
    for checkpoint in sorted({row["_commit_ts"] for row in whole[:-1]} - {whole[-1]["_commit_ts"]}):
        async with following(
            mysql.uri, meta, f"{name}.*", start_ts=checkpoint, tables=tables
        ) as again:
            wanted = [
                {**row, "_from": checkpoint} for row in whole if row["_commit_ts"] > checkpoint
            ]
            assert await again.seen(f"{name}.t", len(wanted)) == wanted


def test_a_server_that_lacks_what_was_read_is_refused(mysql: MariaDb) -> None:
    options = MySqlOptions.of(SourceUri.parse(mysql.uri))
    saved_position = present(options)
    lost = ",".join(
        filter(None, (saved_position.gtids, "3c22d75d-e5e0-11f1-ba82-02fc00000001:1-7"))
    )
    with pytest.raises(LogBehindError, match="02fc00000001:1-7"):
        open_log(
            options,
            SavedPosition(saved_position.ts, lost, saved_position.file, saved_position.position),
            0,
        )


async def test_partial_json_is_refused_by_name(mysql: MariaDb, meta: EtcdMeta) -> None:
    name = mysql.database()
    mysql.execute(
        f"CREATE TABLE {name}.t (id INT PRIMARY KEY, j JSON)",
        f"""INSERT INTO {name}.t VALUES (1, '{{"a": "{"x" * 99}"}}')""",
    )
    with pytest.RaisesGroup(
        pytest.RaisesExc(EventUnsupportedError, match="binlog_row_value_options"),
        flatten_subgroups=True,
    ):
        async with following(mysql.uri, meta, f"{name}.*") as feed:
            mysql.execute(
                "SET binlog_row_value_options = 'PARTIAL_JSON'",
                f"UPDATE {name}.t SET j = JSON_SET(j, '$.b', 1)",
            )
            await asyncio.wait_for(asyncio.wait([feed.task]), 40)
