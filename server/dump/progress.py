"""Progress of a dump by table. Pure.

`TableProgress` is what is durable: the table's ranges of keys, and in each the last key that is at
the target for good (docs/format/dump.md). `TableDump` is a table while it is dumped: its durable
progress, and what is ahead of that in this process only. Invariants:
1. What is durable of a cursor is at the target: a chunk counts once the checkpoint has reached its
   high watermark, and after all chunks before it in its range. Whatever is lost in a crash is read
   again, never left out.
2. A chunk that must be read again takes those behind it in its range with it: nothing is counted
   over a gap.
"""

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from storage.model.errors import CorruptError


class TableState(enum.Enum):
    """The state of one table of a dump."""

    WAITING = "waiting"
    DUMPING = "dumping"
    DONE = "done"
    FAILED = "failed"
    DROPPED = "dropped"

    @property
    def is_over(self) -> bool:
        """Whether no more of it will be read."""
        return self in {TableState.DONE, TableState.FAILED, TableState.DROPPED}


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of a key as the server gave it: the protocol's type and bytes,
    to be bound again as they are.
    """

    type: int
    data: bytes


Cursor = tuple[Cell, ...]
"""A row's key; rows behind it are those whose key is greater in the server's order."""


@dataclass(frozen=True, slots=True)
class Range:
    """The keys in `(after, until]`, without end where None; `after` moves on."""

    after: Cursor | None = None
    until: Cursor | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class TableProgress:
    """The durable progress of one table."""

    name: str
    table_id: int
    job: str
    state: TableState = TableState.WAITING
    error: str = ""
    ranges: tuple[Range, ...] = (Range(),)
    rows: int = 0
    bytes: int = 0
    chunks: int = 0
    rows_estimated: int = 0
    high_ts: int = 0
    """The commit_ts of the last high watermark that counts."""
    rows_per_s: int = 0
    """The recent reading rate."""
    rows_read: int = 0
    """Rows that were read, at the target or not; less again when chunks must be read again."""
    chunks_verified: int = 0
    """The number of `chunks` whose sums matched the server's."""
    chunks_repaired: int = 0
    """Chunks that were read again as their sums were not."""

    @classmethod
    def parse(cls, doc: Mapping[str, Any]) -> Self:
        """Read the document of `to_doc`.

        Raises:
            CorruptError: it is not one.
        """
        try:
            return cls(
                name=str(doc["name"]),
                table_id=int(doc["table_id"]),
                job=str(doc["job"]),
                state=TableState(doc["state"]),
                error=str(doc["error"]),
                ranges=tuple(map(_range, doc["ranges"])),
                rows=int(doc["rows"]),
                bytes=int(doc["bytes"]),
                chunks=int(doc["chunks"]),
                rows_estimated=int(doc["rows_estimated"]),
                high_ts=int(doc["high_ts"]),
                rows_per_s=int(doc["rows_per_s"]),
                rows_read=int(doc.get("rows_read", doc["rows"])),
                chunks_verified=int(doc.get("chunks_verified", 0)),
                chunks_repaired=int(doc.get("chunks_repaired", 0)),
            )
        except (KeyError, TypeError, ValueError) as err:
            raise CorruptError(f"not a dump's progress: {err!r}; restart the dump") from err

    def to_doc(self) -> dict[str, Any]:
        """The document in the metadata."""
        return {
            "name": self.name,
            "table_id": self.table_id,
            "job": self.job,
            "state": self.state.value,
            "error": self.error,
            "ranges": [_range_doc(each) for each in self.ranges],
            "rows": self.rows,
            "bytes": self.bytes,
            "chunks": self.chunks,
            "rows_estimated": self.rows_estimated,
            "high_ts": self.high_ts,
            "rows_per_s": self.rows_per_s,
            "rows_read": self.rows_read,
            "chunks_verified": self.chunks_verified,
            "chunks_repaired": self.chunks_repaired,
        }


def _range(doc: Mapping[str, Any]) -> Range:
    return Range(_cursor(doc["after"]), _cursor(doc["until"]), bool(doc["done"]))


def _range_doc(each: Range) -> dict[str, Any]:
    return {"after": _cursor_doc(each.after), "until": _cursor_doc(each.until), "done": each.done}


