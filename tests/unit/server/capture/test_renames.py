"""Renames of TiDB's tables, from the DDL job to the metadata and to what readers see."""

import itertools
import json

import pytest

from server.capture.catalog import FeedCatalog
from server.capture.errors import RenamedIntoFilterError
from server.capture.source.tidb import TidbSource
from server.changefeed.filter import TableFilter
from server.changefeed.history import History, SchemaChange, by_id
from server.changefeed.records import SchemaRecords
from server.changefeed.terms import Terms
from server.puller.tidb.schema_puller import table_change
from server.puller.tidb.table import record_of
from storage.tidb.ddl import Action, Job
from storage.tidb.schema import Column, TableInfo
from storage.tidb.schema_history import SchemaHistory, Table

START = 100
FEED = "feed"
DATABASES = {1: "shop", 2: "old"}


def info(table_id, name):
    return json.loads(TableInfo.build(table_id, name, [Column.bigint("id")]).to_json())


class Cluster:
    """Tables a, b and c of `shop`, ids 1 to 3, and x of `old`, id 4;
    and a changefeed that takes what `rules` take.
    """

    def __init__(self, meta, *rules):
        tables = [
            Table(1, "shop", info(1, "a")),
            Table(1, "shop", info(2, "b")),
            Table(1, "shop", info(3, "c")),
        ]
        tables.append(Table(2, "old", info(4, "x")))
        self.history = SchemaHistory(START, DATABASES, tables)
        self._source = TidbSource.__new__(
            TidbSource
        )  # its tables only: nothing is read from a store
        self._meta, self._rules = meta, TableFilter(rules)
        self._numbers = itertools.count(10)
        taken = [
            record_of(table)
            for table in tables
            if self._rules.takes(table.schema_name, table.table_name)
        ]
        self.start = SchemaChange(START, tables=by_id(taken))

    async def write(self, ops):
        assert (await self._meta.txn([], ops)).succeeded

    async def catalog(self):
        """As after a restart: what the metadata has."""
        records = SchemaRecords(self._meta, self.write)
        changes = await records.load(FEED) or [self.start]
        if changes == [self.start]:
            await records.append(FEED, self.start)

        async def save(change):
            await records.append(FEED, change)

        return FeedCatalog(Terms(FEED, self._rules), self._source, History(changes), START, save)

    async def rename(self, catalog, ts, *steps):
        """One statement; steps are (table id, new name, new database)."""
        arguments = [
            [1] * len(steps),
            [step[2] for step in steps],
            [],
            [step[0] for step in steps],
            [],
        ]
        infos = [info(table_id, name) for table_id, name, _ in steps]
        job = {
            "id": next(self._numbers),
            "type": Action.RENAME_TABLES,
            "state": 6,
            "schema_id": 1,
            "table_id": 0,
        }
        job |= {
            "query": f"RENAME at {ts}",
            "raw_args": arguments,
            "binlog": {"MultipleTableInfos": infos},
        }
        change = table_change(self.history.apply(Job.parse(json.dumps(job)), ts), catalog)
        if change is not None:
            await catalog.change(change)
        return change


def in_force(catalog, ts):
    return {version.name: version.span.table_id for version in catalog.versions.at(ts)}


@pytest.mark.parametrize(
    ("steps", "after", "renamed"),
    [
        (
            [(1, "tmp", 1), (2, "a", 1), (1, "b", 1)],
            {"shop.a": 2, "shop.b": 1, "shop.c": 3},
            {("shop.a", "shop.b"), ("shop.b", "shop.a")},
        ),
        (
            [(1, "m", 1), (1, "n", 1)],
            {"shop.n": 1, "shop.b": 2, "shop.c": 3},
            {("shop.a", "shop.n")},
        ),
        (
            [(1, "tmp", 1), (3, "a", 1), (2, "c", 1), (1, "b", 1)],
            {"shop.a": 3, "shop.b": 1, "shop.c": 2},
            {("shop.a", "shop.b"), ("shop.b", "shop.c"), ("shop.c", "shop.a")},
        ),
        ([(1, "a", 2)], {"shop.b": 2, "shop.c": 3, "old.a": 1}, {("shop.a", "old.a")}),
    ],
    ids=["swap", "chain", "cycle of three", "to another database"],
)
async def test_tables_renamed_in_one_statement_are_followed_and_a_restart_changes_nothing(
    meta, steps, after, renamed
):
    cluster = Cluster(meta, "shop.*", "old.*")
    catalog = await cluster.catalog()
    change = await cluster.rename(catalog, 110, *steps)
    for each in (catalog, await cluster.catalog()):
        assert in_force(each, 109) == {"shop.a": 1, "shop.b": 2, "shop.c": 3, "old.x": 4}
        assert in_force(each, 110) == {**after, "old.x": 4}
        [ddl] = each.versions.ddls(110)
        assert set(ddl.renamed) == renamed
    await catalog.change(change)
    assert [each.ts for each in catalog.versions.ddls(110)] == [110], "a repetition changes nothing"


async def test_a_swap_is_followed_again_and_again(meta):
    cluster = Cluster(meta, "shop.*")
    catalog = await cluster.catalog()
    for ts in range(110, 150, 10):
        one, other = in_force(catalog, ts)["shop.a"], in_force(catalog, ts)["shop.b"]
        await cluster.rename(catalog, ts, (one, "tmp", 1), (other, "a", 1), (one, "b", 1))
        assert (in_force(catalog, ts)["shop.a"], in_force(catalog, ts)["shop.b"]) == (other, one)
    assert in_force(await cluster.catalog(), 140) == in_force(catalog, 140)


async def test_a_rename_out_of_the_filter_ends_the_table_and_one_into_it_is_refused(meta):
    cluster = Cluster(meta, "shop.*")
    catalog = await cluster.catalog()
    await cluster.rename(catalog, 110, (1, "a", 2))
    assert in_force(catalog, 110) == {"shop.b": 2, "shop.c": 3}
    with pytest.raises(RenamedIntoFilterError, match=r"shop\.x.* as old\.x"):
        await cluster.rename(catalog, 120, (4, "x", 1))


async def test_a_shadow_from_outside_of_the_filter_takes_the_place_of_a_table(meta):
    """As gh-ost does: what the name had was copied into the shadow."""
    cluster = Cluster(meta, "shop.a")
    catalog = await cluster.catalog()
    await cluster.rename(catalog, 110, (1, "_a_del", 1), (4, "a", 1))
    assert in_force(catalog, 110) == {"shop.a": 4}


async def test_renames_of_tables_that_nobody_takes_are_of_no_concern(meta):
    cluster = Cluster(meta, "shop.a")
    catalog = await cluster.catalog()
    assert await cluster.rename(catalog, 110, (2, "tmp", 1), (3, "b", 1), (2, "c", 1)) is None
    assert not catalog.versions.ddls(110)
