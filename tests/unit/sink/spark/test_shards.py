"""Merged shards against a replay of each: any DDL of any shard, deaths at any step."""

import dataclasses

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Shard, TableMeta
from pyspark_tidemark.lake.barrier import Barrier
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.format import APPEND, DROP, IGNORE, SCD2, SOFT_DELETE, UPSERT
from pyspark_tidemark.lake.schema import ENVELOPE, Policy
from pyspark_tidemark.lake.shards import merged_table

from tests.integration.lake.evolving import EvolvingFeed
from tests.integration.lake.memory import MemoryManifest, MemoryTarget

INT, WIDE, TEXT = pa.int32(), pa.int64(), pa.string()
NAMES = ["s1.t", "s2.t", "s3.t"]
TYPES = {"a": [INT, WIDE], "b": [TEXT], "c": [INT]}
MERGED = Shard("lake.t", "_shard")


def meta(name, key=("id",), **columns):
    envelope = {each: pa.string() if each == "_op" else WIDE for each in ENVELOPE}
    fields = [*envelope.items(), ("id", INT), *columns.items()]
    return TableMeta(name, key, pa.schema(fields), shard=MERGED)


def test_a_merged_table_has_all_columns_with_the_widest_types():
    one, other = meta("s1.t", a=INT, b=TEXT), meta("s2.t", c=INT, a=WIDE)
    table = merged_table([one, other])
    assert (table.name, table.key) == ("lake.t", ("_shard", "id"))
    assert table.schema.names == [*ENVELOPE, "_shard", "id", "a", "b", "c"]
    assert table.schema.field("a").type == WIDE
    again = merged_table([other, one])
    assert {*again.schema} == {*table.schema}


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({"a": INT}, {"a": TEXT}, "column a is string in s2.t, and int32 in another one"),
        ({"a": INT}, {"A": INT}, "a of s1.t is A in s2.t"),
        ({"a": INT}, {"a": INT, "key": ("id", "a")}, "the key is id int32 in s1.t and id int32, a"),
        ({"key": ()}, {}, "the key is nothing in s1.t and id int32 in s2.t"),
    ],
)
def test_what_one_table_cannot_hold_is_refused_by_name(one, other, message):
    with pytest.raises(SourceError, match=r"the shards of lake\.t cannot be merged") as err:
        merged_table([meta("s1.t", **one), meta("s2.t", **other)])
    assert message in err.value.message


class ShardedFeed(EvolvingFeed):
    """A changefeed whose tables are shards, but for those of the database `other`."""

    def describe(self, ts=None, *, known=None):
        described = super().describe(ts, known=known)
        tables = {
            name: table
            if table.shards or name.startswith("other.")
            else dataclasses.replace(table, shard=MERGED)
            for name, table in described.tables.items()
        }
        return dataclasses.replace(described, tables=tables)


class KeepingFeed(ShardedFeed):
    """The same, with what a lake keeps of shards in mode soft-delete."""

    def __init__(self):
        super().__init__()
        self._kept = [(0, {})]

    def kept(self, ts):
        """All rows that the merged table had up to `ts`, by shard and key."""
        return next(rows for at, rows in reversed(self._kept) if at <= ts)

    def put(self, ts, name, *rows):
        super().put(ts, name, *rows)
        own = {"_shard": name, "_commit_ts": ts, "is_deleted": False}
        self._change_kept(
            ts, {(name, row["id"]): row | own for row in rows} if is_shard(name) else {}
        )

    def delete(self, ts, name, key):
        super().delete(ts, name, key)
        row = self.kept(ts)[name, key]
        self._change_kept(ts, {(name, key): row | {"_commit_ts": ts, "is_deleted": True}})

    def truncate(self, ts, name):
        super().truncate(ts, name)
        self._mark(ts, name)

    def drop(self, ts, name):
        super().drop(ts, name)
        self._mark(ts, name)

    def create_or_replace(self, ts, name, /, **columns):
        super().create_or_replace(ts, name, **columns)
        self._mark(ts, name)

    def rename(self, ts, old, new):
        super().rename(ts, old, new)
        moved = {key: row for key, row in self.kept(ts).items() if key[0] == old}
        named = {(new, key[1]): row | {"_shard": new} for key, row in moved.items()}
        self._change_kept(ts, named, moved)

    def alter(self, ts, name, query, renamed=None, defaults=None, dropped=(), /, **columns):
        before = next(each for each in self.versions if each.name == name and each.to_ts > ts)
        super().alter(ts, name, query, renamed, defaults, dropped, **columns)
        gone = {each for each in before.columns if each not in columns or each in dropped}
        new = {each: value for each, value in (defaults or {}).items() if each in columns}
        self._change_kept(
            ts,
            {
                key: row | dict.fromkeys(gone) | new
                for key, row in self.kept(ts).items()
                if key[0] == name
            },
        )

    def _mark(self, ts, name):
        marks = {"_commit_ts": ts, "is_deleted": True}
        rows = self.kept(ts).items()
        live = {key: row for key, row in rows if key[0] == name and not row["is_deleted"]}
        self._change_kept(ts, {key: row | marks for key, row in live.items()})

    def _change_kept(self, ts, changed, gone=()):
        left = {key: row for key, row in self.kept(ts).items() if key not in gone}
        shards = [each for each in self.versions if is_shard(each.name) and each.to_ts > ts]
        columns = {column for each in shards for column in each.columns}
        columns |= {"_shard", "_commit_ts", "is_deleted"}
        rows = {
            key: {column: value for column, value in row.items() if column in columns}
            for key, row in (left | changed).items()
        }
        # The last shard takes the table with it.
        self._kept.append((ts, rows if shards else {}))


