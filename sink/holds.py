"""Withholds cuts while tables are read again, so that no reader sees such a table in part.

Pure but for a lock.

Some DDL changes rows without logging them, so its table is read again after it. From that DDL on no
cut is offered until all such tables are complete, at a high watermark; the next cut then goes up to
there. The time from the first DDL to that watermark is a window. Invariants:
1. No cut ends within a window, except at a DDL, which no cut may cross.
2. At such a DDL a table of the window stays as it was at the window's first DDL. All its rows come
   with the cut that reaches the window's end, and the table is emptied at the last DDL before,
   where that cut begins.
3. An acknowledgement within a window does not move the checkpoint beyond the window's first DDL, so
   a run that begins again there reads the tables again.
4. Such a window may then end at another ts. A reader that stands at its former end, where there is
   no DDL, has the tables complete: its next cut brings the later changes, and not all rows again.
"""

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from pyspark_tidemark.lake.schema import difference

from sink.errors import RangeHeldError
from sink.mounter import COLUMN_ID, TableMounter
from sink.versions import Ddl, Versions
from storage.model.errors import TidemarkError
from storage.model.ts import MAX_TS


@dataclass(slots=True)
class Window:
    """Tables that are read again: `since_ts` is the first DDL,
    `end_ts` where all are complete (MAX_TS: not yet).
    """

    since_ts: int
    end_ts: int = MAX_TS
    reasons: dict[int, str] = field(default_factory=dict)
    tables: dict[int, int | None] = field(default_factory=dict)
    """The commit_ts of each table's last DDL, by table id: its rows come from there on. None: the
    table has ended, and no rows come.
    """

    def has(self, ts: int) -> bool:
        """Whether `ts` lies within the window: a cut may begin or end there only at a DDL."""
        return self.since_ts <= ts < self.end_ts


