"""The plan of an audit: each table is compared whole in each period, evenly,
whatever fails or is altered meanwhile.
"""

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from server.verify.audit_plan import AuditPlan
from server.verify.spans import Extent, KeySpans

FAST = 10**9
SIZES = st.dictionaries(
    st.sampled_from(["a.t", "a.u", "b.t", "b.long", "c.other"]),
    st.integers(0, 3_000_000),
    min_size=1,
    max_size=5,
)


@dataclass
class Audit:
    """Takes the turns of a plan over tables with dense integer keys; `text` ones have no ranges."""

    plan: AuditPlan
    sizes: dict[str, int]
    text: set[str] = field(default_factory=set)
    compared: list[tuple[float, str, int, int]] = field(default_factory=list)
    """When, and which keys, from one to below another."""

    def turn(self, now_s):
        """Returns what was picked."""
        if not self.plan.is_due(now_s):
            return {}
        self.plan.keep({name: f"lake.{name}" for name in self.sizes})
        for table, rows in self.sizes.items():
            column = None if table in self.text else "id"
            if self.plan.needs_round(table, column, now_s):
                self.plan.begin(
                    table, column, Extent(rows, 0, max(rows - 1, 0)), len(self.sizes), now_s
                )
        return self.plan.picks(now_s)

    def compare(self, now_s, table, pick, *, equal=True):
        for low, high in ((None, None),) if pick.spans is None else pick.spans.spans:
            self.compared.append(
                (now_s, table, -1 if low is None else low, 10**9 if high is None else high)
            )
        return self.plan.compared(table, pick, equal=equal)

    def missed(self, table, from_s, to_s):
        """The first key that was not compared in that time; None: all were."""
        reached = -1
        for low, high in sorted(
            (low, high)
            for at, name, low, high in self.compared
            if name == table and from_s <= at < to_s
        ):
            if low > reached:
                return reached
            reached = max(reached, high)
        return None if reached == 10**9 else reached


@settings(max_examples=60, deadline=None)
@given(
    SIZES,
    st.sampled_from([60, 600, 3600, 86_400]),
    st.integers(0, 2**31),
    st.lists(st.tuples(st.floats(0, 3), st.sampled_from(["a.t", "b.t", "c.other"])), max_size=5),
    st.sets(st.sampled_from(["a.u", "c.other"])),
)
def test_every_key_of_every_table_is_compared_in_each_period(sizes, period_s, seed, ddls, text):
    chance = random.Random(seed)
    audit = Audit(AuditPlan(period_s, FAST, chance), sizes, text)
    told = sorted((at * period_s, table) for at, table in ddls)
    now_s = 0.0
    while now_s < 3 * period_s:
        while told and told[0][0] <= now_s:
            audit.plan.note_altered([told.pop(0)[1]])
        for table, pick in audit.turn(now_s).items():
            audit.compare(now_s, table, pick)
        assert audit.plan.late_s(now_s) == 0.0
        now_s += audit.plan.turn_s * chance.uniform(
            0.9, 1.0
        )  # as punctual as a loop is that looks now and then
    for table in sizes:
        rounds = sorted({round(at, 6) for at, name, *_ in audit.compared if name == table})
        assert rounds[0] < period_s
        assert audit.missed(table, 0, period_s) is None
        assert audit.missed(table, 0, 2.2 * period_s) is None


@settings(max_examples=30, deadline=None)
@given(st.integers(10_000, 5_000_000), st.integers(0, 2**31))
def test_ranges_are_spread_over_the_period(rows, seed):
    audit = Audit(AuditPlan(3600, FAST, random.Random(seed)), {"a.t": rows})
    counts = []
    for number in range(12):
        picks = audit.turn(number * audit.plan.turn_s)
        counts.append(len(picks["a.t"].numbers) if picks else 0)
        for table, pick in picks.items():
            audit.compare(number, table, pick)
    slots = sum(counts)
    assert max(counts[1:]) <= slots / 12 + 2
    assert counts[-1] == 0, "a delayed turn still comes in time"
    assert audit.missed("a.t", 0, 12) is None


