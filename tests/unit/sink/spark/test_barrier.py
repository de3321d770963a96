"""Barriers against a model upstream: any DDL, a death at any step, some tables ahead of it."""

import dataclasses
from contextlib import suppress
from itertools import count

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark_tidemark.column_metadata import column_ids, with_column_ids
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import FILTER_UPDATE, ChangefeedMeta, Ddl, TableMeta
from pyspark_tidemark.lake.barrier import Barrier
from pyspark_tidemark.lake.format import DROP, EVOLVE, EXCEPTION, KEEP, UPSERT
from pyspark_tidemark.lake.schema import ENVELOPE, Policy, lake_schema

from tests.integration.lake.evolving import EvolvingFeed
from tests.integration.lake.memory import MemoryManifest, MemoryTable, MemoryTarget

NAMES = ["s.a", "s.b", "s.c"]
INT, WIDE, TEXT = pa.int32(), pa.int64(), pa.string()


@dataclasses.dataclass(frozen=True)
class Upstream:
    """One table: columns as (name, id, type), rows by their values."""

    table_id: int
    columns: tuple
    key: tuple = ("id",)
    schema_ts: int = 0
    rows: tuple = ()

    def meta(self, name):
        types = {each: pa.string() if each == "_op" else pa.int64() for each in ENVELOPE}
        schema = pa.schema([*types.items(), *((name, kind) for name, _, kind in self.columns)])
        ids = {name: number for name, number, _ in self.columns}
        return TableMeta(name, self.key, schema, self.schema_ts, {}, self.table_id, ids)


class Feed:
    """Implements `Changefeed.describe`."""

    def __init__(self, tables):
        self.history = [(0, tables, None)]

    @property
    def tables(self):
        return self.history[-1][1]

    def describe(self, ts, known=None):
        tables = next(tables for at, tables, _ in reversed(self.history) if at <= ts)
        metas = {name: table.meta(name) for name, table in tables.items()}
        ddls = tuple(ddl for at, _, ddl in self.history if ddl is not None and at >= ts)
        return ChangefeedMeta(ts, ts, metas, ddls)


class DeathError(Exception):
    pass


class Mortal(MemoryTarget):
    """Dies before or after one of its steps."""

    def __init__(self, empties_with_cut):
        super().__init__()
        self.empties_with_cut = empties_with_cut
        self.steps = 0
        self.dies_at = None


def _mortal(name):
    step = getattr(MemoryTarget, name)

    def made(self, *arguments):
        for makes in (False, True):
            if makes:
                step(self, *arguments)
            self.steps += 1
            if self.steps == self.dies_at:
                raise DeathError

    return made


for _name in ("alter", "rekey", "truncate", "replace", "drop", "rename"):
    setattr(Mortal, _name, _mortal(_name))


