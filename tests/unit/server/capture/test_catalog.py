"""The catalog: whatever DDLs come, whoever dies at whatever write,
readers see the same tables at each ts.
"""

import asyncio
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.capture.catalog import FeedCatalog, TablesRead
from server.capture.errors import RenamedIntoFilterError, TableIneligibleError
from server.changefeed.filter import TableFilter
from server.changefeed.history import History, SchemaChange
from server.changefeed.table import TableRecord
from server.changefeed.terms import Terms
from server.puller.source import TableChange
from server.puller.tidb.table import following, tidb_table
from sink.mounter import COLUMN_ID
from sorter.errors import RangeCleanedError
from storage.model.errors import UnavailableError
from storage.tidb.schema import Column, TableInfo
from storage.tidb.schema_history import FORMER_ID
from tests.unit.server.capture.upstream import (
    START,
    STATEMENTS,
    Database,
    FakeSource,
    Metadata,
    evolved,
    record,
    seen,
)


async def told(catalog, changes, checkpoint_ts=START):
    """Report changes as a log that is read from the checkpoint on;
    a rename into the filter ends it.
    """
    for change in changes:
        if change.commit_ts > checkpoint_ts:
            try:
                await catalog.change(change)
            except RenamedIntoFilterError:
                return


async def reference(database):
    metadata = Metadata()
    await metadata.begin(Database())
    catalog = await metadata.catalog(START)
    await told(catalog, database.changes)
    return metadata, catalog


@settings(deadline=None, max_examples=60)
@given(STATEMENTS)
def test_each_ts_has_the_tables_that_the_filter_takes(statements):
    async def run():
        database = evolved(statements)
        _, catalog = await reference(database)
        tables = dict(Database().tables)
        for change in database.changes:
            if change.commit_ts > catalog.history.last_ts:
                break
            for name in change.dropped:
                del tables[name.removeprefix("s.")]
            tables |= {table.record.table_name: table.record for table in change.tables}
            expected = sorted(
                (table.name, table.table_info["id"], table.table_info["columns"])
                for name, table in tables.items()
                if not name.startswith("tmp_")
            )
            found = [
                (it.name, it.span.table_id, it.mounter.columns)
                for it in catalog.at(change.commit_ts)
            ]
            assert sorted(found) == expected

    asyncio.run(run())


@settings(deadline=None, max_examples=150)
@given(STATEMENTS, st.integers(0, 40), st.integers(0, 13), st.randoms(use_true_random=False))
def test_a_crash_at_any_write_gives_the_same_catalog(statements, writes, steps, draw):
    async def run():
        database = evolved(statements)
        _, whole = await reference(database)
        metadata = Metadata()
        await metadata.begin(Database())
        metadata.writes_left = writes
        catalog, checkpoint_ts = await metadata.catalog(START), START
        try:
            checkpoint_ts = await lived(metadata, catalog, database, steps, draw)
        except Died as death:
            checkpoint_ts = death.checkpoint_ts
        metadata.writes_left = -1
        again = await metadata.catalog(checkpoint_ts)
        await told(again, database.changes, checkpoint_ts)
        whole.forget(checkpoint_ts)
        assert seen(again, checkpoint_ts, database.ts) == seen(whole, checkpoint_ts, database.ts)
        reread = await metadata.catalog(checkpoint_ts)
        assert seen(reread, checkpoint_ts, database.ts) == seen(whole, checkpoint_ts, database.ts)

    asyncio.run(run())


class Died(Exception):  # noqa: N818 - a death is no error here
    def __init__(self, checkpoint_ts):
        super().__init__()
        self.checkpoint_ts = checkpoint_ts


async def lived(metadata, catalog, database, steps, draw: random.Random):
    """Take changes, let the checkpoint follow, and collect behind it, until the end or death."""
    checkpoint_ts = START
    try:
        for change in database.changes[:steps]:
            await catalog.change(change)
            checkpoint_ts = draw.randint(checkpoint_ts, change.commit_ts)
            if draw.random() < 0.5:
                garbage = catalog.history.garbage(checkpoint_ts)
                await metadata.records.collect("feed", garbage)
                catalog.history.forget(garbage)
                catalog.forget(checkpoint_ts)
    except (UnavailableError, RenamedIntoFilterError) as err:
        raise Died(checkpoint_ts) from err
    return checkpoint_ts


