"""Turns one region's stream of prewrites, commits and scanned rows into committed row changes. Pure.

A store tells a transaction's write twice: PREWRITE brings the value, COMMIT only the commit_ts; `(start_ts, key)` joins
them. Until INITIALIZED the incremental scan and the live stream interleave, so a COMMIT may precede its PREWRITE.

Invariants:
1. A change with `start < commit_ts` comes out at least once, whole, and nothing else comes out.
2. No change with `commit_ts <= resolved_ts` comes out: that would be a row nobody reads any more (LateCommitError).
3. An entry never outlives its transaction's COMMIT or ROLLBACK, whatever the order of scan and stream.

Source: TiCDC's matcher and region worker; kvproto cdcpb.proto. A delete's prewrite has no value, and neither has the
fake prewrite that a transaction's heartbeat causes, so before INITIALIZED the two cannot be told apart.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import pyarrow as pa

from storage.model.errors import CorruptError, UnavailableError
from storage.model.event import DELETE, INSERT, UPDATE, raw_batch

PREWRITE: Final = 1
COMMIT: Final = 2
ROLLBACK: Final = 3
COMMITTED: Final = 4
INITIALIZED: Final = 5
_OP_DELETE: Final = 2

_TxnKey = tuple[int, bytes]


class _Prewrite(NamedTuple):
    """What a PREWRITE brought: copied, because a row of a message keeps the whole message in memory."""

    op_type: int
    value: bytes
    old_value: bytes
    generation: int


class _Commit(NamedTuple):
    start_ts: int
    commit_ts: int
    key: bytes
    op_type: int


class UnmatchedCommitError(UnavailableError):
    """An initialized region committed what it never prewrote; subscribing again reads the row from the store."""

    code = "ErrPrewriteNotMatch"


class LateCommitError(CorruptError):
    """A region broke its promise that nothing at or below its resolved_ts follows."""

    code = "ErrResolvedTsBroken"


class Row(Protocol):
    """The fields of `cdcpb.Event.Row` that matter here."""

    @property
    def type(self) -> int:
        """PREWRITE … INITIALIZED."""
        ...

    @property
    def op_type(self) -> int:
        """1 put, 2 delete."""
        ...

    @property
    def start_ts(self) -> int:
        """The transaction's start."""
        ...

    @property
    def commit_ts(self) -> int:
        """Set in COMMIT and COMMITTED."""
        ...

    @property
    def key(self) -> bytes:
        """The raw row key."""
        ...

    @property
    def value(self) -> bytes:
        """Set in PREWRITE and COMMITTED of a put."""
        ...

    @property
    def old_value(self) -> bytes:
        """What the row was before; empty when it did not exist."""
        ...

    @property
    def generation(self) -> int:
        """Which flush of a pipelined transaction wrote it; 0 for others."""
        ...


@dataclass(slots=True)
class Changes:
    """Committed row changes as the columns of RAW_SCHEMA, in order of arrival."""

    commit_ts: list[int] = field(default_factory=list)
    start_ts: list[int] = field(default_factory=list)
    op: list[int] = field(default_factory=list)
    key: list[bytes] = field(default_factory=list)
    value: list[bytes | None] = field(default_factory=list)
    old_value: list[bytes | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.key)

    def to_batch(self) -> pa.RecordBatch:
        """All changes as one batch of RAW_SCHEMA."""
        return raw_batch(self.commit_ts, self.start_ts, self.op, self.key, self.value, self.old_value)


