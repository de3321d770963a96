"""A hold against an oracle: the table is never resolved beyond it, never back,
and nothing promised is lost.
"""

from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.dump.cluster.holds import HoldableRows, HoldLateError, PulledTables
from server.puller.open_transactions import OpenTransactions
from storage.model.errors import ClosedError
from storage.model.event import snapshot_rows
from storage.model.span import Span

SPAN = Span(7, b"a", b"b")


class Sorter:
    """Keeps what comes, in order."""

    def __init__(self, executor: Executor | None = None) -> None:
        self.executor: Any = executor
        self.open_transactions = OpenTransactions()
        self.resolved: list[int] = []
        self.added: list[tuple[int, int]] = []
        self.refuses = False

    def add(self, _span: Span, batch: pa.RecordBatch) -> None:
        if self.refuses:
            raise ClosedError("no more")
        resolved = self.resolved[-1] if self.resolved else 0
        for commit_ts in batch["commit_ts"].to_pylist():
            assert commit_ts > resolved, "a row behind what was promised"
            self.added.append((commit_ts, resolved))

    def resolve(self, _span: Span, ts: int) -> None:
        assert not self.resolved or ts > self.resolved[-1], "never back, never twice"
        self.resolved.append(ts)


def chunk(ts: int) -> pa.RecordBatch:
    return snapshot_rows(pa.array([b"k"], pa.binary()), pa.array([b"v"], pa.binary()), ts)


STEPS = st.lists(
    st.one_of(st.integers(1, 9), st.sampled_from(["chunk", "give up", "refused"])), max_size=40
)


@given(STEPS)
def test_a_chunk_always_comes_before_its_table_is_resolved_and_promises_are_kept(
    steps: list[int | str],
) -> None:
    sorter = Sorter()
    rows = HoldableRows(SPAN, 1, sorter)
    clock = promised = 1
    held_at: int | None = None
    for step in steps:
        if isinstance(step, int):
            clock += step
            promised = clock
            rows.resolve(SPAN, promised)
        elif held_at is None:
            rows.hold()
            clock += 1
            held_at = clock
            rows.hold_below(held_at)
        else:
            sorter.refuses = step == "refused"
            if step == "give up":
                rows.let_go()
            elif sorter.refuses:
                with pytest.raises(ClosedError):
                    rows.add_held([chunk(held_at)])
                assert rows.resolved_ts < held_at, "a failure does not end the hold by itself"
                rows.let_go()
            else:
                rows.add_held([chunk(held_at)])
                assert sorter.added[-1][0] == held_at
            held_at = None
        limit = promised if held_at is None else min(promised, held_at - 1)
        assert rows.resolved_ts == limit
        assert sorter.resolved[-1:] == ([limit] if limit > 1 else [])


def test_a_hold_that_comes_too_late_is_refused_and_a_new_one_stands_where_the_table_is() -> None:
    sorter = Sorter()
    rows = HoldableRows(SPAN, 1, sorter)
    rows.resolve(SPAN, 10)
    rows.hold()
    rows.resolve(SPAN, 20)
    with pytest.raises(HoldLateError):
        rows.hold_below(10)
    rows.hold_below(15)
    assert sorter.resolved == [10, 14]
    rows.let_go()
    assert sorter.resolved == [10, 14, 20]


def test_threads_that_resolve_never_pass_a_hold() -> None:
    with ThreadPoolExecutor(2) as threads:
        sorter = Sorter(threads)
        rows = HoldableRows(SPAN, 1, sorter)
        for base in range(10, 2000, 10):
            rows.hold()
            resolving = threads.submit(rows.resolve, SPAN, base + 9)
            rows.hold_below(base)
            rows.add_held([chunk(base)])
            resolving.result()
        assert len(sorter.added) == 199
        assert sorter.resolved[-1] == 1999


def test_each_pull_of_a_table_is_another_generation_and_its_end_is_counted() -> None:
    tables = PulledTables()
    table: Any = type("Table", (), {"span": SPAN, "name": "a.b"})()
    rows = HoldableRows(SPAN, 1, Sorter())
    generations = set()
    for ends in range(3):
        with tables.pulled(table, rows):
            held = tables.all()[SPAN.table_id]
            assert (held.table, held.rows, tables.ends) == (table, rows, ends)
            generations.add(held.generation)
        assert (tables.all(), tables.ends) == ({}, ends + 1)
    assert len(generations) == 3