@settings(deadline=None, max_examples=60)
@given(STATEMENTS)
def test_what_is_behind_the_checkpoint_is_collected(statements):
    async def run():
        database = evolved(statements)
        metadata, catalog = await reference(database)
        garbage = catalog.history.garbage(database.ts + 1)
        await metadata.records.collect("feed", garbage)
        catalog.history.forget(garbage)
        kept = await metadata.records.load("feed")
        assert kept == list(catalog.history)
        needed_ts = catalog.history.needed_from(database.ts + 1)
        assert needed_ts == database.ts + 1 or not catalog.history.at(database.ts)
        needed = catalog.history.at(needed_ts - 1) or catalog.history.at(database.ts)
        assert sorted(table.name for change in kept for table in change.tables) == sorted(needed)

    asyncio.run(run())


@settings(deadline=None, max_examples=60)
@given(STATEMENTS)
def test_who_stands_at_a_change_sees_it_and_the_tables_before_it_after_a_collection_and_a_restart(
    statements,
):
    async def run():
        database = evolved(statements)
        _, whole = await reference(database)
        for ddl in whole.versions.ddls(START + 1):
            metadata, catalog = await reference(database)
            garbage = catalog.history.garbage(ddl.ts)
            await metadata.records.collect("feed", garbage)
            catalog.history.forget(garbage)
            catalog.forget(ddl.ts)
            for each in (catalog, await metadata.catalog(ddl.ts)):
                assert each.versions.ddls(ddl.ts) == whole.versions.ddls(ddl.ts)
                for ts in (ddl.ts - 1, ddl.ts):
                    assert in_force(each, ts) == in_force(whole, ts)
            after = catalog.history.garbage(ddl.ts + 1)
            catalog.history.forget(after)
            catalog.forget(ddl.ts + 1)
            if in_force(whole, ddl.ts):
                with pytest.raises(RangeCleanedError):
                    catalog.versions.at(ddl.ts - 1)

    asyncio.run(run())


def test_the_change_that_left_no_table_stays_known_as_the_checkpoint_goes_on_without_its_reader():
    async def run():
        database = evolved([("drop", "a", "b"), ("drop", "b", "a")])
        _, whole = await reference(database)
        metadata, catalog = await reference(database)
        last_ts = whole.versions.ddls(START + 1)[-1].ts
        for checkpoint_ts in (last_ts + 1, last_ts + 1000):
            garbage = catalog.history.garbage(checkpoint_ts)
            await metadata.records.collect("feed", garbage)
            catalog.history.forget(garbage)
            catalog.forget(checkpoint_ts)
            for each in (catalog, await metadata.catalog(checkpoint_ts)):
                assert [ddl.ts for ddl in each.versions.ddls(last_ts)] == [last_ts]
                assert in_force(each, last_ts - 1) == in_force(whole, last_ts - 1)
                assert in_force(each, last_ts) == in_force(each, checkpoint_ts) == []

    asyncio.run(run())


def in_force(catalog, ts):
    return sorted(
        (version.name, version.span.table_id, version.mounter.columns)
        for version in catalog.versions.at(ts)
    )


def catalog_of(*tables, ignore=False, rules=("s.*", "!s.tmp_*")):
    saved = []

    async def save(change):
        saved.append(change)

    history = History([SchemaChange(START, tables=tables)])
    return FeedCatalog(
        Terms("feed", TableFilter(rules), ignore), FakeSource(), history, START, save
    ), saved


def change(ts, *tables, dropped=(), truncated=()):
    return TableChange(ts, f"ddl {ts}", tuple(map(FakeSource().table, tables)), dropped, truncated)


async def test_a_table_renamed_into_the_filter_is_refused_as_its_rows_are_not_at_the_target():
    catalog, saved = catalog_of(record("a", 1))
    with pytest.raises(RenamedIntoFilterError, match=r"makes s\.b.* as s\.tmp_x"):
        await catalog.change(change(110, record("b", 9), dropped=("s.tmp_x",)))
    assert not saved


async def test_a_shadow_table_takes_the_place_of_a_table_whether_the_filter_takes_it_or_not():
    """As gh-ost and pt-online-schema-change do: what the name had was copied into the shadow."""
    for shadow in ("tmp_a", "_a_gho"):
        catalog, _ = catalog_of(record("a", 1))
        if shadow == "_a_gho":
            await catalog.change(change(105, record(shadow, 9, 2)))
        await catalog.change(
            change(110, record("a", 9, 2), record("tmp_old", 1), dropped=(f"s.{shadow}",))
        )
        assert [(table.name, table.span.table_id) for table in catalog.at(110)] == [("s.a", 9)]


async def test_a_table_that_becomes_ineligible_stops_the_changefeed_by_name():
    catalog, _ = catalog_of(record("a", 1), ignore=True)
    with pytest.raises(TableIneligibleError, match=r"s\.a has no key"):
        catalog.table(record("a", 1, keyless=True))


