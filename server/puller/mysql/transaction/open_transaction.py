"""The transaction that a log is in the middle of: its events so far, and the savepoints it may go
back to.

Its events are kept part by part (`TransactionParts`), in memory, or on disk beyond the
changefeed's share.

A server logs ROLLBACK TO SAVEPOINT, and the rows before it, where the transaction also made or
dropped a temporary table, or wrote a table without transactions; else it cuts both out of its log.
Rows of tables without transactions are in transactions of their own, so all rows of the transaction
from the savepoint on are undone.

Invariants:
1. `rows` counts the row events that are in force: going back to a savepoint cuts them like a stack.
2. TABLE_MAPs stay when the rows behind them are undone: later rows of the same statement may lean
   on them.
3. If rows that are undone were given already, nothing more is given, and the end says which ones
   (TornTransactionError): the next reading leaves them out from the beginning.
"""

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from server.puller.mysql.ddl.statement import Statement
from server.puller.mysql.ddl.tree import TableName
from server.puller.mysql.session.errors import XaTooLargeError
from server.puller.mysql.transaction.commits import Commits, Gtid, joined, pieces, size_of
from server.puller.open_transactions import Format, OpenRows, OpenTransactions, TxnKey
from storage.mysql.buffer import Bytes, Offsets
from storage.mysql.control import Query
from storage.mysql.event import Events, EventType
from storage.mysql.table_map import TableMap

PART_BYTES: Final = 512 << 10
"""About as large a part is held and given; files on disk are mapped as a whole,
some dozens at a time.
"""
RowRanges: TypeAlias = tuple[tuple[int, int], ...]
"""Row events of one transaction, `[first, last)`, counted from its beginning."""
Torn: TypeAlias = dict[tuple[str, str, int], RowRanges | None]
"""Transactions of which rows are left out (None: all), by their GTID, the log's file and the offset
behind their first event: a server that has died in one gives its GTID out again, at another place,
and at this place of another server is another transaction.
"""
_BYTES_MAX: Final = 512 << 20
_COUNT: Final = struct.Struct("<Q")
_PLACE: Final = struct.Struct(">I")


class TransactionParts:
    """The event buffers of one open transaction, in the order of the log;
    each part is a copy of its own (`commits.joined`), so it keeps no read buffer alive.
    """

    def __init__(self, rows: OpenRows[Events], number: int) -> None:
        self.size = 0
        """Bytes of all parts."""
        self._rows = rows
        self._number = number
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Events]:
        """Read the parts, one at a time; raises as `take`."""
        for place in range(self._count):
            yield _there(self._rows.get(self._at(place)))

    def append(self, part: Events) -> None:
        """Add a part behind the others."""
        self._rows.put(self._at(self._count), part)
        self._count += 1
        self.size += size_of(part)

    def pop(self) -> Events:
        """Take out the last part; raises as `take`."""
        self._count -= 1
        part = _there(self._rows.pop(self._at(self._count)))
        self.size -= size_of(part)
        return part

    def take(self) -> Iterator[Events]:
        """Take out all parts, one at a time; the iterator must be used up.

        Raises:
            CorruptDatabaseError, SpillDamagedError: what is on disk is damaged.
        """
        count, self._count, self.size = self._count, 0, 0
        for place in range(count):
            yield _there(self._rows.pop(self._at(place)))
        self._rows.settle()

    def clear(self) -> None:
        """Drop all parts, unread."""
        for place in range(self._count):
            self._rows.discard(self._at(place))
        self._rows.settle()
        self._count, self.size = 0, 0

    def _at(self, place: int) -> TxnKey:
        return self._number, _PLACE.pack(place)


