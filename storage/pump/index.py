"""The index of a Pump in LevelDB: where each commit and prewrite is in the value log, and the
commit_ts up to which all commits are known (max_commit_ts).

Keys (docs/format/pump.md): `c` commit_ts start_ts -> pointer, `p` start_ts -> pointer, `m` fid ->
largest commit_ts whose prewrite stands in that segment, `s` -> state, `g` -> gc_ts. Invariants:

1. Index keys and state of a group are one WriteBatch, so the state never speaks of keys that are
   not there.
2. Everything before `handle` is in the index and matched; a start replays the log from there. Only
   gc_ts is synced: a crash may bring back an older state, whose handle is earlier in the log.
3. The index is derived: if the log ends before what the index knows, the index is rebuilt from the
   log.

`apply`, `oldest_waiting`, `advance_gc_ts`, `reload` and `reset` belong to one thread at a time; the
rest may be called from any.
"""

import struct
from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

from storage.kv import KV, WriteBatch
from storage.model.errors import CorruptError
from storage.pump.binlog import Kind
from storage.pump.matcher import Matcher
from storage.value_log import Pointer

COMMIT_PREFIX, PREWRITE_PREFIX, SEGMENT_PREFIX = b"c", b"p", b"m"
START = Pointer(0, 0, 0)
WAITING_BYTES = 512
"""The memory of a prewrite without an outcome, rounded up: its position, not its rows."""
_STATE_KEY, _GC_KEY = b"s", b"g"
_STATE_VERSION = 1
_STATE = struct.Struct("<BIQIQQ")
_POINTER = struct.Struct("<IQI")
_U64 = struct.Struct(">Q")
_PAIR = struct.Struct(">QQ")
_U32 = struct.Struct(">I")

Entry = tuple[int, int, int]
"""(kind, start_ts, commit_ts) of a binlog."""


class IndexVersionError(CorruptError):
    """The index was written by a version this one does not know."""

    code = "ErrPumpIndexVersion"


class Commit(NamedTuple):
    """A commit of the index; `prewrite` is None for a heartbeat and for a commit whose prewrite is
    not known.
    """

    commit_ts: int
    start_ts: int
    pointer: Pointer
    prewrite: Pointer | None


