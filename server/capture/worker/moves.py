"""Tables move from one worker to another while their changefeed goes on.

`TableMover` chooses what moves and when; `TableOperators` carries each move out. Tables move for
three reasons:

1. Workers have come or gone: tables move until the workers' weights are even.
2. One worker has far more to do than its fair share (`_UNEVEN`): tables move away from it until it
   has little more than that (`_EVEN`). Once somebody has moved a table by command, this stops until
   workers come or go.
3. Somebody moves a table by command.

In one such division each table moves at most once, and a table that moved lately does not move
again because of its weight. A split table (`splitting`) moves part by part, or by command with all
its parts to one worker.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from server.capture.errors import TableMoveError
from server.capture.traffic import weights
from server.capture.worker.operators import REPORT_EVERY_S, TableOperators
from server.capture.worker.placement import Balance, Move, is_uneven, next_move
from server.capture.worker.pool import Worker
from server.capture.worker.share import WorkerShare
from server.capture.worker.shared_tables import SharedTables
from storage.model.errors import TidemarkError
from storage.model.span import Span
from storage.model.ts import MAX_TS

_LOOK_EVERY_S: Final = 0.5
_SETTLED_S: Final = 2.0
"""How long the set of workers must stay the same before tables move: in a rolling restart workers
come and go one after the other.
"""
MOVE_S: Final = 630.0
"""How long a call waits for a table's move at most."""
_AGAIN_S: Final = 10.0
_WEIGH_EVERY_S: Final = 60.0
"""How often weights are compared; as long as traffic is averaged over."""
_SPLIT_EVERY_S: Final = 600.0
"""How often tables are checked for a split: they grow slowly, and each check reads all their
regions from the coordinator.
"""
_UNEVEN: Final = 0.3
"""A worker may have this fraction more than its fair share before tables move away."""
_EVEN: Final = 0.1
"""Moves for weight stop at this fraction, well below where they start, so that they do not start
again at once.
"""
_log = structlog.get_logger(__name__)


class Shares(Protocol):
    """The shares of a run, as tasks of it."""

    async def start(self, worker: Worker) -> WorkerShare:
        """A share without tables on one more worker; it serves when this returns."""
        ...

    def end(self, share: WorkerShare) -> None:
        """End a share without tables."""
        ...