class TransactionPartStore:
    """Stores the parts of all open transactions of a log; used by one thread at a time."""

    def __init__(self, shared: OpenTransactions) -> None:
        self._shared = shared
        self._rows = OpenRows(shared, Format(_encode, _decode, size_of))
        self._numbers = itertools.count(1)

    def begin(self) -> TransactionParts:
        """Make room for one more transaction, without parts so far."""
        return TransactionParts(self._rows, next(self._numbers))

    def spill_if_short(self) -> None:
        """Write all parts to disk if the changefeed holds too much in memory;
        waits while the disk refuses.

        Raises:
            OpenTransactionsClosedError: `end` was called while the disk took nothing.
            XaTooLargeError: there is no directory to spill into, and no room in memory.
        """
        if self._shared.is_short:
            self._rows.spill()
        if self._shared.used_bytes > _BYTES_MAX:
            raise XaTooLargeError(
                f"prepared XA transactions hold more than {_BYTES_MAX >> 20} MiB of rows, which "
                "are kept in memory "
                "here: commit or roll back the oldest (XA RECOVER on the server), then try again"
            )

    def end(self) -> None:
        """End all waits for the disk; may be called from any thread."""
        self._rows.end()


@dataclass(frozen=True, slots=True)
class Savepoint:
    """A place within a transaction."""

    rows: int
    """How many row events in force are before it."""
    read: int
    """How many row events were read before it, undone ones too."""
    rows_if_outer: int
    """`rows` of the first savepoint of this name. If the later one was set by a function or
    trigger, whose savepoints end with it, a ROLLBACK TO behind it means the first one; the log does
    not say which.
    """


@dataclass(frozen=True, slots=True)
class UnclearSavepoint:
    """A ROLLBACK TO SAVEPOINT of which the log does not tell which rows it undoes."""

    commit_ts: int
    name: str
    tables: frozenset[TableName] | None
    """The tables of its transaction; None: any."""
    reason: str
    nests: bool = False
    """It is clear if no function and no trigger sets savepoints:
    the last one of the name is meant.
    """