class Index:
    """The index of one value log."""

    def __init__(self, kv: KV) -> None:
        """Load the state.

        Raises:
            IndexVersionError: it is of an unknown version.
        """
        self.late_commits = 0
        self.kv = kv
        self.reload()

    def reload(self) -> None:
        """Load the state, as at a start; the log must be replayed from `replay_from` on."""
        self.handle, self.head, self.max_commit_ts = _load_state(self.kv)
        self.replay_from = self.handle
        self.gc_ts = int(_U64.unpack(self.kv.get(_GC_KEY) or bytes(8))[0])
        self._matcher: Matcher[Pointer] = Matcher(self.max_commit_ts)
        self._segment_ts = {
            _U32.unpack(key[1:])[0]: _U64.unpack(ts)[0] for key, ts in self.kv.scan(b"m", b"n")
        }

    def renew(self) -> None:
        """As `reload`, after a write that failed: the store takes none before it is renewed. No
        thread may read meanwhile.
        """
        self.kv.renew()
        self.reload()

    @property
    def waiting(self) -> int:
        """Prewrites without an outcome."""
        return self._matcher.waiting

    @property
    def waiting_bytes(self) -> int:
        """About the memory that the waiting prewrites take."""
        return self._matcher.waiting * WAITING_BYTES

    @property
    def oldest_waiting_ts(self) -> int:
        """start_ts of the prewrite that holds max_commit_ts back; 0 if none does."""
        oldest = self._matcher.oldest
        return 0 if oldest is None else oldest[0]

    def oldest_waiting(self, limit: int) -> list[tuple[int, Pointer]]:
        """start_ts and pointer of the prewrites that have waited longest;
        of the thread that calls `apply`.
        """
        return self._matcher.oldest_waiting(limit)

    def apply(self, entries: Iterable[Entry], pointers: Iterable[Pointer]) -> None:
        """Index a group in the order of the log, and advance max_commit_ts as far as all commits
        are known.

        When this raises, the index in memory and on disk may differ: call `renew`.
        """
        batch = WriteBatch()
        pointer = START
        for (kind, start_ts, commit_ts), pointer in zip(entries, pointers, strict=True):
            if kind == Kind.PREWRITE:
                self._prewrite(batch, start_ts, pointer)
            elif kind == Kind.COMMIT:
                self._commit(batch, start_ts, commit_ts, pointer)
            elif start_ts == commit_ts:
                self._matcher.advance(commit_ts)
                batch.put(commit_key(commit_ts, start_ts), _POINTER.pack(*pointer))
            elif self._matcher.settle(start_ts, 0) is not None:
                batch.delete(prewrite_key(start_ts))
        head = Pointer(pointer.fid, pointer.offset + pointer.length, 0)
        oldest = self._matcher.oldest
        handle = head if oldest is None else oldest[1].position
        max_commit_ts = self._matcher.max_commit_ts
        batch.put(_STATE_KEY, _STATE.pack(_STATE_VERSION, *handle[:2], *head[:2], max_commit_ts))
        self.kv.write(batch, sync=False)
        self.handle, self.head, self.max_commit_ts = handle, head, max_commit_ts
        self.replay_from = head

    def commits(
        self, after: tuple[int, int], upto_ts: int, limit: int, limit_bytes: int
    ) -> list[Commit]:
        """Commits after the pair (commit_ts, start_ts), up to `upto_ts` inclusive, in order.

        Ends after `limit` commits, or with the one that takes their records beyond `limit_bytes`.
        """
        commits: list[Commit] = []
        size = 0
        for key, value in self.kv.scan(commit_key(*after) + b"\0", commit_key(upto_ts + 1, 0)):
            commit_ts, start_ts = _PAIR.unpack(key[1:])
            pointer = Pointer(*_POINTER.unpack(value))
            prewrite = self._pointer(prewrite_key(start_ts)) if start_ts != commit_ts else None
            commits.append(Commit(commit_ts, start_ts, pointer, prewrite))
            size += pointer.length + (prewrite.length if prewrite else 0)
            if len(commits) >= limit or size >= limit_bytes:
                break
        return commits

    def find(self, ts: int) -> Pointer | None:
        """Return the place of the commit with commit_ts `ts`, else of the prewrite with start_ts
        `ts`; None: there is neither.
        """
        for _, value in self.kv.scan(commit_key(ts, 0), commit_key(ts + 1, 0)):
            return Pointer(*_POINTER.unpack(value))
        return self._pointer(prewrite_key(ts))

    def advance_gc_ts(self, ts: int) -> bool:
        """Move gc_ts to `ts`, durably; False when it is not ahead, or not below max_commit_ts."""
        if not self.gc_ts < ts < self.max_commit_ts:
            return False
        self._keep_gc_ts(ts)
        return True

    def _keep_gc_ts(self, ts: int) -> None:
        batch = WriteBatch()
        batch.put(_GC_KEY, _U64.pack(ts))
        self.kv.write(batch, sync=True)
        self.gc_ts = ts

    def droppable(self, segments: dict[int, int]) -> list[int]:
        """The oldest of the log's segments (number -> max_ts) that neither a reader after gc_ts nor
        a restart can need.

        Segments are removed from the oldest on, so a gap in their numbers always means a lost file.
        A crash that brings back an older handle still finds the handle's segment: gc_ts was made
        durable when max_commit_ts was above it, by a synced write, which also made the state of
        that time durable.
        """
        return list(takewhile(lambda fid: self._is_done(fid, segments[fid]), sorted(segments)))

    def _is_done(self, fid: int, max_ts: int) -> bool:
        return fid < self.handle.fid and max(max_ts, self._segment_ts.get(fid, 0)) <= self.gc_ts

    def delete_segment(self, fid: int) -> None:
        """Delete the entry of a removed segment."""
        if self._segment_ts.pop(fid, None) is not None:
            batch = WriteBatch()
            batch.delete(SEGMENT_PREFIX + _U32.pack(fid))
            self.kv.write(batch, sync=False)

    def reset(self, first_fid: int, least_gc_ts: int = 0) -> None:
        """Empty the index, which is to be rebuilt from segment `first_fid` on; gc_ts stays, or
        becomes `least_gc_ts`, durably.
        """
        if least_gc_ts > self.gc_ts:
            self._keep_gc_ts(least_gc_ts)
        for prefix in (COMMIT_PREFIX, PREWRITE_PREFIX, SEGMENT_PREFIX, _STATE_KEY):
            self.kv.delete_range(prefix, bytes([prefix[0] + 1]))
        self.handle = self.head = self.replay_from = Pointer(first_fid, 0, 0)
        self.max_commit_ts = 0
        self._matcher = Matcher()
        self._segment_ts = {}

    def _prewrite(self, batch: WriteBatch, start_ts: int, pointer: Pointer) -> None:
        if self._matcher.waits(start_ts):
            return
        commit_ts = self._matcher.prewrite(start_ts, pointer)
        # A prewrite that came after its commit, which GC has removed, would stay for ever.
        if commit_ts is None or commit_ts > self.gc_ts:
            batch.put(prewrite_key(start_ts), _POINTER.pack(*pointer))
        if commit_ts:
            self._keep_segment(batch, pointer.fid, commit_ts)

    def _commit(self, batch: WriteBatch, start_ts: int, commit_ts: int, pointer: Pointer) -> None:
        before = self._matcher.max_commit_ts
        prewrite = self._matcher.settle(start_ts, commit_ts)
        key = commit_key(commit_ts, start_ts)
        # GC goes by a segment's own timestamps, and a prewrite may stand in an older one.
        if prewrite is not None and prewrite.position.fid != pointer.fid:
            self._keep_segment(batch, prewrite.position.fid, commit_ts)
        if prewrite is None and commit_ts <= before and not self._has(batch, key):
            # Readers were told that everything up to `before` is known, and this was not.
            self.late_commits += 1
        batch.put(key, _POINTER.pack(*pointer))

    def _has(self, batch: WriteBatch, key: bytes) -> bool:
        return key in batch.ops or self.kv.get(key) is not None

    def _keep_segment(self, batch: WriteBatch, fid: int, commit_ts: int) -> None:
        """Keep a segment as long as the commits whose prewrites are in it."""
        if commit_ts > self._segment_ts.get(fid, 0):
            self._segment_ts[fid] = commit_ts
            batch.put(SEGMENT_PREFIX + _U32.pack(fid), _U64.pack(commit_ts))

    def _pointer(self, key: bytes) -> Pointer | None:
        value = self.kv.get(key)
        return None if value is None else Pointer(*_POINTER.unpack(value))


def commit_key(commit_ts: int, start_ts: int) -> bytes:
    """The key of a commit: in commit order."""
    return COMMIT_PREFIX + _PAIR.pack(commit_ts, start_ts)


def prewrite_key(start_ts: int) -> bytes:
    """The key of a prewrite."""
    return PREWRITE_PREFIX + _U64.pack(start_ts)


def prewrite_of(key: bytes) -> bytes:
    """The key of the prewrite that belongs to the commit with this key."""
    return PREWRITE_PREFIX + key[1 + _U64.size :]


def _load_state(kv: KV) -> tuple[Pointer, Pointer, int]:
    value = kv.get(_STATE_KEY)
    if value is None:
        return START, START, 0
    if value[0] != _STATE_VERSION or len(value) != _STATE.size:
        raise IndexVersionError(
            f"the pump index is of version {value[0]}, this tidemark knows {_STATE_VERSION}; "
            "move its kv directory away to rebuild it from the value log"
        )
    _, handle_fid, handle_offset, head_fid, head_offset, max_commit_ts = _STATE.unpack(value)
    return Pointer(handle_fid, handle_offset, 0), Pointer(head_fid, head_offset, 0), max_commit_ts
