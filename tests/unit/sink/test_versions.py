"""Versions of tables: whatever DDLs come, each ts has the tables that an oracle of snapshots
has.
"""

import bisect
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sink.errors import DdlOrderError
from sink.versions import Versions
from sorter.errors import RangeCleanedError
from storage.model.span import Span
from storage.model.ts import MAX_TS

START = 100
NAMES = ["s.a", "s.b", "s.c"]


@dataclass(frozen=True)
class Table:
    name: str
    span: Span
    mounter: Any


@dataclass(frozen=True)
class Change:
    commit_ts: int
    query: str
    tables: tuple[Table, ...] = ()
    dropped: tuple[str, ...] = ()
    truncated: tuple[str, ...] = ()


def span(number: int) -> Span:
    return Span(number, b"t%d" % number, b"")


class Upstream:
    """A database whose tables change; remembers what was in force after each DDL."""

    def __init__(self) -> None:
        self.tables = {"s.a": Table("s.a", span(1), "a0"), "s.b": Table("s.b", span(2), "b0")}
        self.ts, self.spans = START, 2
        self.history = [(START, dict(self.tables))]
        self.changes: list[Change] = []

    def ddl(self, kind: str, name: str, other: str, after: int) -> None:
        self.ts += after
        query = f"{kind} {name} {other} {self.ts}"
        table, target = self.tables.get(name), self.tables.get(other)
        if kind == "create" and table is None:
            self.spans += 1
            self.take(Change(self.ts, query, (Table(name, span(self.spans), query),)))
        elif kind == "alter" and table is not None:
            self.take(Change(self.ts, query, (Table(name, table.span, query),)))
        elif kind == "drop" and table is not None:
            self.take(Change(self.ts, query, dropped=(name,)))
        elif kind == "truncate" and table is not None:
            self.spans += 1
            self.take(
                Change(self.ts, query, (Table(name, span(self.spans), query),), truncated=(name,))
            )
        elif kind == "empty" and table is not None:
            self.take(Change(self.ts, query, truncated=(name,)))
        elif kind == "rename" and table is not None and target is None:
            self.take(Change(self.ts, query, (Table(other, table.span, query),), dropped=(name,)))
        elif kind == "swap" and table is not None and target is not None and name != other:
            swapped = (Table(other, table.span, query), Table(name, target.span, query))
            self.take(Change(self.ts, query, swapped))

    def take(self, change: Change) -> None:
        for name in change.dropped:
            del self.tables[name]
        self.tables |= {table.name: table for table in change.tables}
        self.history.append((change.commit_ts, dict(self.tables)))
        self.changes.append(change)

    def at(self, ts: int) -> dict[str, Table]:
        return self.history[bisect.bisect_right([each for each, _ in self.history], ts) - 1][1]


kinds = st.sampled_from(["create", "alter", "drop", "truncate", "empty", "rename", "swap"])
ddls = st.lists(
    st.tuples(kinds, st.sampled_from(NAMES), st.sampled_from(NAMES), st.integers(1, 3)), max_size=14
)


def evolved(statements: list[tuple[str, str, str, int]]) -> tuple[Upstream, Versions]:
    upstream = Upstream()
    versions = Versions(START, upstream.tables.values())
    for statement in statements:
        upstream.ddl(*statement)
    for change in upstream.changes:
        assert not versions.is_known(change)
        assert versions.change(change) is not None
        assert versions.change(change) is None
    return upstream, versions