def _cursor(doc: Any) -> Cursor | None:
    return (
        None if doc is None else tuple(Cell(int(kind), bytes.fromhex(data)) for kind, data in doc)
    )


def _cursor_doc(cursor: Cursor | None) -> list[list[Any]] | None:
    return None if cursor is None else [[cell.type, cell.data.hex()] for cell in cursor]


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """What was read of one range of a table as a chunk."""

    place: int
    """The range's index in the table's ranges."""
    epoch: int
    """The range's epoch when the chunk was read; see `TableDump.set_back`."""
    last: Cursor | None
    """The key of its last row; None: it has no rows."""
    ends: bool
    """Whether the range ends with it."""
    rows: int
    bytes: int
    checked: bool = False
    """Whether it counts only if its sum matches the server's."""


@dataclass(slots=True)
class _RangeProgress:
    """One range while it is read."""

    durable: Range
    """The range with the cursor that is durable at the target."""
    epoch: int = 0
    """Grows each time the range is set back: chunks of an earlier epoch do not count."""
    unsettled: deque[tuple[int, ChunkRead]] = field(default_factory=deque)
    """The chunks whose windows have closed and that are not durable yet, with the commit_ts of
    their high watermarks.
    """
    rows_ahead: int = 0
    """Rows of chunks that were read and are not durable yet, those of open windows included."""

    @property
    def closed(self) -> Range:
        """The range with the cursor behind the last chunk whose window has closed."""
        return _behind(self.durable, self.unsettled[-1][1]) if self.unsettled else self.durable


