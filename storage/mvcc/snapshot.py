"""Reads at a timestamp: the versions visible to a transaction started at `ts`. Pure over a frozen
`Reader`.

A lock that may still commit at or before `ts` stops the reader (KeyIsLocked), unless the caller
knows its transaction: `resolved` ones commit later than `ts` or never, `committed` ones are
committed at or before it.

`scan_locks` and `key_history` show what is stored, whatever may be seen of it: for lock resolution,
and for MvccGetByKey.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from storage.codec import encode_bytes
from storage.kv import Reader
from storage.model.ts import MAX_TS
from storage.mvcc.engine import Versions
from storage.mvcc.errors import KeyIsLockedError
from storage.mvcc.record import (
    AFTER_VERSIONS,
    DELETE,
    LOCK_COLUMN,
    PUT,
    VALUE_COLUMN,
    WRITE_COLUMN,
    Lock,
    Write,
    column_range,
    decode_lock,
    decode_write,
    split_version,
    user_key,
)

_SEEK_AFTER = 32


class Row(NamedTuple):
    """One key of a scan: its value, or the lock that hides it."""

    key: bytes
    value: bytes
    error: KeyIsLockedError | None = None


class Snapshot:
    """Everything committed at or before `ts`."""

    def __init__(
        self,
        reader: Reader,
        ts: int,
        *,
        resolved: frozenset[int] = frozenset(),
        committed: frozenset[int] = frozenset(),
        ignore_locks: bool = False,
    ) -> None:
        self._reader = reader
        self._versions = Versions(reader)
        self._ts = ts
        self._resolved = resolved
        self._committed = committed
        self._ignore_locks = ignore_locks

    def get(self, key: bytes) -> bytes | None:
        """The value of a raw key, or None.

        Raises:
            KeyIsLockedError: a lock stands in the way.
        """
        version = self.version(key)
        return None if version is None else version[0]

    def version(self, key: bytes) -> tuple[bytes, int] | None:
        """The value of a raw key and its commit_ts (0: it is still a lock, committed elsewhere).

        Raises as `get`.
        """
        encoded = encode_bytes(key)
        lock = None if self._ignore_locks else self._versions.lock(encoded)
        if lock is not None and self._meets(key, lock):
            if lock.start_ts not in self._committed:
                raise KeyIsLockedError(key, lock)
            # The caller knows that this one is committed at or before ts: its value is in the lock
            # still.
            return (self._versions.written_value(encoded, lock), 0) if lock.kind == PUT else None
        write = self._versions.data_write(encoded, self._ts)
        if write is None or write[1].kind != PUT:
            return None
        return self._versions.written_value(encoded, write[1]), write[0]

    def scan(
        self,
        lower: bytes,
        upper: bytes,
        limit: int,
        *,
        key_only: bool = False,
        reverse: bool = False,
    ) -> list[Row]:
        """Return at most `limit` rows of the encoded range `[lower, upper)` in key order; locked
        keys are returned as errors.
        """
        values = self._values(lower, upper, key_only=key_only, reverse=reverse)
        rows = self._with_locks(values, lower, upper, reverse=reverse)
        return list(islice(rows, limit))

    def _meets(self, key: bytes, lock: Lock) -> bool:
        """Whether the lock may decide what is visible at ts."""
        if not lock.changes_data or lock.start_ts > self._ts or lock.min_commit_ts > self._ts:
            return False
        if self._ts == MAX_TS and lock.primary == key and not lock.async_commit:
            # an autocommit point read: the newest committed version will do
            return False
        return lock.start_ts not in self._resolved

    def _locks(
        self, lower: bytes, upper: bytes, *, reverse: bool
    ) -> Iterator[tuple[bytes, bytes, Lock]]:
        if self._ignore_locks:
            return
        for column_key, data in self._reader.scan(
            *column_range(LOCK_COLUMN, lower, upper), reverse=reverse
        ):
            lock = decode_lock(data)
            key = user_key(column_key[1:])
            if self._meets(key, lock):
                yield column_key[1:], key, lock

    def _with_locks(
        self, values: Iterator[tuple[bytes, bytes]], lower: bytes, upper: bytes, *, reverse: bool
    ) -> Iterator[Row]:
        """Merge the visible values with the locks in the way, both in key order."""
        locks = self._locks(lower, upper, reverse=reverse)
        lock = next(locks, None)
        for encoded, value in values:
            while lock is not None and (lock[0] > encoded if reverse else lock[0] < encoded):
                yield from self._locked_row(*lock)
                lock = next(locks, None)
            # The lock's row comes in the next turn, and hides the value that is older than it.
            if lock is not None and lock[0] == encoded:
                continue
            yield Row(user_key(encoded), value)
        while lock is not None:
            yield from self._locked_row(*lock)
            lock = next(locks, None)

    def _locked_row(self, encoded: bytes, key: bytes, lock: Lock) -> Iterator[Row]:
        if lock.start_ts not in self._committed:
            yield Row(key, b"", KeyIsLockedError(key, lock))
        elif lock.kind == PUT:
            yield Row(key, self._versions.written_value(encoded, lock))

    def _values(
        self, lower: bytes, upper: bytes, *, key_only: bool, reverse: bool
    ) -> Iterator[tuple[bytes, bytes]]:
        visible = (
            self._visible_backward(lower, upper) if reverse else self._visible_forward(lower, upper)
        )
        for encoded, write in visible:
            if write.kind == PUT:
                yield encoded, b"" if key_only else self._versions.written_value(encoded, write)

    def _visible_forward(self, lower: bytes, upper: bytes) -> Iterator[tuple[bytes, Write]]:
        """The newest data write at or before ts of each key;
        a key with many versions is left by a seek.
        """
        start, stop = column_range(WRITE_COLUMN, lower, upper)
        while True:
            done, skipped = b"", 0
            for column_key, data in self._reader.scan(start, stop):
                encoded, commit_ts = split_version(column_key)
                if encoded == done:
                    skipped += 1
                    # A hot key may have thousands of versions: a seek leaves them behind.
                    if skipped > _SEEK_AFTER:
                        break
                    continue
                if commit_ts > self._ts:
                    continue
                write = decode_write(data)
                if write.kind in (PUT, DELETE):
                    done, skipped = encoded, 0
                    yield encoded, write
            else:
                return
            # Just behind the last version of `done`, so the seek skips the rest of its versions.
            start = WRITE_COLUMN + done + AFTER_VERSIONS

    def _visible_backward(self, lower: bytes, upper: bytes) -> Iterator[tuple[bytes, Write]]:
        """Like `_visible_forward`, keys descending: versions then come oldest first,
        and the last that fits wins.
        """
        current, chosen = b"", None
        for column_key, data in self._reader.scan(
            *column_range(WRITE_COLUMN, lower, upper), reverse=True
        ):
            encoded, commit_ts = split_version(column_key)
            if encoded != current:
                if chosen is not None:
                    yield current, chosen
                current, chosen = encoded, None
            if commit_ts <= self._ts:
                write = decode_write(data)
                if write.kind in (PUT, DELETE):
                    chosen = write
        if chosen is not None:
            yield current, chosen


def scan_locks(
    reader: Reader, lower: bytes, upper: bytes, max_ts: int, limit: int
) -> list[tuple[bytes, Lock]]:
    """(raw key, lock) of the encoded range with start_ts <= `max_ts`, at most `limit` (0: all)."""
    pairs = reader.scan(*column_range(LOCK_COLUMN, lower, upper))
    locks = ((user_key(key[1:]), decode_lock(data)) for key, data in pairs)
    return list(islice((item for item in locks if item[1].start_ts <= max_ts), limit or None))


@dataclass(frozen=True, slots=True)
class KeyHistory:
    """Everything stored for one key; `values` are (start_ts, value) of the value column."""

    lock: Lock | None
    writes: tuple[tuple[int, Write], ...]
    values: tuple[tuple[int, bytes], ...]


def key_history(reader: Reader, key: bytes) -> KeyHistory:
    """All records of one raw key, newest first."""
    encoded = encode_bytes(key)
    versions = Versions(reader)
    values = reader.scan(VALUE_COLUMN + encoded, VALUE_COLUMN + encoded + AFTER_VERSIONS)
    return KeyHistory(
        versions.lock(encoded),
        tuple(versions.writes(encoded)),
        tuple((split_version(column_key)[1], value) for column_key, value in values),
    )


def key_of_transaction(reader: Reader, lower: bytes, upper: bytes, start_ts: int) -> bytes | None:
    """The first raw key of the encoded range that the transaction locked,
    wrote or is rolled back on; walks it all.
    """
    for column_key, data in reader.scan(*column_range(LOCK_COLUMN, lower, upper)):
        if decode_lock(data).start_ts == start_ts:
            return user_key(column_key[1:])
    for column_key, data in reader.scan(*column_range(WRITE_COLUMN, lower, upper)):
        if decode_write(data).start_ts == start_ts:
            return user_key(split_version(column_key)[0])
    return None