@given(st.integers(0, 2**31), st.integers(1, 2000))
def test_a_turn_reads_no_more_than_its_time_allows(seed, rows_per_s):
    sizes = {"a.t": 1_000_000, "b.t": 300_000, "c.other": 5}
    audit = Audit(AuditPlan(3600, rows_per_s, random.Random(seed)), sizes)
    for number in range(30):
        picks = audit.turn(number * 300.0)
        read = [
            (len(pick.numbers) * 10_000 if sizes[table] > 5 else 5) for table, pick in picks.items()
        ]
        assert sum(read) <= rows_per_s * 300 or len(read) == 1
        for table, pick in picks.items():
            audit.compare(number, table, pick)
    if rows_per_s >= 1000:  # 1,300,005 rows an hour are due
        assert audit.missed("a.t", 0, 12) is None
    # 30 turns read less than all tables once: with more, the next round may have begun in time
    if rows_per_s <= 140:
        assert audit.plan.late_s(9000.0) > 0


def test_a_table_that_was_altered_has_a_sample_at_once_and_not_all_of_it():
    audit = Audit(AuditPlan(86_400, FAST, random.Random(7)), {"a.t": 2_400_000, "b.t": 5})
    for table, pick in audit.turn(0.0).items():
        audit.compare(0.0, table, pick)
    assert not audit.plan.is_urgent(1.0)
    audit.plan.note_altered(["a.t", "gone.t"])
    assert audit.plan.is_urgent(1.0)
    picks = audit.turn(1.0)
    assert len(picks["a.t"].numbers) == 20  # of 240 ranges
    audit.compare(1.0, "a.t", picks["a.t"])
    assert not audit.plan.is_urgent(1.0)
    assert "a.t" not in audit.turn(1.0)


def test_what_was_not_compared_is_due_again_and_a_failing_table_keeps_nobody_waiting():
    audit = Audit(AuditPlan(3600, FAST, random.Random(7)), {"a.t": 2_400_000, "b.t": 2_400_000})
    first = audit.turn(0.0)
    audit.compare(0.0, "b.t", first["b.t"])
    audit.plan.failed("a.t", 0.0)
    assert audit.turn(299.0).keys() <= {"b.t"}
    again = audit.turn(300.0)
    assert set(first["a.t"].numbers) <= set(again["a.t"].numbers)
    audit.plan.failed("a.t", 300.0)
    assert "a.t" not in audit.turn(899.0)
    for _ in range(20):
        audit.plan.failed("a.t", 900.0)
    assert "a.t" not in audit.turn(4499.0), "it waits for a period at most"
    assert "a.t" in audit.turn(4500.0)
    assert audit.plan.late_s(4500.0) == 900.0
    audit.plan.note_altered(["a.t"])
    audit.plan.failed("a.t", 4500.0)
    assert not audit.plan.is_urgent(4501.0)


def test_a_round_without_a_difference_is_told():
    audit = Audit(AuditPlan(60, FAST, random.Random(7)), {"a.t": 30_000})
    ends, turns = [], 0
    for number in range(24):
        now_s = number * 10.0
        for table, pick in audit.turn(now_s).items():
            turns += 1
            if audit.compare(now_s, table, pick, equal=turns > 1):
                ends.append(number)
    assert ends
    assert min(ends) >= 6, "the first round has a difference"


def test_tables_without_ranges_and_small_ones_are_compared_whole():
    audit = Audit(
        AuditPlan(60, FAST, random.Random(7)), {"a.t": 10_000, "b.long": 9_000_000}, {"b.long"}
    )
    picked = {}
    for number in range(6):
        picked |= audit.turn(number * 10.0)
    assert {table: pick.spans for table, pick in picked.items()} == {"a.t": None, "b.long": None}


def test_a_new_key_begins_a_new_round():
    audit = Audit(AuditPlan(60, FAST, random.Random(7)), {"a.t": 100_000})
    audit.turn(0.0)
    assert not audit.plan.needs_round("a.t", "id", 1.0)
    assert audit.plan.needs_round("a.t", "other", 1.0)
    audit.plan.begin("a.t", "other", Extent(100_000, 5, 9), 1, 1.0)
    spans = audit.plan.picks(41.0)["a.t"].spans
    assert spans == KeySpans("other", ((None, 6), (6, 7), (7, 8), (8, 9), (9, None)))


def test_what_is_held_of_many_tables_is_bounded():
    plan = AuditPlan(3600, FAST, random.Random(7))
    for number in range(1000):
        plan.begin(f"a.t{number}", "id", Extent(10**9, 0, 10**9), 1000, 0.0)
    assert sum(len(each.slots) for each in plan._rounds.values()) <= 100_000