def next_ddl(draw, tables, ts, numbers):
    """The tables above a DDL at `ts`, and the DDL."""

    def new_table():
        columns = (("id", next(numbers), INT), ("k", next(numbers), INT), ("x", next(numbers), INT))
        return Upstream(next(numbers), columns, schema_ts=ts)

    def altered(name, **values):
        return {**tables, name: dataclasses.replace(tables[name], schema_ts=ts, **values)}

    kind = draw(st.sampled_from(KINDS if tables else ["create"]))
    if kind == "create":
        name = draw(st.sampled_from(NAMES))
        truncated = draw(st.sampled_from([(), (name,)])) if name in tables else ()
        return {**tables, name: new_table()}, Ddl(ts, kind, (name,), truncated=truncated)
    if kind == "move":
        olds = draw(st.lists(st.sampled_from(sorted(tables)), min_size=1, unique=True))
        kept = [name for name in NAMES if name not in tables or name in olds]
        news = draw(st.permutations(kept))[: len(olds)]
        pairs = [(old, new) for old, new in zip(olds, news, strict=True) if old != new]
        left = {name: table for name, table in tables.items() if name not in dict(pairs)}
        moved = {new: dataclasses.replace(tables[old], schema_ts=ts) for old, new in pairs}
        return left | moved, Ddl(ts, kind, tuple(moved), renamed=tuple(pairs))

    name = draw(st.sampled_from(sorted(tables)))
    table = tables[name]
    own = [column for column in table.columns if column[0] not in ("id", "k")]
    if kind in ("drop", "unfilter"):
        query = FILTER_UPDATE if kind == "unfilter" else kind
        rest = {other: each for other, each in tables.items() if other != name}
        return rest, Ddl(ts, query, dropped=(name,))
    if kind == "truncate":
        number = draw(st.sampled_from([table.table_id, next(numbers)]))
        return altered(name, rows=(), table_id=number), Ddl(ts, kind, (name,), truncated=(name,))
    if kind == "rekey":
        return altered(name, key=("id", "k") if table.key == ("id",) else ("id",)), Ddl(
            ts, kind, (name,)
        )
    if kind == "add" or not own:
        column = (f"c{next(numbers)}", next(numbers), INT)
        rows = tuple({**row, column[0]: None} for row in table.rows)
        return altered(name, columns=(*table.columns, column), rows=rows), Ddl(ts, kind, (name,))
    old, number, type_ = draw(st.sampled_from(own))
    if kind == "remove":
        columns = tuple(column for column in table.columns if column[0] != old)
        rows = tuple({key: row[key] for key in row if key != old} for row in table.rows)
        return altered(name, columns=columns, rows=rows), Ddl(ts, kind, (name,))
    if kind == "retype":  # the rows are read again
        columns = tuple(
            (old, number, TEXT) if column[0] == old else column for column in table.columns
        )
        return altered(name, columns=columns, rows=()), Ddl(ts, kind, (name,), truncated=(name,))
    # Another column takes the name, or the same one gets another.
    column = (f"r{next(numbers)}", number, type_) if kind == "rename" else (old, next(numbers), INT)
    new = column[0]
    columns = tuple(column if each[0] == old else each for each in table.columns)
    rows = tuple(
        {new if key == old else key: value for key, value in row.items()}
        if kind == "rename"
        else {**row, old: None}
        for row in table.rows
    )
    return altered(name, columns=columns, rows=rows), Ddl(ts, kind, (name,))


KINDS = ["create", "drop", "unfilter", "truncate", "move", "move", "rekey"]
KINDS += ["add", "remove", "retype", "rename", "swap"]


def plain(rows):
    """Rows by their id, without what only a target has."""
    return {row["id"]: {name: row[name] for name in row if name != "_commit_ts"} for row in rows}


def apply_cut(feed, target, result, names, end_ts, numbers):
    """One new row in each of some tables; those that the barrier changed have none besides."""
    for name in names:
        upstream = feed.tables[name]
        number = next(numbers)
        row = {
            column: number if kind != TEXT else str(number) for column, _, kind in upstream.columns
        }
        grown = dataclasses.replace(upstream, rows=(*upstream.rows, row))
        feed.tables[name] = grown
        meta = grown.meta(name)
        known = target.tables.get(name)
        if known is None:
            schema = with_column_ids(lake_schema(meta), meta.column_ids)
            known = target.tables[name] = MemoryTable(schema, meta.key, 0)
        if name in result.emptied and known.position < end_ts:
            known.rows.clear()
        known.rows[known.keyed(row)] = row | {"_commit_ts": end_ts}
        known.position = end_ts


