"""The windows of a dump (the DBLog algorithm): chunks read between two written watermarks,
and what changed meanwhile.

    low watermark committed → SELECTs of chunks → high watermark written → … → the log passes low …
    high

A chunk shows every change before the low watermark in the log, and none after the high one. Rows
that the log changes in between may be older or newer than that change, so the log's are taken; the
others are as of the high watermark, and come with its commit_ts. Invariants:
1. A row of a chunk is added at most once, and only if the log has no image with exactly its key
   between the two watermarks.
2. A chunk counts only if its table still has, at the high watermark, the columns with which it was
   read.
3. A checked chunk counts only if each of its rows that the log did not change between the
   watermarks is the server's.
4. A chunk counts only if it shows all XA transactions that the log has committed before the low
   watermark. Servers log `XA COMMIT` first and commit afterwards, in any order (seen on MariaDB
   10.11). So a transaction that the log has committed before the low watermark, and that the server
   still lists as prepared after it, may be missing in the chunk.
5. Watermarks of no round under way (of another process, or of a round that was given up) change
   nothing.
Pure; called in the order of the log, by one thread at a time.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from server.dump.mysql.check import ChunkMismatch, unexplained
from server.dump.progress import ChunkRead
from storage.model.event import snapshot_rows

LOW: Final = 1
HIGH: Final = 2
CHANGED_BYTES_MAX: Final = 128 << 20
"""If the keys changed in one window take more bytes, its chunks are read again, smaller."""
_XA_MAX: Final = 4096
"""The number of recent XA commits to remember: more than a server has sessions."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one table, in the order of their keys; `keys` are canonical,
    `values` behind their format byte.
    """

    table_id: int
    version: int
    """The version of the table when it was read (`Windows.version`)."""
    read: ChunkRead
    """The position in the table from which it was read."""
    keys: pa.Array
    values: pa.Array
    mismatch: ChunkMismatch | None = None
    """Which rows were not the server's, if it was checked."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A chunk whose window has closed; `rows` None: it must be read again;
    `differing` keys have other rows.
    """

    chunk: Chunk
    rows: pa.RecordBatch | None
    differing: pa.Array | None = None


@dataclass(slots=True)
class _Round:
    low: str
    high: str
    tables: frozenset[int]
    is_open: bool = False
    overflown: bool = False
    changed_bytes: int = 0
    changed: dict[int, list[pa.Array]] = field(default_factory=dict)
    chunks: Sequence[Chunk] = ()
    xa_committed: dict[str, int] = field(default_factory=dict)
    """The XA commits in the log before the low watermark; see `Windows`."""
    xa_prepared: frozenset[str] = frozenset()
    """The XA transactions that the server showed as prepared after the low watermark."""


class Windows:
    """The rounds under way, in the order of their watermarks."""

    def __init__(self, changed_bytes_max: int = CHANGED_BYTES_MAX) -> None:
        self._rounds: deque[_Round] = deque()
        self._versions: dict[int, int] = {}
        self._xa_committed: dict[str, int] = {}
        """XA transactions whose COMMIT the log has passed, and which may still be under way at the
        server; with the number of that COMMIT, as xids are used again.
        """
        self._xa_commits = 0
        self._changed_bytes_max = changed_bytes_max
        self.xa_unfinished: frozenset[str] = frozenset()
        """The XA transactions for which the last window was discarded: the log has their COMMIT,
        and the server shows them as prepared.
        """

    def __len__(self) -> int:
        return len(self._rounds)

    def version(self, table_id: int) -> int:
        """The number of schema changes of the table that the log has passed."""
        return self._versions.get(table_id, 0)

    def begin(self, low: str, high: str, tables: Collection[int]) -> None:
        """Begin a round: its low watermark is written next, then these tables are read."""
        self._rounds.append(_Round(low, high, frozenset(tables)))

    def fill(
        self, high: str, chunks: Sequence[Chunk], xa_prepared: frozenset[str] = frozenset()
    ) -> None:
        """Note what a round has read, before it writes its high watermark.

        `xa_prepared` are the XA transactions that the server had prepared between the low watermark
        and the reads.
        """
        for each in self._rounds:
            if each.high == high:
                each.chunks, each.xa_prepared = chunks, xa_prepared

    def give_up(self, high: str) -> None:
        """Forget a round, whichever of its watermarks were written or still will be."""
        self._rounds = deque(each for each in self._rounds if each.high != high)

    def changed(self, table_id: int, keys: pa.Array) -> None:
        """Note the keys of row images that the log has passed."""
        for each in self._rounds:
            if each.is_open and table_id in each.tables and not each.overflown:
                each.changed.setdefault(table_id, []).append(keys)
                each.changed_bytes += keys.nbytes
                # Keys are dropped, not the round: its chunks are read again, smaller.
                if each.changed_bytes > self._changed_bytes_max:
                    each.overflown = True
                    each.changed.clear()

    def xa_moved(self, xid: str, *, waits: bool) -> None:
        """Note that the log has passed an XA transaction's PREPARE (`waits`) or its COMMIT."""
        # Popped first, so that an xid that is used again becomes the newest entry: the oldest ones
        # are dropped.
        self._xa_committed.pop(xid, None)
        if not waits:
            self._xa_commits += 1
            self._xa_committed[xid] = self._xa_commits
            if len(self._xa_committed) > _XA_MAX:
                del self._xa_committed[next(iter(self._xa_committed))]

    def table_changed(self, table_id: int) -> None:
        """Note that the log has passed a change of the table's columns, its drop, or its
        truncation.
        """
        self._versions[table_id] = self.version(table_id) + 1

    def ends(self, unique_identifier: str) -> bool:
        """Whether this is the high watermark of a round in progress."""
        return any(each.high == unique_identifier for each in self._rounds)

    def watermark(self, unique_identifier: str, kind: int, commit_ts: int) -> list[Closed]:
        """Note a watermark that the log has passed; returns the chunks whose window it closes."""
        if kind == LOW:
            for each in self._rounds:
                if each.low == unique_identifier:
                    each.is_open, each.xa_committed = True, dict(self._xa_committed)
            return []
        if kind != HIGH or not self.ends(unique_identifier):
            return []
        lost: list[Closed] = []
        # The log has the watermarks in the order of the rounds. An earlier round whose high
        # watermark has not come was given up, or never wrote it: its chunks are read again.
        while (first := self._rounds.popleft()).high != unique_identifier:
            lost += [Closed(chunk, None) for chunk in first.chunks]
        self._look_at_xa(first)
        return lost + [self._closed(first, chunk, commit_ts) for chunk in first.chunks]

    def _look_at_xa(self, closed: _Round) -> None:
        self.xa_unfinished = closed.xa_prepared & closed.xa_committed.keys()
        # The others have ended at the server: a transaction that is prepared under one of their
        # xids later is a new one.
        for xid in closed.xa_committed.keys() - closed.xa_prepared:
            if self._xa_committed.get(xid) == closed.xa_committed[xid]:
                del self._xa_committed[xid]

    def _closed(self, closed: _Round, chunk: Chunk, commit_ts: int) -> Closed:
        # The chunk does not count: the log did not show the low watermark, or had more changed keys
        # than fit into memory, or has changed the table.
        if not closed.is_open or closed.overflown or chunk.version != self.version(chunk.table_id):
            return Closed(chunk, None)
        # Committed in the log before the low watermark, prepared at the server behind it: see
        # invariant 4.
        if closed.xa_committed.keys() & closed.xa_prepared:
            return Closed(chunk, None)
        changed = closed.changed.get(chunk.table_id, [])
        differing = unexplained(chunk.mismatch, changed)
        if differing is not None:
            return Closed(chunk, None, differing)
        if not changed:
            return Closed(chunk, snapshot_rows(chunk.keys, chunk.values, commit_ts))
        kept = pc.invert(pc.is_in(chunk.keys, value_set=pa.concat_arrays(changed)))
        return Closed(
            chunk, snapshot_rows(chunk.keys.filter(kept), chunk.values.filter(kept), commit_ts)
        )
