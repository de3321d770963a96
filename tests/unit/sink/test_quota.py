"""The memory quota: never a deadlock, never more than the quota but for what was forced,
nothing lost.
"""

import threading
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sink.errors import QuotaClosedError
from sink.progress import Acquire, ResolvedTs, acquire_mode
from sink.quota import MemQuota, QuotaLedger
from storage.model.span import Span

SPANS = [Span(1, b"a", b"b"), Span(2, b"b", b"c")]
TOTAL = 10

operations = st.lists(
    st.tuples(
        st.sampled_from(["try", "force", "refund", "record", "release", "remove", "add"]),
        st.sampled_from(SPANS),
        st.integers(0, 6),
    ),
    max_size=40,
)


@given(operations)
def test_used_is_what_tasks_hold_and_what_is_recorded(history: list[tuple[str, Span, int]]) -> None:
    ledger, held, forced, present = QuotaLedger(TOTAL), 0, 0, set()
    recorded: dict[Span, list[tuple[int, int]]] = {span: [] for span in SPANS}
    for moment, (operation, span, asked) in enumerate(history):
        size = min(asked, held) if operation in ("refund", "record") else asked
        if operation == "try":
            room = ledger.used_bytes + size <= TOTAL
            assert ledger.try_acquire(size) is room
            held += size * room
        elif operation == "force":
            ledger.force_acquire(size)
            held, forced = held + size, forced + size
        elif operation in ("refund", "record"):
            held -= size
            if operation == "refund":
                ledger.refund(size)
            else:
                ledger.record(span, ResolvedTs(moment), size)
                recorded[span] += [(moment, size)] if span in present else []
        elif operation == "release":
            freed = sum(part for ts, part in recorded[span] if ts <= size)
            recorded[span] = [(ts, part) for ts, part in recorded[span] if ts > size]
            assert ledger.release(span, ResolvedTs(size)) == freed
        elif operation == "remove":
            assert ledger.remove_table(span) == sum(part for _, part in recorded[span])
            recorded[span] = []
            present.discard(span)
        else:
            ledger.add_table(span)
            present.add(span)
        assert ledger.used_bytes == held + sum(
            part for parts in recorded.values() for _, part in parts
        )
        assert ledger.used_bytes <= TOTAL + forced


def test_a_batch_record_is_released_with_its_commit_ts_not_before() -> None:
    ledger = QuotaLedger(TOTAL)
    ledger.add_table(SPANS[0])
    ledger.force_acquire(7)
    ledger.record(SPANS[0], ResolvedTs(5, batch_id=1), 3)
    ledger.record(SPANS[0], ResolvedTs(5), 4)
    assert ledger.release(SPANS[0], ResolvedTs(4)) == 0
    assert ledger.release(SPANS[0], ResolvedTs(5)) == 7


class Task:
    """A task of the model: transactions of some batches each, by the seed's rules."""

    def __init__(self, span: Span, transactions: list[int], *, split_txn: bool) -> None:
        self.span, self.split_txn = span, split_txn
        self.batches = [
            (txn, part) for txn, parts in enumerate(transactions) for part in range(parts)
        ]
        self.done = self.pending = 0
        self.gave_up = False

    @property
    def at_boundary(self) -> bool:
        return self.done == 0 or self.batches[self.done][0] != self.batches[self.done - 1][0]


