"""The checks in the manner of Jepsen, in small, and that they see what is wrong."""

import json
import random
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.e2e.chaos.checks import ACCOUNTS, BANK, OPENING_BALANCE, Checker, Verdict
from tests.e2e.chaos.history import Change, Tables, Transaction, parse
from tests.e2e.chaos.mariadb_workload import COLUMNS
from tests.e2e.chaos.timeline import KINDS, timeline


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("source", "seed"), [("mariadb", 3), ("store", 4)])
def test_each_cut_is_right_whatever_becomes_of_processes(source: str, seed: int) -> None:
    flags = ("--small", "--source", source, "--target", "memory", "--dump")
    flags = (*flags, "--seed", str(seed), "--minutes", "0.3", "--faults", "kill,stop,net,clock")
    command = [sys.executable, "-m", "tests.e2e.chaos", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict["right"]
    assert sum(verdict["faults"].values()) >= 2
    assert verdict["lakes"][0]["cuts"] >= 3


def transaction(number: int, *changes: Change) -> Transaction:
    return Transaction(f"0-1-{number}", [Change("marks", [], [number, "k"]), *changes])


def opened() -> Transaction:
    rows = [
        Change(name, [], [account, OPENING_BALANCE]) for name in BANK for account in range(ACCOUNTS)
    ]
    return transaction(1, *rows, Change("tallies", [], [1, 0]))


A = "accounts_a"
HISTORY = [
    opened(),
    transaction(2, Change(A, [0, 1000], [0, 995]), Change(A, [1, 1000], [1, 1005])),
    transaction(3, Change("lists_a", [], [0, "3"]), Change("lists_b", [], [0, "3"])),
    transaction(
        4,
        Change("members", [], [1, "n", None, 4]),
        Change("tallies", [1, 0], [1, 1]),
        Change("owners", [], [1, 4]),
        Change("pets", [], [1, 1]),
    ),
    transaction(
        5,
        Change("lists_a", [0, "3"], [0, "3 5"]),
        Change("members", [1, "n", None, 4], [2, "n", None, 5]),
    ),
]
CUTS = (1, 3, 5)


def state_at(count: int) -> Tables:
    tables: Tables = {name: {} for name in COLUMNS}
    for each in HISTORY[:count]:
        each.apply(tables)
    return tables


def verdict_of(spoil: Callable[[int, Tables], object] = lambda _, __: None) -> Verdict:
    checker = Checker(HISTORY, [1, 2, 3, 4, 5])
    for number, count in enumerate(CUTS):
        lake = state_at(count)
        spoil(number, lake)
        checker.check(number, number + 1, lake)
    return checker.end(state_at(5))


def test_the_checks_pass_what_is_right() -> None:
    assert verdict_of().wrong == []


SPOILT: dict[str, tuple[Callable[[Tables], object], str]] = {
    "a lost mark": (lambda lake: lake["marks"].pop(2), "are no prefix"),
    "an unknown mark": (lambda lake: lake["marks"].update({9: (9, "k")}), "unknown"),
    "half a transfer": (lambda lake: lake[A].update({0: (0, 1000)}), "the bank has"),
    "a lost row": (lambda lake: lake["lists_b"].pop(0), "lists_b differs in 1"),
    "an older row": (lambda lake: lake["lists_a"].update({0: (0, "3 3")}), "lists_a differs"),
    "a list in another order": (
        lambda lake: lake["lists_a"].update({0: (0, "5 3")}),
        "not in the order of commits",
    ),
    "an element before its mark": (
        lambda lake: lake["lists_a"].update({0: (0, "3 7")}),
        "are not marked",
    ),
    "a key that stayed": (
        lambda lake: lake["members"].update({1: (1, "n", None, 4)}),
        "members share a name",
    ),
    "a trigger's row that is missing": (
        lambda lake: lake["tallies"].update({1: (1, 0)}),
        "the trigger counted",
    ),
    "a child without its parent": (lambda lake: lake["owners"].pop(1), "without an owner"),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_the_checks_see_what_is_wrong_in_the_last_cut(spoilt: str) -> None:
    change, said = SPOILT[spoilt]
    found = verdict_of(lambda number, lake: change(lake) if number == 2 else None)
    assert any(said in each for each in found.wrong), found.wrong


def test_the_checks_see_a_cut_that_goes_back_or_does_not_follow_or_comes_too_early() -> None:
    checker = Checker(HISTORY, [5, 6])
    checker.check(0, 1, state_at(4))
    checker.check(2, 3, state_at(3))
    found = " ".join(checker.end(state_at(5)).wrong)
    for said in ("does not follow", "went back", "the last cut has", "history lacks [6]"):
        assert said in found


def test_a_cut_has_just_what_was_committed_up_to_its_end() -> None:
    checker = Checker(HISTORY, commit_ts=[10, 20, 30, 40, 50])
    checker.check(0, 39, state_at(3))
    assert checker.verdict.wrong == []
    checker.check(39, 50, state_at(4))
    assert checker.verdict.wrong == ["cut 2 (50): 4 of 5"]


def test_a_dump_brings_rows_in_any_order_but_only_right_ones_and_at_last_all() -> None:
    checker = Checker(HISTORY, dumped=1)
    some = state_at(3)
    del some["accounts_b"], some["marks"][1]
    checker.check(0, 1, some)
    assert checker.verdict.wrong == []
    assert "all rows of the dump" in checker.end(state_at(5)).wrong[0]
    stale = state_at(3)
    stale[A][0] = (0, 1000)
    checker.check(1, 2, stale)
    assert "accounts_a differs in 1" in checker.verdict.wrong[-1]


def test_a_transaction_of_the_log_is_one_that_committed() -> None:
    text = """
#251128 18:00:00 server id 1  end_log_pos 99 CRC32 0x1 \tGTID 0-1-7 trans
### UPDATE `chaos`.`members`
### WHERE
###   @1=-1 (4294967295)
###   @2='n 1'
### SET
###   @1=2
###   @2=NULL
### INSERT INTO `changefeed_dump`.`idle`
### SET
###   @1=9.5
COMMIT/*!*/;
#251128 18:00:01 server id 1  end_log_pos 199 CRC32 0x1 \tGTID 0-1-8 trans
### DELETE FROM `chaos`.`members`
### WHERE
###   @1=2
"""
    [found] = parse(text.splitlines(), "chaos")
    assert found.gtid == "0-1-7"
    assert found.changes == [Change("members", [-1, "n 1"], [2, None])]


def test_a_timeline_follows_from_its_seed_and_a_node_has_one_fault_at_a_time() -> None:
    victims = {kind: ["a", "b", "c"] for kind in KINDS}
    faults = timeline(random.Random(5), victims, 300, 2)
    assert faults == timeline(random.Random(5), victims, 300, 2)
    assert {fault.kind for fault in faults} == set(KINDS)
    assert max(fault.end_s for fault in faults) <= 300.01
    for one in faults:
        for other in faults:
            if (
                one is not other
                and one.node == other.node
                and "clock" not in (one.kind, other.kind)
            ):
                assert one.end_s <= other.at_s or other.end_s <= one.at_s
