"""Pumps' transactions in one order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.puller.pump.transactions import BinlogInvalidError, Merge, Transaction
from storage.model.ts import MAX_TS

MOST = 1 << 30


def txn(commit_ts: int, size: int = 1) -> Transaction:
    return Transaction(commit_ts, commit_ts - 1, b"x" * size, 0, b"")


def times(found: list[Transaction]) -> list[int]:
    return [transaction.commit_ts for transaction in found]


def test_nothing_comes_out_above_the_slowest_pump() -> None:
    merge = Merge(10)
    assert [merge.add("a"), merge.add("b")] == [10, 10]
    merge.push("a", txn(12))
    merge.push("a", txn(15))
    assert (merge.take(MAX_TS, MOST), merge.resolved_ts, merge.slowest) == ([], 10, ("b", 10))
    merge.push("b", txn(13))
    assert times(merge.take(MAX_TS, MOST)) == [12, 13]
    assert merge.resolved_ts == 13


def test_nothing_comes_out_above_the_ts_up_to_which_all_pumps_are_known() -> None:
    merge = Merge(10)
    merge.add("a")
    merge.push("a", txn(12))
    merge.push("a", txn(20))
    assert (times(merge.take(15, MOST)), merge.resolved_ts) == ([12], 15)


def test_a_heartbeat_lets_the_others_go() -> None:
    merge = Merge(10)
    merge.add("a")
    merge.add("b")
    merge.push("a", txn(12))
    merge.heartbeat("b", 30)
    assert (times(merge.take(MAX_TS, MOST)), merge.resolved_ts) == ([12], 12)


def test_a_transaction_that_two_pumps_have_comes_once() -> None:
    merge = Merge(10)
    merge.add("a")
    merge.add("b")
    for pump in "ab":
        merge.push(pump, txn(12))
        merge.heartbeat(pump, 20)
    assert times(merge.take(MAX_TS, MOST)) == [12]


def test_without_pumps_everything_known_is_complete() -> None:
    merge = Merge(10)
    assert (merge.take(17, MOST), merge.resolved_ts) == ([], 17)


def test_a_pump_that_joins_is_read_from_where_the_others_are() -> None:
    merge = Merge(10)
    merge.take(17, MOST)
    assert merge.add("late") == 17
    merge.push("late", txn(16 + 2))
    assert times(merge.take(MAX_TS, MOST)) == [18]


def test_a_pump_that_goes_back_is_refused() -> None:
    merge = Merge(10)
    merge.add("a")
    merge.push("a", txn(12))
    with pytest.raises(
        BinlogInvalidError, match="pump a sent a transaction with commit_ts 11 after one with 12"
    ):
        merge.push("a", txn(11))


def test_much_comes_out_in_parts_that_are_complete() -> None:
    merge = Merge(0)
    merge.add("a")
    for ts in range(2, 12):
        merge.push("a", txn(ts, 1000))
    found = merge.take(MAX_TS, 3000)
    assert times(found) == [2, 3, 4]
    assert merge.resolved_ts == 4
    assert merge.waiting_bytes("a") == 7 * txn(2, 1000).size_bytes


class Pumps(RuleBasedStateMachine):
    """Any pumps at any pace: out comes what went in, once, in order, and never too early."""

    @initialize()
    def begin(self) -> None:
        self.merge = Merge(0)
        self.sent: dict[str, list[int]] = {}
        self.position: dict[str, int] = {}
        self.expected: set[int] = set()
        self.out: list[int] = []
        self.known_ts = 0

    @precondition(lambda self: len(self.sent) < 4)
    @rule()
    def join(self) -> None:
        """A pump is registered before it has a transaction above what all pumps were known for."""
        name = f"pump {len(self.sent)}"
        self.position[name] = max(self.merge.add(name), self.known_ts)
        self.sent[name] = []

    @precondition(lambda self: bool(self.sent))
    @rule(data=st.data(), step=st.integers(1, 5), only_heartbeat=st.booleans())
    def send(self, data: st.DataObject, step: int, *, only_heartbeat: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.sent)))
        self.position[name] += step
        if only_heartbeat:
            self.merge.heartbeat(name, self.position[name])
        else:
            self.merge.push(name, txn(self.position[name]))
            self.expected.add(self.position[name])

    @rule(step=st.integers(0, 6), most=st.sampled_from([1, 700, MOST]))
    def take(self, step: int, most: int) -> None:
        self.known_ts += step
        before = self.merge.resolved_ts
        found = times(self.merge.take(self.known_ts, most))
        assert found == sorted(set(found))
        assert all(before < ts <= self.merge.resolved_ts for ts in found)
        self.out += found

    @invariant()
    def complete(self) -> None:
        if hasattr(self, "merge"):
            assert self.out == sorted(ts for ts in self.expected if ts <= self.merge.resolved_ts)
            assert self.merge.resolved_ts <= max(self.known_ts, 0)


TestPumps = Pumps.TestCase


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(0, 60))
def test_one_pump_gives_what_it_sent(steps: list[int], limit: int) -> None:
    merge, at, sent = Merge(0), 0, []
    merge.add("a")
    for step in steps:
        at += step
        merge.push("a", txn(at))
        sent.append(at)
    assert times(merge.take(limit, MOST)) == [ts for ts in sent if ts <= limit]
