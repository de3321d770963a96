"""Tables move from one worker to another while their changefeed goes on.

A move has three steps, so that one worker serves a table at any time. The second worker pulls the
tables from the checkpoint, while the first one serves them. When it is as far as with its other
tables, the owner asks it from then on. Then the first worker gives them up. What goes wrong before
the second step changes nothing.

Tables move when workers come or go, until their weights are even; while none does, once one worker
has far more to do than its part (`_UNEVEN`), and then until it has not; and when somebody asks. In
one such division each table moves once at most, and one that moved lately does not move again
because of its weight. Where somebody has moved a table, none moves until workers come or go.

A table that is split (`splitting`) moves part by part, or by command with all its parts to one
worker. It is split, and put together again, by the same steps: several workers may have what is new
then, and several what was before.

A table moves only when it had one schema since before the checkpoint: the second worker begins with
one. One whose schema changes meanwhile stays, and is tried again when that is acknowledged.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from server.capture import metrics
from server.capture.errors import ChangefeedNotRunningError, TableMoveError
from server.capture.traffic import weights
from server.capture.worker.placement import Balance, Move, is_uneven, next_move
from server.capture.worker.pool import Worker
from server.capture.worker.share import MovableShare, WorkerShare
from server.capture.worker.shared_tables import SharedTables
from server.changefeed.table import SourceTable
from sink.versions import Version, Versions
from sorter.errors import TableNotFoundError
from storage.model.errors import TidemarkError
from storage.model.span import Span
from storage.model.ts import MAX_TS
from storage.tasks import gather

_LOOK_EVERY_S: Final = 0.5
_SETTLED_S: Final = 2.0
"""Workers that come or go do so one after the other, as when all are restarted."""
_REPORT_EVERY_S: Final = 0.05
_CATCH_UP_S: Final = 600.0
"""A worker may take this long to catch up with a table before the move is given up."""
MOVE_S: Final = 630.0
"""How long a call waits for a table's move at most."""
_AGAIN_S: Final = 10.0
_UNDO_S: Final = 3.0
_WEIGH_EVERY_S: Final = 60.0
"""How often weights are compared; as long as traffic is averaged over."""
_SPLIT_EVERY_S: Final = 600.0
"""How often tables are checked for a split: they grow slowly, and each check reads all their
regions from the coordinator.
"""
_REST_S: Final = 300.0
"""A moved table stays on its worker for this long, whatever its weight."""
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
        self._has_ended = False
        self.moving: dict[Span, Worker] = {}
        """Tables that are on their way, and where to."""
        self._moved_s: dict[Span, float] = {}
        """When each table last moved."""
        self._is_by_hand = False
        """Whether a table was moved by command since workers joined or left."""
        self._kept_whole: set[Span] = set()
        """Tables that were put together by command since then."""

    async def run(self, workers: Callable[[], Sequence[Worker]], shares: Shares) -> None:
        """Divide the tables among the workers that are there, until cancelled.

        A worker that is not there any more keeps its share until its tables are elsewhere: it may
        be one that is drained. One that has died ends the run by the error of its share.
        """
        try:
            await self._keep_balanced(workers, shares)
        finally:
            # Whoever waits for a move would wait for reports that do not come any more.
            self._has_ended = True

    async def _keep_balanced(self, workers: Callable[[], Sequence[Worker]], shares: Shares) -> None:
        loop, since_s = asyncio.get_running_loop(), 0.0
        weighed_s = split_s = loop.time()
        names: set[str] = set()
        # What the run began with is even, and what somebody moved stays: until workers come or go.
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
        """The workers of the run that are there: as the run knows them, since one that was out of
        reach for a moment is another object there.
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
            # It may have been over when the first worker was to give it up.
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
                if source is not target and not await self._moved(Move((part,), source, target)):
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
                if shape is not None and not await self._reshaped(whole, shape):
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

    def progress(self, span: Span) -> tuple[str, int]:
        """Return the worker that a table is moving to and how far the table is there; empty: it is
        not moving.
        """
        target = self.moving.get(span)
        if target is None:
            return "", 0
        try:
            return target.id, self._tables.shares[target].resolved_ts(span)
        except TableNotFoundError:  # it is only just beginning
            return target.id, 0

    async def _balance(self, there: Mapping[str, Worker], shares: Shares) -> bool:
        """Divide the tables among these workers; whether that is done: some may have to wait."""
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
        """Split tables over these workers, and put others together, as they should be; whether that
        is done: some may have to wait.
        """
        splitting = self._tables.splitting
        if splitting is None:
            return True
        done = True
        for whole, shape in await splitting.shapes(staying):
            if whole in self._kept_whole:
                continue
            try:
                async with self._moving:
                    done &= await self._reshaped(whole, shape)
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
        """Tables that have ended are divided no more."""
        # Those that ended in history that is kept are still read where they are.
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
        division.moved |= self._resting()
        while await self._step(staying, division):
            pass

    async def _division(self, slack: float) -> "_Division":
        """Weights as they are now: that they change meanwhile must not move tables to and fro."""
        traffic = await asyncio.to_thread(self._tables.traffic)
        count = sum(map(len, self._tables.placement.tables().values()))
        placement = self._tables.placement
        return _Division(Balance(weights(count, traffic), slack), placement.is_only_part)

    def _resting(self) -> set[Span]:
        """The tables that moved lately."""
        now_s = asyncio.get_running_loop().time()
        self._moved_s = {
            span: moved_s for span, moved_s in self._moved_s.items() if now_s < moved_s + _REST_S
        }
        return {*self._moved_s}

    async def _step(self, staying: Sequence[Worker], division: "_Division") -> bool:
        """One move towards the division among these workers; False: there is none now."""
        async with self._moving:
            tables = self._tables.placement.tables()
            move = await _next(division, tables, staying, self._can_move)
            if move is None:
                return False
            try:
                division.moved |= {*await self._moved(move)}
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
        # The whole is no further than its last share, and must not go back to it: it waits where it
        # is until this one has the barrier of now.
        with tables.sink.holding() as held_ts:
            while share.resolved_ts() < held_ts:  # noqa: ASYNC110 - reports come on a stream
                await asyncio.sleep(_REPORT_EVERY_S)
            tables.sink.join(share)
        tables.placement.join(worker)

    def _can_move(self, span: Span) -> bool:
        return bool(self._movable([span]))

    def _movable(self, spans: Iterable[Span]) -> dict[Span, tuple[SourceTable, int]]:
        """Return the tables and parts that can move now, each with the ts of its schema."""
        movable: dict[Span, tuple[SourceTable, int]] = {}
        for span in spans:
            whole = self._movable_version(self._tables.placement.whole(span))
            if whole is not None:
                movable[span] = self._known_as(span, whole)
        return movable

    def _movable_version(self, span: Span) -> Version | None:
        """The version of a whole table, if it can move now."""
        versions, checkpoint_ts = self._tables.catalog.versions, self._tables.sink.checkpoint_ts()
        newest = versions.of_span(span, MAX_TS - 1)
        if newest is None or not _has_one_schema(versions, newest, checkpoint_ts):
            return None
        return newest

    def _check_same(self, whole: Span, version: Version) -> None:
        """Raises TableMoveError: the table has another version by now."""
        if self._movable_version(whole) is not version:
            raise TableMoveError(f"the schema of table {whole.table_id} has changed meanwhile")

    def _known_as(self, span: Span, version: Version) -> tuple[SourceTable, int]:
        """A table, or a part of it, as a worker has it."""
        table, splitting = self._tables.catalog.of(version), self._tables.splitting
        if span != table.span and splitting is not None:
            table = splitting.source.part(table, span)
        return table, version.from_ts

    async def _moved(self, move: Move[Worker]) -> tuple[Span, ...]:
        """Carry out a move, under the lock; the tables that have moved, which may be none."""
        tables = self._movable(move.spans)
        if not tables:
            return ()
        shares = self._tables.shares
        source, target = shares[move.source], shares[move.target]
        self.moving = dict.fromkeys(tables, move.target)
        try:
            await self._catch_up(tables, target)
            moved = await self._switch(tables, move, source, target)
        except BaseException:
            # Also when whoever asked waits no more; where the run ends, the share does, too.
            with suppress(TidemarkError):
                await asyncio.to_thread(target.remove, [*tables], _UNDO_S)
            raise
        finally:
            self.moving = {}
        now_s = asyncio.get_running_loop().time()
        self._moved_s |= dict.fromkeys(moved, now_s)
        await self._give_up(moved, source, target)
        metrics.TABLES_MOVED.labels(self._tables.changefeed).inc(len(moved))
        _log.info(
            "tables moved",
            changefeed=self._tables.changefeed,
            tables=len(moved),
            source=move.source.name,
            target=move.target.name,
        )
        return moved

    async def _reshaped(self, whole: Span, shape: Mapping[Span, Worker]) -> bool:
        """Let a table consist of other parts, or of itself, under the lock; False: it cannot now.

        Raises:
            TidemarkError: it is what it was.
        """
        placement, sink, shares = self._tables.placement, self._tables.sink, self._tables.shares
        version = self._movable_version(whole)
        if version is None:
            return False
        before = {
            span: shares[worker]
            for span in placement.parts(whole)
            if (worker := placement.find(span)) is not None
        }
        if len(before) < len(placement.parts(whole)):
            return False  # it is only just beginning
        # A part that stays the same stays where it is.
        after = {span: before.get(span, shares[worker]) for span, worker in shape.items()}
        new = {span: share for span, share in after.items() if span not in before}
        # Before they are anywhere: a plan over all tables would take their rows twice.
        sink.expect(new)
        try:
            await gather(
                self._catch_up({span: self._known_as(span, version)}, share)
                for span, share in new.items()
            )
            async with self._tables.changing:
                self._check_same(whole, version)
                # The table is as far as all tables at least; what is known of it may be older.
                checkpoint_ts = max(sink.checkpoint_ts(), sink.checkpoint_ts(whole))
                for span, share in new.items():
                    await asyncio.to_thread(share.count, {span: checkpoint_ts})
                placement.reshape(whole, shape)
                sink.reshape(whole, after)
        except BaseException:
            for span, share in new.items():
                with suppress(TidemarkError):
                    await asyncio.to_thread(share.remove, [span], _UNDO_S)
            raise
        gone = {span: share for span, share in before.items() if span not in after}
        await self._replaced(whole, gone, new)
        _log.info(
            "table split" if len(shape) > 1 else "table put together",
            changefeed=self._tables.changefeed,
            table_id=whole.table_id,
            parts=len(shape),
        )
        return True

    async def _replaced(
        self, whole: Span, before: Mapping[Span, MovableShare], after: Mapping[Span, MovableShare]
    ) -> None:
        """Remove the spans that a table consisted of from the workers."""
        now_s = asyncio.get_running_loop().time()
        self._moved_s |= dict.fromkeys(after, now_s)
        try:
            # A reader may have acknowledged the table by itself until it went over.
            checkpoint_ts = min(
                (share.checkpoint_ts(span) for span, share in before.items()), default=0
            )
            for span, share in after.items():
                if checkpoint_ts > share.checkpoint_ts(span):
                    await asyncio.to_thread(share.ack, checkpoint_ts, span)
            for span, share in before.items():
                await asyncio.to_thread(share.remove, [span])
        except TidemarkError as err:
            # They are asked about it no more: it costs them memory, until their shares end.
            _log.warning(
                "what a table consisted of could not be removed",
                table_id=whole.table_id,
                error=str(err),
            )

    async def _catch_up(
        self, tables: Mapping[Span, tuple[SourceTable, int]], target: MovableShare
    ) -> None:
        """Let the second worker pull the tables, until it is as far as with its others.

        Raises:
            TableMoveError: it takes too long.
            ChangefeedNotRunningError: the run has ended meanwhile.
        """
        start_ts = self._tables.sink.checkpoint_ts()
        # What an interrupted move has left there.
        await asyncio.to_thread(target.remove, [*tables])
        await asyncio.to_thread(target.add, list(tables.values()), start_ts)
        deadline_s = asyncio.get_running_loop().time() + _CATCH_UP_S
        while min(map(target.resolved_ts, tables)) < target.resolved_ts():
            if self._has_ended:
                raise ChangefeedNotRunningError(
                    f"changefeed {self._tables.changefeed} runs no more, or begins again; try again"
                )
            if asyncio.get_running_loop().time() > deadline_s:
                raise TableMoveError(
                    f"the worker has not caught up with {len(tables)} tables in {_CATCH_UP_S:g} s; "
                    "they stay where they are"
                )
            await asyncio.sleep(_REPORT_EVERY_S)

    async def _switch(
        self,
        tables: Mapping[Span, tuple[SourceTable, int]],
        move: Move[Worker],
        source: MovableShare,
        target: MovableShare,
    ) -> tuple[Span, ...]:
        """Ask the second worker from now on, for the tables whose schema is still the same."""
        async with self._tables.changing:
            now = self._movable(tables)
            same = tuple(
                span for span, (_, from_ts) in tables.items() if _is_at(now, span, from_ts)
            )
            if changed := tables.keys() - {*same}:
                await asyncio.to_thread(target.remove, [*changed])
            if same:
                # A table is as far as its share at least; what is known of it may be older.
                share_ts = source.checkpoint_ts()
                positions = {span: max(share_ts, source.checkpoint_ts(span)) for span in same}
                await asyncio.to_thread(target.count, positions)
                self._tables.placement.move(same, move.target)
                self._tables.sink.move(same, target)
        return same

    async def _give_up(
        self, spans: Sequence[Span], source: MovableShare, target: MovableShare
    ) -> None:
        """Let the first worker have the tables no more."""
        try:
            # A reader may have acknowledged a table by itself until it went over.
            for span in spans:
                checkpoint_ts = source.checkpoint_ts(span)
                if checkpoint_ts > target.checkpoint_ts(span):
                    await asyncio.to_thread(target.ack, checkpoint_ts, span)
            await asyncio.to_thread(source.remove, spans)
        except TidemarkError as err:
            # It is asked about them no more: they cost it memory, until its share ends.
            _log.warning("tables that moved could not be removed", error=str(err))


@dataclass(slots=True)
class _Division:
    """Tables are being divided: by weights that stay the same, and each moves once at most."""

    balance: Balance
    is_only_part: Callable[[Worker, Span], bool]
    """Whether a worker has no other part of the table."""
    moved: set[Span] = field(default_factory=set)
    """They do not move again, except away from a worker that leaves."""

    def next(
        self,
        tables: Mapping[Worker, Sequence[Span]],
        staying: Sequence[Worker],
        can_move: Callable[[Span], bool],
    ) -> Move[Worker] | None:
        """The next step, of those that can move now."""
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
    """The next step; of a million tables it takes a second to find."""
    return await asyncio.to_thread(division.next, tables, staying, can_move)


def _schema_changed(span: Span) -> TableMoveError:
    return TableMoveError(
        f"table {span.table_id} cannot move now: its schema has changed since the checkpoint; try "
        "again when readers have acknowledged that"
    )


def _has_one_schema(versions: Versions, version: Version, checkpoint_ts: int) -> bool:
    """Whether nothing above the checkpoint has a schema other than the newest."""
    # A table that was created at the checkpoint may still be planned from below it, as a reader may
    # have yet to come there: only who has had it from its beginning knows that nothing is missing.
    return version.from_ts < checkpoint_ts or (
        version.from_ts == checkpoint_ts and not versions.is_new(version)
    )


def _is_at(tables: Mapping[Span, tuple[SourceTable, int]], span: Span, from_ts: int) -> bool:
    return span in tables and tables[span][1] == from_ts
