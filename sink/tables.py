"""The tables of a sink manager (TiCDC's tableSinks), and the positions of all of them together
("the whole"), which it knows without visiting each table. Pure.

Invariants:
1. The resolved_ts of the whole is that of its slowest table, but never above the barrier (TiCDC's
   lastBarrierTs), which only moves forward, nor above the limit. A table that has ended no longer
   counts once it is resolved, or acknowledged, to its end.
2. Tables that are not busy have no rows in the sorter, so nothing to read, to stage or to clean.
3. The cost of every call but `add`, `settle` and the list of all tables is independent of the
   number of tables: `Slowest` knows the minimum over 100,000 tables after each of their steps.
4. A table that stands by is served, but is not part of the whole: another sink counts it until it
is
   counted here (`count`). So a table moves between captures while both have it.
"""

import heapq
import itertools
from collections.abc import Mapping
from typing import Generic, TypeVar

from sink.holds import Holds
from sink.progress import CheckpointPosition, SharedCheckpoint
from sink.table_sink import TableSink
from sorter.errors import TableExistsError, TableNotFoundError
from storage.model.span import Span
from storage.model.ts import MAX_TS

Key = TypeVar("Key")


class Slowest(Generic[Key]):
    """Keys with timestamps, and the least of these. Not thread-safe: calls must not overlap."""

    def __init__(self) -> None:
        self._ts: dict[Key, int] = {}
        # of each key an entry at or below its timestamp
        self._heap: list[tuple[int, int, Key]] = []
        # of entries with one timestamp the first comes up first
        self._serials = itertools.count()

    def __len__(self) -> int:
        return len(self._ts)

    def add(self, key: Key, ts: int) -> None:
        """Add a key, or begin it anew: entries of its former time are dropped when they come up."""
        self._ts[key] = ts
        heapq.heappush(self._heap, (ts, next(self._serials), key))
        self._tidy()

    def remove(self, key: Key) -> None:
        """Forget a key; one that is not there is no error."""
        self._ts.pop(key, None)
        self._tidy()

    def move(self, key: Key, ts: int) -> None:
        """Raise the timestamp of a present key to `ts`, if it is lower."""
        self._ts[key] = max(self._ts[key], ts)

    def least(self) -> tuple[int, Key] | None:
        """The key with the least timestamp, and that timestamp."""
        heap = self._heap
        # Entries are set right only when they come up: `move` then costs nothing, however often a
        # table moves between two looks.
        while heap:
            ts, serial, key = heap[0]
            now = self._ts.get(key)
            if now is None:
                heapq.heappop(heap)
            elif now != ts:
                heapq.heapreplace(heap, (now, serial, key))
            else:
                return ts, key
        return None

    def _tidy(self) -> None:
        # Tables that come and go leave entries above the least one, which never come up.
        if len(self._heap) > 2 * len(self._ts):
            self._heap = [(ts, next(self._serials), key) for key, ts in self._ts.items()]
            heapq.heapify(self._heap)