async def test_a_new_table_that_is_ineligible_is_left_out_only_where_that_was_asked_for():
    catalog, _ = catalog_of(record("a", 1), ignore=True)
    assert catalog.table(record("b", 2, keyless=True)) is None
    catalog, _ = catalog_of(record("a", 1))
    with pytest.raises(TableIneligibleError):
        catalog.table(record("b", 2, keyless=True))
    assert catalog.table(record("tmp_b", 2, keyless=True)) is None


async def test_a_change_of_other_tables_is_not_kept():
    catalog, saved = catalog_of(record("a", 1))
    await catalog.change(change(110, record("tmp_b", 2)))
    await catalog.change(change(120, dropped=("s.tmp_b",)))
    assert not saved
    assert catalog.versions.ddls(START + 1) == []


async def test_a_change_is_durable_before_anybody_sees_it():
    catalog, _ = catalog_of(record("a", 1))
    order = []

    class Processor:
        async def changed(self, ddl):
            order.append(("changed", ddl.ts))

        def resolved(self, ts):
            order.append(("resolved", ts))

    async def save(stored):
        order.append(("saved", stored.commit_ts, catalog.versions.next_change(START) > 200))

    catalog._save, catalog.listener = save, Processor()
    await catalog.change(change(110, record("a", 1, 2)))
    await catalog.change(change(110, record("a", 1, 2)))
    catalog.resolve(120)
    assert order == [("saved", 110, True), ("changed", 110), ("resolved", 120)]


async def test_a_log_that_is_read_again_gets_the_tables_of_changes_that_are_known_as_they_are_known():
    catalog, _ = catalog_of(record("a", 1))
    await catalog.change(change(110, record("a", 1, 2)))
    await catalog.change(change(120, record("a", 1, 3)))
    again = catalog.table(record("a", 1, 9), 110)
    assert again is not None
    assert again.mounter.columns == 2
    assert catalog.table(record("b", 5), 110) is None, "it was of no concern then"


class Recorder:
    """A listener whose reader takes all that it is told of."""

    def __init__(self):
        self.delivered = []

    def resolved(self, ts):
        pass

    async def wait_delivered(self, ts):
        self.delivered.append(ts)


async def test_what_is_refused_waits_for_no_cut_that_a_table_withholds():
    """The log stands still there, and the table would be complete at a later place of it only."""
    catalog, _ = catalog_of(record("a", 1))
    catalog.listener = listener = Recorder()
    for ts, since_ts in ((110, 0), (130, 120)):
        if since_ts:
            catalog.holds.begin(since_ts, 1)
        with pytest.raises(UnavailableError):
            await catalog.refuse(ts, UnavailableError("not understood"))
    assert listener.delivered == [110, 120]


def test_a_catalog_that_begins_anew_reads_no_table_again():
    """To read a hundred thousand tables takes a minute."""
    made = []

    class Counted(FakeSource):
        def table(self, record, before=None):
            made.append(record)
            return super().table(record, before)

    source = Counted()
    history = History([SchemaChange(START, tables=(record("a", 1), record("b", 2)))])
    terms = Terms("feed", TableFilter(["*.*"]))
    first = FeedCatalog(terms, source, history, START, None)
    assert len(made) == 2
    again = FeedCatalog(terms, TablesRead(first.read(), source), history, START, None)
    assert len(made) == 2
    assert again.tables == first.tables
    assert all(one is other for one, other in zip(again.tables, first.tables, strict=True))
    other = History([SchemaChange(START, tables=(record("a", 1),))])
    FeedCatalog(terms, TablesRead(first.read(), source), other, START, None)
    assert len(made) == 3, "another record, though it says the same"


class TidbTables(FakeSource):
    """Reads the records of TiDB's tables."""

    def table(self, table, before=None):
        return tidb_table(table if before is None else following(table, before))


def tidb_record(table_id, column_id, **more):
    columns = [Column.bigint("id"), Column.bigint("v")]
    info = json.loads(TableInfo.build(table_id, "a", columns).to_json())
    info["cols"][1]["id"] = column_id
    return TableRecord("s", info | more)


async def test_a_table_that_tidb_gives_another_id_keeps_the_identities_of_its_columns():
    """By PARTITION BY, say: another identity would be another column, without the rows' values."""
    built_anew = tidb_record(7, 5, tidemark_column_ids={"5": 2})
    history = History([SchemaChange(START, tables=(built_anew,))])
    terms = Terms("feed", TableFilter(["s.*"]))
    catalog = FeedCatalog(terms, TidbTables(), history, START, None)
    for former, identity in (({FORMER_ID: 7}, b"2"), ({}, b"5")):
        table = catalog.table(tidb_record(9, 5, **former), 110)
        assert table.mounter.schema.field("v").metadata[COLUMN_ID] == identity