class TableMover:
    """Moves tables between the shares of a run, one group after the other."""

    def __init__(self, tables: SharedTables) -> None:
        self._tables = tables
        self._moving = asyncio.Lock()
        """Held from the choice of a move to its end, so that the choice stays valid."""
        self.operators = TableOperators(tables)
        self._is_by_hand = False
        """Whether a table was moved by command since workers joined or left."""
        self._kept_whole: set[Span] = set()
        """Tables that were put together by command since then."""

    async def run(self, workers: Callable[[], Sequence[Worker]], shares: Shares) -> None:
        """Divide the tables among the present workers, until cancelled.

        A worker that leaves keeps its share until its tables have moved away, as it may be one that
        is drained. A worker that dies ends the run by the error of its share.
        """
        try:
            await self._keep_balanced(workers, shares)
        finally:
            # Whoever waits for a move would wait for reports that do not come any more.
            self.operators.has_ended = True

    async def _keep_balanced(self, workers: Callable[[], Sequence[Worker]], shares: Shares) -> None:
        loop, since_s = asyncio.get_running_loop(), 0.0
        weighed_s = split_s = loop.time()
        names: set[str] = set()
        # The run began with an even division, so nothing moves before workers come or go.
        balanced = {worker.name for worker in self._tables.placement.workers}
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            there = {worker.name: worker for worker in workers()}
            if there.keys() != names:
                names, since_s = {*there}, loop.time()
            is_settled = loop.time() - since_s >= _SETTLED_S
            if not there or not is_settled:
                continue
            if names == balanced:
                if loop.time() >= split_s + _SPLIT_EVERY_S:
                    await self._split(self._staying(there))
                    split_s = loop.time()
                if loop.time() >= weighed_s + _WEIGH_EVERY_S:
                    await self._weigh(self._staying(there))
                    weighed_s = loop.time()
            elif await self._balance(there, shares):
                balanced, weighed_s = names, loop.time()
                split_s = weighed_s

    def _staying(self, there: Mapping[str, Worker]) -> list[Worker]:
        """The run's workers that are present. The run's own objects: a worker that was unreachable
        for a moment is another object in `there`.
        """
        return [worker for worker in self._tables.placement.workers if worker.name in there]

    async def move(self, span: Span, target: Worker) -> None:
        """Move one table, or all parts of one that is split, by command; returns when it has moved.

        Raises:
            TableMoveError: it cannot move now, or does not within `MOVE_S`. It is where it was, but
                for parts that have moved already.
            TidemarkError: a worker is gone.
        """
        try:
            async with asyncio.timeout(MOVE_S):
                await self._move(span, target)
        except TimeoutError:
            # The timeout may have come after the switch, while the first worker gave the table up.
            placement = self._tables.placement
            if not all(placement.has(target, part) for part in placement.parts(span)):
                raise TableMoveError(
                    f"table {span.table_id} has not moved within {MOVE_S:g} s: other tables were on "
                    f"their way, or {target.name} does not catch up; it stays where it is"
                ) from None

    async def _move(self, span: Span, target: Worker) -> None:
        async with self._moving:
            placement = self._tables.placement
            # Looked up only now: the move that was waited for may have taken the table elsewhere.
            for part in placement.parts(span):
                source = placement.worker(part)
                if target not in self._tables.shares:
                    raise TableMoveError(
                        f"{target.name} has left the changefeed; see `capture list`"
                    )
                if source is not target and not await self.operators.move(
                    Move((part,), source, target)
                ):
                    raise _schema_changed(span)
                self._is_by_hand = True

    async def split(self, whole: Span, *, put_together: bool) -> None:
        """Split a table over all workers by command, or put one together again; returns when that
        is done. It stays so until workers come or go.

        Raises:
            TableMoveError: it cannot now, or does not within `MOVE_S`; it is what it was.
            TidemarkError: a worker is gone, or the coordinator does not tell the regions.
        """
        splitting = self._tables.splitting
        if splitting is None:
            raise TableMoveError(
                "tables of this changefeed are not split: set `enable-table-across-nodes` of "
                "[scheduler] first, by `changefeed update --config FILE`"
            )
        try:
            async with asyncio.timeout(MOVE_S), self._moving:
                workers = self._tables.placement.workers
                if put_together:
                    shape = splitting.whole(whole, workers)
                else:
                    shape = await splitting.split(whole, workers)
                if shape is not None and not await self.operators.reshape(whole, shape):
                    raise _schema_changed(whole)
                self._is_by_hand = True
                if put_together:
                    self._kept_whole.add(whole)
                else:
                    self._kept_whole.discard(whole)
        except TimeoutError:
            raise TableMoveError(
                f"table {whole.table_id} was not divided anew within {MOVE_S:g} s: other tables were "
                "on their way, or a capture does not catch up; see `changefeed query`"
            ) from None

    async def _balance(self, there: Mapping[str, Worker], shares: Shares) -> bool:
        """Divide the tables among these workers; returns False if some tables cannot move yet."""
        placement = self._tables.placement
        names = {worker.name for worker in placement.workers}
        if names != there.keys():
            # A table that begins meanwhile is placed under this lock, and would be forgotten.
            async with self._tables.changing:
                await asyncio.to_thread(self._forget_ended)
            self._is_by_hand = False
            self._kept_whole.clear()
        for name in there.keys() - names:
            await self._join(there[name], shares)
        staying = self._staying(there)
        has_split = await self._split(staying)
        division = await self._division(0.0)
        while await self._step(staying, division):
            pass
        async with self._moving:
            for worker in placement.workers:
                if worker not in staying and placement.leave(worker):
                    # It has no tables any more, so that none of it can end meanwhile.
                    share = self._tables.shares[worker]
                    gone_ts = await asyncio.to_thread(self._gone_ts, share)
                    del self._tables.shares[worker]
                    self._tables.sink.leave(share, gone_ts)
                    shares.end(share)
                    _log.info(
                        "worker has no share any more",
                        changefeed=self._tables.changefeed,
                        worker=worker.name,
                    )
            is_even = await _next(division, placement.tables(), staying, lambda _: True) is None
            return has_split and is_even

    async def _split(self, staying: Sequence[Worker]) -> bool:
        """Split tables that have become large over these workers, and put small ones together
        again; returns False if some could not be changed yet.
        """
        splitting = self._tables.splitting
        if splitting is None:
            return True
        done = True
        for whole, shape in await splitting.shapes(staying):
            try:
                async with self._moving:
                    # Whoever had the lock before may have put it together by command.
                    if whole not in self._kept_whole:
                        done &= await self.operators.reshape(whole, shape)
            except TidemarkError as err:
                done = False
                _log.warning(
                    "a table is not split, or put together, for now",
                    changefeed=self._tables.changefeed,
                    table_id=whole.table_id,
                    parts=len(shape),
                    error=str(err),
                )
        if not done:
            await asyncio.sleep(_AGAIN_S)
        return done

    def _forget_ended(self) -> None:
        """Drop tables that have ended from the division."""
        # Tables whose end lies in kept history are still read where they are.
        sink = self._tables.sink
        kept = self._tables.catalog.versions.spans(sink.keep_ts or sink.checkpoint_ts())
        self._tables.placement.keep_only({each[0].span for each in kept})

    def _gone_ts(self, share: WorkerShare) -> int:
        """Return the ts at which the last ended table of a share ended; ended tables
        are not moved.
        """
        ends = (
            versions[-1].to_ts
            for versions in self._tables.catalog.versions.spans(0)
            if self._tables.sink.is_with(share, versions[-1].span)
        )
        return max((ts for ts in ends if ts < MAX_TS), default=0)

    async def _weigh(self, staying: Sequence[Worker]) -> None:
        """Move tables from a worker that has far more to do than the others."""
        # A table that moves leaves kept history behind: that takes a reason that does not pass.
        if self._is_by_hand or self._tables.sink.keep_ts:
            return
        division = await self._division(_EVEN)
        if not is_uneven(self._tables.placement.tables(), division.balance._replace(slack=_UNEVEN)):
            return
        division.moved |= self.operators.resting()
        while await self._step(staying, division):
            pass

    async def _division(self, slack: float) -> "_Division":
        """A division by the present weights, which stay fixed for all its moves: weights that
        change meanwhile would move tables to and fro.
        """
        traffic = await asyncio.to_thread(self._tables.traffic)
        count = sum(map(len, self._tables.placement.tables().values()))
        placement = self._tables.placement
        return _Division(Balance(weights(count, traffic), slack), placement.is_only_part)

    async def _step(self, staying: Sequence[Worker], division: "_Division") -> bool:
        """Make one move towards the division; returns False if no table can or needs to move."""
        async with self._moving:
            tables = self._tables.placement.tables()
            move = await _next(division, tables, staying, self.operators.can_move)
            if move is None:
                return False
            try:
                division.moved |= {*await self.operators.move(move)}
            except TidemarkError as err:
                _log.warning(
                    "tables stay where they are for now",
                    changefeed=self._tables.changefeed,
                    tables=len(move.spans),
                    worker=move.target.name,
                    error=str(err),
                )
            else:
                return True
        await asyncio.sleep(_AGAIN_S)
        return False

    async def _join(self, worker: Worker, shares: Shares) -> None:
        tables = self._tables
        tables.shares[worker] = share = await shares.start(worker)
        # The resolved_ts of the whole is the least of all shares', and must not go back when this
        # one joins: the whole is held where it is until the new share has reached that.
        with tables.sink.holding() as held_ts:
            while share.resolved_ts() < held_ts:  # noqa: ASYNC110 - reports come on a stream
                await asyncio.sleep(REPORT_EVERY_S)
            tables.sink.join(share)
        tables.placement.join(worker)