class TableDump:
    """One table while it is dumped: `durable`, and what is ahead of it in this process only.

    A chunk is read (`note_read`), its window closes (`count_chunk`), and the checkpoint passes its
    high watermark (`settle`). A chunk that must be read again is `set_back` instead.
    """

    def __init__(self, durable: TableProgress) -> None:
        self.durable = durable
        self._ranges = [_RangeProgress(each) for each in durable.ranges]
        self._unread = list(durable.ranges)
        """Each range from the last key that was read on."""
        self._expected = 0

    def next_range(self, taken: frozenset[int] = frozenset()) -> int | None:
        """A range that has more to read and is not `taken`; None: there is none."""
        open_ranges = (
            place for place, each in enumerate(self._unread) if not each.done and place not in taken
        )
        return next(open_ranges, None)

    def unread(self, place: int) -> tuple[Range, int]:
        """The part of the range that is still to be read, and the range's epoch."""
        return self._unread[place], self._ranges[place].epoch

    def note_read(self, chunk: ChunkRead) -> None:
        """Let the next chunk of the range begin behind this one; ignores one of an older epoch."""
        progress = self._range_of(chunk)
        if progress is not None:
            self._unread[chunk.place] = _behind(self._unread[chunk.place], chunk)
            progress.rows_ahead += chunk.rows

    def count_chunk(self, chunk: ChunkRead, commit_ts: int) -> bool:
        """Count a chunk whose window has closed, with the high watermark at `commit_ts`. Returns
        False, and its rows do not count, if it was set back meanwhile.
        """
        progress = self._range_of(chunk)
        if progress is None:
            return False
        progress.unsettled.append((commit_ts, chunk))
        return True

    def set_back(self, chunk: ChunkRead) -> bool:
        """Set the range back behind the last chunk that counts, so that `chunk` is read again, and
        what was read behind it. Returns False if that was done before.
        """
        progress = self._range_of(chunk)
        if progress is None:
            return False
        # Chunks behind it were read already, or are being read: with the new epoch none of them
        # counts any more.
        progress.epoch += 1
        progress.rows_ahead = sum(each.rows for _, each in progress.unsettled)
        self._unread[chunk.place] = progress.closed
        return True

    def _range_of(self, chunk: ChunkRead) -> _RangeProgress | None:
        """The range that a chunk was read of; None: it was set back or planned anew since."""
        return self._ranges[chunk.place] if self.is_current(chunk.place, chunk.epoch) else None

    def is_current(self, place: int, epoch: int) -> bool:
        """Whether the range is still in that epoch, so that what `unread` returned is valid."""
        return place < len(self._ranges) and self._ranges[place].epoch == epoch

    def settle(self, checkpoint_ts: int) -> bool:
        """Move `durable` over the chunks whose high watermark the durable checkpoint has reached;
        returns whether it has changed.
        """
        before = self.durable
        for place, progress in enumerate(self._ranges):
            # In the order of the range: a chunk behind one that is not at the target would move the
            # cursor over a gap.
            while progress.unsettled and progress.unsettled[0][0] <= checkpoint_ts:
                commit_ts, chunk = progress.unsettled.popleft()
                progress.durable = _behind(progress.durable, chunk)
                progress.rows_ahead -= chunk.rows
                self.durable = replace(
                    self.durable,
                    rows=self.durable.rows + chunk.rows,
                    bytes=self.durable.bytes + chunk.bytes,
                    chunks=self.durable.chunks + 1,
                    chunks_verified=self.durable.chunks_verified + chunk.checked,
                    high_ts=max(self.durable.high_ts, commit_ts),
                    ranges=(
                        *self.durable.ranges[:place],
                        progress.durable,
                        *self.durable.ranges[place + 1 :],
                    ),
                )
        rows_read = self.durable.rows + sum(each.rows_ahead for each in self._ranges)
        estimated = self._estimated(before)
        if (rows_read, estimated) != (self.durable.rows_read, self.durable.rows_estimated):
            self.durable = replace(self.durable, rows_read=rows_read, rows_estimated=estimated)
        if self.durable.state is TableState.DUMPING and all(
            each.done for each in self.durable.ranges
        ):
            # What it waited for while it was read is over.
            self.durable = replace(self.durable, state=TableState.DONE, error="")
        return self.durable != before

    def set_expected(self, rows: int) -> None:
        """Set the present estimate of the total number of rows."""
        self._expected = rows

    def _estimated(self, before: TableProgress) -> int:
        """The estimate to show: the expected rows, but never so many that the percentage at the
        target goes back.
        """
        if not self._expected:
            return self.durable.rows_estimated
        shown = before.rows and before.rows_estimated
        most = self.durable.rows * before.rows_estimated // before.rows if shown else self._expected
        return max(min(self._expected, most), self.durable.rows)

    def count_repair(self) -> None:
        """Count a chunk that is read again because its sum was not that of the server."""
        self.durable = replace(self.durable, chunks_repaired=self.durable.chunks_repaired + 1)

    def set_state(self, state: TableState, error: str = "") -> None:
        """Set the table's state, and why it waits or has failed."""
        self.durable = replace(self.durable, state=state, error=error)

    def set_rate(self, rows_per_s: int) -> None:
        """Set the rate at which it is read, for its status."""
        self.durable = replace(self.durable, rows_per_s=rows_per_s)

    def begin(self, ranges: tuple[Range, ...], rows_estimated: int) -> None:
        """Begin to read the table, in these ranges."""
        self._replace(replace(self.durable, ranges=ranges, rows_estimated=rows_estimated))
        self.set_state(TableState.DUMPING)

    def restart(self, table_id: int) -> None:
        """Begin the table anew: nothing that was read of it counts."""
        fresh = TableProgress(self.durable.name, table_id, self.durable.job)
        self._replace(fresh)

    def _replace(self, durable: TableProgress) -> None:
        # The new epoch is above all so far: chunks of the former ranges that are still being read
        # must not count for new ranges of the same index.
        newest = max((each.epoch for each in self._ranges), default=0) + 1
        self.durable = durable
        self._ranges = [_RangeProgress(each, newest) for each in durable.ranges]
        self._unread = list(durable.ranges)

    @property
    def complete_ts(self) -> int | None:
        """The last high watermark, if all of the table was read and all windows have closed; else
        None.
        """
        if self.durable.state.is_over and self.durable.state is not TableState.DONE:
            return None
        if self.durable.state is TableState.WAITING or not all(
            each.closed.done for each in self._ranges
        ):
            return None
        return max(
            [self.durable.high_ts, *(ts for each in self._ranges for ts, _ in each.unsettled)]
        )

    @property
    def rows_counted(self) -> int:
        """The rows of chunks whose windows have closed, durable or not."""
        return self.durable.rows + sum(
            chunk.rows for each in self._ranges for _, chunk in each.unsettled
        )


def _behind(of: Range, chunk: ChunkRead) -> Range:
    """The range without the chunk, which was read from its beginning."""
    return replace(of, after=chunk.last if chunk.last is not None else of.after, done=chunk.ends)
