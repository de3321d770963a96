"""Rules about columns: what is taken of which table, and what is refused before anything leaks."""

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.capture.catalog import FeedCatalog, Terms
from server.capture.source.mysql import mysql_table
from server.changefeed.columns import RULES_MAX, ColumnRuleError, ColumnRules
from server.changefeed.filter import FilterRuleError, TableFilter
from server.changefeed.history import History, SchemaChange
from server.changefeed.table import SourceTable, TableIneligibleError, TableRecord, check_names
from server.puller.source import TableChange
from sink.mounter import SelectedMounter, source_columns, whole_mounter
from storage.model.event import INSERT, RAW_SCHEMA
from storage.mysql.schema import Column, Table, Type

NAMES = ("id", "name", "Phone", "mail_home", "mail_work")


def record(name: str = "orders", names: tuple[str, ...] = NAMES) -> TableRecord:
    columns = tuple(Column(name=each, type=Type.LONG, nullable=each != names[0]) for each in names)
    return TableRecord("shop", Table(7, name, columns, names[:1]).to_doc())


def table(name: str = "orders", names: tuple[str, ...] = NAMES) -> SourceTable:
    return mysql_table(record(name, names))


def taken(*rules: str, name: str = "orders") -> list[str]:
    found = mysql_table(ColumnRules(rules).of(table(name)))
    return found.mounter.schema.names[4:]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], list(NAMES)),
        (["shop.orders=name"], ["id", "name"]),
        (["shop.orders=phone , name"], ["id", "name", "Phone"]),
        (["shop.*=*,!mail_*"], ["id", "name", "Phone"]),
        (["shop.*=*,!mail_*,mail_work"], ["id", "name", "Phone", "mail_work"]),
        (["shop.other=id", "shop.*=name"], ["id", "name"]),
        (["shop.*=name", "shop.orders=*"], ["id", "name"]),
        (['"shop"."orders"=name'], ["id", "name"]),
        (["/^(shop|x=y)$/.orders=name"], ["id", "name"]),
        (["crm.*=name"], list(NAMES)),
        (["shop.orders=*,Phone->tel"], ["id", "name", "tel", "mail_home", "mail_work"]),
        (["shop.orders=phone->_tel , ID->number"], ["number", "_tel"]),
    ],
)
def test_the_first_rule_about_a_table_decides_and_the_last_of_its_columns(
    rules: list[str], expected: list[str]
) -> None:
    assert taken(*rules) == expected


@pytest.mark.parametrize(
    "rule", ["shop.orders", "shop.orders=", "=a", "!shop.*=a", "shop.orders=a,,b", "shop.*=!"]
)
def test_rules_of_another_form_are_refused(rule: str) -> None:
    with pytest.raises(ColumnRuleError, match=r"SCHEMA\.TABLE=COLUMN"):
        ColumnRules([rule])
    with pytest.raises(FilterRuleError):
        ColumnRules(["orders=a"])
    with pytest.raises(ColumnRuleError, match="at most"):
        ColumnRules(["a.b=c"] * (RULES_MAX + 1))


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (["shop.typo=name"], "decides of no table"),
        (["shop.*=*", "shop.orders=name"], "'shop.orders=name' about columns decides of no table"),
        (["shop.orders=*,!phoen"], "no column 'phoen'; it has id, name, Phone"),
        (["shop.orders=*,!ID"], "leaves out id of shop.orders, which tell its rows apart"),
    ],
)
def test_a_rule_that_would_let_through_what_it_was_to_leave_out_is_refused(
    rules: list[str], said: str
) -> None:
    with pytest.raises(ColumnRuleError, match=said):
        ColumnRules(rules).check([table()])
    ColumnRules(["shop.*=*,!mail_*"]).check([table(), table("bare", ("id", "n"))])


def test_a_record_says_what_is_taken_and_reads_as_before_without_it() -> None:
    chosen = ColumnRules(["shop.*=name"]).of(table())
    assert chosen.selected == ["name"]
    assert chosen.whole == record()
    assert chosen != record()
    assert TableRecord("shop", dict(chosen.table_info)) == chosen, (
        "a rule applied twice changes nothing"
    )
    assert ColumnRules(["shop.*=name"]).of(mysql_table(chosen)) == chosen


