"""Turns one region's stream of prewrites, commits and scanned rows into committed row changes.

A store tells a transaction's write twice: PREWRITE brings the value, COMMIT only the commit_ts;
`(start_ts, key)` joins them. Until INITIALIZED the incremental scan and the live stream interleave,
so a COMMIT may precede its PREWRITE.

Invariants:
1. A change with `start_ts < commit_ts` comes out at least once, whole, and nothing else comes out.
2. No change with `commit_ts <= resolved_ts` comes out: that would be a row nobody reads any more
   (LateCommitError).
3. An entry never outlives its transaction's COMMIT or ROLLBACK, whatever the order of scan and
   stream.

Source: TiCDC's matcher and region worker; kvproto cdcpb.proto. A transaction's heartbeat makes the
store repeat a prewrite without its value, and a delete's prewrite has no value either: before
INITIALIZED the two look alike.
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol

from server.puller.open_transactions import (
    ENTRY_BYTES,
    Format,
    OpenRows,
    OpenTransactions,
    TxnKey,
)
from server.puller.tikv.changes import OP_DELETE, Changes, Columns
from storage.model.errors import CorruptError, UnavailableError

PREWRITE: Final = 1
COMMIT: Final = 2
ROLLBACK: Final = 3
COMMITTED: Final = 4
INITIALIZED: Final = 5
_TYPE: Final = attrgetter("type")

# Of a PREWRITE: op_type, value, old_value, generation. Copies, because a row of a message keeps the
# whole message in memory; and a plain tuple, because one is made for each row.
_Prewrite = tuple[int, bytes, bytes, int]
_OP_TYPE: Final = 0
_VALUE: Final = 1
_OLD_VALUE: Final = 2
_GENERATION: Final = 3
# op_type, generation, length of the value
_PREWRITE_HEAD: Final = struct.Struct(">BQI")
_COMMIT: Final = struct.Struct(">QB")
_EMIT_ROWS: Final = 1024


class _Commit(NamedTuple):
    start_ts: int
    commit_ts: int
    key: bytes
    op_type: int


def _encode_prewrite(data: _Prewrite) -> bytes:
    op_type, value, old_value, generation = data
    return _PREWRITE_HEAD.pack(op_type, generation, len(value)) + value + old_value


def _decode_prewrite(data: bytes) -> _Prewrite:
    op_type, generation, length = _PREWRITE_HEAD.unpack_from(data)
    end = _PREWRITE_HEAD.size + length
    return op_type, data[_PREWRITE_HEAD.size : end], data[end:], generation


_PREWRITES: Final = Format[_Prewrite](
    _encode_prewrite, _decode_prewrite, lambda data: len(data[_VALUE]) + len(data[_OLD_VALUE])
)
_COMMITS: Final = Format[tuple[int, int]](
    lambda commit: _COMMIT.pack(*commit), _COMMIT.unpack, lambda _: 0
)
_MARKS: Final = Format[bytes](lambda mark: mark, lambda mark: mark, lambda _: 0)
_MARK: Final = b"\1"


class UnmatchedCommitError(UnavailableError):
    """An initialized region sent a commit whose prewrite it had never sent;
    subscribing again reads the row from the store.
    """

    code = "ErrPrewriteNotMatch"


class LateCommitError(CorruptError):
    """A region broke its promise that nothing at or below its resolved_ts follows."""

    code = "ErrResolvedTsBroken"


class _Committing(Protocol):
    """A COMMIT of a message, or one kept since."""

    @property
    def start_ts(self) -> int:
        """The transaction's start."""
        ...

    @property
    def commit_ts(self) -> int:
        """Its end."""
        ...

    @property
    def key(self) -> bytes:
        """The raw row key."""
        ...

    @property
    def op_type(self) -> int:
        """1 put, 2 delete, 0: as in the prewrite."""
        ...


class Row(_Committing, Protocol):
    """The fields of `cdcpb.Event.Row` that matter here;
    commit_ts is set in COMMIT and COMMITTED only.
    """

    @property
    def type(self) -> int:
        """PREWRITE … INITIALIZED."""
        ...

    @property
    def value(self) -> bytes:
        """Set in PREWRITE and COMMITTED of a put."""
        ...

    @property
    def old_value(self) -> bytes:
        """The row before; empty when it did not exist."""
        ...

    @property
    def generation(self) -> int:
        """Which flush of a pipelined transaction wrote it; 0 for others."""
        ...