@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 3),
    st.data(),
)
def test_no_schedule_of_tasks_deadlocks_or_takes_more_than_one_transaction_each(
    transactions, split, total, data
) -> None:
    """Model check: tasks need one unit a batch; what they handed over is acknowledged whenever
    nobody else can move.
    """
    ledger = QuotaLedger(total)
    tasks = [
        Task(Span(i, b"", b""), parts, split_txn=split) for i, parts in enumerate(transactions)
    ]
    for task in tasks:
        ledger.add_table(task.span)
    ids = count(1)
    unfinished = list(tasks)
    for _ in range(200):
        movable = [task for task in unfinished if may_move(ledger, task)]
        if not unfinished:
            break
        if movable and data.draw(st.booleans()):
            step(ledger, data.draw(st.sampled_from(movable)), ids)
        else:
            acknowledge(ledger, tasks)
            movable = movable or [task for task in unfinished if may_move(ledger, task)]
            assert movable, "deadlock: everything handed over is acknowledged, and nobody can move"
            step(ledger, movable[0], ids)
        longest = sum(max(parts) for parts in transactions)
        assert ledger.used_bytes <= total + (0 if split else longest)
        unfinished = [task for task in unfinished if task.done < len(task.batches)]
    assert not unfinished


def may_move(ledger: QuotaLedger, task: Task) -> bool:
    mode = acquire_mode(txn_finished=task.at_boundary, split_txn=task.split_txn)
    return mode is not Acquire.BLOCK or ledger.has_room(1)


def step(ledger: QuotaLedger, task: Task, ids) -> None:
    mode = acquire_mode(txn_finished=task.at_boundary, split_txn=task.split_txn)
    if task.at_boundary and task.pending:
        ledger.record(task.span, ResolvedTs(task.batches[task.done - 1][0]), task.pending)
        task.pending = 0
    if mode is Acquire.TRY and not ledger.try_acquire(1):
        return
    if mode is not Acquire.TRY:
        ledger.force_acquire(1)
    task.pending += 1
    task.done += 1
    finished = task.done == len(task.batches)
    if finished or task.split_txn:
        ts = task.batches[task.done - 1][0]
        ledger.record(
            task.span, ResolvedTs(ts) if finished else ResolvedTs(ts, next(ids)), task.pending
        )
        task.pending = 0


def acknowledge(ledger: QuotaLedger, tasks: list[Task]) -> None:
    for task in tasks:
        ledger.release(task.span, ResolvedTs(1 << 60))


def test_block_acquire_waits_for_room_and_takes_it() -> None:
    quota, taken = MemQuota(TOTAL), threading.Event()
    assert quota.try_acquire(TOTAL)
    thread = threading.Thread(target=lambda: (quota.block_acquire(4), taken.set()))
    thread.start()
    assert not taken.is_set()
    quota.refund(4)
    assert taken.wait(60)
    thread.join()
    assert quota.used_bytes == TOTAL


def test_closing_wakes_up_who_waits() -> None:
    quota, errors = MemQuota(TOTAL), []
    quota.force_acquire(TOTAL)

    def wait() -> None:
        try:
            quota.block_acquire(1)
        except QuotaClosedError as err:
            errors.append(err)

    thread = threading.Thread(target=wait)
    thread.start()
    quota.close()
    thread.join(60)
    assert [error.code for error in errors] == ["ErrQuotaClosed"]


def test_more_than_the_quota_is_given_when_nothing_else_is_taken() -> None:
    quota = MemQuota(TOTAL)
    quota.block_acquire(TOTAL + 1)
    assert quota.used_bytes == TOTAL + 1


def test_refunding_more_than_was_acquired_is_a_defect() -> None:
    with pytest.raises(AssertionError):
        QuotaLedger(TOTAL).refund(1)


def test_memory_of_a_table_that_left_is_nobodys_and_an_idle_table_holds_no_account() -> None:
    ledger = QuotaLedger(TOTAL)
    ledger.force_acquire(6)
    ledger.record(SPANS[0], ResolvedTs(1), 6)
    assert ledger.used_bytes == 0

    ledger.add_table(SPANS[1])
    ledger.force_acquire(6)
    ledger.record(SPANS[1], ResolvedTs(1), 6)
    assert ledger.release(SPANS[1], ResolvedTs(1)) == 6
    assert ledger._accounts == {SPANS[1]: None}
    assert MemQuota(TOTAL).total_bytes == TOTAL
