"""Cuts while tables are read again: whole before, whole after, never in between;
whatever DDLs come meanwhile.

The random walk has a lake that applies what it is given as the lake's job does, and is compared at
every cut with a model of the upstream.
"""

import random

import pytest

from server.capture import flight
from server.capture.catalog import Refusal
from sink.errors import RangeHeldError
from sink.flight.feeds import Poll
from tests.unit.server.capture.flight_feed import A_WIDE, START, A, B, Shape

C = Shape.of(3, "c", "x")


def reads_again(feed, ts, *shapes, table_ids=(1,)):
    for table_id in table_ids:
        feed.holds.begin(ts, table_id)
    feed.ddl(ts, *shapes, truncated=tuple(shape.source.name for shape in shapes))


def soon(feed, start, **limits):
    """The next cut, without waiting for one."""
    return feed.feeds.latest(
        "feed", None, start, limits.get("rows"), limits.get("bytes"), Poll(0.05)
    )


def test_no_cut_passes_the_ddl_until_the_table_is_complete_and_the_next_one_has_all_of_it(
    opened, monkeypatch
):
    monkeypatch.setattr(flight, "_CALL_WAIT_S", 0.2)
    feed = opened(A, B)
    feed.put(A, 1010, 1, x=5)
    reads_again(feed, 1020, A_WIDE)
    feed.put(A_WIDE, 1030, 1, x=0, y=0)
    feed.put(B, 1035, 1, x=6)
    feed.resolve(1040)
    assert soon(feed, START) == 1020, "up to the DDL, everything is as it was"
    assert soon(feed, 1020) == soon(feed, 1020, rows=1) == 1020
    assert feed.feeds.latest("feed", "s.b", 1020, None, None, Poll(0.05)) == 1020, (
        "cuts are of all tables"
    )
    with pytest.raises(RangeHeldError):
        feed.planned(1020, 1030, ["s.b"])
    feed.put(A_WIDE, 1050, 2, x=1, y=1)
    feed.holds.end(1050)
    assert soon(feed, 1020) == 1020, "rows are not sorted up to there"
    feed.resolve(1060)
    assert soon(feed, 1020, rows=1) == soon(feed, 1020, bytes=1) == 1050, "whatever fits"
    assert soon(feed, 1020) == 1060
    assert sorted(feed.planned(1020, 1050)) == [("s.a", 1020, 1050), ("s.b", 1020, 1050)]
    assert feed.ids("s.a", 1020, 1050) == [(1030, 1), (1050, 2)]
    assert [ddl.truncated for ddl in feed.feeds.describe("feed", 1020).ddls] == [("s.a",)]
    assert feed.feeds.ack("feed", None, 1050) == 1050


def test_ddls_in_between_are_cuts_in_which_the_table_stays_as_it_was(opened):
    feed = opened(A, B)
    reads_again(feed, 1020, A)
    feed.put(A, 1025, 1, x=1)
    feed.ddl(1030, Shape.of(2, "b", "x", "z"))
    feed.put(A, 1035, 2, x=2)
    feed.put(Shape.of(2, "b", "x", "z"), 1036, 1, x=6, z=7)
    feed.holds.end(1040)
    feed.resolve(1045)
    assert soon(feed, 1020) == 1030
    assert feed.planned(1020, 1030) == [], "its rows come later"
    assert feed.feeds.ack("feed", None, 1030) == 1020, "who begins again here reads the table again"
    assert soon(feed, 1030) == 1045
    assert sorted(feed.planned(1030, 1045)) == [("s.a", 1020, 1045), ("s.b", 1030, 1045)]
    assert feed.planned(1034, 1045, ["s.a"]) == [("s.a", 1034, 1045)], (
        "at an earlier end of the window it was whole"
    )
    ddls = feed.feeds.describe("feed", 1020).ddls
    assert [(ddl.ts, ddl.truncated) for ddl in ddls] == [(1020, ()), (1030, ("s.a",))]
    assert feed.feeds.ack("feed", None, 1045) == 1045
    feed.holds.drop_below(1045)
    assert not feed.holds.shown([], feed.versions)


def test_a_cut_that_ends_where_the_table_is_not_complete_any_more_is_refused(opened):
    """The capture died after it had offered one, and began to read again."""
    feed = opened(A, B)
    reads_again(feed, 1020, A)
    feed.holds.end(1050)
    feed.resolve(1060)
    with pytest.raises(RangeHeldError, match="latest cut"):
        feed.planned(1020, 1040)


