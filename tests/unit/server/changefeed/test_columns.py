"""Rules about columns: what is taken of which table, and what is refused before anything leaks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.capture.catalog import FeedCatalog
from server.capture.creation import eligible
from server.capture.source.mysql import mysql_table
from server.changefeed.columns import RULES_MAX, ColumnRuleError, ColumnRules
from server.changefeed.filter import FilterRuleError, TableFilter
from server.changefeed.history import History, SchemaChange
from server.changefeed.masks import MaskRules
from server.changefeed.table import SourceTable, TableIneligibleError, TableRecord, check_names
from server.changefeed.terms import Terms
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


COLUMNS = (
    Column(name="id", type=Type.LONG, nullable=False, id=1),
    Column(name="name", type=Type.LONG, id=2),
    Column(name="phone", type=Type.LONG, id=3),
)


def feed_of(*rules: str, columns: tuple[Column, ...] = COLUMNS) -> FeedCatalog:
    terms = Terms("c", TableFilter(["*.*"]), columns=ColumnRules(rules))
    started = SchemaChange(1, tables=(terms.of(mysql_table(numbered("orders", columns))),))

    async def save(_: SchemaChange) -> None: ...

    source: Any = SimpleNamespace(table=lambda record, _before=None: mysql_table(record))
    return FeedCatalog(terms, source, History([started]), 1, save)


def numbered(
    name: str, columns: tuple[Column, ...], key: tuple[str, ...] = ("id",), table_id: int = 7
) -> TableRecord:
    return TableRecord("shop", Table(table_id, name, columns, key).to_doc())


def named(**names: str) -> tuple[Column, ...]:
    """The columns, some renamed."""
    return tuple(replace(each, name=names.get(each.name, each.name)) for each in COLUMNS)


def shown(feed: FeedCatalog, record: TableRecord) -> list[str]:
    found = feed.table(record)
    assert found is not None
    return found.mounter.schema.names[4:]


async def change(feed: FeedCatalog, ts: int, record: TableRecord, *dropped: str) -> None:
    found = feed.table(record)
    assert found is not None
    await feed.change(TableChange(ts, "ALTER", (found,), dropped))


async def test_a_column_that_is_left_out_stays_out_under_any_name() -> None:
    feed = feed_of("shop.*=*,!phone")
    await change(feed, 2, numbered("orders", named(phone="tel")))
    assert shown(feed, numbered("orders", named(phone="tel"))) == ["id", "name"]
    again = (*named(phone="mobile"), Column(name="added", type=Type.LONG, id=4))
    await change(feed, 3, numbered("orders", again))
    assert shown(feed, numbered("orders", again)) == ["id", "name", "added"]
    back = (*named(phone="mobile"), Column(name="phone", type=Type.LONG, id=5))
    assert shown(feed, numbered("orders", back)) == ["id", "name"]
    truncated = numbered("orders", again, table_id=9)
    assert shown(feed, truncated) == ["id", "name", "added"], "TiDB's TRUNCATE: another id"
    other = numbered("other", named(phone="tel"), table_id=8)
    assert shown(feed, other) == ["id", "name", "tel"], "a new table: by its names"


async def test_names_that_change_places_take_what_was_decided_with_them() -> None:
    feed = feed_of("shop.*=*,!phone")
    swapped = named(phone="name", name="phone")
    assert shown(feed, numbered("orders", swapped)) == ["id"], "one by its rule, one as it was"
    feed = feed_of("shop.*=id,name")
    await change(feed, 2, numbered("orders", named(name="title", phone="tel")))
    assert shown(feed, numbered("orders", named(name="title", phone="tel"))) == ["id", "title"]
    feed = feed_of("shop.*=id,name->title")
    assert shown(feed, numbered("orders", named(name="remark"))) == ["id", "title"]


async def test_a_left_out_column_that_is_asked_for_stops_the_changefeed_by_name() -> None:
    feed = feed_of("shop.*=id,name")
    taking = (COLUMNS[0], replace(COLUMNS[2], name="name"))
    with pytest.raises(TableIneligibleError, match=r"name was left out so far, as phone.*Undo"):
        feed.table(numbered("orders", taking))
    with pytest.raises(TableIneligibleError, match="phone is left out, and would tell rows apart"):
        feed.table(numbered("orders", COLUMNS, ("id", "phone")))


async def test_a_rule_about_a_renamed_tables_name_takes_no_more_than_before() -> None:
    feed = feed_of("shop.orders=*,!phone", "shop.other=*", "shop.third=phone", "shop.less=id")
    assert shown(feed, numbered("moved", COLUMNS)) == ["id", "name"]
    assert shown(feed, numbered("other", COLUMNS)) == ["id", "name"]
    with pytest.raises(ColumnRuleError, match="phone was left out so far"):
        shown(feed, numbered("third", named()))
    assert shown(feed, numbered("moved", COLUMNS, table_id=8)) == ["id", "name", "phone"]
    await change(feed, 5, numbered("moved", COLUMNS), "shop.orders")
    added = (*named(phone="tel"), Column(name="added", type=Type.LONG, id=4))
    assert shown(feed, numbered("moved", added)) == ["id", "name"]
    assert shown(feed, numbered("moved", COLUMNS, table_id=9)) == ["id", "name"]


def found(columns: tuple[Column, ...], name: str = "orders", table_id: int = 7) -> TableRecord:
    """As the catalogue shows a table, without a statement that says what became of columns."""
    record = numbered(name, columns, table_id=table_id)
    return TableRecord("shop", record.table_info, matched_by_names=True)


RENUMBERED = (*COLUMNS[:2], Column(name="tel", type=Type.LONG, id=4))


@pytest.mark.parametrize("masks", [[], ["shop.*=phone:mask.with.3.chars"]], ids=["out", "masked"])
def test_what_was_hidden_is_not_shown_where_only_names_tell_which_column_is_which(
    masks: list[str],
) -> None:
    columns = ColumnRules([] if masks else ["shop.*=*,!phone"])
    terms = Terms("c", TableFilter(["*.*"]), columns=columns, masks=MaskRules(masks))
    source: Any = SimpleNamespace(table=lambda record, _before=None: mysql_table(record))
    before = [
        terms.of(mysql_table(numbered("orders", COLUMNS))),
        terms.of(mysql_table(numbered("others", COLUMNS, table_id=8))),
    ]
    others = found(COLUMNS, "others", 8)

    def taken_of(record: TableRecord) -> list[str]:
        selection = eligible(source, [others, record], terms, before)
        return selection.read[1].mounter.schema.names[4:]

    hidden = ["phone"] if masks else []
    assert taken_of(found(COLUMNS)) == ["id", "name", *hidden]
    with pytest.raises(TableIneligibleError, match=r"has no column phone any more.*tel instead"):
        taken_of(found(RENUMBERED))
    told = numbered("orders", RENUMBERED)
    assert taken_of(told) == ["id", "name", "tel"], "a statement said that tel is another one"
    assert taken_of(found(COLUMNS[:2])) == ["id", "name"]
    anew = tuple(replace(each, id=each.id + 10) for each in named(phone="tel"))
    assert taken_of(found(anew)) == ["id", "name", "tel"], "CREATE OR REPLACE"
    renamed = terms.of(mysql_table(numbered("orders", named(phone="tel"))), mysql_table(before[0]))
    before[0] = renamed
    assert len(taken_of(found(named(phone="tel")))) == 2 + len(hidden), "though no rule names it"


def test_a_table_that_may_be_one_that_is_gone_shows_nothing_that_was_hidden_in_that() -> None:
    terms = Terms("c", TableFilter(["shop.*"]), columns=ColumnRules(["shop.o*=*,!phone"]))
    source: Any = SimpleNamespace(table=lambda record, _before=None: mysql_table(record))
    before = [
        terms.of(mysql_table(numbered("orders", COLUMNS))),
        terms.of(mysql_table(numbered("others", COLUMNS, table_id=8))),
    ]
    moved, others = found(COLUMNS, "moved", 9), found(COLUMNS, "others", 8)
    with pytest.raises(TableIneligibleError, match=r"moved is new, and may be shop\.orders"):
        eligible(source, [others, moved], terms, before)
    assert eligible(source, [others, found(COLUMNS), moved], terms, before)
    assert eligible(source, [others, found(COLUMNS[:2], "moved", 9)], terms, before)


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
