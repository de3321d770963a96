"""A real MariaDB's table as of any cut, under a writer: it equals what the log says,
transaction by transaction.
"""

import pytest

from server.changefeed.info import ChangefeedInfo
from server.verify.catalog import Table
from server.verify.errors import VerifyHistoryError, VerifyMovedError
from server.verify.mysql_upstream import MySqlUpstream
from server.verify.spans import KeySpans
from tests.integration.mysql.replica import following
from tests.integration.verify.writer import ROWS, Writer, created

pytestmark = pytest.mark.timeout(180)
TRANSACTIONS = 300


def info(mariadb):
    return ChangefeedInfo(
        id="feed",
        sink_uri="delta:///lake",
        source_uri=mariadb.uri,
        start_ts=0,
        target_ts=0,
        create_time="",
    )


async def rows_at(mariadb, meta, source, ts):
    table = Table(source, ts)
    async with MySqlUpstream.open(meta, info(mariadb), [table]) as upstream:
        found = [row async for batch in upstream.rows(table) for row in batch.to_pylist()]
        again = [row async for batch in upstream.rows(table) for row in batch.to_pylist()]
    ranges = Table(source, ts, spans=KeySpans("id", ((None, 3), (3, 40), (40, None))))
    async with MySqlUpstream.open(meta, info(mariadb), [table], in_chunks=True) as upstream:
        chunks = [row async for batch in upstream.rows(table) for row in batch.to_pylist()]
        parts = [row async for batch in upstream.rows(ranges) for row in batch.to_pylist()]
    key = lambda row: row["id"]  # noqa: E731 - short
    assert sorted(found, key=key) == sorted(again, key=key), "it can be read twice"
    assert sorted(found, key=key) == sorted(chunks, key=key) == sorted(parts, key=key), (
        "in chunks and ranges, too"
    )
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row for row in found}


async def test_the_table_at_each_cut_is_what_the_log_made_of_it(mariadb, meta):
    name = created(mariadb)
    columns = ("id", "v", "kind", "amount")
    held = {
        row[0]: dict(zip(columns, row, strict=True))
        for row in mariadb.execute(f"SELECT * FROM {name}.t")
    }
    async with following(mariadb.uri, meta, f"{name}.t") as feed:
        [(span, [(_, source)])] = feed.target.versions.items()
        with Writer(mariadb, name) as writer:
            await feed.until(
                lambda: writer.written > TRANSACTIONS and feed.rows_of(span) > TRANSACTIONS
            )
            changes = feed.target.changes_of(span)
            ends = sorted({change["_commit_ts"] for change in changes})
            cuts = [feed.start_ts, ends[len(ends) // 3], ends[-1]]
            found = {cut: await rows_at(mariadb, meta, source, cut) for cut in cuts}
    for cut in cuts:
        while changes and changes[0]["_commit_ts"] <= cut:
            change = changes.pop(0)
            if change["_op"] == "delete":
                held.pop(change["id"])
            else:
                held[change["id"]] = {column: change[column] for column in columns}
        assert found[cut] == held


async def test_a_table_that_was_altered_after_the_cut_is_told(mariadb, meta):
    name = created(mariadb)
    async with following(mariadb.uri, meta, f"{name}.t") as feed:
        [(_, [(_, source)])] = feed.target.versions.items()
        mariadb.execute("ALTER TABLE other ADD COLUMN n INT", database=name)
        assert len(await rows_at(mariadb, meta, source, feed.start_ts)) == ROWS
        mariadb.execute("ALTER TABLE t ADD COLUMN n INT", database=name)
        with pytest.raises(
            VerifyMovedError,
            match=rf"{name}\.t has changed at \d+, after the cut \(ALTER TABLE t ADD",
        ):
            await rows_at(mariadb, meta, source, feed.start_ts)


async def test_a_table_that_has_got_rows_of_a_partition_after_the_cut_is_told(mariadb, meta):
    name = created(mariadb)
    async with following(mariadb.uri, meta, f"{name}.t") as feed:
        [(_, [(_, source)])] = feed.target.versions.items()
        mariadb.execute(
            "CREATE TABLE parted LIKE t",
            "ALTER TABLE parted PARTITION BY HASH (id) PARTITIONS 1",
            "INSERT INTO parted (id) VALUES (1)",
            "ALTER TABLE parted EXCHANGE PARTITION p0 WITH TABLE t",
            database=name,
        )
        with pytest.raises(VerifyMovedError, match=rf"{name}\.t has changed at \d+, after the cut"):
            await rows_at(mariadb, meta, source, feed.start_ts)


async def test_a_cut_of_which_nothing_is_known_in_the_log_is_told(mariadb, meta):
    name = created(mariadb)
    async with following(mariadb.uri, meta, f"{name}.t") as feed:
        [(_, [(_, source)])] = feed.target.versions.items()
        with pytest.raises(VerifyHistoryError, match="no place in the log"):
            await rows_at(mariadb, meta, source, 1)