@settings(max_examples=300)
@given(st.data(), st.booleans(), st.sampled_from([DROP, KEEP]))
def test_whatever_dies_at_whichever_step_the_target_has_the_tables_of_its_upstream(
    data, empties_with_cut, on_drop
):
    feed, target, manifest = Feed({}), Mortal(empties_with_cut), MemoryManifest()
    policy, numbers = Policy(UPSERT, EVOLVE, on_drop), count(1)
    gone = set()
    for ts in range(10, 10 * data.draw(st.integers(2, 7)), 10):
        before = feed.tables
        tables, ddl = next_ddl(data.draw, before, ts, numbers)
        feed.history.append((ts, dict(tables), ddl))

        had = {*target.tables}
        target.steps, target.dies_at = 0, data.draw(st.none() | st.integers(1, 8))
        try:
            result = Barrier(feed, target, manifest, policy).cross(ts, first=False)
        except DeathError:
            target.dies_at = None
            result = Barrier(feed, target, manifest, policy).cross(ts, first=False)
        target.dies_at = None

        # Tables that the barrier changed are in the cut; a life that ends amid it crosses again.
        changed = sorted({*data.draw(st.sets(st.sampled_from(NAMES))), *result.changed})
        names = [name for name in changed if name in tables]
        cut = data.draw(st.integers(0, len(names)))
        apply_cut(feed, target, result, names[:cut], ts + 5, numbers)
        target.steps = 0
        again = Barrier(feed, target, manifest, policy).cross(ts, first=False)
        assert again.tables.keys() == tables.keys()
        apply_cut(feed, target, again, names[cut:], ts + 5, numbers)

        gone = (gone | (before.keys() - tables.keys() - {old for old, _ in ddl.renamed})) - {
            *tables
        }
        for name, known in target.tables.items():
            assert name in feed.tables or name in gone, name
            if name in feed.tables:
                upstream, meta = feed.tables[name], feed.tables[name].meta(name)
                assert {*known.schema.names} == {*lake_schema(meta).names}
                assert column_ids(known.schema) == meta.column_ids
                assert known.key == upstream.key
                assert plain(known.rows.values()) == plain(upstream.rows), (name, ddl)
        filled = {name for name, table in feed.tables.items() if table.rows}
        assert filled <= target.tables.keys()
        drops = on_drop == DROP and ddl.query == "drop"
        stayed = {*ddl.dropped} & target.tables.keys()
        assert stayed == (set() if drops else {*ddl.dropped} & had)


@given(st.permutations(NAMES), st.lists(st.integers(1, 8), max_size=3))
def test_tables_change_places_whatever_dies(news, deaths):
    columns = (("id", 1, INT), ("k", 2, INT))
    tables = {
        name: Upstream(number, columns, rows=({"id": number, "k": 0},))
        for number, name in enumerate(NAMES)
    }
    feed, target, manifest = Feed(tables), Mortal(empties_with_cut=False), MemoryManifest()
    nothing = Barrier(feed, target, manifest, Policy(UPSERT)).cross(0, first=True)
    apply_cut(feed, target, nothing, NAMES, 5, count(10))
    moves = dict(zip(NAMES, news, strict=True))
    renamed = tuple((old, new) for old, new in moves.items() if old != new)
    moved = {new: dataclasses.replace(tables[old], schema_ts=10) for old, new in moves.items()}
    feed.history.append((10, moved, Ddl(10, "move", tuple(news), renamed=renamed)))

    for death in [*deaths, None]:
        target.steps, target.dies_at = 0, death
        with suppress(DeathError):
            Barrier(feed, target, manifest, Policy(UPSERT)).cross(10, first=False)
    assert {name: plain(known.rows.values()) for name, known in target.tables.items()} == {
        name: plain(table.rows[-1:]) for name, table in moved.items()
    }


class LogTarget(MemoryTarget):
    """Holds statements besides, as a log does."""

    def __init__(self):
        super().__init__()
        self.statements = []

    def write_statement(self, ddl, before, now):
        self.statements.append((ddl.query, {*before.tables}, {*now.tables}))


def two_tables(feed=None):
    """Tables `s.a` and `s.b` with a row each, and a target that has them up to 5."""
    feed, target = feed or EvolvingFeed(), LogTarget()
    for name in ("s.a", "s.b"):
        feed.create(0, name, id=INT, x=INT)
        schema, meta = lake_schema(feed.describe(0).tables[name]), feed.describe(0).tables[name]
        target.tables[name] = MemoryTable(
            with_column_ids(schema, meta.column_ids),
            meta.key,
            5,
            {(1,): {"id": 1, "x": 1, "_commit_ts": 5}},
        )
    return feed, target


def cross(feed, target, ts, evolution=EVOLVE, *, first=False):
    return Barrier(feed, target, MemoryManifest(), Policy(UPSERT, evolution)).cross(ts, first=first)


def test_the_first_cut_of_a_lake_follows_no_ddl():
    feed, target = two_tables()
    feed.drop(10, "s.a")
    result = cross(feed, target, 10, first=True)
    assert (result.dropped, result.changed, {*result.tables}) == ((), frozenset(), {"s.b"})
    assert not target.statements