def is_shard(name):
    return not name.startswith("other.")


def replayed(feed, ts):
    """The rows of the merged table, by shard and key."""
    shards = {name: rows for name, rows in feed.state(ts).items() if name in NAMES}
    columns = {column for rows in shards.values() for row in rows.values() for column in row}
    return {
        (name, key): dict.fromkeys(columns) | row | {"_shard": name}
        for name, rows in shards.items()
        for key, row in rows.items()
    }


class DeathError(Exception):
    pass


class Mortal(MemoryTarget):
    steps, dies_at = 0, None


def _mortal(name):
    step = getattr(MemoryTarget, name)

    def made(self, *arguments):
        for makes in (False, True):
            outcome = step(self, *arguments) if makes else None
            self.steps += 1
            if self.steps == self.dies_at:
                raise DeathError
        return outcome

    return made


for _name in ("alter", "rekey", "replace", "drop", "create", "apply"):
    setattr(Mortal, _name, _mortal(_name))


def _one_by_one(self, table, steps):
    """As Delta: each step is a commit."""
    for step in steps:
        for makes in (False, True):
            if makes:
                MemoryTarget.change_rows(self, table, [step])
            self.steps += 1
            if self.steps == self.dies_at:
                raise DeathError


Mortal.change_rows = _one_by_one


def next_statement(draw, feed, ts):
    """One transaction or DDL at `ts`."""
    state = feed.state(ts)
    open_versions = {each.name: each for each in feed.versions if each.to_ts > ts}
    del open_versions["other.u"]
    free = [name for name in NAMES if name not in open_versions]
    kind = draw(st.sampled_from(KINDS if open_versions else ["create"]))
    if kind == "create":
        if free:
            chosen = draw(st.lists(st.sampled_from(sorted(TYPES)), unique=True))
            columns = {name: draw(st.sampled_from(TYPES[name])) for name in chosen}
            feed.create(ts, draw(st.sampled_from(free)), id=INT, **columns)
        return
    name = draw(st.sampled_from(sorted(open_versions)))
    columns = open_versions[name].columns
    if kind == "put":
        keys = draw(st.lists(st.integers(1, 3), min_size=1, unique=True))
        values = {column: "x" if kind == TEXT else ts for column, kind in columns.items()}
        feed.put(ts, name, *[values | {"id": key} for key in keys])
    elif kind == "delete":
        if state[name]:
            feed.delete(ts, name, draw(st.sampled_from(sorted(state[name]))))
    elif kind in ("drop", "truncate"):
        getattr(feed, kind)(ts, name)
    elif kind == "rename":
        if free:
            feed.rename(ts, name, draw(st.sampled_from(free)))
    elif kind == "replace":
        feed.create_or_replace(ts, name, id=INT, a=WIDE)
    else:
        left = {column: each for column, each in columns.items() if column != "id"}
        gone = draw(st.lists(st.sampled_from(sorted(left)), unique=True)) if left else []
        left = {column: each for column, each in left.items() if column not in gone}
        if "a" in left:
            left["a"] = draw(st.sampled_from([left["a"], WIDE]))
        new = [column for column in TYPES if column not in left and draw(st.booleans())]
        added = {column: draw(st.sampled_from(TYPES[column])) for column in new}
        held = {column: "d" if TYPES[column] == [TEXT] else ts for column in new}
        held = {column: value for column, value in held.items() if draw(st.booleans())}
        feed.alter(ts, name, "ALTER …", {}, held, tuple(gone), id=INT, **left, **added)


KINDS = ["create", "put", "put", "put", "delete", "drop", "truncate", "rename", "replace"]
KINDS += ["alter", "alter", "alter"]


