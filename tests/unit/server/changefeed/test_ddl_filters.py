"""Event filters about DDL: what is ignored, what is refused by name, and what is carried out all
the same, as rows would not fit behind it.
"""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.capture.catalog import FeedCatalog
from server.capture.source.mysql import mysql_table
from server.changefeed.event_filter import (
    DROPS,
    NOT_IGNORABLE,
    TRUNCATE_TABLE,
    WITHOUT_EFFECT,
    DdlNotIgnorableError,
    EventFilter,
    EventFilterError,
    EventFilters,
    check_ddl,
    check_rereads,
)
from server.changefeed.filter import TableFilter
from server.changefeed.history import History, SchemaChange
from server.changefeed.table import SourceTable, TableRecord
from server.changefeed.terms import Terms
from server.puller.source import TableChange
from storage.mysql.schema import Column, Table, Type

SOURCE: Any = SimpleNamespace(table=lambda record, _before=None: mysql_table(record))
MYSQL = "mysql://u@h:3306?on-unclear-ddl=stop"
LAKE = "delta:///lake"
ID = Column(name="id", type=Type.LONG, nullable=False, id=1)
VALUE = Column(name="v", type=Type.LONG, id=2)


def record(name: str = "t", number: int = 7, *columns: Column) -> TableRecord:
    return TableRecord("shop", Table(number, name, columns or (ID, VALUE), ("id",)).to_doc())


def filters(matcher: str = "shop.t", **members: Any) -> EventFilters:
    return EventFilters([EventFilter((matcher,), **members)])


def truncating(**members: Any) -> EventFilters:
    return filters(ignore_event=("Truncate Table",), **members)


@pytest.mark.parametrize("event", sorted(NOT_IGNORABLE))
def test_ddl_behind_which_rows_would_not_fit_is_refused_by_name(event: str) -> None:
    with pytest.raises(EventFilterError, match=f"'{event}'.*would not fit"):
        filters(ignore_event=("delete", event))


@pytest.mark.parametrize("event", sorted({*WITHOUT_EFFECT, *DROPS, TRUNCATE_TABLE}))
def test_other_ddl_of_ticdcs_is_taken(event: str) -> None:
    check_ddl(filters(ignore_event=(event.upper(),)), MYSQL, LAKE)


def test_what_is_not_known_or_cannot_be_read_is_refused() -> None:
    with pytest.raises(EventFilterError, match="'dorp table' is not known"):
        filters(ignore_event=("dorp table",))
    with pytest.raises(EventFilterError, match="cannot be read"):
        filters(ignore_sql=("(",))
    with pytest.raises(EventFilterError, match="at most"):
        filters(ignore_sql=("x" * 2000,))


def test_a_filter_of_ddl_is_kept_as_it_was_given_and_others_as_before() -> None:
    given = EventFilter(("a.b",), ignore_event=("drop table",), ignore_sql=("^drop",))
    assert EventFilter.from_document(given.to_document()) == given
    assert "ignore_sql" not in EventFilter(("a.b",), ignore_event=("delete",)).to_document()


def test_what_target_or_source_would_do_all_the_same_is_refused() -> None:
    for each in (filters(ignore_event=("drop table",)), filters(ignore_sql=("^drop",))):
        check_ddl(each, MYSQL, LAKE)
        with pytest.raises(EventFilterError, match="on-drop=drop"):
            check_ddl(each, MYSQL, f"{LAKE}?mode=append&on-drop=drop")
        with pytest.raises(EventFilterError, match="on-drop=drop"):
            check_ddl(each, MYSQL, f"{LAKE}?on-drop=dro%70")
    for source in ("", "pump://h:8250"):
        with pytest.raises(EventFilterError, match="of TiDB is another one"):
            check_ddl(truncating(), source, LAKE)
    with pytest.raises(EventFilterError, match="on-unclear-ddl stop"):
        check_rereads(truncating(), "mysql://u@h:3306")


async def _saved(_: SchemaChange) -> None: ...