class Matcher:
    """One subscription to one region, pulled from `start_ts` (exclusive).

    What waits for the end of its transaction beyond the limit of `shared` goes to disk with
    `spill_if_short`.
    """

    def __init__(self, start_ts: int, shared: OpenTransactions | None = None) -> None:
        self.start_ts = start_ts
        self.resolved_ts = start_ts
        self.initialized = False
        self._shared = shared or OpenTransactions()
        self._prewrites = OpenRows(self._shared, _PREWRITES)
        # Only before INITIALIZED, while the scan may still bring prewrites; commits by (commit_ts,
        # op_type).
        self._early_commits = OpenRows(self._shared, _COMMITS)
        self._early_rollbacks = OpenRows(self._shared, _MARKS)
        self._committed = OpenRows(self._shared, _MARKS)

    def __len__(self) -> int:
        """Rows waiting for their transaction to end."""
        return len(self._prewrites) + len(self._early_commits)

    def spill_if_short(self) -> None:
        """Spill waiting prewrites to disk if the changefeed exceeds its memory.

        Raises:
            OpenTransactionsClosedError: `end` was called while the disk took nothing.
        """
        for rows in self._maps:
            rows.settle()
            if self._shared.is_short:
                rows.spill()

    def end(self) -> None:
        """Let no thread wait for the disk any more; may be called from any thread."""
        for rows in self._maps:
            rows.end()

    def clear(self) -> None:
        """Drop the waiting prewrites, in memory and on disk."""
        for rows in self._maps:
            rows.clear()

    @property
    def _maps(self) -> tuple[OpenRows[Any], ...]:
        return self._prewrites, self._early_commits, self._early_rollbacks, self._committed

    def apply(self, rows: Iterable[Row], out: Changes) -> None:
        """Take rows in the order the store sent them,
        and append the changes they complete to `out`.

        Raises:
            UnmatchedCommitError: a commit without prewrite after INITIALIZED; subscribe again.
            LateCommitError: a change at or below `resolved_ts`; the upstream cannot be trusted.
        """
        # By runs of one type: a store sends many prewrites, then many commits, and the loops inside
        # look at the type once.
        for kind, run in groupby(rows, _TYPE):
            if kind == COMMITTED:
                self._scanned(list(run), out)
            elif kind == PREWRITE:
                self._prewritten(run)
            elif kind == COMMIT:
                self._commits(list(run), out)
            elif kind == ROLLBACK:
                for row in run:
                    self._rollback((row.start_ts, row.key))
            elif kind == INITIALIZED:
                self._initialize(out)

    def resolve(self, ts: int) -> bool:
        """Note the region's promise that no later change has `commit_ts <= ts`;
        returns whether that is news.
        """
        # Until the scan is through, rows at or below `ts` may still come from it.
        if not self.initialized or ts <= self.resolved_ts:
            return False
        self.resolved_ts = ts
        return True

    def _scanned(self, rows: list[Row], out: Changes) -> None:
        columns = Columns(
            [row.commit_ts for row in rows],
            [row.start_ts for row in rows],
            [row.op_type for row in rows],
            [row.key for row in rows],
            [row.value for row in rows],
            [row.old_value for row in rows],
        )
        self._emit(columns, out)

    def _prewritten(self, rows: Iterable[Row]) -> None:
        """The hottest loop: one map in memory, and its bytes counted by the run."""
        waiting, size = self._prewrites, 0
        memory = waiting.memory
        may_be_committed = not self.initialized and len(self._committed) > 0
        for row in rows:
            at = (row.start_ts, row.key)
            # The scan may bring the prewrite of a transaction that has come out already: the entry
            # would wait for ever.
            if may_be_committed and at in self._committed:
                continue
            if waiting.spilled:
                waiting.load(at)
            new = (row.op_type, row.value, row.old_value, row.generation)
            earlier = memory.setdefault(at, new)
            if earlier is new:
                size += ENTRY_BYTES + len(at[1]) + len(new[_VALUE]) + len(new[_OLD_VALUE])
                continue
            # A heartbeat's prewrite has no value, and must not take the place of one that has.
            fake = not new[_VALUE] and new[_GENERATION] == earlier[_GENERATION]
            # But a delete's own has none either: it tells itself by its old value.
            if fake and new[_OLD_VALUE] and not (earlier[_VALUE] or earlier[_OLD_VALUE]):
                fake = False
            # A pipelined transaction may flush a key again; the last generation is what it commits.
            if not fake and new[_GENERATION] >= earlier[_GENERATION]:
                memory[at] = new
                size += (
                    len(new[_VALUE])
                    + len(new[_OLD_VALUE])
                    - len(earlier[_VALUE])
                    - len(earlier[_OLD_VALUE])
                )
        waiting.grew(size)

    def _commits(self, rows: list[Row], out: Changes) -> None:
        if not self.initialized:
            for row in rows:
                self._early_commit(_Commit(row.start_ts, row.commit_ts, row.key, row.op_type), out)
            return
        waiting, size = self._prewrites, 0
        memory = waiting.memory
        prewrites: list[_Prewrite] = []
        for row in rows:
            at = (row.start_ts, row.key)
            if waiting.spilled:
                waiting.load(at)
            data = memory.pop(at, None)
            if data is None:
                raise UnmatchedCommitError(
                    f"the commit at {row.commit_ts} of the transaction {row.start_ts} has no "
                    "prewrite"
                )
            size += ENTRY_BYTES + len(at[1]) + len(data[_VALUE]) + len(data[_OLD_VALUE])
            prewrites.append(data)
        waiting.grew(-size)
        self._emit(_joined(rows, prewrites), out)

    def _early_commit(self, commit: _Commit, out: Changes) -> None:
        at = (commit.start_ts, commit.key)
        self._prewrites.load(at)
        prewrite = self._prewrites.memory.get(at)
        # Kept until the scan is through if the prewrite is still to come, may be a fake one, or may
        # not be the last of its generations.
        if prewrite is None or not prewrite[_VALUE] or prewrite[_GENERATION] > 0:
            self._early_commits.put(at, (commit.commit_ts, commit.op_type))
        else:
            # The mark goes in before the prewrite goes out: the scan may send it once more.
            self._committed.put(at, _MARK)
            self._prewrites.pop(at)
            self._emit(_joined([commit], [prewrite]), out)

    def _rollback(self, at: TxnKey) -> None:
        if self.initialized:
            self._prewrites.pop(at)
        else:
            # The scan may have read the lock before the rollback, and send its prewrite after it.
            self._early_rollbacks.put(at, _MARK)

    def _initialize(self, out: Changes) -> None:
        self.initialized = True
        commits = (
            _Commit(at[0], commit_ts, at[1], op)
            for at, (commit_ts, op) in self._early_commits.drain()
        )
        while some := list(islice(commits, _EMIT_ROWS)):
            prewrites = [self._prewrites.pop((commit.start_ts, commit.key)) for commit in some]
            # Without a prewrite, or for a put with only a fake one, the scan has brought the row as
            # COMMITTED.
            pairs = [
                (commit, prewrite)
                for commit, prewrite in zip(some, prewrites, strict=True)
                if prewrite is not None and (prewrite[_VALUE] or commit.op_type == OP_DELETE)
            ]
            if pairs:
                self._emit(
                    _joined([commit for commit, _ in pairs], [prewrite for _, prewrite in pairs]),
                    out,
                )
        # After the commits: from here on no prewrite comes from the scan, so the marks have done
        # their work.
        for at, _ in self._early_rollbacks.drain():
            self._prewrites.pop(at)
        self._committed.clear()

    def _emit(self, rows: Columns, out: Changes) -> None:
        if min(rows.commit_ts) <= self.resolved_ts:
            # A store may send what lies at or below the checkpoint it was asked for: no defect, the
            # sorter has it.
            rows = rows.above(self.start_ts)
            late_ts = min(rows.commit_ts, default=self.resolved_ts + 1)
            if late_ts <= self.resolved_ts:
                raise LateCommitError(
                    f"a change committed at {late_ts} came after resolved_ts {self.resolved_ts}; "
                    "rows may be missing downstream: compare the data, then create the changefeed "
                    "anew"
                )
        out.extend(rows)


def _joined(commits: Sequence[_Committing], prewrites: Sequence[_Prewrite]) -> Columns:
    """Commits with what their prewrites brought."""
    return Columns(
        [commit.commit_ts for commit in commits],
        [commit.start_ts for commit in commits],
        [commit.op_type or data[_OP_TYPE] for commit, data in zip(commits, prewrites, strict=True)],
        [commit.key for commit in commits],
        [data[_VALUE] for data in prewrites],
        [data[_OLD_VALUE] for data in prewrites],
    )