@settings(deadline=None)
@given(ddls)
def test_each_ts_has_the_tables_of_its_time(statements: list[tuple[str, str, str, int]]) -> None:
    upstream, versions = evolved(statements)
    for ts in range(START, upstream.ts + 2):
        expected = upstream.at(ts)
        assert {version.name: (version.span, version.mounter) for version in versions.at(ts)} == {
            name: (table.span, table.mounter) for name, table in expected.items()
        }
        for name in NAMES:
            found = versions.version(name, ts)
            assert (found.span if found else None) == (
                expected[name].span if name in expected else None
            )
            assert found is None or versions.of_span(found.span, ts) is found
            mine = [change.commit_ts for change in upstream.changes if change.commit_ts > ts]
            assert versions.next_change(ts) == min(mine, default=MAX_TS)
            assert versions.next_change(ts, name) >= versions.next_change(ts)
            assert found is None or versions.next_change(ts, name) <= found.to_ts
        assert [ddl.ts for ddl in versions.ddls(ts)] == [
            change.commit_ts for change in upstream.changes if change.commit_ts >= ts
        ]


@settings(deadline=None)
@given(ddls)
def test_the_versions_of_a_span_follow_one_another(
    statements: list[tuple[str, str, str, int]],
) -> None:
    upstream, versions = evolved(statements)
    for ts in range(START, upstream.ts + 1):
        for of_span in versions.spans(ts):
            assert all(
                before.to_ts <= after.from_ts for before, after in itertools.pairwise(of_span)
            )
            assert of_span[0].to_ts > ts
    for ddl in versions.ddls(START):
        for of_span in versions.spans_of(ddl):
            assert any(ddl.ts in (version.from_ts, version.to_ts) for version in of_span)


@settings(deadline=None)
@given(ddls, st.integers(0, 30))
def test_what_is_forgotten_changes_nothing_above(
    statements: list[tuple[str, str, str, int]], after: int
) -> None:
    upstream, versions = evolved(statements)
    whole = evolved(statements)[1]
    versions.drop_below(START + after)
    assert all(versions.is_known(change) for change in upstream.changes)
    for ts in range(START + after, upstream.ts + 2):
        assert [(v.name, v.from_ts) for v in versions.at(ts)] == [
            (v.name, v.from_ts) for v in whole.at(ts)
        ]
        assert versions.ddls(ts) == whole.ddls(ts)
        assert versions.spans(ts) == whole.spans(ts)
        assert [versions.next_change(ts, name) for name in NAMES] == [
            whole.next_change(ts, name) for name in NAMES
        ]
    if after:
        with pytest.raises(RangeCleanedError):
            versions.at(START + after - 1)


def test_a_rename_is_told_as_such_and_a_swap_as_two() -> None:
    _, versions = evolved(
        [("rename", "s.a", "s.c", 1), ("swap", "s.b", "s.c", 1), ("drop", "s.b", "s.b", 1)]
    )
    first, second, third = versions.ddls(START)
    assert (first.tables, first.dropped, first.renamed) == (("s.c",), (), (("s.a", "s.c"),))
    assert (second.tables, second.dropped) == (("s.c", "s.b"), ())
    assert second.renamed == (("s.b", "s.c"), ("s.c", "s.b"))
    assert (third.tables, third.dropped, third.renamed) == ((), ("s.b",), ())
    assert first.names == {"s.a", "s.c"}


def test_a_ddl_of_other_tables_is_none_of_ours() -> None:
    versions = Versions(START, Upstream().tables.values())
    assert (
        versions.change(Change(START + 1, "DROP TABLE s.x", dropped=("s.x",), truncated=("s.y",)))
        is None
    )
    assert versions.next_change(START) == MAX_TS


def test_ddls_out_of_order_are_refused() -> None:
    _, versions = evolved([("alter", "s.a", "s.a", 5)])
    with pytest.raises(DdlOrderError, match="two DDLs"):
        versions.change(Change(START + 5, "another", dropped=("s.b",)))
    with pytest.raises(DdlOrderError, match="comes after"):
        versions.change(Change(START + 4, "late", dropped=("s.b",)))
    assert versions.is_known(Change(START, "before the start"))
    assert versions.version("s.b", START + 9) is not None


def test_a_schema_older_than_what_is_kept_keeps_its_ts() -> None:
    versions = Versions(START, Upstream().tables.values(), {"s.a": 7})
    assert [(version.name, version.from_ts) for version in versions.at(START)] == [
        ("s.a", 7),
        ("s.b", START),
    ]