@dataclass(slots=True)
class _Division:
    """One division of the tables, by fixed weights; each table moves at most once in it."""

    balance: Balance
    is_only_part: Callable[[Worker, Span], bool]
    """Whether a worker has no other part of the table."""
    moved: set[Span] = field(default_factory=set)
    """The tables that have moved: they do not move again, except away from a worker that leaves."""

    def next(
        self,
        tables: Mapping[Worker, Sequence[Span]],
        staying: Sequence[Worker],
        can_move: Callable[[Span], bool],
    ) -> Move[Worker] | None:
        """The next move, among the tables for which `can_move` holds; None: there is none."""
        leaving = {
            span for worker, spans in tables.items() if worker not in staying for span in spans
        }

        def can_move_again(span: Span) -> bool:
            return (span not in self.moved or span in leaving) and can_move(span)

        return next_move(tables, staying, can_move_again, self.balance, self.is_only_part)


async def _next(
    division: _Division,
    tables: Mapping[Worker, Sequence[Span]],
    staying: Sequence[Worker],
    can_move: Callable[[Span], bool],
) -> Move[Worker] | None:
    """The next move. In a thread: with a million tables the search takes a second."""
    return await asyncio.to_thread(division.next, tables, staying, can_move)


def _schema_changed(span: Span) -> TableMoveError:
    return TableMoveError(
        f"table {span.table_id} cannot move now: its schema has changed since the checkpoint; try "
        "again when readers have acknowledged that"
    )
