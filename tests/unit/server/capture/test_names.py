"""Names that a target cannot hold are refused before rows flow,
and what is printed then is a way out.
"""

import re
import shlex
from types import SimpleNamespace
from typing import Any

import pytest

from server.capture.catalog import FeedCatalog
from server.capture.creation import TableSelection, eligible
from server.capture.source.mysql import mysql_table
from server.changefeed.columns import ColumnRules
from server.changefeed.filter import TableFilter
from server.changefeed.history import History, SchemaChange
from server.changefeed.table import TableIneligibleError, TableRecord
from server.changefeed.terms import Terms
from server.puller.source import TableChange
from storage.mysql.schema import Column, Table, Type

SOURCE: Any = SimpleNamespace(table=lambda record, _before=None: mysql_table(record))
ODD = (
    "x.y",
    "a b",
    " a",
    "a,b;c",
    "{}()=",
    "it's",
    '"',
    "`",
    "\\",
    "%s",
    "$x",
    "a\tb",
    "Größe",
    "列名",
    "order",
    "_x",
)
"""Names that every target holds."""


def record(name: str = "t", *columns: str, number: int = 7, schema: str = "shop") -> TableRecord:
    made = tuple(
        Column(name=each, type=Type.LONG, nullable=each != "id") for each in ("id", *columns)
    )
    return TableRecord(schema, Table(number, name, made, ("id",)).to_doc())


def chosen(
    target: str, *records: TableRecord, rules: tuple[str, ...] = (), ignore: bool = False
) -> TableSelection:
    terms = Terms("feed", TableFilter(["*.*"]), ignore, ColumnRules(rules), target)
    return eligible(SOURCE, records, terms)


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("postgresql", ("n" * 64, "é" * 32, "ctid")),
        ("postgresql", ("n" * 64 + "1", "n" * 64 + "2")),
        ("mysql", ("n" * 65, "a😀", "upstream_a")),
        ("delta", ("_Metadata", "upstream_Metadata")),
        ("iceberg", ("_metadata",)),
        ("parquet", ("Cut",)),
    ],
)
def test_the_printed_option_gives_columns_names_that_the_target_holds(
    target: str, names: tuple[str, ...]
) -> None:
    table = record("odd table", "plain", *names)
    with pytest.raises(TableIneligibleError) as refused:
        chosen(target, table)
    assert all(name in refused.value.message for name in names)
    option, rule = shlex.split(re.findall(r"--columns '[^']*'", refused.value.message)[0])
    assert option == "--columns"
    found = mysql_table(chosen(target, table, rules=(rule,)).tables[0])
    shown = found.mounter.schema.names[4:]
    assert shown[:2] == ["id", "plain"]
    assert len(set(shown)) == 2 + len(names)


@pytest.mark.parametrize(
    ("target", "schema", "name"),
    [
        ("postgresql", "shop", "t" * 64),
        ("postgresql", "é" * 32, "t"),
        ("postgresql", "pg_shop", "t"),
        ("postgresql", ".shop", "t"),
        ("mysql", ".", "t"),
        ("mysql", "shop", "t" * 65),
        ("mysql", "shop", "it's 😀"),
    ],
)
def test_the_printed_filter_leaves_a_table_out(target: str, schema: str, name: str) -> None:
    table = record(name, schema=schema)
    with pytest.raises(TableIneligibleError) as refused:
        chosen(target, table, record(number=8))
    said = refused.value.message
    _, rule, *_ = shlex.split(said[said.index("--filter") : said.index(" as its last filter")])
    taken = TableFilter(("*.*", rule))
    assert taken.takes("shop", "t")
    assert not taken.takes(schema, name)
    assert chosen(target, table, record(number=8), ignore=True).ignored == (f"{schema}.{name}",)


def test_a_name_that_no_rule_can_give_is_to_be_changed_at_the_source() -> None:
    with pytest.raises(TableIneligibleError, match="Rename them at the source"):
        chosen("postgresql", record("t", "a,b" + "n" * 64))


@pytest.mark.parametrize(
    "target", ["delta", "iceberg", "parquet", "postgresql", "mysql", "flight", ""]
)
def test_what_a_target_holds_is_not_refused(target: str) -> None:
    tables = [
        record("t", *ODD),
        record("x.y z", number=8),
        record("a;b", number=9, schema="{sch`ema}"),
    ]
    assert len(chosen(target, *tables).tables) == 3
    if target != "postgresql":
        chosen(target, record("t" * 64, "n" * 64, "ctid", schema="pg_shop"))
    if target != "mysql":
        assert len(chosen(target, record("t"), record("T", number=8)).tables) == 2
        chosen(target, record("😀", "a😀"))


def test_mysql_takes_names_that_differ_in_case_only_for_one() -> None:
    with pytest.raises(
        TableIneligibleError,
        match=r"takes shop\.Orders and shop\.orders for one.*--filter '!shop\.orders'",
    ):
        chosen("mysql", record("Orders"), record("orders", number=8))


def test_a_ddl_that_brings_such_a_name_is_refused_or_its_new_table_left_out() -> None:
    async def save(_: SchemaChange) -> None: ...

    history = History([SchemaChange(1, tables=(record(),))])
    terms = Terms("feed", TableFilter(["*.*"]), ignore_ineligible=True, target="postgresql")
    catalog = FeedCatalog(terms, SOURCE, history, 1, save)
    with pytest.raises(TableIneligibleError, match=r"a column xmin of its own.*Undo the DDL"):
        catalog.table(record("t", "xmin"))
    assert catalog.table(record("u", "xmin", number=8)) is None
    assert catalog.table(record("u", "x min", number=8)) is not None


@pytest.mark.parametrize("target", ["mysql", "delta"])
async def test_a_ddl_that_brings_a_name_in_another_case_is_refused_where_the_target_takes_both_for_one(
    target: str,
) -> None:
    async def save(_: SchemaChange) -> None: ...

    history = History([SchemaChange(1, tables=(record("t"),))])
    catalog = FeedCatalog(
        Terms("feed", TableFilter(["*.*"]), target=target), SOURCE, history, 1, save
    )
    other = mysql_table(record("T", number=8))
    if target == "delta":
        await catalog.change(TableChange(10, "CREATE TABLE T", (other,)))
        assert {table.name for table in catalog.tables} == {"shop.t", "shop.T"}
        return
    with pytest.raises(
        TableIneligibleError, match=r"takes shop\.t and shop\.T for one.*--filter '!shop\.T'"
    ):
        await catalog.change(TableChange(10, "CREATE TABLE T", (other,)))
    assert catalog.history.last_ts == 1, "nothing is durable"
    await catalog.change(
        TableChange(11, "RENAME TABLE t TO T", (mysql_table(record("T")),), ("shop.t",))
    )
    await catalog.change(TableChange(12, "DROP TABLE T", dropped=("shop.T",)))
    await catalog.change(TableChange(13, "CREATE TABLE t", (mysql_table(record("t", number=9)),)))
    assert [table.name for table in catalog.tables] == ["shop.t"]