def test_a_table_that_ends_meanwhile_holds_nobody_back(opened):
    feed = opened(A, B)
    feed.put(A, 1010, 1, x=5)
    reads_again(feed, 1020, A)
    feed.put(A, 1025, 2, x=5)
    feed.ddl(1030, dropped=("s.a",))
    feed.sorter.resolve(A.source.span, 1030)
    feed.holds.leave(1)
    feed.holds.end(1030)
    feed.put(B, 1035, 1, x=6)
    feed.resolve(1040)
    assert soon(feed, 1020) == 1030
    assert feed.planned(1020, 1030) == [], "of a table that was never complete"
    assert [ddl.truncated for ddl in feed.feeds.describe("feed", 1020).ddls] == [(), ()]
    assert soon(feed, 1030) == 1040
    assert feed.feeds.ack("feed", None, 1040) == 1040


class Walk:
    """An upstream whose tables change at random, and the feed that is told of it."""

    def __init__(self, feed, shapes, seed):
        self.feed, self.shapes, self.random = feed, shapes, random.Random(seed)
        self.rows = {name: {} for name in shapes}
        self.at, self.ddls, self.again, self.ts = {START: self.copy()}, {START}, set(), START

    def copy(self):
        return {name: dict(rows) for name, rows in self.rows.items()}

    def step(self):
        self.ts += 10
        name, chance = self.random.choice(list(self.shapes)), self.random.random()
        if chance < 0.6:
            key, value = self.random.randrange(5), self.random.randrange(100)
            self.rows[name][key] = value
            self.feed.put(self.shapes[name], self.ts, key, x=value)
        elif chance < 0.8:
            self.alter(name, changes_values=chance < 0.7)
        elif self.again:
            self.complete()
        self.at[self.ts] = self.copy()
        self.feed.resolve(self.ts)

    def alter(self, name, changes_values):
        shape = self.shapes[name]
        self.ddls.add(self.ts)
        if changes_values:
            rows = self.rows[name]
            self.rows[name] = {
                key: -value - 1 for key, value in rows.items() if self.random.random() < 0.8
            }
            self.again.add(name)
            reads_again(self.feed, self.ts, shape, table_ids=(shape.info.id,))
        else:
            if name in self.again:
                self.feed.holds.begin(self.ts, shape.info.id)
            self.feed.ddl(self.ts, shape)

    def complete(self):
        """Chunks of all tables that are read again, at their high watermark."""
        for name in self.again:
            for key, value in self.rows[name].items():
                self.feed.put(self.shapes[name], self.ts, key, x=value)
        self.feed.holds.end(self.ts)
        self.again.clear()


def applied(feed, lake, cut, end):
    """One cut as the lake's job applies it."""
    parts = feed.feeds.plan("feed", None, cut, end)
    for ddl in feed.feeds.describe("feed", cut).ddls if cut > START else ():
        for name in ddl.truncated if ddl.ts == cut else ():
            lake[name].clear()
    for part in parts:
        for row in feed.rows(part.table, part.start_ts, part.end_ts):
            lake[part.table][row["id"]] = row["x"]
    feed.feeds.ack("feed", None, end)


@pytest.mark.parametrize("seed", range(12))
def test_a_lake_has_every_table_whole_at_every_cut(opened, seed):
    shapes = {"s.a": A, "s.b": B, "s.c": C}
    feed = opened(*shapes.values())
    walk = Walk(feed, shapes, seed)
    for _ in range(60):
        walk.step()
    lake, cut, cuts = {name: {} for name in shapes}, START, 0
    while (end := soon(feed, cut, rows=walk.random.choice([None, 1, 5]))) > cut:
        applied(feed, lake, cut, end)
        cut, cuts = end, cuts + 1
        if cut in walk.ddls:
            states = [state for ts, state in walk.at.items() if ts <= cut]
            assert all(rows in [state[name] for state in states] for name, rows in lake.items()), (
                seed,
                cut,
            )
        else:
            assert lake == walk.at[max(ts for ts in walk.at if ts <= cut)], (seed, cut)
    assert cuts > 5


def test_whoever_is_further_than_a_new_run_comes_lets_it_end(opened):
    """A capture died before an acknowledgement was durable, and the log ends at a refused DDL,
    before what was read already.
    """
    feed = opened(A, B)
    reads_again(feed, 1020, A)
    feed.resolve(1040)
    feed.catalog.refusal = Refusal(1020, RangeHeldError("refused"))
    assert soon(feed, 1035) == 1035, "nothing comes that could be acknowledged"
    assert feed.feeds.ack("feed", None, 1035) == 1020


def test_whoever_is_further_than_a_refused_ddl_has_what_is_before_it(opened):
    feed = opened(A, B)
    feed.resolve(1010)
    feed.catalog.refusal = Refusal(1010, RangeHeldError("refused"))
    assert feed.feeds.ack("feed", None, 1035) == 1010
