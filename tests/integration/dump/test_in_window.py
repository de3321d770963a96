"""What happens within a window, at exactly that place: after a chunk was read,
before the high watermark is written.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pymysql
import pytest

from server.dump.mysql import reader
from server.dump.mysql.reader import ChunkReader, Server
from server.dump.progress import TableState
from storage.meta.client import EtcdMeta
from tests.integration.dump.dumping import over, start, until
from tests.integration.mysql.replica import Feed, following
from tests.mariadb import MariaDb

KEYED = "CREATE TABLE t (id INT PRIMARY KEY, version INT NOT NULL)"
UPDATED = "UPDATE t SET version = 1 WHERE id < 20"
XA = ("XA START 'x'", UPDATED, "DELETE FROM t WHERE id = 30", "XA END 'x'", "XA PREPARE 'x'")
Statements = Sequence[str]


def once_after_a_read(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do it when the first chunk was read."""
    read, count = ChunkReader.read, itertools.count()

    def reading(by: ChunkReader, *arguments: Any, **named: Any) -> Any:
        taken = read(by, *arguments, **named)
        if next(count) == 0:
            act()
        return taken

    monkeypatch.setattr(ChunkReader, "read", reading)


def held(feed: Feed, name: str) -> dict[int, int]:
    """Versions by id, as a target has them in the end."""
    spans = [
        (versions[0][0], span)
        for span, versions in feed.target.versions.items()
        if versions[-1][1].name == name
    ]
    truncated = [change.commit_ts for change in feed.target.changes if name in change.truncated]
    found: dict[int, int] = {}
    for change in feed.target.changes_of(max(spans)[1]):
        if any(change["_commit_ts"] > ts for ts in truncated):
            found, truncated = {}, [ts for ts in truncated if change["_commit_ts"] <= ts]
        if change["_op"] == "delete":
            found.pop(change["id"], None)
        else:
            assert found.get(change["id"], 0) <= change["version"], "a row went back in time"
            found[change["id"]] = change["version"]
    return found


CASES: dict[str, tuple[str, Statements, Statements, Statements]] = {
    "rows change": (
        KEYED,
        (),
        (UPDATED, "DELETE FROM t WHERE id = 30", "REPLACE INTO t VALUES (40, 1), (900, 1)"),
        (),
    ),
    "keys move": (KEYED, (), ("UPDATE t SET id = id + 900, version = 1 WHERE id < 20",), ()),
    "partitions": (
        f"{KEYED} PARTITION BY HASH(id) PARTITIONS 4",
        (),
        (UPDATED, "DELETE FROM t WHERE id = 30"),
        (),
    ),
    "truncate": (KEYED, (), ("TRUNCATE TABLE t", "INSERT INTO t VALUES (1, 7)"), ()),
    "a column comes": (
        KEYED,
        (),
        ("ALTER TABLE t ADD COLUMN more INT DEFAULT 3 FIRST", UPDATED),
        (),
    ),
    "a column changes": (
        KEYED,
        (),
        ("ALTER TABLE t MODIFY version DECIMAL(20,2) NOT NULL", UPDATED),
        (),
    ),
    "the key changes": (
        KEYED,
        (),
        ("ALTER TABLE t DROP PRIMARY KEY, ADD PRIMARY KEY (version, id)", UPDATED),
        (),
    ),
    "made anew": (KEYED, (), ("DROP TABLE t", KEYED, "INSERT INTO t VALUES (1, 7)"), ()),
    "another takes its place": (
        KEYED,
        (),
        (
            *("CREATE TABLE shadow LIKE t", "ALTER TABLE shadow ADD COLUMN more INT"),
            *(
                "INSERT INTO shadow SELECT id, version, 1 FROM t",
                "RENAME TABLE t TO old, shadow TO t",
                UPDATED,
            ),
        ),
        (),
    ),
    "XA prepared before, committed within": (KEYED, XA, ("XA COMMIT 'x'",), ()),
    "XA prepared before, committed after": (KEYED, XA, (), ("XA COMMIT 'x'",)),
    "XA prepared within, committed after": (KEYED, (), XA, ("XA COMMIT 'x'",)),
    "XA prepared and committed within": (KEYED, (), (*XA, "XA COMMIT 'x'"), ()),
    "XA rolled back within": (KEYED, XA, ("XA ROLLBACK 'x'", UPDATED), ()),
}