def catalog(events: EventFilters) -> FeedCatalog:
    terms = Terms("f", TableFilter(["shop.*"]), events=events)
    tables = tuple(terms.of(mysql_table(each)) for each in (record(), record("u", 8)))
    return FeedCatalog(terms, SOURCE, History([SchemaChange(1, tables=tables)]), 1, _saved)


def taken(feed: FeedCatalog, each: TableRecord) -> SourceTable:
    table = feed.table(each)
    assert table is not None
    return table


@pytest.mark.parametrize("events", [truncating(), filters(ignore_sql=("^TRUNCATE +TABLE",))])
async def test_rows_of_a_table_stay_whose_truncate_is_ignored_and_others_go(
    events: EventFilters,
) -> None:
    feed = catalog(events)
    await feed.change(TableChange(2, "truncate table t", truncated=("shop.t",)))
    assert not feed.versions.ddls(2)
    assert len(feed.history) == 1, "nothing is kept of it"
    await feed.change(TableChange(3, "truncate table t, u", truncated=("shop.t", "shop.u")))
    [ddl] = feed.versions.ddls(2)
    assert ddl.truncated == ("shop.u",)


async def test_a_table_that_is_made_anew_begins_empty_whatever_is_ignored_of_truncate() -> None:
    feed = catalog(truncating())
    new = taken(feed, record("t", 9))
    await feed.change(TableChange(2, "create or replace", (new,), truncated=("shop.t",)))
    [ddl] = feed.versions.ddls(2)
    assert (ddl.tables, ddl.truncated) == (("shop.t",), ("shop.t",))


@pytest.mark.parametrize(
    "after",
    [
        record("t", 7, ID, VALUE, Column(name="w", type=Type.LONG, id=3)),
        record("t", 7, ID),
        record("t", 7, ID, replace(VALUE, type=Type.LONGLONG)),
        record("t", 7, ID, replace(VALUE, name="value")),
        record("t", 9),
    ],
    ids=["added", "dropped", "widened", "renamed", "made anew"],
)
async def test_a_statement_that_changes_rows_stops_the_changefeed_if_it_was_to_be_ignored(
    after: TableRecord,
) -> None:
    feed = catalog(filters(ignore_sql=("INDEX", "^alter")))
    new = taken(feed, after)
    with pytest.raises(DdlNotIgnorableError, match=r"'ALTER t'.*shop\.t, by ignore-sql '\^alter'"):
        await feed.change(TableChange(2, "ALTER t", (new,)))
    assert not feed.versions.ddls(2)
    await feed.change(TableChange(3, "CHANGE t", (new,)))
    assert feed.versions.ddls(2), "another statement does it"


async def test_a_rename_that_was_to_be_ignored_stops_the_changefeed() -> None:
    feed = catalog(filters("shop.*", ignore_sql=("^rename",)))
    moved = taken(feed, record("new", 7))
    with pytest.raises(DdlNotIgnorableError, match=r"shop\.new"):
        await feed.change(TableChange(2, "RENAME t", (moved,), dropped=("shop.t",)))


async def test_a_version_that_reads_alike_and_a_drop_are_followed() -> None:
    feed = catalog(filters("shop.*", ignore_sql=(".",)))
    await feed.change(TableChange(2, "ADD INDEX", (taken(feed, record()),)))
    await feed.change(TableChange(3, "DROP TABLE t", dropped=("shop.t",)))
    assert [ddl.dropped for ddl in feed.versions.ddls(3)] == [("shop.t",)]
    assert [table.name for table in feed.tables] == ["shop.u"]


@given(
    st.sampled_from(["a+", "^x.y", "(?i)z", "[b-d]", "a|b"]), st.text("abcdxyzABZ \n", max_size=9)
)
def test_expressions_match_anywhere_in_any_case(text: str, query: str) -> None:
    found = re.search(text, query, re.IGNORECASE | re.DOTALL) is not None
    each = EventFilter(("a.b",), ignore_sql=(text,))
    assert (each.matching(query) is not None) == found
