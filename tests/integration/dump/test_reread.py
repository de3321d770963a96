"""Tables whose stored values a DDL changes are read again by themselves:
the target ends as the source is.
"""

import pytest

from server.dump.job import DumpRecords
from server.dump.progress import TableState
from storage.meta.client import EtcdMeta
from tests.integration.dump.dumping import Rows, over, source, start, until
from tests.integration.mysql.replica import Feed, following
from tests.mariadb import MariaDb

TABLES = (
    "CREATE TABLE t (id INT PRIMARY KEY, v INT, b VARCHAR(9))",
    "CREATE TABLE other (id INT PRIMARY KEY, v INT)",
    "INSERT INTO other VALUES (1, 1)",
    "INSERT INTO t VALUES (1, NULL, 'abcdef'), (2, 2, 'x'), (3, NULL, 'gone')",
)


def there(feed: Feed, name: str) -> Rows:
    """What a target holds that empties the table where it is told to."""
    span = next(
        span for span, versions in feed.target.versions.items() if versions[-1][1].name == name
    )
    emptied = max(
        (change.commit_ts for change in feed.target.changes if name in change.truncated), default=0
    )
    rows: Rows = {}
    for change in feed.target.changes_of(span):
        if change["_commit_ts"] > emptied:
            rows.pop(change["id"], None)
            if change["_op"] != "delete":
                rows[change["id"]] = {
                    key: value for key, value in change.items() if not key.startswith("_")
                }
    return rows


@pytest.mark.parametrize("dumped", [(), ("*",), ("*.other",)])
@pytest.mark.parametrize(
    ("statement", "columns"),
    [
        ("ALTER TABLE t MODIFY v INT NOT NULL", ("id", "v", "b")),
        ("ALTER TABLE t MODIFY b VARCHAR(3), RENAME COLUMN v TO w", ("id", "w", "b")),
        ("ALTER TABLE t ADD g INT AS (id * 2) STORED, RENAME TO t", ("id", "v", "b", "g")),
    ],
)
async def test_a_table_whose_values_an_alter_changes_is_read_again(
    mariadb: MariaDb,
    meta: EtcdMeta,
    dumped: tuple[str, ...],
    statement: str,
    columns: tuple[str, ...],
) -> None:
    database = mariadb.database()
    name = f"{database}.t"
    mariadb.execute(*TABLES, database=database)
    async with following(f"{mariadb.uri}?idle-row-ms=200", meta, f"{database}.*") as feed:
        if dumped:
            await start(meta, tables=tuple(each.replace("*.", f"{database}.") for each in dumped))
            await until(meta, feed, over)
        mariadb.execute(
            "DELETE FROM t WHERE id = 3", "SET sql_mode=''", statement, database=database
        )
        await feed.until(lambda: any(name in change.truncated for change in feed.target.changes))
        await until(
            meta, feed, lambda found: name in found and found[name].state is TableState.DONE
        )
        mariadb.execute("SET sql_mode=''", "INSERT INTO t (id) VALUES (9)", database=database)
        await feed.until(lambda: there(feed, name) == source(mariadb, name, columns))
    job = await DumpRecords(meta, "feed").job()
    assert job is not None
    assert list(job.reasons) == [name]
    assert any(
        why in job.reasons[name] for why in ("NULL becomes", "may be cut", "computed for each row")
    )
    assert job.takes(f"{database}.other") == bool(dumped), "only what was altered is read again"
