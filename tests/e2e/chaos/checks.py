"""The verdict: each cut of a lake against the history, and against what any bank, list and key
promises by itself. Pure.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.e2e.chaos.history import Row, Tables, Transaction, Value

BANK = ("accounts_a", "accounts_b", "accounts_c")
LISTS = ("lists_a", "lists_b")
ACCOUNTS, OPENING_BALANCE = 8, 1000
TOTAL = len(BANK) * ACCOUNTS * OPENING_BALANCE
_SAMPLES = 10


@dataclass
class Verdict:
    """What was compared, and what was wrong."""

    cuts: int = 0
    rows: int = 0
    wrong: list[str] = field(default_factory=list)
    """A few examples."""
    faults: int = 0

    def fault(self, *what: object) -> None:
        """Count one."""
        self.faults += 1
        if len(self.wrong) < _SAMPLES:
            self.wrong.append(" ".join(map(str, what)))


class Checker:
    """Follows one lake, cut after cut."""

    def __init__(
        self,
        history: Sequence[Transaction],
        committed: Iterable[int] = (),
        commit_ts: Sequence[int] = (),
        dumped: int = 0,
    ) -> None:
        """`committed` are marks whose commit was answered, `commit_ts` those of the history, where
        they are known. The rows of the first `dumped` transactions come by a dump: up to its end a
        cut has some of the rows that it should have, and no others.
        """
        self.verdict = Verdict()
        self.last = history[-1].mark or 0
        """The mark of the newest transaction."""
        self.at = dumped
        """How many transactions the newest cut shows."""
        self._history = history
        self._committed = set(committed)
        self._commit_ts = commit_ts
        self._places = {transaction.mark: place for place, transaction in enumerate(history, 1)}
        self._dumped = dumped
        self._is_whole = not dumped
        self._state: Tables = {}
        for transaction in history[:dumped]:
            transaction.apply(self._state)
        self._lists: dict[tuple[str, Value], list[str]] = {}
        self._end_ts: int | None = None

    def check(self, start_ts: int, end_ts: int, lake: Tables) -> None:
        """The next cut, and all tables as it shows them."""
        self.verdict.cuts += 1
        if self._end_ts not in (None, start_ts):
            self.verdict.fault("cut", start_ts, end_ts, "does not follow", self._end_ts)
        self._end_ts = end_ts
        where = f"cut {self.verdict.cuts} ({end_ts}):"
        self._move(where, lake["marks"])
        if self._commit_ts and self.at != bisect_right(self._commit_ts, end_ts):
            self.verdict.fault(where, self.at, "of", bisect_right(self._commit_ts, end_ts))
        self._is_whole = self._is_whole or all(
            rows == self._state.get(table, {}) for table, rows in lake.items()
        )
        for table, rows in lake.items():
            wanted = self._state.get(table, {})
            if not self._is_whole:
                wanted = {key: row for key, row in wanted.items() if key in rows}
            self._compare(f"{where} {table}", rows, wanted)
        for fault in broken_promises(lake) if self._is_whole else ():
            self.verdict.fault(where, fault)
        self._check_lists(where, lake)

    def end(self, source: Tables) -> Verdict:
        """After the last cut: it has the whole history, which is what the source shows, and which
        has each transaction whose commit was answered.
        """
        if not self._is_whole:
            self.verdict.fault("no cut has all rows of the dump")
        if self.at != len(self._history):
            self.verdict.fault("the last cut has", self.at, "of", len(self._history))
        lost = self._committed - self._places.keys()
        if lost:
            self.verdict.fault("the history lacks", sorted(lost)[:5])
        for table, rows in source.items():
            self._compare(
                f"the history's {table} is not the source's:", self._state.get(table, {}), rows
            )
        return self.verdict

    def _move(self, where: str, marks: Mapping[Value, Row]) -> None:
        """Let the state be the history's at this cut, which is a prefix of it."""
        places = {self._places.get(int(str(mark)), 0) for mark in marks}
        places |= set(range(1, self._dumped + 1))
        unknown = len(places & {0})
        if places != set(range(1, len(places) + 1)):
            missing = sorted(set(range(1, len(places) + 1)) - places)
            self.verdict.fault(
                where, len(places), "transactions are no prefix:", missing[:5], "missing,",
                unknown, "unknown",
            )  # fmt: skip
        if len(places) < self.at:
            self.verdict.fault(where, "went back from", self.at, "transactions to", len(places))
            return
        for transaction in self._history[self.at : len(places)]:
            transaction.apply(self._state)
        self.at = max(self.at, min(len(places), len(self._history)))

    def _compare(self, what: str, found: Mapping[Value, Row], wanted: Mapping[Value, Row]) -> None:
        self.verdict.rows += len(wanted)
        if found == wanted:
            return
        odd = [key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key)]
        key = min(odd, key=str)
        self.verdict.fault(
            what, "differs in", len(odd), "rows:", found.get(key), "is, should be", wanted.get(key)
        )

    def _check_lists(self, where: str, lake: Tables) -> None:
        """Each list only grows, and all elements stand in the order of commits."""
        for table in LISTS:
            for key, row in lake[table].items():
                elements = str(row[1]).split()
                before = self._lists.get((table, key), [])
                if elements[: len(before)] != before:
                    self.verdict.fault(where, table, key, "does not go on as it began")
                places = [self._places.get(int(element), 0) for element in elements]
                if 0 in places or places != sorted(places):
                    self.verdict.fault(where, table, key, "is not in the order of commits")
                self._lists[table, key] = elements


def broken_promises(lake: Tables) -> list[str]:
    """What rows say by themselves, without any history."""
    faults = []
    marked = bool(lake["marks"])
    total = sum(int(str(row[1])) for name in BANK for row in lake[name].values())
    if total != (TOTAL if marked else 0):
        faults.append(f"the bank has {total}, not {TOTAL}")
    for column, place in (("name", 1), ("slot", 2)):
        values = [row[place] for row in lake["members"].values() if row[place:] and row[place]]
        if len(set(values)) != len(values):
            faults.append(f"members share a {column}: {sorted(map(str, values))}")
    if "tallies" in lake:
        faults += _broken_references(lake)
    seen = {str(mark) for mark in lake["marks"]}
    for name in LISTS:
        unseen = {each for row in lake[name].values() for each in str(row[1]).split()} - seen
        if unseen:
            faults.append(f"{name} has {sorted(unseen)[:5]}, which are not marked")
    return faults


def _broken_references(lake: Tables) -> Iterator[str]:
    """What a database keeps by triggers and foreign keys."""
    tallies = [row[1] for row in lake["tallies"].values()]
    if tallies != ([len(lake["members"])] if lake["marks"] else []):
        yield f"the trigger counted {tallies}, members are {len(lake['members'])}"
    orphans = [row for row in lake["pets"].values() if row[1] not in lake["owners"]]
    if orphans:
        yield f"pets without an owner: {orphans}"