@pytest.mark.parametrize("case", CASES)
async def test_the_target_equals_the_source_whatever_comes_between_a_chunk_and_its_high_watermark(
    mariadb: MariaDb, meta: EtcdMeta, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    table, before, inside, after = CASES[case]
    database = mariadb.database()
    before, inside, after = (
        [each.replace("'x'", f"'{database}'") for each in part] for part in (before, inside, after)
    )
    mariadb.execute(table, "INSERT INTO t SELECT seq, 0 FROM seq_1_to_300", database=database)
    async with following(f"{mariadb.uri}?idle-row-ms=200", meta, f"{database}.t") as feed:
        mariadb.execute(*before, "SELECT 1", database=database)
        happened = asyncio.Event()
        loop = asyncio.get_running_loop()

        def happen() -> None:
            mariadb.execute(*inside, "SELECT 1", database=database)
            loop.call_soon_threadsafe(happened.set)

        once_after_a_read(monkeypatch, happen)
        await start(meta)
        name = f"{database}.t"
        await until(
            meta,
            feed,
            lambda found: (
                happened.is_set() and name in found and found[name].state is TableState.DONE
            ),
        )
        mariadb.execute(*after, "SELECT 1", database=database)
        wanted = dict(mariadb.execute("SELECT id, version FROM t", database=database))
        await feed.until(lambda: held(feed, name) == wanted)


async def test_a_plan_refused_for_a_ddl_that_is_ahead_of_the_log_is_made_again(
    mariadb: MariaDb, meta: EtcdMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = mariadb.database()
    mariadb.execute(KEYED, "INSERT INTO t SELECT seq, 0 FROM seq_1_to_300", database=database)
    plan, count = Server.plan, itertools.count()

    def planned(server: Server, *arguments: Any) -> Any:
        if next(count) == 0:
            mariadb.execute("RENAME TABLE t TO u", "SELECT 1", database=database)
        return plan(server, *arguments)

    monkeypatch.setattr(
        reader, "SPLIT_ROWS_MIN", 0
    )  # as of a large table: its key's bounds are asked for
    monkeypatch.setattr(Server, "plan", planned)
    async with following(f"{mariadb.uri}?idle-row-ms=200", meta, f"{database}.*") as feed:
        await start(meta)
        (found,) = (await until(meta, feed, over)).values()
        assert found.state is TableState.DONE, found.error
        assert len(held(feed, f"{database}.u")) == 300


async def test_a_xid_that_is_used_again_without_changes_is_named_while_it_is_prepared(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    database = mariadb.database()
    name, xid = f"{database}.t", f"'{database}'"
    mariadb.execute(KEYED, "INSERT INTO t SELECT seq, 0 FROM seq_1_to_300", database=database)
    committed = [each.replace("'x'", xid) for each in (*XA, "XA COMMIT 'x'")]
    # Nothing of this one is in the log.
    again = [f"XA START {xid}", "SELECT COUNT(*) FROM t", f"XA END {xid}", f"XA PREPARE {xid}"]
    async with following(f"{mariadb.uri}?idle-row-ms=200", meta, name) as feed:
        mariadb.execute(*committed, "SELECT 1", database=database)
        mariadb.execute(*again, "SELECT 1", database=database)
        await start(meta)
        found = await until(meta, feed, lambda found: name in found and bool(found[name].error))
        assert f"XA ROLLBACK X'{database.encode().hex()}'" in found[name].error
        with suppress(pymysql.err.OperationalError):  # "was rolled back", as its session is gone
            mariadb.execute(f"XA ROLLBACK {xid}")
        (done,) = (await until(meta, feed, over)).values()
        assert (done.state, done.error) == (TableState.DONE, "")
        wanted = dict(mariadb.execute("SELECT id, version FROM t", database=database))
        await feed.until(lambda: held(feed, name) == wanted)
