"""A group of commands: each is decided against a draft, then all are stored as one synced batch.

A `Draft` is the state that the commands of the group see: the store plus what the group wrote so
far. Each command writes into a stage of its own, so that one that fails leaves nothing behind.
`Engine.apply` hands out an outcome only after the whole group is durable. Observers learn of it as
`Change`s: prewrites, commits and rollbacks of Put and Delete, in the order applied.

One thread at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import Any, Final, NamedTuple

from storage.defect import request_error
from storage.kv import KV, Reader, WriteBatch
from storage.model.errors import CorruptError, TidemarkError
from storage.model.ts import MAX_TS
from storage.mvcc.errors import MvccError
from storage.mvcc.read_fence import ReadFence
from storage.mvcc.record import (
    AFTER_VERSIONS,
    DELETE,
    PUT,
    WRITE_COLUMN,
    Lock,
    Write,
    decode_lock,
    decode_write,
    lock_key,
    split_version,
    value_key,
    write_key,
)

PREWRITE: Final = 1
COMMIT: Final = 2
ROLLBACK: Final = 3
COMMITTED: Final = 4


class Change(NamedTuple):
    """One event on one key; numbers of `event` as in cdcpb.Event.LogType.

    `op` is `record.PUT` or `record.DELETE`.

    Only a PREWRITE and a COMMITTED carry values; `old_value` is what the transaction replaced, b""
    when nothing. `txn_source` is 0 for what users wrote.
    """

    event: int
    key: bytes
    encoded: bytes
    op: int
    start_ts: int
    commit_ts: int = 0
    value: bytes = b""
    old_value: bytes = b""
    txn_source: int = 0


class Versions:
    """Percolator's three columns of a reader, by encoded key."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def lock(self, encoded: bytes) -> Lock | None:
        """The lock of a key."""
        data = self._reader.get(lock_key(encoded))
        return None if data is None else decode_lock(data)

    def writes(self, encoded: bytes, newest_ts: int = MAX_TS) -> Iterator[tuple[int, Write]]:
        """(commit_ts, write) with commit_ts <= `newest_ts`, newest first."""
        for key, data in self._reader.scan(
            write_key(encoded, newest_ts), WRITE_COLUMN + encoded + AFTER_VERSIONS
        ):
            yield split_version(key)[1], decode_write(data)

    def data_write(self, encoded: bytes, newest_ts: int = MAX_TS) -> tuple[int, Write] | None:
        """The newest PUT or DELETE with commit_ts <= `newest_ts`."""
        for commit_ts, write in self.writes(encoded, newest_ts):
            if write.kind in (PUT, DELETE):
                return commit_ts, write
        return None

    def value(self, encoded: bytes, newest_ts: int = MAX_TS) -> bytes | None:
        """The key's value at `newest_ts`, whatever its lock."""
        newest = self.data_write(encoded, newest_ts)
        if newest is None or newest[1].kind != PUT:
            return None
        return self.written_value(encoded, newest[1])

    def written_value(self, encoded: bytes, record: Write | Lock) -> bytes:
        """The value of a PUT record.

        Raises:
            CorruptError: the value column lacks it.
        """
        if record.short_value is not None:
            return record.short_value
        value = self._reader.get(value_key(encoded, record.start_ts))
        if value is None:
            raise CorruptError(
                f"the value of key {encoded.hex()} written by transaction {record.start_ts} is "
                "missing; restore the store from a backup"
            )
        return value


