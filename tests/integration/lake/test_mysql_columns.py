"""From MariaDB to PostgreSQL by a lake job: each value stays with its column,
however a DDL is written.

Each case is a table of its own that holds rows before the DDL; the lake must equal SELECT, column
by column.
"""

import contextlib

import pytest
from pymysql.cursors import DictCursor

from tests.integration.capture.processes import running_cluster
from tests.integration.lake.test_databases import rows
from tests.integration.lake.test_job_errors import keeping, until
from tests.mariadb import running_mariadb

pytestmark = pytest.mark.timeout(500)

CASES = {
    "comment_before": ["/* app:migrate */ ALTER TABLE {t} RENAME COLUMN v TO w"],
    "dashes_before": ["-- x\nALTER TABLE {t} RENAME COLUMN v TO w"],
    "hash_before": ["# x\nALTER TABLE {t} RENAME COLUMN v TO w"],
    "comment_between": ["ALTER TABLE {t} RENAME /* x */ COLUMN v TO w"],
    "no_blanks": ["ALTER TABLE {t} RENAME COLUMN`v`TO`w`"],
    "if_exists": ["ALTER TABLE {t} RENAME COLUMN IF EXISTS v TO w"],
    "other_case": ["ALTER TABLE {t} RENAME COLUMN V TO w"],
    "only_case": ["ALTER TABLE {t} RENAME COLUMN v TO V"],
    "change_other_case": ["ALTER TABLE {t} CHANGE V w INT"],
    "change_qualified": ["ALTER TABLE {t} CHANGE {t}.v w INT"],
    "modify_other_case": ["ALTER TABLE {t} MODIFY V BIGINT"],
    "modify_key": ["ALTER TABLE {t} MODIFY ID BIGINT"],
    "swap": ["ALTER TABLE {t} RENAME COLUMN x TO y, RENAME COLUMN y TO x"],
    "swap_by_change": ["ALTER TABLE {t} CHANGE x y INT, CHANGE y x INT"],
    "shift": ["ALTER TABLE {t} RENAME COLUMN x TO y, RENAME COLUMN y TO z"],
    "rename_and_add": ["ALTER TABLE {t} RENAME COLUMN v TO w, ADD COLUMN v INT DEFAULT 77"],
    "drop_and_add": ["ALTER TABLE {t} DROP v, ADD v INT DEFAULT 5"],
    "comment_like_a_rename": [
        "ALTER TABLE {t} DROP x, ADD z INT DEFAULT 8 COMMENT 'rename column v to z'"
    ],
    "two_adds": ["ALTER TABLE {t} ADD p INT DEFAULT 3", "ALTER TABLE {t} ADD q INT DEFAULT 4"],
    "two_renames": ["ALTER TABLE {t} RENAME COLUMN v TO a", "ALTER TABLE {t} RENAME COLUMN a TO b"],
    "drop_then_add": ["ALTER TABLE {t} DROP v", "ALTER TABLE {t} ADD v INT DEFAULT 9"],
    "set_statement_rename": [
        "SET STATEMENT lock_wait_timeout=5 FOR ALTER TABLE {t} RENAME COLUMN v TO w"
    ],
    "set_statement_add": [
        "SET STATEMENT lock_wait_timeout=5 FOR ALTER TABLE {t} ADD w INT DEFAULT 5"
    ],
    "set_statement_truncate": ["SET STATEMENT lock_wait_timeout=5 FOR TRUNCATE TABLE {t}"],
    "replace_as_select": [
        "CREATE OR REPLACE TABLE {t} (PRIMARY KEY (id)) AS SELECT 2 AS id, 'new' AS v"
    ],
    "only_key": [
        "ALTER TABLE {t} DROP PRIMARY KEY, ADD PRIMARY KEY (v)",
        "UPDATE {t} SET id = 1 WHERE v = 20",
    ],
    "key_and_column": [
        (
            "ALTER TABLE {t} DROP PRIMARY KEY, ADD PRIMARY KEY (id), RENAME COLUMN id TO old, RENAME "
            "COLUMN v TO id"
        ),
        "UPDATE {t} SET old = 1 WHERE id = 20",
    ],
    "values_change": ["SET sql_mode=''", "ALTER TABLE {t} MODIFY u INT NOT NULL"],
}


def test_every_value_stays_with_its_column_however_the_ddl_is_written(tmp_path, postgres):
    target = postgres.create("columns")
    secret = tmp_path / "password"
    secret.write_text("s3cret")
    with (
        running_mariadb() as server,
        running_cluster(tmp_path) as cluster,
        contextlib.ExitStack() as stack,
    ):

        def lake():
            found = {}
            for name in CASES:
                with contextlib.suppress(Exception):  # it may not be there yet, or not again
                    found[name] = in_order(rows(target, f"shop.{name}"))
            return found

        def upstream():
            with (
                contextlib.closing(server.connect()) as connection,
                connection.cursor(DictCursor) as cursor,
            ):
                return {name: in_order(selected(cursor, name)) for name in CASES}

        server.execute(
            "CREATE USER cdc IDENTIFIED BY 's3cret'",
            "GRANT ALL ON *.* TO cdc",
            "CREATE DATABASE shop",
        )

        def differing():
            expected, found = upstream(), lake()
            return [name for name in CASES if found.get(name) != expected[name]]

        columns = "id INT PRIMARY KEY, v INT NOT NULL, x INT, y INT, u INT"
        server.execute(*(f"CREATE TABLE shop.{name} ({columns})" for name in CASES))
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
        server.execute(
            *(
                f"INSERT INTO shop.{name} VALUES (1, 10, 100, 1000, NULL), (2, 20, 200, 2000, 7)"
                for name in CASES
            )
        )
        stack.enter_context(keeping(cluster, tmp_path))
        until(differing, [])

        cluster.cli(
            "changefeed", "pause", "-c", "shop"
        )  # what follows is read late: the catalogue is further by then
        for name, statements in CASES.items():
            server.execute(*(statement.format(t=f"shop.{name}") for statement in statements))
        cluster.cli("changefeed", "resume", "-c", "shop")
        until(differing, [])
        (feed,) = cluster.cli("changefeed", "list")
        assert feed["summary"]["state"] == "normal"


def selected(cursor, name):
    cursor.execute(f"SELECT * FROM shop.{name}")
    return cursor.fetchall()


def in_order(found):
    """Rows by key, without our own column, whatever the order of columns."""
    shown = (
        tuple(sorted((name, value) for name, value in row.items() if name != "_commit_ts"))
        for row in found
    )
    return sorted(shown, key=repr)
