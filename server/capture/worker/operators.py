"""One move of tables from a worker to another, or one change of how a table is split.

A move has three steps, so that one worker serves a table at any time. The second worker pulls the
tables from the checkpoint, while the first one serves them. When it is as far as with its other
tables, the owner asks it from then on. Then the first worker gives them up. What goes wrong before
the second step changes nothing.

A table is split, and put together again, by the same steps: several workers may have what is new
then, and several what was before.

A table moves only when it had one schema since before the checkpoint: the second worker begins with
one. One whose schema changes meanwhile stays, and is tried again when that is acknowledged.
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
            # Also when whoever asked waits no more; where the run ends, the share does, too.
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
                self._catch_up({span: self._pulled_as(span, version)}, share)
                for span, share in new.items()
            )
            async with self._tables.changing:
                self._check_same(whole, version)
                # The table is as far as all tables at least; what is known of it may be older.
                checkpoint_ts = max(sink.checkpoint_ts(), sink.checkpoint_ts(whole))
                for span, share in new.items():
                    await asyncio.to_thread(share.count, {span: checkpoint_ts})
                # Where a part that stays is now, which `shape` need not know: it may have moved
                # since that was thought of.
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

    async def _release(
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


def _has_one_schema(versions: Versions, version: Version, checkpoint_ts: int) -> bool:
    """Whether nothing above the checkpoint has a schema other than the newest."""
    # A table that was created at the checkpoint may still be planned from below it, as a reader may
    # have yet to come there: only who has had it from its beginning knows that nothing is missing.
    return version.from_ts < checkpoint_ts or (
        version.from_ts == checkpoint_ts and not versions.is_new(version)
    )


def _is_at(tables: Mapping[Span, tuple[SourceTable, int]], span: Span, from_ts: int) -> bool:
    return span in tables and tables[span][1] == from_ts