class Draft(Versions):
    """The state that a group's commands read and write; not thread-safe.

    `get` and `scan` see the base, what earlier commands of the group wrote, and what the current
    one wrote. `accept` or `discard` ends the current command.
    """

    def __init__(
        self, base: Reader, *, old_values: bool = False, fence: ReadFence | None = None
    ) -> None:
        super().__init__(self)
        self.old_values = old_values
        self.fence = fence or ReadFence()
        self.ops: dict[bytes, bytes | None] = {}
        self.changes: list[Change] = []
        self.unlocked: list[bytes] = []
        self._base = base
        self._stage: dict[bytes, bytes | None] = {}
        self._stage_changes: list[Change] = []
        self._stage_unlocked: list[bytes] = []
        self._new_writes: dict[bytes, set[bytes]] = {}

    def get(self, key: bytes) -> bytes | None:
        """See `Reader.get`."""
        if key in self._stage:
            return self._stage[key]
        if key in self.ops:
            return self.ops[key]
        return self._base.get(key)

    def scan(
        self, lower: bytes, upper: bytes = b"", *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """See `Reader.scan`; sees what the group wrote."""
        own = self._own_keys(lower, upper)
        if not own:
            return self._base.scan(lower, upper, reverse=reverse)
        own.sort(reverse=reverse)
        return self._merged(own, self._base.scan(lower, upper, reverse=reverse), reverse=reverse)

    def put_lock(self, encoded: bytes, lock: Lock) -> None:
        """Lock a key, or change its lock."""
        self._stage[lock_key(encoded)] = lock.encode()

    def delete_lock(self, encoded: bytes) -> None:
        """Unlock a key; requests that wait for it are woken once the group is durable."""
        self._stage[lock_key(encoded)] = None
        self._stage_unlocked.append(encoded)

    def put_write(self, encoded: bytes, commit_ts: int, write: Write) -> None:
        """Write a commit or rollback record of a key."""
        key = write_key(encoded, commit_ts)
        self._stage[key] = write.encode()
        self._new_writes.setdefault(encoded, set()).add(key)

    def put_value(self, encoded: bytes, start_ts: int, value: bytes) -> None:
        """Store a value that is too long for its record."""
        self._stage[value_key(encoded, start_ts)] = value

    def delete_value(self, encoded: bytes, start_ts: int) -> None:
        """Drop the value of a transaction that is rolled back."""
        self._stage[value_key(encoded, start_ts)] = None

    def put(self, key: bytes, value: bytes) -> None:
        """Set a key of a column without versions."""
        self._stage[key] = value

    def delete(self, key: bytes) -> None:
        """Remove any key of any column."""
        self._stage[key] = None
        if key[:1] == WRITE_COLUMN:
            self._new_writes.setdefault(split_version(key)[0], set()).add(key)

    def note(self, change: Change) -> None:
        """Tell the observers, once the group is durable."""
        self._stage_changes.append(change)

    def accept(self) -> None:
        """Keep the current command's writes."""
        self.ops.update(self._stage)
        self.changes += self._stage_changes
        self.unlocked += self._stage_unlocked
        self.discard()

    def discard(self) -> None:
        """Drop the current command's writes."""
        self._stage, self._stage_changes, self._stage_unlocked = {}, [], []

    def _own_keys(self, lower: bytes, upper: bytes) -> list[bytes]:
        # Nearly every command scans the versions of one key. A group may have thousands of other
        # writes, so the versions that it wrote are indexed by their key.
        if lower[:1] == WRITE_COLUMN and upper.endswith(AFTER_VERSIONS):
            versions: set[bytes] = self._new_writes.get(upper[1 : -len(AFTER_VERSIONS)], set())
            return [key for key in versions if lower <= key < upper]
        return [
            key for key in {*self.ops, *self._stage} if lower <= key and (not upper or key < upper)
        ]

    def _merged(
        self, own: list[bytes], base: Iterator[tuple[bytes, bytes]], *, reverse: bool
    ) -> Iterator[tuple[bytes, bytes]]:
        changed = set(own)
        changed_pairs = ((key, b"") for key in own)
        base_pairs = ((key, value) for key, value in base if key not in changed)
        pairs = merge(changed_pairs, base_pairs, key=lambda pair: pair[0], reverse=reverse)
        for key, value in pairs:
            # None: the group deleted it.
            current = self.get(key) if key in changed else value
            if current is not None:
                yield key, current


Command = Callable[[Draft], Any]
"""A decision bound to its request; its return value is the command's result."""
STEP_KEYS = 1024
"""The keys that a command over a range looks at before it lets others have their turn."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The result of a command over a range that did a part of its work, which is committed with its
    group; the caller submits `rest` as the next command.
    """

    rest: Command


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Results aligned with the commands, MvccError, CorruptError and DefectError as values, and
    the changes in the order applied.

    `unlocked` are the encoded keys that lost a lock, whose waiters may try again.
    """

    results: Sequence[Any]
    changes: Sequence[Change]
    unlocked: Sequence[bytes] = ()


class Engine:
    """The write side of the store; timestamps that a group reserves in `fence` are released after
    its observers were called.
    """

    def __init__(self, kv: KV, fence: ReadFence | None = None) -> None:
        self.kv = kv
        self.fence = fence or ReadFence()
        self.old_values = False

    def apply(self, commands: Sequence[Command]) -> GroupResult:
        """Decide and store a group; durable when it returns.

        Raises:
            TidemarkError: the disk failed or is corrupt; nothing of the group may be relied on.
        """
        draft = Draft(self.kv, old_values=self.old_values, fence=self.fence)
        results: list[Any] = []
        for command in commands:
            try:
                results.append(command(draft))
            except (MvccError, CorruptError) as err:
                # A refusal, or damage under one key, is this command's alone: the others go on.
                draft.discard()
                results.append(err)
            except TidemarkError:
                raise  # the disk failed, not the command
            except Exception as err:  # noqa: BLE001 - a defect ends its command, not the group
                draft.discard()
                results.append(request_error(err, "store command"))
            else:
                draft.accept()
        if draft.ops:
            batch = WriteBatch()
            batch.ops = draft.ops
            # Synced before any result is handed out: a client may act on an answer at once.
            self.kv.write(batch, sync=True)
        return GroupResult(results, draft.changes, draft.unlocked)
