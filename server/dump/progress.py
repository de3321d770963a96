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
class Read:
    """A chunk that was read from a range of a table; `last` None: nothing was there."""

    place: int
    epoch: int
    last: Cursor | None
    ends: bool
    """Whether the range ends with it."""
    rows: int
    bytes: int
    checked: bool = False
    """Whether it counts only if its sum matches the server's."""


@dataclass(slots=True)
class _Reading:
    """One range while it is read: `epoch` grows when it is set back,
    `unsettled` are the chunks not yet durable.
    """

    at: Range
    epoch: int = 0
    unsettled: deque[tuple[int, Read]] = field(default_factory=deque)
    """With the commit_ts of their high watermarks."""
    rows_ahead: int = 0
    """Rows of chunks that were read and are not yet durable, in windows still open, too."""

    @property
    def closed(self) -> Range | None:
        """The range as far as its windows have closed; None: none has."""
        return _moved(self.at, self.unsettled[-1][1]) if self.unsettled else None


class TableDump:
    """One table while it is dumped: `durable`, and what is ahead of it in this process only."""

    def __init__(self, durable: TableProgress) -> None:
        self.durable = durable
        self._ranges = [_Reading(each) for each in durable.ranges]
        self._ahead = list(durable.ranges)
        self._expected = 0

    def next_range(self, taken: frozenset[int] = frozenset()) -> int | None:
        """A range that has more to read and is not `taken`; None: there is none."""
        open_ranges = (
            place for place, each in enumerate(self._ahead) if not each.done and place not in taken
        )
        return next(open_ranges, None)

    def ahead(self, place: int) -> tuple[Range, int]:
        """The range that is still to be read, and its epoch."""
        return self._ahead[place], self._ranges[place].epoch

    def read(self, chunk: Read) -> None:
        """A chunk was read; the next one begins behind it. One of an older epoch is forgotten."""
        reading = self._reading(chunk)
        if reading is not None:
            self._ahead[chunk.place] = _moved(self._ahead[chunk.place], chunk)
            reading.rows_ahead += chunk.rows

    def closed(self, chunk: Read, commit_ts: int) -> bool:
        """Its window has closed; returns whether its rows count:
        not if it was set back meanwhile.
        """
        reading = self._reading(chunk)
        if reading is None:
            return False
        reading.unsettled.append((commit_ts, chunk))
        return True

    def again(self, chunk: Read) -> bool:
        """Read a chunk again, and what was read behind it;
        returns whether it was not set back before.
        """
        reading = self._reading(chunk)
        if reading is None:
            return False
        # Chunks behind it were read already, or are being read: with the new epoch none of them
        # counts any more.
        reading.epoch += 1
        reading.rows_ahead = sum(each.rows for _, each in reading.unsettled)
        self._ahead[chunk.place] = reading.closed or reading.at
        return True

    def _reading(self, chunk: Read) -> _Reading | None:
        """The range of a chunk, as it was when that was read; None: it was set back,
        or planned anew.
        """
        return self._ranges[chunk.place] if self.is_now(chunk.place, chunk.epoch) else None

    def is_now(self, place: int, epoch: int) -> bool:
        """Whether the range is still in that epoch, so that what `ahead` returned is valid."""
        return place < len(self._ranges) and self._ranges[place].epoch == epoch

    def settle(self, checkpoint_ts: int) -> bool:
        """Everything up to `checkpoint_ts` is at the target for good;
        returns whether `durable` has moved.
        """
        before = self.durable
        for place, reading in enumerate(self._ranges):
            # In the order of the range: a chunk behind one that is not at the target would move the
            # cursor over a gap.
            while reading.unsettled and reading.unsettled[0][0] <= checkpoint_ts:
                commit_ts, chunk = reading.unsettled.popleft()
                reading.at = _moved(reading.at, chunk)
                reading.rows_ahead -= chunk.rows
                self.durable = replace(
                    self.durable,
                    rows=self.durable.rows + chunk.rows,
                    bytes=self.durable.bytes + chunk.bytes,
                    chunks=self.durable.chunks + 1,
                    chunks_verified=self.durable.chunks_verified + chunk.checked,
                    high_ts=max(self.durable.high_ts, commit_ts),
                    ranges=(
                        *self.durable.ranges[:place],
                        reading.at,
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

    def expected(self, rows: int) -> None:
        """Set the present estimate of the total number of rows."""
        self._expected = rows

    def _estimated(self, before: TableProgress) -> int:
        """The number of rows expected, but for now no more than leave the share of those at the
        target where it was.
        """
        if not self._expected:
            return self.durable.rows_estimated
        shown = before.rows and before.rows_estimated
        most = self.durable.rows * before.rows_estimated // before.rows if shown else self._expected
        return max(min(self._expected, most), self.durable.rows)

    def repaired(self) -> None:
        """A chunk is read again as its sum was not that of the server."""
        self.durable = replace(self.durable, chunks_repaired=self.durable.chunks_repaired + 1)

    def moved_to(self, state: TableState, error: str = "") -> None:
        """The table is in another state."""
        self.durable = replace(self.durable, state=state, error=error)

    def set_rate(self, rows_per_s: int) -> None:
        """Note how fast it was read lately."""
        self.durable = replace(self.durable, rows_per_s=rows_per_s)

    def planned(self, ranges: tuple[Range, ...], rows_estimated: int) -> None:
        """Reading begins, in these ranges."""
        self._restarted(replace(self.durable, ranges=ranges, rows_estimated=rows_estimated))
        self.moved_to(TableState.DUMPING)

    def restart(self, table_id: int) -> None:
        """Begin anew: nothing that was read counts."""
        fresh = TableProgress(self.durable.name, table_id, self.durable.job)
        self._restarted(fresh)

    def _restarted(self, durable: TableProgress) -> None:
        # Above all epochs so far: chunks of the former ranges that are still under way find theirs
        # gone, also where the new ranges have the same places.
        newest = max((each.epoch for each in self._ranges), default=0) + 1
        self.durable = durable
        self._ranges = [_Reading(each, newest) for each in durable.ranges]
        self._ahead = list(durable.ranges)

    @property
    def closed_ts(self) -> int | None:
        """The last high watermark of a table whose windows have all closed; None:
        there is something to read.
        """
        if self.durable.state.is_over and self.durable.state is not TableState.DONE:
            return None
        if self.durable.state is TableState.WAITING or not all(
            (each.closed or each.at).done for each in self._ranges
        ):
            return None
        return max(
            [self.durable.high_ts, *(ts for each in self._ranges for ts, _ in each.unsettled)]
        )

    @property
    def rows_ahead(self) -> int:
        """Rows whose windows have closed, durable or not."""
        return self.durable.rows + sum(
            chunk.rows for each in self._ranges for _, chunk in each.unsettled
        )


def _moved(at: Range, chunk: Read) -> Range:
    return replace(at, after=chunk.last if chunk.last is not None else at.after, done=chunk.ends)