class Holds:
    """The windows of one changefeed, in order, of which the last one may be open;
    safe to use from many threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: list[Window] = []
        self.error: TidemarkError | None = None
        """Why a table cannot be read again, and so no cut be offered."""

    def clear(self) -> None:
        """Forget all windows: the log is read anew, from the checkpoint."""
        with self._lock:
            self._windows.clear()
            self.error = None

    @property
    def open_since(self) -> int:
        """The commit_ts of the DDL from which on cuts are withheld; 0: no cut is."""
        with self._lock:
            window = self._open()
            return window.since_ts if window else 0

    @property
    def waiting(self) -> dict[int, tuple[int, str]]:
        """The tables for which cuts are withheld, by id: since which DDL they are read again,
        and why.
        """
        with self._lock:
            window = self._open()
            if window is None:
                return {}
            return {
                each: (ts, window.reasons.get(each, ""))
                for each, ts in window.tables.items()
                if ts is not None
            }

    def begin(self, ts: int, table_id: int, reason: str = "") -> None:
        """Note that a table is read again from its DDL at `ts` on, or once more because another DDL
        touched it.
        """
        with self._lock:
            window = self._open()
            if window is None:
                window = Window(ts)
                self._windows.append(window)
            window.tables[table_id] = ts
            if reason:
                window.reasons[table_id] = reason

    def leave(self, table_id: int) -> None:
        """Note that a table has ended before it was complete: readers see it as it was, until its
        end.
        """
        with self._lock:
            window = self._open()
            # Kept in the window, without rows: what readers had of it is emptied only where it
            # gets another key or type.
            if window is not None:
                window.tables[table_id] = None

    def end(self, ts: int) -> None:
        """Close the open window: all its tables are complete at `ts`."""
        with self._lock:
            window = self._open()
            if window is not None:
                window.end_ts = ts
            self.error = None

    def drop_below(self, checkpoint_ts: int) -> None:
        """Drop the windows that end at or below the checkpoint, which no reader needs any more."""
        with self._lock:
            self._windows = [each for each in self._windows if each.end_ts > checkpoint_ts]

    def bound(self, resolved_ts: int) -> int:
        """The ts up to which readers may go while everything is resolved up to `resolved_ts`;
        MAX_TS: nothing is withheld there, so `resolved_ts` is their limit.
        """
        with self._lock:
            window = self._of(resolved_ts)
            return window.since_ts if window else MAX_TS

    def cut_end(self, start_ts: int, end_ts: int) -> int:
        """The end of a cut that begins at `start_ts`, and that could reach `end_ts` if nothing was
        withheld.
        """
        with self._lock:
            window = self._of(end_ts)
            if window is None or end_ts == window.since_ts:
                return end_ts
            # A cut that begins before the window ends at its first DDL; one that begins there goes
            # up to where all tables are complete.
            return window.end_ts if start_ts >= window.since_ts else window.since_ts

    def acknowledged(self, ts: int) -> int:
        """The ts up to which an acknowledgement of `ts` may move the checkpoint: the first DDL of
        the window in which `ts` lies, else `ts`.
        """
        with self._lock:
            window = self._of(ts)
            return window.since_ts if window else ts

    def tables(self, start_ts: int, end_ts: int, ddls: Collection[int]) -> dict[int, int | None]:
        """For each table that is read again within a cut, the ts from which on its rows are part of
        the cut; None: none of its rows are.

        `ddls` are those at which the cut begins or ends.

        Raises:
            RangeHeldError: no cut ends there.
        """
        with self._lock:
            window = next((each for each in self._windows if each.has(start_ts)), None)
            if window is None or end_ts <= start_ts:
                return {}
            # Invariant 4: a start that is no DDL is where an earlier window ended, before a crash.
            if end_ts >= window.end_ts:
                is_within = start_ts == window.since_ts or start_ts in ddls
                return dict(window.tables) if is_within else {}
            if end_ts not in ddls:
                raise RangeHeldError(
                    f"no cut ends at {end_ts} any more: tables are read again since the DDL at "
                    f"{window.since_ts}, and are not complete there; ask for the latest cut"
                )
            return dict.fromkeys(window.tables)

    def shown(self, ddls: Sequence[Ddl], versions: Versions) -> tuple[Ddl, ...]:
        """The DDLs that readers get: tables that are read again are truncated at the DDL before
        their rows come.
        """
        with self._lock:
            windows = [each for each in self._windows if ddls and each.end_ts > ddls[0].ts]
        for window in windows:
            inside = [each.ts for each in versions.ddls(window.since_ts) if window.has(each.ts)]
            ddls = [
                _shown(each, window, inside[-1], versions) if window.has(each.ts) else each
                for each in ddls
            ]
        return tuple(ddls)

    def _open(self) -> Window | None:
        return self._windows[-1] if self._windows and self._windows[-1].end_ts == MAX_TS else None

    def _of(self, ts: int) -> Window | None:
        return next((each for each in self._windows if each.has(ts)), None)


def _shown(ddl: Ddl, window: Window, last_ts: int, versions: Versions) -> Ddl:
    ids = {version.name: version.span.table_id for version in versions.at(ddl.ts)}
    reread = {name for name, table_id in ids.items() if table_id in window.tables}
    others = tuple(name for name in ddl.truncated if name not in reread)
    names = {name for name in reread if _is_another(name, ddl.ts, versions)}
    if ddl.ts == last_ts:
        names |= {name for name in reread if window.tables[ids[name]] is not None}
    return replace(ddl, truncated=(*others, *sorted(names)))


def _is_another(name: str, ts: int, versions: Versions) -> bool:
    """Whether the key, or a column's type, is another one above `ts`: few targets could keep the
    old rows, also of a table that ends later, in the window.
    """
    now = versions.version(name, ts)
    before = versions.of_span(now.span, ts - 1) if now is not None else None
    # Most tables of a window are as they were: comparing the columns of each at each DDL is slow.
    if now is None or before is None or now is before:
        return False
    # Columns are paired by identity, not by name, as targets pair them.
    change = difference(before.mounter.schema, now.mounter.schema)
    is_retyped = bool(change.widened or change.incompatible)
    return is_retyped or _key(before.mounter) != _key(now.mounter)


def _key(mounter: TableMounter) -> list[tuple[str, bytes | None]]:
    """The key's columns by name and identity."""
    return [
        (name, (mounter.schema.field(name).metadata or {}).get(COLUMN_ID))
        for name in mounter.key_columns
    ]
