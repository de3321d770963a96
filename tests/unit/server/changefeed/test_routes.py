"""Routes: which names a target has of which tables, and that two tables never have one."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.flight import FILTER_UPDATE

from server.capture.catalog import FeedCatalog
from server.capture.creation import TableSelection, eligible
from server.capture.source.mysql import mysql_table
from server.changefeed.filter import TableFilter
from server.changefeed.history import History, SchemaChange, by_id, table_json
from server.changefeed.records import SchemaRecords
from server.changefeed.routes import (
    NAME_CHARACTERS_MAX,
    NO_ROUTES,
    RULES_MAX,
    RouteRuleError,
    RouteRules,
    TableRouteConflictError,
    check_merging,
    check_taken_over,
)
from server.changefeed.table import ShardOf, SourceTable, TableIneligibleError, TableRecord
from server.changefeed.terms import Terms
from server.puller.source import TableChange
from server.verify.catalog import LakeCut, tables_at
from server.verify.errors import VerifyUnsupportedError
from server.verify.lake.question import ShardPart
from sorter.errors import RangeCleanedError
from storage.model.event import snapshot_rows
from storage.mysql.schema import Column, Table, Type

SOURCE: Any = SimpleNamespace(table=lambda record, _before=None: mysql_table(record))
START = 1
MYSQL = "mysql://u@h:3306"


def record(name: str, number: int = 7, schema: str = "shop") -> TableRecord:
    columns = (Column(name="id", type=Type.LONG, nullable=False, id=1),)
    return TableRecord(schema, Table(number, name, columns, ("id",)).to_doc())


def target(name: str, *rules: str, schema: str = "shop") -> str:
    return ".".join(RouteRules(rules).of(record(name, schema=schema)).target)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ((), "shop.orders"),
        (("crm.*=lake.{table}",), "shop.orders"),
        (("shop.*=lake.{schema}_{table}",), "lake.shop_orders"),
        (("shop.*={schema}.o", "shop.orders=x.y"), "shop.o"),
        (("shop.orders = x . y.z ",), "x.y.z"),
        (('"shop"."orders"={table}.{schema}',), "orders.shop"),
        (("/^(shop|a=b)$/.*=l.{table}",), "l.orders"),
    ],
)
def test_the_first_rule_about_a_table_gives_its_name(rules: tuple[str, ...], expected: str) -> None:
    assert target("orders", *rules) == expected


def test_names_that_look_like_placeholders_are_names() -> None:
    assert target("{schema}", "*.*=l.{table}_{schema}") == "l.{schema}_shop"


@pytest.mark.parametrize(
    "rule",
    [
        "shop.*",
        "shop.*=",
        "shop.*=lake",
        "shop.*=.x",
        "shop.*=x.",
        "!shop.*=a.b",
        "a.b={x}.{table}",
    ],
)
def test_rules_of_another_form_are_refused(rule: str) -> None:
    with pytest.raises(RouteRuleError, match="the route"):
        RouteRules([rule])


def test_too_many_rules_and_names_that_cannot_be_parted_are_refused() -> None:
    with pytest.raises(RouteRuleError, match="at most"):
        RouteRules(["a.b=c.d"] * (RULES_MAX + 1))
    with pytest.raises(RouteRuleError, match="has a dot"):
        target("t", "*.*={table}.{schema}", schema="s") and target("x.y", "*.*={table}.{schema}")
    with pytest.raises(RouteRuleError, match="characters"):
        target("t" * NAME_CHARACTERS_MAX, "*.*=l.{schema}_{table}")


def chosen(*records: TableRecord, rules: tuple[str, ...], lake: str = "") -> TableSelection:
    terms = Terms("f", TableFilter(["*.*"]), target=lake, routes=RouteRules(rules))
    return eligible(SOURCE, records, terms)


def test_two_tables_into_one_are_refused_before_anything_is_made() -> None:
    one, other = record("t", 7, "a"), record("t", 8, "b")
    assert [
        each.target for each in chosen(one, other, rules=("*.*=l.{schema}_{table}",)).tables
    ] == [
        ("l", "a_t"),
        ("l", "b_t"),
    ]
    with pytest.raises(TableRouteConflictError, match=r"a\.t and b\.t would both be l\.t"):
        chosen(one, other, rules=("*.*=l.{table}",))
    with pytest.raises(TableRouteConflictError, match=r"a\.t and b\.t would both be a\.t"):
        chosen(one, other, rules=("b.t=a.t",))
    with pytest.raises(TableIneligibleError, match="for one name"):
        chosen(one, other, rules=("a.t=l.T", "b.t=l.t"), lake="mysql")
    with pytest.raises(RouteRuleError, match=r"'c\.\*=l\.x' decides of no table"):
        chosen(one, rules=("*.*=l.{table}", "c.*=l.x"))


def test_a_target_holds_the_names_that_it_gets() -> None:
    with pytest.raises(TableIneligibleError, match="cannot hold the table l"):
        chosen(record("t"), rules=(f"*.*=l.{'x' * 64}",), lake="postgresql")
    chosen(record("t" * 64), rules=("*.*=l.t",), lake="postgresql")


async def _saved(_: SchemaChange) -> None: ...


def catalog(rules: tuple[str, ...], *changes: SchemaChange, lake: str = "") -> FeedCatalog:
    terms = Terms("f", TableFilter(["*.*"]), target=lake, routes=RouteRules(rules))
    return FeedCatalog(terms, SOURCE, History(changes), START, _saved)


def taken(feed: FeedCatalog, each: TableRecord) -> SourceTable:
    table = feed.table(each)
    assert table is not None
    return table


def routed(rules: tuple[str, ...], *records: TableRecord) -> SchemaChange:
    return SchemaChange(START, tables=tuple(map(RouteRules(rules).of, records)))


async def test_readers_see_a_table_under_its_name_in_the_target_through_ddls() -> None:
    rules = ("a.*=b.{table}", "b.*=a.{table}")
    one, two = record("t", 7, "a"), record("t", 8, "b")
    feed = catalog(rules, routed(rules, one, two))
    assert {each.name: each.span.table_id for each in feed.versions.at(START)} == {
        "b.t": 7,
        "a.t": 8,
    }
    assert {each.name for each in feed.tables} == {"a.t", "b.t"}
    await feed.change(TableChange(2, "drop", dropped=("a.t",)))
    await feed.change(TableChange(3, "truncate", truncated=("b.t",)))
    new = taken(feed, record("u", 8, "b"))
    await feed.change(TableChange(4, "rename", (new,), dropped=("b.t",)))
    moved = taken(feed, record("u", 8, "c"))
    await feed.change(TableChange(5, "rename", (moved,), dropped=("b.u",)))
    for each in (feed, catalog(rules, *feed.history)):
        drop, truncate, rename, move = each.versions.ddls(2)
        assert (drop.dropped, truncate.truncated) == (("b.t",), ("a.t",))
        assert (rename.renamed, move.renamed) == ((("a.t", "a.u"),), (("a.u", "c.u"),))
        assert {version.name for version in each.versions.at(5)} == {"c.u"}
    found = feed.named("c.u")
    assert found is not None
    assert feed.named("b.t") is None
    assert feed.source_names(["a.u", "c.u"], 5) == ("b.u", "c.u")


async def test_a_topic_has_no_text_of_a_statement_about_a_routed_table() -> None:
    rules = ("a.*=l.{table}",)
    tables = (record("t", 7, "a"), record("t", 8, "b"), record("w", 6, "a"))
    feed = catalog(rules, routed(rules, *tables), lake="kafka")
    moved = taken(feed, record("t", 7, "c"))
    new = taken(feed, record("u", 9, "c"))
    coming = taken(feed, record("v", 10, "a"))
    for change in (
        TableChange(2, "TRUNCATE a.t", truncated=("a.t",)),
        TableChange(3, "TRUNCATE b.t", truncated=("b.t",)),
        TableChange(4, "DROP a.w, b.t", dropped=("a.w", "b.t")),
        TableChange(5, "RENAME a.t TO c.t", (moved,), dropped=("a.t",)),
        TableChange(6, "CREATE c.u", (new,)),
        TableChange(7, f"{FILTER_UPDATE} a.v */", (coming,)),
    ):
        await feed.change(change)
    for each in (feed, catalog(rules, *feed.history, lake="kafka")):
        queries = [ddl.query for ddl in each.versions.ddls(2)]
        assert queries == ["", "TRUNCATE b.t", "", "", "CREATE c.u", f"{FILTER_UPDATE} a.v */"]
    assert [change.query for change in feed.history][1:3] == ["TRUNCATE a.t", "TRUNCATE b.t"]
    lake = catalog(rules, *feed.history, lake="delta")
    assert next(ddl.query for ddl in lake.versions.ddls(2)) == "TRUNCATE a.t"


async def test_a_ddl_that_brings_two_tables_into_one_is_refused_and_changes_nothing() -> None:
    rules = ("*.*=l.{table}",)
    feed = catalog(rules, routed(rules, record("t", 7, "a"), record("u", 9, "a")))
    other = taken(feed, record("t", 8, "b"))
    with pytest.raises(TableRouteConflictError, match=r"a\.t and b\.t"):
        await feed.change(TableChange(2, "create", (other,)))
    with pytest.raises(TableRouteConflictError, match=r"b\.t comes as a\.t goes"):
        await feed.change(TableChange(2, "rename", (other,), dropped=("a.t",)))
    assert not feed.versions.ddls(2)
    swapped = [taken(feed, record(name, number, "a")) for name, number in (("u", 7), ("t", 9))]
    await feed.change(TableChange(3, "swap", tuple(swapped), dropped=("a.t", "a.u")))
    [swap] = feed.versions.ddls(2)
    assert set(swap.renamed) == {("l.t", "l.u"), ("l.u", "l.t")}


NAMES = [("a", "t"), ("a", "u"), ("b", "t"), ("b", "u")]
STEPS = st.lists(
    st.tuples(st.sampled_from(["drop", "create", "rename", "truncate", "swap"]), *[
        st.sampled_from(NAMES)
    ] * 2),
    max_size=12,
)  # fmt: skip


async def run(rules: tuple[str, ...], steps: list[Any]) -> FeedCatalog:
    """What a server does to its tables, as a changefeed with these routes follows it."""
    numbers = {NAMES[0]: 7, NAMES[2]: 8}
    start = [record(name, number, schema) for (schema, name), number in numbers.items()]
    feed, free = catalog(rules, routed(rules, *start)), 9
    for ts, (kind, one, other) in enumerate(steps, 2):
        dotted, brought = tuple(map(".".join, (one, other))), []
        if kind == "create" and one not in numbers:
            numbers[one], free = free, free + 1
            brought = [one]
            change = TableChange(ts, kind)
        elif one not in numbers:
            continue
        elif kind == "drop":
            del numbers[one]
            change = TableChange(ts, kind, dropped=dotted[:1])
        elif kind == "truncate":
            change = TableChange(ts, kind, truncated=dotted[:1])
        elif kind == "rename" and other not in numbers:
            numbers[other] = numbers.pop(one)
            brought = [other]
            change = TableChange(ts, kind, dropped=dotted[:1])
        elif kind == "swap" and other in numbers and one != other:
            numbers[one], numbers[other] = numbers[other], numbers[one]
            brought = [one, other]
            change = TableChange(ts, kind, dropped=dotted)
        else:
            continue
        tables = tuple(
            taken(feed, record(name, numbers[schema, name], schema)) for schema, name in brought
        )
        await feed.change(TableChange(ts, kind, tables, change.dropped, change.truncated))
    return feed


@given(steps=STEPS)
async def test_readers_of_routes_see_what_others_see_by_other_names(steps: list[Any]) -> None:
    """Names that change places with others are the hardest: each is also a name of the source."""
    plain = await run((), steps)
    rules = ("a.*=b.{table}", "b.*=a.{table}")
    feed = await run(rules, steps)
    for each in (feed, catalog(rules, *feed.history)):
        assert list(map(_mirrored, plain.versions.ddls(START))) == each.versions.ddls(START)
        for ts in range(START, len(steps) + 2):
            ours = {version.name: version.span for version in each.versions.at(ts)}
            theirs = {_other(version.name): version.span for version in plain.versions.at(ts)}
            assert ours == theirs


def _other(name: str) -> str:
    schema, _, table = name.partition(".")
    return f"{'b' if schema == 'a' else 'a'}.{table}"


def _mirrored(ddl: Any) -> Any:
    members = {
        member: tuple(map(_other, getattr(ddl, member)))
        for member in ("tables", "dropped", "truncated")
    }
    renamed = tuple((_other(old), _other(new)) for old, new in ddl.renamed)
    return type(ddl)(ddl.ts, ddl.query, **members, renamed=renamed)


MERGE = "/^[abc]$/.t*=l.t{shard=_shard}"
ID = Column(name="id", type=Type.LONG, nullable=False, id=1)
V = Column(name="v", type=Type.LONG, id=2)


def shard(schema: str, *columns: Column, name: str = "t", key: tuple[str, ...] = ("id",)) -> Any:
    number = {"a": 7, "b": 8, "c": 9}[schema]
    return TableRecord(schema, Table(number, name, columns or (ID, V), key).to_doc())


def test_tables_of_a_route_with_a_shard_column_are_one_in_the_target() -> None:
    rules = (MERGE, "a.u=x.y")
    tables = [*chosen(shard("a"), shard("b"), record("u", 1, "a"), rules=rules).read]
    assert [(each.target_name, each.place) for each in tables] == [
        ("a.t", "l.t"),
        ("b.t", "l.t"),
        ("x.y", "x.y"),
    ]
    again = SchemaChange.from_json(
        1, SchemaChange(1).head_json(), [table_json(each.record) for each in tables]
    )
    assert [each.shard for each in by_id(again.tables)] == [
        None,
        ShardOf("l", "t", "_shard"),
        ShardOf("l", "t", "_shard"),
    ]
    assert tables[0].record.whole == shard("a")
    assert RouteRules(()).of(tables[0].record) == shard("a")
    names = [
        each.record.place
        for each in chosen(shard("a"), rules=("a.*={table}.{schema}{shard=s}",)).read
    ]
    assert names == [("t", "a")]


@pytest.mark.parametrize("end", ["{shard}", "{shard=}", "{shard=a b}", "{shard=1}", "{shard=s}x"])
def test_a_shard_column_has_a_plain_name(end: str) -> None:
    with pytest.raises(RouteRuleError, match="the route"):
        RouteRules([f"*.t=l.t{end}"])


@pytest.mark.parametrize(
    ("other", "rules", "message"),
    [
        (
            shard("b", ID, V, key=("id", "v")),
            (MERGE,),
            "the key is id int32 in a.t and id int32, v",
        ),
        (shard("b", replace(ID, type=Type.LONGLONG), V), (MERGE,), "the key is id int32 in a.t"),
        (shard("b", ID, replace(V, type=Type.BLOB)), (MERGE,), "column v is"),
        (shard("b", ID, replace(V, name="V")), (MERGE,), "v of a.t is V in b.t"),
        (shard("b"), ("a.t=l.t{shard=_shard}", "b.t=l.t"), "would both be l.t"),
        (shard("b"), ("a.t=l.t{shard=_shard}", "b.t=l.t{shard=s}"), "would both be l.t"),
        (shard("b"), ("a.t=b.t{shard=_shard}",), "would both be b.t"),
        (shard("b"), ("a.t=l.t{shard=_shard}", "b.t=a.t"), "would both be a.t"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(other: Any, rules: Any, message: str) -> None:
    with pytest.raises(TableRouteConflictError) as err:
        chosen(shard("a"), other, rules=rules)
    assert message in err.value.message


def test_a_table_with_the_shard_column_s_name_and_names_that_a_lake_cannot_hold_are_refused() -> (
    None
):
    with pytest.raises(TableIneligibleError, match=r"a\.t cannot be a shard of l\.t"):
        chosen(shard("a", ID, replace(V, name="_SHARD")), rules=(MERGE,))
    with pytest.raises(TableIneligibleError, match="cannot be a shard"):
        chosen(shard("a"), rules=("a.t=l.t{shard=_op}",))
    with pytest.raises(TableIneligibleError, match=r"a column cut; .*\{shard=cut\}"):
        chosen(shard("a"), rules=("a.t=l.t{shard=cut}",), lake="parquet")


@pytest.mark.parametrize(
    ("sink", "why"),
    [
        ("spark://", "lakes of Delta"),
        ("postgresql://u@h/d", "lakes of Delta"),
        ("kafka://h/t", "lakes of Delta"),
        ("delta:///l?mode=scd2", "the modes upsert, soft-delete, append"),
        ("iceberg:///l?mode=soft-delete", ""),
        ("delta:///l?schema-evolution=ignore", "schema-evolution=ignore"),
        ("delta:///l?mode=append", ""),
        ("parquet:///l", ""),
        ("iceberg:///l?on-drop=drop", ""),
    ],
)
def test_what_cannot_merge_yet_is_refused_before_the_source_is_asked(sink: str, why: str) -> None:
    check_merging(NO_ROUTES, sink)
    if why:
        with pytest.raises(RouteRuleError, match="merges tables") as err:
            check_merging(RouteRules((MERGE,)), sink)
        assert why in err.value.message
        return
    check_merging(RouteRules((MERGE,)), sink)


async def test_ddl_of_shards_that_the_target_could_not_follow_is_refused_and_changes_nothing() -> (
    None
):
    rules = (MERGE, "*.x=l.x{shard=_shard}")
    feed = catalog(rules, routed(rules, shard("a"), shard("b")))
    assert {each.name for each in feed.versions.at(START)} == {"a.t", "b.t"}
    for moved, dropped, why in (
        (shard("a", ID, replace(V, name="w")), (), "column v of a.t, a shard of l.t, becomes w"),
        (shard("a", name="x"), ("a.t",), "its rows would go from l.t to l.x"),
        (shard("a", name="u"), ("a.t",), "its rows would go from l.t to a.u"),
        (shard("a", ID, replace(V, type=Type.BLOB)), (), "column v is"),
        (shard("a", ID, V, key=("v",)), (), "the key is"),
        (shard("c", ID, replace(V, type=Type.BLOB)), (), "column v is"),
    ):
        with pytest.raises(TableRouteConflictError) as err:
            await feed.change(TableChange(2, "DDL", (taken(feed, moved),), dropped))
        assert why in err.value.message
        assert "changefeed update -c f --filter" in err.value.message
    taken_name = TableRecord("b", {**shard("a").table_info})
    chain = (taken(feed, taken_name), taken(feed, shard("b", name="t2")))
    with pytest.raises(TableRouteConflictError, match="the name of another shard"):
        await feed.change(TableChange(2, "RENAME", chain, ("a.t",)))
    with pytest.raises(TableRouteConflictError, match=r"would both be l\.t"):
        await feed.change(TableChange(2, "CREATE", (taken(feed, record("t", 1, "l")),)))
    assert not feed.versions.ddls(2)
    wide = taken(feed, shard("a", ID, replace(V, type=Type.LONGLONG), replace(V, name="n", id=3)))
    await feed.change(TableChange(2, "ALTER", (wide,)))
    await feed.change(TableChange(3, "RENAME", (taken(feed, shard("a", name="t2")),), ("a.t",)))
    await feed.change(TableChange(4, "CREATE", (taken(feed, shard("c")),)))
    await feed.change(TableChange(5, "DROP", dropped=("b.t",)))
    for each in (feed, catalog(rules, *feed.history)):
        assert each.versions.ddls(3)[0].renamed == (("a.t", "a.t2"),)
        shards = {version.name: each.record(version).shard for version in each.versions.at(5)}
        assert shards == dict.fromkeys(("a.t2", "c.t"), ShardOf("l", "t", "_shard"))
    with pytest.raises(RangeCleanedError):
        feed.record(replace(feed.versions.at(5)[0], from_ts=1234))


def test_a_shard_takes_what_is_another_one_s_place_and_no_other_table_does() -> None:
    merged = RouteRules((MERGE,)).of
    check_taken_over([merged(shard("a"))], [merged(shard("b"))], "")
    plain = RouteRules(("a.t=l.t",)).of(shard("a"))
    for coming, going in ((plain, merged(shard("b"))), (merged(shard("b")), plain)):
        with pytest.raises(TableRouteConflictError, match=r"both are l\.t"):
            check_taken_over([coming], [going], "")


async def test_verify_compares_each_shard_as_the_merged_table_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def load(*_: object) -> list[SchemaChange]:
        wide = shard("b", ID, replace(V, name="n", type=Type.LONGLONG, id=3))
        return [routed((MERGE,), shard("c"), wide, shard("a"), record("u", 1, "z"))]

    monkeypatch.setattr(SchemaRecords, "load", load)
    no_meta: Any = None
    info: Any = SimpleNamespace(id="f", source_uri=MYSQL)
    tables = {each.name: each for each in await tables_at(no_meta, info, LakeCut(9), None)}
    assert {name: each.target_name for name, each in tables.items()} == {
        **dict.fromkeys(("a.t", "b.t", "c.t"), "l.t"),
        "z.u": "z.u",
    }
    # The first one answers for rows that no shard has.
    assert tables["a.t"].part == ShardPart("_shard", "a.t", ("b.t", "c.t"))
    assert tables["c.t"].part == ShardPart("_shard", "c.t")
    assert (tables["z.u"].part, tables["z.u"].key) == (None, ("id",))
    assert {tables[name].schema for name in ("a.t", "b.t", "c.t")} == {tables["a.t"].schema}
    assert set(tables["a.t"].schema.names) == {"_shard", "id", "v", "n"}
    # One alone is compared as it is with all others.
    [alone] = await tables_at(no_meta, info, LakeCut(9), "b.t")
    assert (alone.part, alone.schema) == (tables["b.t"].part, tables["b.t"].schema)
    assert (tables["b.t"].key, tables["b.t"].span_column) == (("_shard", "id"), "id")

    raw = snapshot_rows(pa.array([b""], pa.binary()), pa.array([b""], pa.binary()), 9)
    own = pa.RecordBatch.from_pydict({"id": pa.array([7], pa.int32()), "n": pa.array([1 << 40])})
    monkeypatch.setattr(type(tables["b.t"].source.mounter), "mount", lambda *_: own)
    row = {"_shard": "b.t", "id": 7, "v": None, "n": 1 << 40}
    mounted = tables["b.t"].mounted(raw)
    assert (mounted.schema, mounted.to_pylist()) == (
        tables["b.t"].schema,
        [{name: row[name] for name in tables["b.t"].schema.names}],
    )

    with pytest.raises(VerifyUnsupportedError, match=r"a\.t, b\.t, c\.t: merged with others"):
        await tables_at(no_meta, info, LakeCut(9, "append"), None)
    assert len(await tables_at(no_meta, info, LakeCut(9, "append"), "z.u")) == 1