class Savepoints:
    """The savepoints of one transaction, in the order in which they were set.

    RELEASE SAVEPOINT is in no log.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Savepoint] = {}
        self._all_ascii = True

    def put(self, name: str, rows: int, read: int) -> None:
        """Set a savepoint; one of the same name moves."""
        key = _lower_case(name)
        before = self._by_name.pop(key, None)
        self._all_ascii &= name.isascii()
        self._by_name[key] = Savepoint(rows, read, before.rows_if_outer if before else rows)

    def get(self, name: str) -> Savepoint | None:
        """Find the savepoint that ROLLBACK TO goes back to; None: the log does not tell which.

        Servers compare names by a collation of their version, by which `é` may be `e`: the last of
        all that may be equal must have the very same name.
        """
        key = _lower_case(name)
        if self._all_ascii and key.isascii():
            return self._by_name.get(key)
        last = next((each for each in reversed(self._by_name) if _may_equal(each, key)), None)
        return self._by_name[key] if last == key else None

    def drop_behind(self, name: str) -> None:
        """ROLLBACK TO `name` ends the savepoints that were set after it."""
        key = _lower_case(name)
        while next(reversed(self._by_name)) != key:
            self._by_name.popitem()


@dataclass(slots=True)
class OpenTransaction:
    """A transaction that has begun."""

    ts: int
    gtid: Gtid | None
    place: tuple[str, int]
    """The log's file, and the offset behind its first event."""
    parts: TransactionParts
    """The events read so far."""
    single: bool
    """The first statement ends the transaction: no BEGIN came."""
    prepared: bool = False
    """It is an XA transaction of two phases: its rows wait for `XA COMMIT`."""
    torn: bool = False
    """An earlier reading found that it has no end: nothing of it is held."""
    left_out: RowRanges = ()
    """Rows that are known to be undone, from an earlier reading."""
    statements: list[tuple[Query, Statement, int]] = field(default_factory=list)
    """Each with the place right behind it in the log file."""
    savepoints: Savepoints = field(default_factory=Savepoints)
    given: int = 0
    """How many parts of it were given before its end."""
    undone: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of rows read, of which some were given already."""
    _rows: int = 0
    _read: int = 0
    _rows_given: int = 0

    def hold(self, part: Events) -> None:
        """Keep events in a buffer of their own; rows that are known to be undone are not kept."""
        rows = part.rows
        if not len(part):
            return
        numbers = np.arange(self._read, self._read + len(rows))
        undone = np.zeros(len(rows), np.bool_)
        for first, last in self.left_out:
            undone |= (numbers >= first) & (numbers < last)
        self._read += len(rows)
        self._rows += len(rows) - int(undone.sum())
        if self.undone or self.torn:
            return  # all of it is read again, or none of it counts
        self._keep(_without(part, rows[undone]))

    def give(self) -> Iterator[Commits]:
        """The parts held, before its end."""
        for part in self.parts.take():
            self.given += 1
            yield Commits(part, np.full(len(part), self.ts), np.empty(0, np.int64), self.given)
        self._rows_given = self._rows

    def complete(self, prepared: "OpenTransaction") -> None:
        """This is the `XA COMMIT` of what was prepared, which is part of it from now on."""
        for part in self.parts.take():
            prepared.parts.append(part)
        self.parts, self.statements = prepared.parts, [*prepared.statements, *self.statements]

    def set_savepoint(self, name: str, rows_since: int) -> None:
        """SAVEPOINT, behind `rows_since` row events that are not held yet."""
        self.savepoints.put(name, self._rows + rows_since, self._read + rows_since)

    def undoes_rows(self, savepoint: Savepoint) -> bool:
        """Whether rows are between a savepoint and here; all events up to here are held."""
        return savepoint.rows < self._rows

    def roll_back_to(self, savepoint: Savepoint) -> None:
        """Undo the rows behind it; all events up to here are held."""
        if savepoint.rows < self._rows_given or self.undone:
            self._undo_given(savepoint)
            return
        excess, behind = self._rows - savepoint.rows, []
        while excess and self.parts:  # of a torn one nothing is held
            part = self.parts.pop()
            rows = part.rows
            cut = min(excess, len(rows))
            behind.append(_without(part, rows[len(rows) - cut :]))
            excess -= cut
        for part in reversed(behind):
            self._keep(part)
        self._rows = savepoint.rows

    def _keep(self, part: Events) -> None:
        """Keep events in buffers of their own."""
        if len(part):
            for piece in pieces(part, PART_BYTES):
                self.parts.append(joined([piece]))

    def _undo_given(self, savepoint: Savepoint) -> None:
        while self.undone and self.undone[-1][0] >= savepoint.read:
            self.undone.pop()
        self.undone.append((savepoint.read, self._read))
        self._rows = min(self._rows, savepoint.rows)
        self.parts.clear()

    def tables(self) -> frozenset[TableName] | None:
        """The tables that its rows may be of; None: not known any more."""
        if self.given:
            return None
        maps = [
            (part, number)
            for part in self.parts
            for number in part.of(EventType.TABLE_MAP).tolist()
        ]
        return frozenset(TableMap.names(part.body(number)) for part, number in maps)

    def rows_left_out(self) -> RowRanges:
        """The row ranges that the next reading is to leave out."""
        return tuple(sorted({*self.left_out, *self.undone}))


def _without(events: Events, numbers: Offsets) -> Events:
    keep = np.ones(len(events), np.bool_)
    keep[numbers] = False
    return Events(events.data, events.begin[keep], events.end[keep])


def _lower_case(name: str) -> str:
    """A name in lower case, as far as all servers agree on it."""
    return name.encode().lower().decode()


def _may_equal(one: str, other: str) -> bool:
    """Whether two names may be one by some collation: of letters beyond ASCII nothing is known."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(
        a == b or not (a.isascii() and b.isascii()) for a, b in pairs
    )


def _there(part: Events | None) -> Events:
    assert part is not None, "each place has a part"
    return part


def _encode(part: Events) -> bytes:
    """The number of events, where each one ends, and all of them one behind the other."""
    ends = part.end.astype("<i8")
    return b"".join((_COUNT.pack(len(part)), ends.data, part.data.u8s[: ends[-1]].data))


def _decode(data: bytes) -> Events:
    (count,) = _COUNT.unpack_from(data)
    end = np.frombuffer(data, "<i8", count, _COUNT.size).astype(np.int64)
    events = memoryview(data)[_COUNT.size + 8 * count :]
    return Events(Bytes.padded(events), np.concatenate([[0], end[:-1]]), end)