@pytest.mark.parametrize("mode", [UPSERT, SOFT_DELETE])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_merged_table_equals_the_replays_of_its_shards_whatever_dies(mode, data):
    feed, target, manifest = KeepingFeed(), Mortal(mode), MemoryManifest()
    policy = Policy(mode, on_drop=DROP)
    feed.create(0, "s1.t", id=INT, a=INT, b=TEXT)
    feed.create(0, "other.u", id=INT)
    for ts in range(10, 10 * data.draw(st.integers(3, 14)), 10):
        next_statement(data.draw, feed, ts)
    applier = None
    start_ts = 0
    for end_ts in [*feed.cut_ends(), 1000]:
        while True:
            target.steps, target.dies_at = 0, data.draw(st.none() | st.integers(1, 10))
            applier = applier or _applier(feed, target, manifest, policy)
            try:
                applier.apply(Cut(0, start_ts, end_ts))
                break
            except (DeathError, SourceError) as err:
                if not isinstance(err, DeathError) and not isinstance(err.__cause__, DeathError):
                    raise
                applier = None
        start_ts = end_ts
        shown_ts = end_ts if end_ts == 1000 else end_ts - 1
        expected = (feed.kept if mode == SOFT_DELETE else lambda ts: replayed(feed, ts))(shown_ts)
        table = target.tables.get("lake.t")
        assert not target.doubled
        if table is None:
            assert not expected
            continue
        # A column that only shards without rows have is in no row of the replay.
        rows = {
            key: {name: value for name, value in row.items() if value is not None}
            for key, row in table.rows.items()
        }
        assert rows == {
            key: {name: value for name, value in row.items() if value is not None}
            for key, row in expected.items()
        }
    assert set(target.tables) <= {"lake.t", "other.u"}
    named = {
        name
        for each in feed.versions
        if each.to_ts > 1000 and each.name in NAMES
        for name in each.columns
    }
    if "lake.t" in target.tables:
        marks = {"is_deleted"} if mode == SOFT_DELETE else set()
        assert {*target.tables["lake.t"].columns} == named | {"_shard"} | marks


def test_a_column_stays_as_wide_as_a_shard_that_is_gone_had_it():
    feed, target = ShardedFeed(), MemoryTarget()
    feed.create(0, "s1.t", id=INT, a=INT)
    feed.create(0, "s2.t", id=INT, a=WIDE)
    feed.drop(10, "s2.t")
    feed.put(20, "s1.t", {"id": 1, "a": 2})
    applier = _applier(feed, target, MemoryManifest())
    applier.apply(Cut(0, 0, 10))
    applier.apply(Cut(0, 10, 30))
    table = target.tables["lake.t"]
    assert table.schema.field("a").type == WIDE
    assert [row["a"] for row in table.rows.values()] == [2]


def test_rows_of_a_shard_that_went_in_a_skipped_stretch_go():
    feed, target, manifest = ShardedFeed(), MemoryTarget(), MemoryManifest()
    feed.create(0, "s1.t", id=INT, a=WIDE)
    feed.create(0, "s2.t", id=INT, b=INT)
    feed.put(5, "s1.t", {"id": 1, "a": 1})
    feed.put(6, "s2.t", {"id": 1, "b": 1})
    feed.drop(10, "s1.t")
    feed.alter(20, "s2.t", "ADD", {}, {}, (), id=INT, b=INT, c=TEXT)
    _applier(feed, target, manifest).apply(Cut(0, 0, 7))
    result = Barrier(feed, target, manifest, Policy(UPSERT)).catch_up(30)
    assert result.changed == {"lake.t"}
    table = target.tables["lake.t"]
    assert [(row["_shard"], row["id"]) for row in table.rows.values()] == [("s2.t", 1)]
    assert table.columns == ["_shard", "id", "b", "c"]


def _applier(feed, target, manifest, policy=None):
    return CutApplier(
        feed,
        "sharded",
        target,
        manifest,
        policy=policy or Policy(UPSERT, on_drop=DROP),
        writers=TableWriters(source_options={}, spark=None, parallel=1),
    )


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy(SCD2), "in the modes upsert, soft-delete, append"),
        (Policy(APPEND, IGNORE), "without --schema-evolution ignore"),
    ],
)
def test_a_job_that_cannot_keep_merged_tables_says_so_before_it_writes(policy, message):
    feed, target = ShardedFeed(), MemoryTarget()
    feed.create(0, "s1.t", id=INT)
    with pytest.raises(SourceError, match=r"lake\.t is merged of shards") as err:
        _applier(feed, target, MemoryManifest(), policy).apply(Cut(0, 0, 10))
    assert message in err.value.message
    assert not target.tables
