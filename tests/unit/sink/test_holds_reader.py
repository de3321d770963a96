"""A reader that follows tables that are read again: whichever cuts it takes, and wherever captures
begin anew, it sees each table whole. The oracle is the tables' history itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from sink.holds import Holds
from sink.mounter import with_column_id
from sink.versions import Versions
from storage.model.span import Span

Rows = dict[int, int]
TABLES = (1, 2, 3)
ROW, PLAIN, REREAD, REKEY, TRUNCATE, DROP = "row", "plain", "reread", "rekey", "truncate", "drop"
"""What happens to a table. `reread` and `rekey` change all its rows, and the log does not say how;
`rekey` gives it another key, too.
"""


@dataclass(frozen=True)
class Step:
    """One change of a table; those of a life have even timestamps, so that copies fit between."""

    ts: int
    kind: str
    table: int
    key: int


def name(table: int) -> str:
    return f"s.t{table}"


def tables_at(steps: Iterable[Step], ts: int) -> dict[int, Rows]:
    """All rows with commit_ts <= `ts`; a DDL at `ts` has not changed them yet."""
    tables: dict[int, Rows] = {table: {} for table in TABLES}
    for step in steps:
        rows = tables.get(step.table)
        if rows is None or step.ts > ts or (step.ts == ts and step.kind != ROW):
            continue
        if step.kind == ROW:
            rows[step.key] = step.ts
        elif step.kind in (REREAD, REKEY):
            rows.update({key: value + 1000 * step.ts for key, value in rows.items()})
        elif step.kind == TRUNCATE:
            rows.clear()
        elif step.kind == DROP:
            del tables[step.table]
    return tables


def version(table: int, key: int) -> Any:
    """A table whose key is its column of that number."""
    columns = [with_column_id(pa.field(f"c{each}", pa.int64()), each) for each in range(20)]
    mounter = SimpleNamespace(schema=pa.schema(columns), key_columns=(f"c{key}",))
    return SimpleNamespace(name=name(table), span=Span(table, b"t", b"u"), mounter=mounter)


@dataclass
class Capture:
    """One life of a capture: it reads the log from the checkpoint, and copies what is to be read
    again.
    """

    steps: list[Step]
    checkpoint_ts: int
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(commit_ts, table, key, value)"""
    copying: dict[int, bool] = field(default_factory=dict)
    """The tables that are read again; whether they are complete."""

    def __post_init__(self) -> None:
        self.holds = Holds()
        self.resolved_ts = self.checkpoint_ts
        self._keys = dict.fromkeys(TABLES, 0)
        there = tables_at(self.steps, self.checkpoint_ts)
        for step in self.steps:
            if step.ts < self.checkpoint_ts and step.kind == REKEY:
                self._keys[step.table] += 1
        # A DDL at the checkpoint itself is followed once more.
        self.versions = Versions(
            self.checkpoint_ts - 1, [version(table, self._keys[table]) for table in there]
        )
        self._todo = [step for step in self.steps if step.ts >= self.checkpoint_ts]

    def advance(self, copied: set[int]) -> None:
        """Take the next step, then copy some of the tables that are read again."""
        step = self._todo.pop(0)
        ts = step.ts
        if step.kind == ROW and step.table in tables_at(self.steps, ts):
            self.rows.append((ts, step.table, step.key, ts))
        elif step.table in tables_at(self.steps, ts):
            self._change(step)
        for table in copied & self.copying.keys():
            self.rows += [
                (ts + 1, table, key, value)
                for key, value in tables_at(self.steps, ts + 1)[table].items()
            ]
            self.copying[table] = True
        self._end(ts + 1)
        self.resolved_ts = ts + 1

    @property
    def has_ended(self) -> bool:
        return not self._todo

    def _change(self, step: Step) -> None:
        if step.kind == REKEY:
            self._keys[step.table] += 1
        is_kept = step.kind in (PLAIN, REREAD, REKEY)
        self.versions.change(
            SimpleNamespace(
                commit_ts=step.ts,
                query=f"{step}",
                tables=(version(step.table, self._keys[step.table]),) if is_kept else (),
                dropped=(name(step.table),) if step.kind == DROP else (),
                truncated=(name(step.table),) if step.kind == TRUNCATE else (),
            )
        )
        if step.kind == DROP and self.copying.pop(step.table, None) is not None:
            self.holds.leave(step.table)
            self._end(step.ts)
        elif step.kind in (REREAD, REKEY) or step.table in self.copying:
            self.holds.begin(step.ts, step.table, step.kind)
            self.copying[step.table] = False

    def _end(self, ts: int) -> None:
        if self.holds.open_since and all(self.copying.values()):
            self.holds.end(ts)
            self.copying.clear()


