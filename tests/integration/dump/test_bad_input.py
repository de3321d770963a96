"""What goes wrong at the source in the middle of a dump: a state and a message where it is,
and the rest goes on.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pymysql

from server.dump.job import DumpRecords
from server.dump.progress import TableState
from storage.meta.client import EtcdMeta
from tests.integration.dump.dumping import applied, hurry, over, source, start, until
from tests.integration.mysql.replica import following
from tests.mariadb import MariaDb

USER = "dumper"
ALL = f"GRANT ALL ON *.* TO {USER}"


def make(mariadb: MariaDb, database: str, *tables: str) -> None:
    for name in tables:
        mariadb.execute(
            f"USE {database}",
            f"CREATE TABLE {name} (id INT PRIMARY KEY, version INT, name VARCHAR(300))",
            f"INSERT INTO {name} SELECT seq, 0, REPEAT('n', 200) FROM seq_1_to_4000",
            f"ANALYZE TABLE {name}",
        )


def hang_up(mariadb: MariaDb) -> None:
    """End the sessions of the dump, but not the one that the log is sent by."""
    for number, user, command in mariadb.execute(
        "SELECT id, user, command FROM information_schema.processlist"
    ):
        if user == USER and not command.startswith("Binlog Dump"):
            with suppress(pymysql.OperationalError):  # it has ended by itself
                mariadb.execute(f"KILL {number}")


async def test_while_the_password_is_wrong_everything_waits_and_says_so(
    mariadb: MariaDb, meta: EtcdMeta, tmp_path: Path
) -> None:
    database = mariadb.database()
    make(mariadb, database, "a", "b")
    secret = tmp_path / "password"
    secret.write_text("right")
    mariadb.execute(f"DROP USER IF EXISTS {USER}", f"CREATE USER {USER} IDENTIFIED BY 'right'", ALL)
    uri = f"mysql://{USER}@127.0.0.1:{mariadb.port}?password-file={secret}"
    async with following(uri, meta, f"{database}.*") as feed:
        job = await start(meta, rows_per_s=300)
        await until(meta, feed, lambda found: any(each.rows for each in found.values()))
        mariadb.execute(f"ALTER USER {USER} IDENTIFIED BY 'other'")
        hang_up(mariadb)
        found = await until(
            meta,
            feed,
            lambda found: (
                len(found) == 2 and all("ErrMySQLLogin" in each.error for each in found.values())
            ),
        )
        assert not any(each.state.is_over for each in found.values()), "a table is not to blame"
        assert all("right" not in each.error for each in found.values())
        secret.write_text("other")
        await hurry(meta, job)
        found = await until(meta, feed, over)
        assert {each.state for each in found.values()} == {TableState.DONE}
        assert {each.error for each in found.values()} == {""}
        for name in ("a", "b"):
            columns = ("id", "version", "name")
            assert applied(feed, f"{database}.{name}") == source(
                mariadb, f"{database}.{name}", columns
            )


async def test_a_table_that_may_not_be_read_fails_by_name_and_goes_on_when_it_may(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    database = mariadb.database()
    make(mariadb, database, "open", "shut")
    mariadb.execute(
        f"DROP USER IF EXISTS {USER}",
        f"CREATE USER {USER}",
        f"GRANT SELECT ON {database}.open TO {USER}",
    )
    mariadb.execute(
        f"GRANT REPLICATION SLAVE, BINLOG MONITOR ON *.* TO {USER}",
        f"GRANT ALL ON changefeed_dump.* TO {USER}",
    )
    mariadb.execute(f"GRANT INSERT ON {database}.shut TO {USER}")  # so the catalogue shows it
    records = DumpRecords(meta, "feed")
    uri = f"mysql://{USER}@127.0.0.1:{mariadb.port}"
    async with following(uri, meta, f"{database}.*") as feed:
        job = await start(meta)
        found = await until(meta, feed, over)
        assert {name.split(".")[1]: each.state for name, each in found.items()} == {
            "open": TableState.DONE,
            "shut": TableState.FAILED,
        }
        assert "ErrMySQLPrivilege" in found[f"{database}.shut"].error
        mariadb.execute(f"GRANT SELECT ON {database}.shut TO {USER}")
        await records.put_job(job, replace(job, attempt=1))
        found = await until(
            meta, feed, lambda found: found[f"{database}.shut"].state is TableState.DONE
        )
        assert len(applied(feed, f"{database}.shut")) == 4000


async def test_conditions_make_estimates_smaller_and_stay_with_a_table_that_is_renamed(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    database = mariadb.database()
    make(mariadb, database, "few", "all_rows")
    few, renamed, full = (f"{database}.{name}" for name in ("few", "other", "all_rows"))
    async with following(mariadb.uri, meta, f"{database}.*") as feed:
        await start(meta, where={few: "id > 1000 AND name LIKE 'n%'"}, rows_per_s=1000)
        found = await until(meta, feed, lambda found: few in found and found[few].rows_read > 0)
        assert 0 < found[few].rows_estimated < found[full].rows_estimated
        assert not found[few].state.is_over
        mariadb.execute(f"RENAME TABLE {few} TO {renamed}")
        await until(meta, feed, over)
        await feed.until(lambda: len(applied(feed, renamed)) == 3000)
        assert min(applied(feed, renamed)) == 1001
