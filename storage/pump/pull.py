"""Reading committed binlogs in commit order: chunks of commits from the index,
joined with their prewrites.

A commit whose prewrite is not known goes out as it is, without rows (an orphan): readers that look
for orphans stop there, and TiDB's Drainer passes over it as over a transaction that changed
nothing.

`Readers` holds how far each open pull is.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from storage.model.errors import CorruptError, InvalidError
from storage.model.ts import MAX_TS
from storage.pump.binlog import join
from storage.pump.index import Commit, Index
from storage.value_log import ValueLog

CHUNK_COMMITS = 512
CHUNK_BYTES = 4 << 20


class BinlogPurgedError(InvalidError):
    """A reader asks for commits that GC has already removed."""

    code = "ErrBinlogPurged"


class Cursor(NamedTuple):
    """The last commit that a reader has received; the next one comes after it."""

    commit_ts: int
    start_ts: int = MAX_TS


class Chunk(NamedTuple):
    """A run of joined binlogs, the cursor after it,
    and start_ts of the commits whose prewrite is not known.
    """

    payloads: list[bytes]
    cursor: Cursor
    orphans: list[int]


def read_chunk(index: Index, log: ValueLog, after: Cursor, upto_ts: int) -> Chunk:
    """The next binlogs after a cursor, up to `upto_ts`;
    the chunk's cursor is `upto_ts` when there are no more.

    Raises:
        BinlogPurgedError: GC has passed the cursor.
        CorruptError: the log does not hold what the index says.
    """
    commits = index.commits(after, upto_ts, CHUNK_COMMITS, CHUNK_BYTES)
    orphans = [
        commit.start_ts for commit in commits if commit.prewrite is None and not _is_fake(commit)
    ]
    # GC runs beside this: what it removed after the look into the index is no damage, and what it
    # removed before is missing in the chunk without an error.
    try:
        payloads = _payloads(log, commits)
    except CorruptError:
        check_not_purged(index, after.commit_ts)
        raise
    check_not_purged(index, after.commit_ts)
    cursor = Cursor(commits[-1].commit_ts, commits[-1].start_ts) if commits else Cursor(upto_ts)
    return Chunk(payloads, cursor, orphans)


def check_not_purged(index: Index, last_ts: int) -> None:
    """Check that GC has removed no commit after `last_ts`.

    Raises:
        BinlogPurgedError: it has.
    """
    if last_ts < index.gc_ts:
        raise BinlogPurgedError(
            f"binlogs up to {index.gc_ts} were removed by GC, a reader at {last_ts} would lose "
            "rows; start it again from a new dump taken after that"
        )


class ReaderPosition:
    """A reader has received everything up to `commit_ts`: it has asked for more since."""

    __slots__ = ("commit_ts",)

    def __init__(self, commit_ts: int) -> None:
        self.commit_ts = commit_ts


class Readers:
    """The open pulls of a storage; GC stays behind the slowest of them."""

    def __init__(self) -> None:
        self._positions: set[ReaderPosition] = set()

    @contextmanager
    def registered(self, commit_ts: int) -> Iterator[ReaderPosition]:
        """Register a reader for the block, at `commit_ts`; the reader moves its position itself."""
        position = ReaderPosition(commit_ts)
        self._positions.add(position)
        try:
            yield position
        finally:
            self._positions.discard(position)

    @property
    def lowest_ts(self) -> int:
        """The slowest reader's commit_ts; MAX_TS when nobody reads."""
        return min((position.commit_ts for position in self._positions), default=MAX_TS)

    def behind(self, ts: int) -> int:
        """How many readers have not received everything up to `ts`."""
        return sum(position.commit_ts < ts for position in self._positions)


def _is_fake(commit: Commit) -> bool:
    return commit.start_ts == commit.commit_ts


def _payloads(log: ValueLog, commits: Sequence[Commit]) -> list[bytes]:
    """All records of the commits and of their prewrites in as few reads as the log allows,
    then joined.
    """
    prewrites = [commit.prewrite for commit in commits if commit.prewrite is not None]
    records = iter(log.read_many([*(commit.pointer for commit in commits), *prewrites]))
    own = [next(records) for _ in commits]
    return [
        payload if commit.prewrite is None else join(payload, next(records))
        for commit, payload in zip(commits, own, strict=True)
    ]