class Matcher:
    """One subscription to one region, pulled from `start_ts` (exclusive)."""

    def __init__(self, start_ts: int) -> None:
        self.start_ts = start_ts
        self.resolved_ts = start_ts
        self.initialized = False
        self._prewrites: dict[_TxnKey, _Prewrite] = {}
        self._early_commits: list[_Commit] = []
        self._early_rollbacks: list[_TxnKey] = []
        self._committed: set[_TxnKey] = set()  # only before INITIALIZED: the scan may still bring their prewrites

    def __len__(self) -> int:
        """Rows waiting for their transaction to end."""
        return len(self._prewrites) + len(self._early_commits)

    def apply(self, rows: Iterable[Row], out: Changes) -> None:
        """Take rows in the order the store sent them, and append the changes they complete to `out`.

        Raises:
            UnmatchedCommitError: a commit without prewrite after INITIALIZED; subscribe again.
            LateCommitError: a change at or below `resolved_ts`; the upstream cannot be trusted.
        """
        for row in rows:
            kind = row.type
            if kind == COMMITTED:
                commit = _Commit(row.start_ts, row.commit_ts, row.key, row.op_type)
                self._emit(commit, _Prewrite(row.op_type, row.value, row.old_value, 0), out)
            elif kind == PREWRITE:
                self._prewrite(row)
            elif kind == COMMIT:
                self._commit(_Commit(row.start_ts, row.commit_ts, row.key, row.op_type), out)
            elif kind == ROLLBACK:
                self._rollback((row.start_ts, row.key))
            elif kind == INITIALIZED:
                self._initialize(out)

    def resolve(self, ts: int) -> bool:
        """Note the region's promise that no later change has `commit_ts <= ts`; returns whether that is news."""
        if not self.initialized or ts <= self.resolved_ts:
            return False
        self.resolved_ts = ts
        return True

    def _prewrite(self, row: Row) -> None:
        at = (row.start_ts, row.key)
        if at in self._committed:
            return
        new = _Prewrite(row.op_type, row.value, row.old_value, row.generation)
        held = self._prewrites.get(at)
        if held is not None:
            fake = not new.value and new.generation == held.generation
            if fake or new.generation < held.generation:
                return
        self._prewrites[at] = new

    def _commit(self, commit: _Commit, out: Changes) -> None:
        at = (commit.start_ts, commit.key)
        held = self._prewrites.get(at)
        if self.initialized:
            if held is None:
                raise UnmatchedCommitError(
                    f"the commit at {commit.commit_ts} of the transaction {commit.start_ts} has no prewrite"
                )
        elif held is None or not held.value or held.generation > 0:
            self._early_commits.append(commit)
            return
        else:
            self._committed.add(at)
        del self._prewrites[at]
        self._emit(commit, held, out)

    def _rollback(self, at: _TxnKey) -> None:
        if self.initialized:
            self._prewrites.pop(at, None)
        else:
            self._early_rollbacks.append(at)

    def _initialize(self, out: Changes) -> None:
        self.initialized = True
        for commit in self._early_commits:
            held = self._prewrites.pop((commit.start_ts, commit.key), None)
            # Without a prewrite, or for a put with only a fake one, the scan has brought the row as COMMITTED.
            if held is not None and (held.value or commit.op_type == _OP_DELETE):
                self._emit(commit, held, out)
        for at in self._early_rollbacks:
            self._prewrites.pop(at, None)
        self._early_commits, self._early_rollbacks, self._committed = [], [], set()

    def _emit(self, commit: _Commit, data: _Prewrite, out: Changes) -> None:
        if commit.commit_ts <= self.start_ts:
            return
        if commit.commit_ts <= self.resolved_ts:
            raise LateCommitError(
                f"a change committed at {commit.commit_ts} came after resolved_ts {self.resolved_ts}; "
                "rows may be missing downstream: compare the data, then create the changefeed anew"
            )
        old_value = data.old_value or None
        out.commit_ts.append(commit.commit_ts)
        out.start_ts.append(commit.start_ts)
        out.key.append(commit.key)
        out.old_value.append(old_value)
        if (commit.op_type or data.op_type) == _OP_DELETE:
            out.op.append(DELETE)
            out.value.append(None)
        else:
            out.op.append(INSERT if old_value is None else UPDATE)
            out.value.append(data.value)
