"""One move of tables from a worker to another, or one change of how a table is split.

A move has three steps, so that exactly one worker serves a table at any time:

1. The second worker pulls the tables from the checkpoint, while the first one serves them.
2. When the second worker has caught up, the owner asks it for the tables from then on.
3. The first worker drops them.

An error before step 2 changes nothing. A table is split, or put together again, by the same steps,
from several workers to several.

A table moves only if it has had one schema since before the checkpoint, because the second worker
begins with one schema. If its schema changes during the move, it stays, and the move is tried again
when readers have acknowledged the change.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import structlog

from server.capture import metrics
from server.capture.errors import ChangefeedNotRunningError, TableMoveError
from server.capture.worker.placement import Move
from server.capture.worker.pool import Worker
from server.capture.worker.share import MovableShare
from server.capture.worker.shared_tables import SharedTables
from server.changefeed.table import SourceTable
from sink.versions import Version, Versions
from sorter.errors import TableNotFoundError
from storage.model.errors import TidemarkError
from storage.model.span import Span
from storage.model.ts import MAX_TS
from storage.tasks import gather

REPORT_EVERY_S: Final = 0.05
_CATCH_UP_S: Final = 600.0
"""A worker may take this long to catch up with a table before the move is given up."""
_UNDO_S: Final = 3.0
_REST_S: Final = 300.0
"""A moved table stays on its worker for this long, whatever its weight."""
_log = structlog.get_logger(__name__)


class TableOperators:
    """Carries out moves and splits of a run's tables, one at a time: callers hold a lock."""

    def __init__(self, tables: SharedTables) -> None:
        self._tables = tables
        self.has_ended = False
        """The run has ended, so workers report no more."""
        self.moving: dict[Span, Worker] = {}
        """Tables that are on their way, and where to."""
        self._moved_s: dict[Span, float] = {}
        """When each table last moved."""

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

    def resting(self) -> set[Span]:
        """The tables that moved lately."""
        now_s = asyncio.get_running_loop().time()
        self._moved_s = {
            span: moved_s for span, moved_s in self._moved_s.items() if now_s < moved_s + _REST_S
        }
        return {*self._moved_s}

    def can_move(self, span: Span) -> bool:
        """Whether a table, or a part of one, can move now."""
        return bool(self._movable([span]))

    def _movable(self, spans: Iterable[Span]) -> dict[Span, tuple[SourceTable, int]]:
        """Return the tables and parts that can move now, each with the ts of its schema."""
        movable: dict[Span, tuple[SourceTable, int]] = {}
        for span in spans:
            whole = self._movable_version(self._tables.placement.whole(span))
            if whole is not None:
                movable[span] = self._pulled_as(span, whole)
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

    def _pulled_as(self, span: Span, version: Version) -> tuple[SourceTable, int]:
        """A table, or a part of it, as a worker has it."""
        table, splitting = self._tables.catalog.of(version), self._tables.splitting
        if span != table.span and splitting is not None:
            table = splitting.source.part(table, span)
        return table, version.from_ts

    async def move(self, move: Move[Worker]) -> tuple[Span, ...]:
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
            # Also if the caller has given up waiting. If the run ends, the share ends with it.
            with suppress(TidemarkError):
                await asyncio.to_thread(target.remove, [*tables], _UNDO_S)
            raise
        finally:
            self.moving = {}
        now_s = asyncio.get_running_loop().time()
        self._moved_s |= dict.fromkeys(moved, now_s)
        await self._release(moved, source, target)
        metrics.TABLES_MOVED.labels(self._tables.changefeed).inc(len(moved))
        _log.info(
            "tables moved",
            changefeed=self._tables.changefeed,
            tables=len(moved),
            source=move.source.name,
            target=move.target.name,
        )
        return moved

    async def reshape(self, whole: Span, shape: Mapping[Span, Worker]) -> bool:
        """Divide a table into other parts, or put it together, under the lock. `shape` has the
        worker of each new part. Returns False if the table cannot be changed now.

        Raises:
            TidemarkError: it could not be done; the table is divided as before.
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
            return False  # the table has only just begun, and is not placed yet
        # A part that stays the same stays where it is.
        after = {span: before.get(span, shares[worker]) for span, worker in shape.items()}
        new = {span: share for span, share in after.items() if span not in before}
        # Before any worker has them: otherwise a plan over all tables would count their rows twice.
        sink.expect(new)
        try:
            await gather(
                self._catch_up({span: self._pulled_as(span, version)}, share)
                for span, share in new.items()
            )
            async with self._tables.changing:
                self._check_same(whole, version)
                # The table's own checkpoint may have been reported before that of all tables, which
                # it has reached, too.
                checkpoint_ts = max(sink.checkpoint_ts(), sink.checkpoint_ts(whole))
                for span, share in new.items():
                    await asyncio.to_thread(share.count, {span: checkpoint_ts})
                # A part that stays is on its present worker; it may have moved since `shape` was
                # made.
                stayed = {
                    span: placement.find(span) or shape[span] for span in before.keys() & after
                }
                placement.reshape(whole, {**shape, **stayed})
                sink.reshape(whole, after)
        except BaseException:
            for span, share in new.items():
                with suppress(TidemarkError):
                    await asyncio.to_thread(share.remove, [span], _UNDO_S)
            raise
        gone = {span: share for span, share in before.items() if span not in after}
        await self._remove_former_spans(whole, gone, new)
        _log.info(
            "table split" if len(shape) > 1 else "table put together",
            changefeed=self._tables.changefeed,
            table_id=whole.table_id,
            parts=len(shape),
        )
        return True

    async def _remove_former_spans(
        self, whole: Span, before: Mapping[Span, MovableShare], after: Mapping[Span, MovableShare]
    ) -> None:
        """Remove the table's former parts from their workers."""
        now_s = asyncio.get_running_loop().time()
        self._moved_s |= dict.fromkeys(after, now_s)
        try:
            # A reader may have acknowledged the former parts until the switch.
            checkpoint_ts = min(
                (share.checkpoint_ts(span) for span, share in before.items()), default=0
            )
            for span, share in after.items():
                if checkpoint_ts > share.checkpoint_ts(span):
                    await asyncio.to_thread(share.ack, checkpoint_ts, span)
            for span, share in before.items():
                await asyncio.to_thread(share.remove, [span])
        except TidemarkError as err:
            # Nobody reads them any more: they only take memory until the workers' shares end.
            _log.warning(
                "what a table consisted of could not be removed",
                table_id=whole.table_id,
                error=str(err),
            )

    async def _catch_up(
        self, tables: Mapping[Span, tuple[SourceTable, int]], target: MovableShare
    ) -> None:
        """Let the second worker pull the tables, and wait until they are as far as its other
        tables.

        Raises:
            TableMoveError: it takes too long.
            ChangefeedNotRunningError: the run has ended meanwhile.
        """
        start_ts = self._tables.sink.checkpoint_ts()
        # An interrupted move may have left them there.
        await asyncio.to_thread(target.remove, [*tables])
        await asyncio.to_thread(target.add, list(tables.values()), start_ts)
        deadline_s = asyncio.get_running_loop().time() + _CATCH_UP_S
        while min(map(target.resolved_ts, tables)) < target.resolved_ts():
            if self.has_ended:
                raise ChangefeedNotRunningError(
                    f"changefeed {self._tables.changefeed} runs no more, or begins again; try again"
                )
            if asyncio.get_running_loop().time() > deadline_s:
                raise TableMoveError(
                    f"the worker has not caught up with {len(tables)} tables in {_CATCH_UP_S:g} s; "
                    "they stay where they are"
                )
            await asyncio.sleep(REPORT_EVERY_S)

    async def _switch(
        self,
        tables: Mapping[Span, tuple[SourceTable, int]],
        move: Move[Worker],
        source: MovableShare,
        target: MovableShare,
    ) -> tuple[Span, ...]:
        """Let the second worker serve the tables from now on, except those whose schema has
        changed; returns the tables that it serves.
        """
        async with self._tables.changing:
            now = self._movable(tables)
            same = tuple(
                span for span, (_, from_ts) in tables.items() if _is_at(now, span, from_ts)
            )
            if changed := tables.keys() - {*same}:
                await asyncio.to_thread(target.remove, [*changed])
            if same:
                # The table's own checkpoint may have been reported before its share's, which it has
                # reached, too.
                share_ts = source.checkpoint_ts()
                positions = {span: max(share_ts, source.checkpoint_ts(span)) for span in same}
                await asyncio.to_thread(target.count, positions)
                self._tables.placement.move(same, move.target)
                self._tables.sink.move(same, target)
        return same

    async def _release(
        self, spans: Sequence[Span], source: MovableShare, target: MovableShare
    ) -> None:
        """Drop the tables from the first worker."""
        try:
            # A reader may have acknowledged a table at the first worker until the switch.
            for span in spans:
                checkpoint_ts = source.checkpoint_ts(span)
                if checkpoint_ts > target.checkpoint_ts(span):
                    await asyncio.to_thread(target.ack, checkpoint_ts, span)
            await asyncio.to_thread(source.remove, spans)
        except TidemarkError as err:
            # Nobody reads them there any more: they only take memory until its share ends.
            _log.warning("tables that moved could not be removed", error=str(err))


def _has_one_schema(versions: Versions, version: Version, checkpoint_ts: int) -> bool:
    """Whether nothing above the checkpoint has a schema other than the newest."""
    # A reader that is still below the checkpoint may plan a table that was created at it: only a
    # worker that has had the table from its beginning can say that no rows are missing.
    return version.from_ts < checkpoint_ts or (
        version.from_ts == checkpoint_ts and not versions.is_new(version)
    )


def _is_at(tables: Mapping[Span, tuple[SourceTable, int]], span: Span, from_ts: int) -> bool:
    return span in tables and tables[span][1] == from_ts