@pytest.mark.parametrize(("start_ts", "statements"), [(10, 0), (5, 1), (None, 0)])
def test_a_topic_that_is_empty_again_gets_the_ddl_where_it_goes_on(start_ts, statements):
    """Its messages had expired: the statement at the changefeed's checkpoint was left out."""
    feed, target = two_tables(Begun(start_ts))
    target.tables.clear()
    feed.drop(10, "s.a")
    result = cross(feed, target, 10, first=True)
    assert (len(target.statements), {*result.tables}) == (statements, {"s.b"})


class Begun(EvolvingFeed):
    """Says where it began."""

    def __init__(self, start_ts):
        super().__init__()
        self.start_ts = start_ts

    def describe(self, ts=None, *, known=None):
        return dataclasses.replace(super().describe(ts, known=known), start_ts=self.start_ts)


def test_a_ts_without_a_ddl_is_crossed_without_a_look_at_the_target():
    feed, _ = two_tables()
    feed.drop(20, "s.a")
    result = cross(feed, None, 10)
    assert ({*result.tables}, result.changed) == ({"s.a", "s.b"}, frozenset())


def test_a_ddl_changes_the_tables_it_names_and_no_other():
    feed, target = two_tables()
    feed.alter(10, "s.a", "ADD y", id=INT, x=INT, y=INT)
    assert cross(feed, target, 10).changed == {"s.a"}
    assert target.statements == [("ADD y", {"s.a", "s.b"}, {"s.a", "s.b"})]


def test_of_ddls_at_timestamps_that_follow_each_other_each_sees_what_the_one_before_left():
    feed, target = two_tables()
    feed.rename(10, "s.a", "s.c")
    feed.rename(11, "s.c", "s.d")
    for ts, renamed in ((10, ("s.a", "s.c")), (11, ("s.c", "s.d"))):
        assert cross(feed, target, ts).renamed == (renamed,)
    assert {*target.tables} == {"s.b", "s.d"}


def test_of_two_ddls_at_one_ts_that_empty_a_table_and_touch_another_each_is_followed():
    feed, target = two_tables()
    feed.truncate(10, "s.a")
    feed.alter(10, "s.a", "MODIFY x TEXT", id=INT, x=TEXT)
    feed.alter(10, "s.b", "ADD y", id=INT, x=INT, y=INT)
    assert cross(feed, target, 10).changed == {"s.a", "s.b"}
    assert target.tables["s.a"].schema.field("x").type == TEXT
    assert "y" in target.tables["s.b"].schema.names


def test_a_table_that_is_emptied_takes_types_that_rows_could_not():
    feed, target = two_tables()
    target.empties_with_cut = True
    feed.alter(10, "s.a", "MODIFY x TEXT", id=INT, x=TEXT)
    feed.ddls[-1] = dataclasses.replace(feed.ddls[-1], truncated=("s.a",))
    cross(feed, target, 10)
    assert target.tables["s.a"].schema.field("x").type == TEXT
    assert not target.tables["s.a"].rows


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda feed: feed.alter(10, "s.a", "ADD y", id=INT, x=INT, y=INT), "s.a"),
        (lambda feed: feed.drop(10, "s.b"), "s.b"),
        (lambda feed: feed.rename(10, "s.a", "s.c"), "s.a"),
        (lambda feed: feed.create(10, "s.c", id=INT), ""),
        (lambda feed: feed.ddls.append(Ddl(10, FILTER_UPDATE, dropped=("s.b",))), ""),
    ],
    ids=["alter", "drop", "rename", "create", "filter"],
)
def test_by_policy_a_ddl_of_a_table_in_the_lake_is_an_error_that_changes_nothing(change, names):
    feed, target = two_tables()
    change(feed)
    if not names:
        cross(feed, target, 10, EXCEPTION)
        return
    with pytest.raises(SourceError, match=rf"^\[TM:ErrSchemaChanged\] {names} changed at 10 "):
        cross(feed, target, 10, EXCEPTION)
    assert {*target.tables} == {"s.a", "s.b"}
    assert not target.statements
    assert "y" not in target.tables["s.a"].schema.names