class TableSinks:
    """Table sinks by span. Not thread-safe: calls must not overlap."""

    def __init__(self) -> None:
        self.barrier_ts: int | None = None
        self.limit_ts = MAX_TS
        self.counting_ts = MAX_TS
        """How far the whole goes at most while it waits for a table that is counted in."""
        self.holds = Holds()
        self.shared = SharedCheckpoint()
        self.most_cleaned_ts = 0
        self.gone_ts = 0
        """Tables that are not here any more had rows at or below it."""
        self.counts = 0
        """How often a table that stood by became a part of the whole."""
        self.removals = 0
        """How often a table of the whole was taken out."""
        self._absent: set[Span] = set()
        self._tables: dict[Span, TableSink] = {}
        self._busy: dict[Span, TableSink] = {}
        self._ended: dict[Span, TableSink] = {}
        self._ended_ts = 0
        self._standby: set[Span] = set()
        self._resolved: Slowest[Span] = Slowest()
        self._checkpoints: Slowest[Span] = Slowest()

    def __len__(self) -> int:
        return len(self._tables)

    def add(self, table: TableSink, *, standby: bool = False) -> None:
        """Add a table; one that stands by is not part of the whole until `count`.

        Raises:
            TableExistsError: it is there already.
        """
        if table.span in self._tables:
            raise TableExistsError(
                f"table {table.span.table_id} is in the sink already; remove it first"
            )
        if standby:
            # What is acknowledged of all tables is of this one, too: where it is counted now.
            self._tables[table.span] = table
            self._standby.add(table.span)
            return
        # What was acknowledged of all tables was not of this one: it begins below.
        if table.start_ts < self.shared.position.checkpoint_ts:
            self.settle()
        self._tables[table.span] = table
        self._absent.discard(table.span)
        self._count(table)

    def count(self, span: Span) -> None:
        """Make a table that stands by a part of the whole; one that is already changes nothing.

        Raises:
            TableNotFoundError: no such table.
        """
        table = self.one(span)
        if span in self._standby:
            self._standby.discard(span)
            self.counts += 1
            self._count(table)

    def remove(self, span: Span, *, comes_back: bool = False) -> TableSink | None:
        """Remove a table. While a table that comes back is missing, the positions of the whole stay
        where they are, and the whole cannot be read (`check_complete`).
        """
        table = self._tables.get(span)
        if table is not None and span not in self._standby:
            self.removals += 1
            if comes_back:
                self._absent.add(span)
            elif table.end_ts < MAX_TS:
                # A range that begins below its end would be taken for one without rows of it.
                self.gone_ts = max(self.gone_ts, min(table.end_ts, table.checkpoint_ts))
                self.most_cleaned_ts = max(self.most_cleaned_ts, self.gone_ts)
        if span not in self._absent:
            self._resolved.remove(span)
            self._checkpoints.remove(span)
        self._standby.discard(span)
        self._busy.pop(span, None)
        self._ended.pop(span, None)
        return self._tables.pop(span, None)

    def check_complete(self) -> None:
        """Check that no table that comes back is missing: its rows would be missing in the whole.

        Raises:
            TableNotFoundError: one is missing.
        """
        if self._absent:
            raise TableNotFoundError(
                f"table {min(self._absent).table_id} is not in this sink now: it is being pulled "
                "again, or the sink is closed; ask again"
            )

    def get(self, span: Span) -> TableSink | None:
        """The table, if it is there."""
        return self._tables.get(span)

    def one(self, span: Span) -> TableSink:
        """The table.

        Raises:
            TableNotFoundError: no such table.
        """
        table = self._tables.get(span)
        if table is None:
            raise TableNotFoundError(
                f"table {span.table_id} is not in this sink; look where it is scheduled"
            )
        return table

    def all(self) -> list[TableSink]:
        """Every table of the whole."""
        return self._counted(self._tables)

    def busy(self) -> list[TableSink]:
        """The tables of the whole that may have rows in the sorter, or staged ones."""
        return self._counted(self._busy)

    def with_rows(self) -> list[TableSink]:
        """The same, and those of the tables that stand by."""
        return list(self._busy.values())

    def note_rows(self, table: TableSink) -> None:
        """Note that the table has rows."""
        self._busy[table.span] = table

    def note_empty(self, table: TableSink) -> None:
        """Note that the table has no rows any more."""
        if self._busy.get(table.span) is table:
            del self._busy[table.span]

    def resolve(self, table: TableSink, ts: int) -> bool:
        """Note that the table is complete up to `ts`; returns whether the whole is further than
        before.
        """
        before = self._least(self._resolved, 0)
        table.resolve(ts)
        if table.span not in self._standby:
            self._resolved.move(table.span, table.complete_ts)
        return self._least(self._resolved, MAX_TS) > before

    def end(self, table: TableSink, ts: int) -> None:
        """Note that the table has no rows above `ts`."""
        table.end_ts = ts
        self._ended_ts = max(self._ended_ts, ts)
        self._ended[table.span] = table
        if table.span not in self._standby:
            self._resolved.move(table.span, table.complete_ts)
        self._note_checkpoint(table)

    def reopen(self, table: TableSink, ts: int) -> bool:
        """Let a table that had ended have rows above `ts`; False: it had not ended."""
        if self._ended.pop(table.span, None) is None:
            return False
        table.reopen(ts)
        table.resolve(ts)
        if table.span not in self._standby:
            self._resolved.add(table.span, table.resolved_ts)
            self._checkpoints.add(table.span, table.checkpoint_ts)
        return True

    def acknowledged(self, table: TableSink) -> None:
        """Note that the table's checkpoint has moved; one that has left meanwhile is no error."""
        if self._tables.get(table.span) is table:
            self._note_checkpoint(table)

    def note_cleaned(self, table: TableSink) -> int:
        """Note that the table is about to be cleaned up to the ts that is returned: no plan may
        begin below it from now on.
        """
        cleaned_ts = table.cleaned_ts
        self.most_cleaned_ts = max(self.most_cleaned_ts, cleaned_ts)
        return cleaned_ts

    def acknowledge_all(self, ts: int) -> bool:
        """Acknowledge everything up to `ts`, also for tables without rows; returns whether the
        shared checkpoint has moved.
        """
        moved = self.shared.move(ts)
        # Only tables that have ended can drop out of the minimum here; the others are not visited.
        for table in self._ended.values():
            self._note_checkpoint(table)
        cleaned_ts = min(self.shared.position.previous_ts, self.shared.keep_ts)
        self.most_cleaned_ts = max(self.most_cleaned_ts, cleaned_ts)
        return moved

    def keep_above(self, ts: int) -> bool:
        """Keep acknowledged rows above `ts`, and not those below any more; returns whether that
        leaves rows to drop.
        """
        is_first = self.shared.keep_ts == MAX_TS
        if not is_first and ts <= self.shared.keep_ts:
            return False
        self.shared.keep_ts = ts
        self.most_cleaned_ts = max(self.most_cleaned_ts, ts)
        return not is_first

    @property
    def keeps_history(self) -> bool:
        """Whether acknowledged rows are kept for long."""
        return self.shared.keep_ts < MAX_TS

    def settle(self) -> None:
        """Let each table have its own checkpoint."""
        for table in self._tables.values():
            table.settle()
            self._note_checkpoint(table)
        self.shared.position = CheckpointPosition(0, 0)

    def passed(self) -> list[TableSink]:
        """The tables that have ended, are acknowledged to their end, and cannot be read again."""
        whole_ts = self.checkpoint_ts(None)
        for table in self._ended.values():
            # A reader that acknowledges table by table does not come back to one that has ended:
            # its `cleaned_ts`, the checkpoint before the last, would stay below its end.
            if table.end_ts <= table.checkpoint_ts < whole_ts and table.lost is None:
                table.ack(None, whole_ts)
        return [table for table in self._ended.values() if table.cleaned_ts >= table.end_ts]

    def upper_ts(self, table: TableSink) -> int:
        """How far the table may go."""
        return min(table.resolved_ts, table.end_ts, self._bound_ts())

    def complete_ts(self) -> int:
        """How far every table is known, whatever the barrier says."""
        return self._least(self._resolved, MAX_TS)

    def resolved_ts(self, span: Span | None) -> int:
        """How far the table (None: every table) may go; without tables the barrier,
        0 if there is none.

        Raises:
            TableNotFoundError: no such table.
        """
        if span is not None:
            return self.upper_ts(self.one(span))
        return min(self._least(self._resolved, self._without_tables()), self._bound_ts())

    def checkpoint_ts(self, span: Span | None) -> int:
        """Everything of the table (None: every table) up to it is committed;
        without tables as `resolved_ts`.

        Raises:
            TableNotFoundError: no such table.
        """
        if span is not None:
            return self.one(span).checkpoint_ts
        return max(
            self._least(self._checkpoints, self._without_tables()),
            self.shared.position.checkpoint_ts,
        )

    def sorted_ts(self) -> int:
        """How far every table is sorted, whatever bounds what may be read;
        without tables as `resolved_ts`.
        """
        return self._least(self._resolved, self._without_tables())

    def slowest(self) -> tuple[Span | None, Span | None]:
        """The tables with the least resolved_ts and the least checkpoint_ts."""
        resolved, checkpoint = self._resolved.least(), self._checkpoints.least()
        return resolved[1] if resolved else None, checkpoint[1] if checkpoint else None

    def _count(self, table: TableSink) -> None:
        self._resolved.add(table.span, table.complete_ts)
        self._checkpoints.add(table.span, table.checkpoint_ts)
        self._note_checkpoint(table)
        self.most_cleaned_ts = max(self.most_cleaned_ts, table.cleaned_ts)

    def _counted(self, tables: Mapping[Span, TableSink]) -> list[TableSink]:
        if not self._standby:
            return list(tables.values())
        return [table for span, table in tables.items() if span not in self._standby]

    def _note_checkpoint(self, table: TableSink) -> None:
        if table.span in self._standby:
            return
        checkpoint_ts = table.checkpoint_ts
        self._checkpoints.move(
            table.span, checkpoint_ts if checkpoint_ts < table.end_ts else MAX_TS
        )

    def _bound_ts(self) -> int:
        bound_ts = min(self.limit_ts, self.counting_ts)
        if self.barrier_ts is not None:
            bound_ts = min(bound_ts, self.barrier_ts)
        return min(bound_ts, self.holds.bound(min(bound_ts, self._least(self._resolved, MAX_TS))))

    def _without_tables(self) -> int:
        """Where the whole stands when no table holds it: at the barrier,
        or where the last table ended.
        """
        return self._ended_ts if self.barrier_ts is None else self._bound_ts()

    def _least(self, timestamps: Slowest[Span], otherwise: int) -> int:
        least = timestamps.least()
        return least[0] if least is not None and least[0] < MAX_TS else otherwise