@dataclass
class Reader:
    """A lake: what it has at `at_ts`."""

    at_ts: int = 1
    tables: dict[int, Rows] = field(default_factory=lambda: {table: {} for table in TABLES})

    def read(self, capture: Capture, share: float) -> bool:
        """Take a cut of about that share of what there is; False: nothing is new."""
        holds, versions, start_ts = capture.holds, capture.versions, self.at_ts
        upper_ts = min(capture.resolved_ts, holds.bound(capture.resolved_ts))
        if upper_ts <= start_ts:
            return False
        fitting_ts = start_ts + 1 + int(share * (upper_ts - start_ts - 1))
        end_ts = min(holds.cut_end(start_ts, fitting_ts), upper_ts, versions.next_change(start_ts))
        assert start_ts < end_ts
        self._follow(capture)
        ddls = {ddl.ts for ts in (start_ts, end_ts) for ddl in versions.ddls(ts, 1)}
        again = holds.tables(start_ts, end_ts, ddls)
        for each in versions.at(start_ts):
            table = each.span.table_id
            from_ts = again.get(table, start_ts)
            for ts, of_table, key, value in capture.rows:
                if from_ts is not None and of_table == table and from_ts < ts <= end_ts:
                    self.tables[table][key] = value
        self.at_ts = end_ts
        return True

    def _follow(self, capture: Capture) -> None:
        ddls = capture.versions.ddls(self.at_ts, 1)
        for ddl in capture.holds.shown(ddls, capture.versions):
            if ddl.ts != self.at_ts:
                continue
            for table in TABLES:
                if name(table) in ddl.truncated:
                    self.tables[table] = {}
                if name(table) in ddl.dropped:
                    del self.tables[table]


kinds = st.sampled_from([ROW, ROW, ROW, PLAIN, REREAD, REREAD, REKEY, TRUNCATE, DROP])
lives = st.lists(
    st.tuples(kinds, st.sampled_from(TABLES), st.integers(0, 2)), min_size=1, max_size=12
).map(lambda steps: [Step(2 * at + 2, *step) for at, step in enumerate(steps)])


@settings(max_examples=400)
@given(lives, st.randoms(use_true_random=True))
def test_a_reader_sees_whole_tables_whatever_is_read_again(
    steps: list[Step], random: Random
) -> None:
    capture, reader = Capture(steps, 1), Reader()
    restarts = random.randint(0, 2)
    while True:
        if capture.has_ended and restarts:
            # What the reader acknowledged may not be durable: the capture begins below it.
            restarts -= 1
            capture = Capture(steps, random.randint(1, capture.checkpoint_ts))
        if capture.has_ended:
            break
        is_last = len(capture._todo) == 1
        copied = {table for table in TABLES if is_last or random.random() < 0.5}
        capture.advance(copied)
        assert set(capture.holds.waiting) == set(capture.copying)
        assert bool(capture.holds.open_since) == bool(capture.copying)
        while is_last or random.random() < 0.5:
            before = {table: dict(rows) for table, rows in reader.tables.items()}
            if not reader.read(capture, random.random()):
                break
            check(reader, before, capture)
            capture.checkpoint_ts = capture.holds.acknowledged(reader.at_ts)
            if random.random() < 0.5:
                capture.holds.drop_below(capture.checkpoint_ts)
                capture.versions.drop_below(capture.checkpoint_ts)
    assert reader.at_ts == capture.resolved_ts
    assert reader.tables == tables_at(steps, reader.at_ts)


def check(reader: Reader, before: dict[int, Rows], capture: Capture) -> None:
    """Each table is as it was at that ts; or as the reader had it, while it waits for all rows of
    the table, or where the table ends before they come; or empty, if it has another key now.
    """
    ts = reader.at_ts
    truth = tables_at(capture.steps, ts)
    assert reader.tables.keys() == truth.keys()
    waits = capture.holds.acknowledged(ts) < ts
    ends = {step.table for step in capture.steps if step.kind == DROP and step.ts == ts}
    emptied = {step.table for step in capture.steps if step.kind == REKEY and step.ts < ts}
    for table, rows in reader.tables.items():
        if rows != truth[table]:
            assert waits or table in ends, (table, ts)
            assert rows == before[table] or (not rows and table in emptied), (table, ts)
