"""Model check of the quota: every interleaving of dispatcher, workers and reader,
over all states of small worlds.

A world is a few tables with a few transactions of a few batches, two workers, and a reader that may
acknowledge a table's next transaction at any moment, staged or not: it can always read from the
sorter. Worker steps are those of `sink.dispatcher.TaskRun`, and `QuotaLedger` and `acquire_mode`
decide. Found for every reachable state:

1. Whoever cannot move is waited for by nobody: a state without a next one has everything
   acknowledged, no task, and all memory given back.
2. Where transactions are split, memory stays within the quota, or one batch that is larger than it.
   Where they are not, what exceeds it are at most the unfinished transactions of the running tasks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from sink.progress import Acquire, acquire_mode
from sink.quota import QuotaLedger

Transactions = tuple[tuple[int, ...], ...]  # sizes of batches


@dataclass(frozen=True, slots=True)
class Table:
    next: int = 0  # batch its next task begins with
    acked: int = 0  # transactions
    records: tuple[tuple[int, int], ...] = ()  # (transaction, size)


@dataclass(frozen=True, slots=True)
class Task:
    table: int
    at: int  # the next batch
    spare: int
    pending: int = 0  # appended, not handed over
    waits: bool = False


@dataclass(frozen=True, slots=True)
class State:
    tables: tuple[Table, ...]
    workers: tuple[Task | None, ...] = (None, None)

    @property
    def used(self) -> int:
        held = sum(task.spare + task.pending for task in self.workers if task)
        return held + sum(size for table in self.tables for _, size in table.records)


@dataclass(frozen=True, slots=True)
class World:
    total: int
    tables: tuple[Transactions, ...]
    split_txn: bool
    request: int = 1  # what a task begins with, and asks for at least
    waits_empty_handed: bool = True

    def batches(self, table: int) -> list[tuple[int, int]]:
        return [(txn, size) for txn, sizes in enumerate(self.tables[table]) for size in sizes]

    def ledger(self, used: int) -> QuotaLedger:
        ledger = QuotaLedger(self.total)
        ledger.used_bytes = used
        return ledger

    def successors(self, state: State) -> Iterator[State]:
        for number in range(len(self.tables)):
            yield from self.acknowledged(state, number)
        for number, task in enumerate(state.workers):
            if task is not None:
                yield from self.worked(state, number, task)
            else:
                yield from self.dispatched(state, number)

    def acknowledged(self, state: State, number: int) -> Iterator[State]:
        table = state.tables[number]
        if table.acked < len(self.tables[number]):
            kept = tuple(record for record in table.records if record[0] > table.acked)
            yield with_table(state, number, replace(table, acked=table.acked + 1, records=kept))

    def dispatched(self, state: State, worker: int) -> Iterator[State]:
        taken = {task.table for task in state.workers if task}
        if not self.ledger(state.used).has_room(self.request):
            return
        for number, table in enumerate(state.tables):
            batches = self.batches(number)
            at = max(
                [table.next, *(n + 1 for n, (txn, _) in enumerate(batches) if txn < table.acked)]
            )
            if number not in taken and at < len(batches):
                yield with_worker(state, worker, Task(number, at, self.request))

    def worked(self, state: State, worker: int, task: Task) -> Iterator[State]:
        batches = self.batches(task.table)
        ended = task.at == len(batches)
        finished = ended or task.at == 0 or batches[task.at][0] != batches[task.at - 1][0]
        if task.pending and (finished or self.split_txn):
            yield with_worker(
                self.recorded(state, task, batches[task.at - 1][0]),
                worker,
                replace(task, pending=0),
            )
        elif ended:
            yield self.left(state, worker, task.table, task.at)
        elif batches[task.at][1] <= task.spare:
            yield with_worker(state, worker, appended(task, batches[task.at][1], task.spare))
        else:
            yield from self.acquired(state, worker, task, batches[task.at][1], finished=finished)

    def acquired(
        self, state: State, worker: int, task: Task, size: int, *, finished: bool
    ) -> Iterator[State]:
        mode = acquire_mode(txn_finished=finished, split_txn=self.split_txn)
        held = 0 if self.waits_empty_handed else task.spare
        want = max(size - held, self.request)
        room = self.ledger(state.used - task.spare + held).has_room(want)
        if room or mode is Acquire.FORCE:
            yield with_worker(
                state, worker, appended(replace(task, waits=False), size, held + want)
            )
        elif mode is Acquire.TRY:
            yield self.left(state, worker, task.table, task.at)
        elif not task.waits:
            yield with_worker(state, worker, replace(task, spare=held, waits=True))

    def recorded(self, state: State, task: Task, txn: int) -> State:
        """Hand over; what is acknowledged already is released at once."""
        table = state.tables[task.table]
        records = (*table.records, (txn, task.pending)) if txn >= table.acked else table.records
        return with_table(state, task.table, replace(table, records=records))

    def left(self, state: State, worker: int, number: int, at: int) -> State:
        return with_worker(
            with_table(state, number, replace(state.tables[number], next=at)), worker, None
        )

    @property
    def bound(self) -> int:
        """Above the quota nothing begins: the excess is what the tasks that were running then still
        had to finish.
        """
        if self.split_txn:
            return max(
                self.total, *(size for table in self.tables for sizes in table for size in sizes)
            )
        return self.total + sum(sorted(max(map(sum, table)) for table in self.tables)[-2:])


def with_table(state: State, number: int, table: Table) -> State:
    return replace(state, tables=(*state.tables[:number], table, *state.tables[number + 1 :]))


def with_worker(state: State, number: int, task: Task | None) -> State:
    return replace(state, workers=(*state.workers[:number], task, *state.workers[number + 1 :]))


def appended(task: Task, size: int, available: int) -> Task:
    return replace(task, at=task.at + 1, spare=available - size, pending=task.pending + size)


def explore(world: World) -> tuple[int, list[State]]:
    """How many states there are, and those without a next one in which something is not done or not
    given back.
    """
    start = State(tuple(Table() for _ in world.tables))
    seen, fresh, stuck = {start}, [start], []
    while fresh:
        state = fresh.pop()
        assert state.used <= world.bound, state
        following = list(world.successors(state))
        acknowledged = all(
            table.acked == len(world.tables[n]) for n, table in enumerate(state.tables)
        )
        if not following and (not acknowledged or state.used or any(state.workers)):
            stuck.append(state)
        for successor in set(following) - seen:
            seen.add(successor)
            fresh.append(successor)
    return len(seen), stuck


WORLDS: list[tuple[Transactions, ...]] = [
    (((1, 1, 1),), ((1, 1, 1),)),
    (((1,), (2, 1)), ((2, 2),)),
    (((3, 1), (1,)), ((1, 2, 1),)),
    (((1, 1),), ((1, 1),), ((2,),)),
]


@pytest.mark.parametrize("tables", WORLDS)
@pytest.mark.parametrize("split_txn", [True, False])
@pytest.mark.parametrize(("total", "request_size"), [(1, 1), (2, 1), (2, 2), (3, 2), (4, 2)])
def test_no_interleaving_deadlocks_or_takes_too_much(
    tables, split_txn, total, request_size
) -> None:
    states, stuck = explore(World(total, tables, split_txn, request_size))
    assert states > 100
    assert not stuck


def test_waiting_with_memory_in_hand_would_deadlock() -> None:
    """The checker finds it: what is acknowledged comes back, what those who wait hold does not."""
    tables: tuple[Transactions, ...] = (((1, 2),), ((1, 2),))
    assert not explore(World(2, tables, split_txn=True, request=2))[1]
    assert explore(World(2, tables, split_txn=True, request=2, waits_empty_handed=False))[1]