async def test_a_renamed_table_keeps_what_is_taken_of_it_unless_a_rule_is_about_its_new_name() -> (
    None
):
    rules = ColumnRules(["shop.orders=name", "shop.other=Phone"])
    started = SchemaChange(1, tables=(rules.of(table()),))

    async def save(_: SchemaChange) -> None: ...

    source: Any = SimpleNamespace(table=lambda record, _before=None: mysql_table(record))
    catalog = FeedCatalog(
        Terms("c", TableFilter(["shop.*"]), columns=rules), source, History([started]), 1, save
    )
    renamed = catalog.table(record("moved"))
    assert renamed is not None
    assert renamed.record.selected == ["name"]
    other = catalog.table(record("other"))
    assert other is not None
    assert other.record.selected == ["Phone"]
    new = catalog.table(TableRecord("shop", {**record("moved").table_info, "id": 8}))
    assert new is not None
    assert new.record.selected is None
    await catalog.change(
        TableChange(5, "RENAME TABLE orders TO moved", (renamed,), ("shop.orders",))
    )
    again = catalog.table(record("moved", (*NAMES, "added")))
    assert again is not None
    assert again.mounter.schema.names[4:] == ["id", "name"]
    truncated = catalog.table(TableRecord("shop", {**record("moved").table_info, "id": 9}))
    assert truncated is not None
    assert truncated.record.selected == ["name"], "TiDB's TRUNCATE gives a table another id"


@given(
    st.sets(st.sampled_from(NAMES)),
    st.lists(st.tuples(*[st.integers(0, 255)] * len(NAMES)), max_size=5),
)
def test_rows_have_the_values_of_the_whole_row_in_fewer_columns(
    chosen: set[str], rows: list[tuple[int, ...]]
) -> None:
    whole = table()
    cut = SelectedMounter(whole.mounter, chosen)
    values = [
        b"\0" + b"\0" + b"".join(number.to_bytes(4, "little") for number in row) for row in rows
    ]
    columns: list[Any] = [
        [5] * len(rows),
        [4] * len(rows),
        [INSERT] * len(rows),
        values,
        values,
        [None] * len(rows),
    ]
    raw = pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, RAW_SCHEMA, strict=True)],
        schema=RAW_SCHEMA,
    )
    assert cut.mount(raw).to_pydict() == {
        name: column
        for name, column in whole.mounter.mount(raw).to_pydict().items()
        if name in cut.schema.names
    }
    assert set(cut.schema.names[4:]) == {"id", *chosen}
    assert cut.split(raw) is raw
    assert whole_mounter(cut) is whole_mounter(whole.mounter)


@pytest.mark.parametrize(
    "rule", ["shop.orders=name->", "shop.orders=->x", "shop.orders=!name->x", "shop.orders=n*->x"]
)
def test_a_new_name_is_for_one_column_that_is_taken(rule: str) -> None:
    with pytest.raises(ColumnRuleError, match="->"):
        ColumnRules([rule])


@pytest.mark.parametrize("name", ["_op", "_OP", "_commit_ts", "_Start_Ts", "_seq"])
def test_a_column_that_is_called_like_one_of_ours_is_refused_left_out_or_renamed(name: str) -> None:
    whole = table(names=("id", "v", name))
    with pytest.raises(TableIneligibleError, match=f"{name}->upstream"):
        check_names(whole, "delta")
    left_out = mysql_table(ColumnRules([f"shop.orders=*,!{name}"]).of(whole))
    check_names(left_out, "delta")
    assert left_out.mounter.schema.names == ["_op", "_commit_ts", "_start_ts", "_seq", "id", "v"]
    renamed = mysql_table(ColumnRules([f"shop.orders=*,{name}->theirs"]).of(whole))
    check_names(renamed, "delta")
    assert renamed.mounter.schema.names[4:] == ["id", "v", "theirs"]
    assert source_columns(renamed.mounter) == {"id", "v", name}
    with pytest.raises(TableIneligibleError, match="another column"):
        check_names(mysql_table(ColumnRules([f"shop.orders=*,{name}->V"]).of(whole)), "delta")


def test_a_renamed_key_is_the_key_and_rows_have_their_values_under_the_new_names() -> None:
    found = mysql_table(
        ColumnRules(["shop.orders=*,id->_id,name->title"]).of(table(names=("id", "name")))
    )
    assert found.mounter.key_columns == ("_id",)
    row = b"\0\0" + (5).to_bytes(4, "little") + (7).to_bytes(4, "little")
    values = [[9], [8], [INSERT], [b"k"], [row], [None]]
    raw = pa.RecordBatch.from_arrays(
        [pa.array(each, field.type) for each, field in zip(values, RAW_SCHEMA, strict=True)],
        schema=RAW_SCHEMA,
    )
    mounted = found.mounter.mount(raw).to_pylist()
    assert [(each["_op"], each["_id"], each["title"]) for each in mounted] == [("insert", 5, 7)]
    assert TableRecord("shop", found.record.table_info).whole == record(names=("id", "name"))
