"""Garbage collection of old versions.

Pure over a frozen `Reader`: it says what to delete, batch by batch.

After GC at `safe_point`, every read at a timestamp >= safe_point gives what it gave before. Of each
key that means: the newest version with commit_ts <= safe_point stays if it is a Put, and goes if it
is a Delete; all older ones go, and so do the Lock and Rollback records up to the safepoint. Locks
are not touched. That Delete goes last of its key: whatever part of the batches is applied, in their
order, what it hid never comes back.

`RangeGC` does a range. `GcWalk` says how far a store has come: one walk over all its regions in key
order. A newer safepoint takes over in the middle of a walk; at the end of the key space the walk
then comes back for what it had done with the older one (TiDB's GC document: "100 % of the
regions"). Every step is a value that is kept on disk, so that a store goes on after a crash where
it was.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Final

from storage.kv import Reader
from storage.mvcc.layout import (
    META,
    WRITE,
    column_range,
    encode_document,
    reading_document,
    split_version,
    value_key,
)
from storage.mvcc.record import DELETE, PUT, Write, decode_write
from storage.mvcc.version_counts import VersionCounts

BATCH_BYTES = 32 << 10
"""Keys of about this many bytes are deleted together (TiKV's MAX_TXN_WRITE_SIZE)."""
STEP_RECORDS = 2048
"""Records looked at before control goes back, garbage or not."""
WALK_KEY: Final = META + b"gc"
_FORMAT: Final = 1


class RangeGC:
    """One look at every write record of the encoded range `[lower, upper)`."""

    def __init__(self, reader: Reader, lower: bytes, upper: bytes, safe_point: int) -> None:
        self.left = VersionCounts()
        """What remains, once all batches were taken."""
        self.deleted_versions = 0
        self._reader = reader
        self._bounds = column_range(WRITE, lower, upper)
        self._safe_point = safe_point
        self._batch: list[bytes] = []
        self._batch_bytes = 0

    def batches(self) -> Generator[list[bytes], None, None]:
        """Store keys to delete; an empty batch means only that some time has passed."""
        current, kept_newest, hides, left_at_start = b"", False, b"", 0
        for seen, (column_key, data) in enumerate(self._reader.scan(*self._bounds), 1):
            encoded, commit_ts = split_version(column_key)
            if encoded != current:
                self._end_row(hides, left_at_start)
                current, kept_newest, hides, left_at_start = encoded, False, b"", self.left.versions
            write = decode_write(data)
            newest = (
                commit_ts <= self._safe_point and not kept_newest and write.kind in (PUT, DELETE)
            )
            if commit_ts > self._safe_point or (newest and write.kind == PUT):
                self.left.add(write.kind, commit_ts)
            elif newest:
                # The newest version is a Delete: it goes after everything it hides, or a crash in
                # between would bring an old row back.
                hides = column_key
            else:
                self._drop(column_key, encoded, write)
            kept_newest = kept_newest or newest
            if self._batch_bytes >= BATCH_BYTES or not seen % STEP_RECORDS:
                yield self._taken()
        self._end_row(hides, left_at_start)
        if self._batch:
            yield self._taken()

    def _end_row(self, hides: bytes, left_at_start: int) -> None:
        if hides:
            self._append(hides)
        self.left.rows += self.left.versions > left_at_start

    def _drop(self, column_key: bytes, encoded: bytes, write: Write) -> None:
        self._append(column_key)
        if write.kind == PUT and write.short_value is None:
            # Its record is in the same batch, so no record is left without its value.
            self._batch.append(value_key(encoded, write.start_ts))
            self._batch_bytes += len(column_key)

    def _append(self, column_key: bytes) -> None:
        self._batch.append(column_key)
        self._batch_bytes += len(column_key)
        self.deleted_versions += 1

    def _taken(self) -> list[bytes]:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        return batch


@dataclass(frozen=True, slots=True)
class GcWalk:
    """Everything before `next_key` is collected at `safe_point`; after a wrap,
    everything from `rewind_key` on as well.

    `begun_safe_point` is the newest safepoint anything was collected at, in a walk or by request:
    history at or after it is whole, older history may have holes.
    """

    safe_point: int = 0
    next_key: bytes = b""
    rewind_key: bytes = b""
    wrapped: bool = False
    finished: bool = True
    begun_safe_point: int = 0

    def switched(self, safe_point: int) -> "GcWalk":
        """The walk under a newer safepoint, from where it is."""
        assert safe_point > self.safe_point, "safepoints only grow"
        begun = max(safe_point, self.begun_safe_point)
        if self.finished:
            return GcWalk(safe_point, finished=False, begun_safe_point=begun)
        return GcWalk(
            safe_point, self.next_key, self.next_key, finished=False, begun_safe_point=begun
        )

    def passed(self, end_key: bytes) -> "GcWalk":
        """The walk after everything up to `end_key` was collected;
        b"" is the end of the key space.
        """
        assert not self.finished, "a finished walk stands still"
        if self.wrapped and (not end_key or end_key >= self.rewind_key):
            return replace(self, finished=True, next_key=b"")
        if end_key:
            return replace(self, next_key=end_key)
        # The first part of the key space was done at an older safepoint: walk up to there once
        # more.
        if self.rewind_key:
            return replace(self, next_key=b"", wrapped=True)
        return replace(self, finished=True, next_key=b"")

    def begun(self, safe_point: int) -> "GcWalk":
        """The same walk after something else was collected at `safe_point`."""
        return replace(self, begun_safe_point=max(safe_point, self.begun_safe_point))

    def encode(self) -> bytes:
        """The bytes kept at `WALK_KEY` (docs/format/mvcc.md)."""
        return encode_document(
            _FORMAT,
            safe_point=self.safe_point,
            next_key=self.next_key.hex(),
            rewind_key=self.rewind_key.hex(),
            wrapped=self.wrapped,
            finished=self.finished,
            begun_safe_point=self.begun_safe_point,
        )


def decode_walk(data: bytes) -> GcWalk:
    """Read what `GcWalk.encode` wrote.

    Raises:
        CorruptError: not such bytes.
    """
    with reading_document(data, _FORMAT, "the GC progress") as document:
        return GcWalk(
            safe_point=int(document["safe_point"]),
            next_key=bytes.fromhex(document["next_key"]),
            rewind_key=bytes.fromhex(document["rewind_key"]),
            wrapped=bool(document["wrapped"]),
            finished=bool(document["finished"]),
            begun_safe_point=int(document["begun_safe_point"]),
        )
