"""The value log of a Pump: numbered append-only segments of records; a record survives any crash
once `append` has returned.

A Pump's binlogs are acknowledged when they are here; its index (`storage.pump.index`) holds only
`Pointer`s into this log, and can be rebuilt from it.

Layout (docs/format/value-log.md): `%06d.vlog`, records of `storage.record`, and in a finalised
(sealed) segment a last record, the footer, with the largest timestamp in it. A segment without a
footer is read as a whole at the next start. `ValueLog` writes, recovers and reads; `SegmentFiles`
are its files, with a bounded set of open readers. Invariants:

1. One writer. A group of payloads is one write and one fdatasync, and its pointers exist only after
   both succeeded.
2. A segment's name is durable before its first record is acknowledged.
3. After a failed write the segment is cut back to its last acknowledged byte. Where that, or a
   sync, fails, the segment is left as it is and a new one is begun: after a failed fdatasync nobody
   knows what the disk holds.
4. Only the segment with the highest number is ever written or truncated; every other one can be
   dropped.
5. A segment is known here until its file is gone, so that a failed `drop` can be repeated.
"""

import errno
import os
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from storage import record
from storage.model.errors import CorruptError, UnavailableError
from storage.record import FOOTER, HEADER_BYTES, Gap, Record
from storage.vfs import FS, File

SEGMENT_BYTES: Final = 256 << 20
_WORTH_FINALISING_BYTES: Final = 1 << 20
_NEAR_BYTES: Final = 16 << 10
"""Two records with at most so many bytes between them are read by one call, which costs less."""
_RUN_BYTES: Final = 1 << 20
"""The longest read of `read_many`, unless a single record is longer."""
_NAME: Final = re.compile(r"(\d{6,})\.vlog")
_FOOTER: Final = struct.Struct("<Q")
_FOOTER_BYTES: Final = HEADER_BYTES + _FOOTER.size
_OPEN_READERS: Final = 64


class ValueLogOpenError(UnavailableError):
    """The files of the log cannot be opened or read."""

    code = "ErrValueLogOpen"


class ValueLogWriteError(UnavailableError):
    """The disk refused a write; nothing of the group was acknowledged."""

    code = "ErrValueLogWrite"


class SegmentMissingError(CorruptError):
    """A pointer names a segment that is not there."""

    code = "ErrSegmentMissing"


class Pointer(NamedTuple):
    """A record's place: segment number, offset of its first byte, its length with the header."""

    fid: int
    offset: int
    length: int


class Skipped(NamedTuple):
    """Damaged bytes that a recovery passed over; `torn` when they were the tail of the log and have
    been cut off.
    """

    fid: int
    offset: int
    length: int
    torn: bool


@dataclass(slots=True)
class Segment:
    """What the log keeps in memory of each segment."""

    max_ts: int = 0
    """The largest timestamp of its payloads."""
    size: int = 0
    """Its acknowledged bytes; the file may have more after a failed write."""
    sealed: bool = False
    """Whether it ends with a footer."""
    gaps: list[Gap] = field(default_factory=list)


class ValueLog:
    """An open value log.

    `append` and `rotate` belong to one thread at a time, the rest may be called from any.
    """

    def __init__(
        self,
        fs: FS,
        directory: Path,
        *,
        ts_of: Callable[[bytes], int],
        segment_bytes: int = SEGMENT_BYTES,
        sync: bool = True,
    ) -> None:
        """Open or create the log: finds the end of the last segment and cuts a torn tail off.

        Args:
            fs: where the files are.
            directory: holds nothing but the log.
            ts_of: the timestamp of a payload, to learn max_ts of a segment that has no footer.
            segment_bytes: a segment is finalised after the write that takes it beyond this size.
            sync: without it an acknowledged append survives a killed process, but not a power cut.

        Raises:
            ValueLogOpenError: the directory cannot be read or written.
        """
        self.skipped: list[Skipped] = []
        self._files = SegmentFiles(fs, directory)
        self._segment_bytes = segment_bytes
        self._sync = sync
        self._segments: dict[int, Segment] = {}
        self._current = -1
        self._active: File | None = None
        try:
            self._recover(ts_of)
        except OSError as err:
            raise ValueLogOpenError(
                f"cannot open the value log in {directory}: {err.strerror}; check the directory "
                "and its disk"
            ) from err

    @property
    def end(self) -> Pointer:
        """Just after the last record, length 0; everything appended later stands at or after it."""
        segment = self._segments.get(self._current)
        return Pointer(self._current, segment.size, 0) if segment else Pointer(0, 0, 0)

    def segments(self) -> dict[int, int]:
        """The number of each segment -> its max_ts, in order."""
        return {fid: segment.max_ts for fid, segment in sorted(self._segments.copy().items())}

    def size_bytes(self) -> int:
        """The acknowledged bytes of all segments."""
        return sum(segment.size for segment in self._segments.copy().values())

    def append(self, payloads: Sequence[bytes], max_ts: int) -> list[Pointer]:
        """Write a group, in order, and wait until it is durable;
        `max_ts` is the largest timestamp in it.

        Raises:
            ValueLogWriteError: the disk is full or broken; no payload of the group was stored, try
                again later.
            RecordTooLargeError: a payload is beyond the record limit; nothing was written.
        """
        try:
            active = self._active or self._begin()
            segment = self._segments[self._current]
            data, pointers = _layout(payloads, self._current, segment.size)
            self._write(active, data, segment.size)
        except OSError as err:
            raise ValueLogWriteError(
                f"cannot write to {self._files.path(max(self._current, 0))}: {err.strerror}; "
                "nothing of this group was "
                "stored. Free some space or check the disk, then write again"
            ) from err
        # Only now: until the write and its sync succeeded, `size` must be the last acknowledged
        # byte, to which a failed write is cut back.
        segment.size += len(data)
        segment.max_ts = max(segment.max_ts, max_ts)
        if segment.size >= self._segment_bytes:
            self.rotate()
        return pointers

    def rotate(self) -> None:
        """Finalise the current segment; the next append begins a new one."""
        active, self._active = self._active, None
        if active is None:
            return
        segment = self._segments[self._current]
        data = _footer(segment.max_ts, segment.size)
        try:
            _write_all(active, data)
            active.sync()
        except OSError:
            # Everything acknowledged is durable, and a segment without a footer is scanned at the
            # next start. There half a footer would be reported as damage.
            with suppress(OSError):
                active.truncate(segment.size)
            return
        finally:
            active.close()
        segment.size += len(data)
        segment.sealed = True

    def read(self, pointer: Pointer) -> bytes:
        """The payload at `pointer`.

        Raises:
            SegmentMissingError: its segment was dropped or lost.
            RecordCorruptError: the bytes there are not that record.
            ValueLogOpenError: the disk cannot be read.
        """
        data = self._files.read(*pointer)
        return record.payload_at(data, 0, pointer.length, pointer.offset)

    def read_many(self, pointers: Sequence[Pointer]) -> list[bytes]:
        """Return the payloads at `pointers`, in their order; neighbouring ones are read together.

        See `read`.
        """
        payloads: list[bytes] = [b""] * len(pointers)
        for run in _runs(pointers):
            fid, start, _ = pointers[run[0]]
            end = pointers[run[-1]].offset + pointers[run[-1]].length
            data = self._files.read(fid, start, end - start)
            for number in run:
                _, offset, length = pointers[number]
                payloads[number] = record.payload_at(data, offset - start, length, offset)
        return payloads

    def scan(self, start: Pointer) -> Iterator[tuple[Pointer, bytes] | Skipped]:
        """Yield all payloads at or after `start` with their pointers, and the damaged stretches
        that were skipped. It ends at the segment that is the last one when it begins.

        Raises:
            SegmentMissingError: the segment of `start`, or one after it, is not there.
        """
        if start.fid > self._current and start != Pointer(0, 0, 0):
            raise self._files.missing(start.fid)
        for fid in range(start.fid, self._current + 1):
            if fid not in self._segments:
                raise self._files.missing(fid)
            offset = start.offset if fid == start.fid else 0
            for part in self._files.records(fid, offset, self._segments[fid].size):
                if isinstance(part, Gap):
                    yield Skipped(fid, part.offset, part.length, torn=False)
                elif part.kind != FOOTER:
                    yield Pointer(fid, part.offset, part.length), part.payload

    def drop(self, fid: int) -> None:
        """Remove a finished segment and free its space; an absent one is no error.

        Raises:
            ValueLogWriteError: the file cannot be removed; the segment stays, drop it again later.
        """
        assert fid != self._current, "the current segment cannot be dropped"
        if fid not in self._segments:
            return
        try:
            self._files.remove(fid)
        except OSError as err:
            raise ValueLogWriteError(
                f"cannot remove {self._files.path(fid)}: {err.strerror}"
            ) from err
        self._segments.pop(fid, None)

    def close(self) -> None:
        """Release the files; a large current segment is finalised,
        so that the next start need not scan it.
        """
        if self.end.offset >= _WORTH_FINALISING_BYTES:
            self.rotate()
        active, self._active = self._active, None
        if active is not None:
            active.close()
        self._files.close()

    def _recover(self, ts_of: Callable[[bytes], int]) -> None:
        for fid in self._files.numbers():
            segment = self._segments[fid] = self._files.inspect(fid, ts_of)
            self.skipped += [
                Skipped(fid, gap.offset, gap.length, torn=False) for gap in segment.gaps
            ]
            self._current = fid
        last = self._segments.get(self._current)
        if last is not None and not last.sealed:
            self._active = self._files.open(self._current)
            self._cut_torn_tail(self._active, last)
            # records of a killed process may so far be in the page cache only
            self._active.sync()

    def _cut_torn_tail(self, active: File, last: Segment) -> None:
        # Only damage that reaches the end is a torn write; in the middle it is a disk's fault, and
        # what follows it was acknowledged.
        if not last.gaps or sum(last.gaps[-1]) != last.size:
            return
        last.size = last.gaps[-1].offset
        active.truncate(last.size)
        self.skipped[-1] = self.skipped[-1]._replace(torn=True)

    def _begin(self) -> File:
        fid = self._current + 1
        self._active = self._files.create(fid)
        self._segments[fid] = Segment()
        self._current = fid
        return self._active

    def _write(self, active: File, data: bytes, offset: int) -> None:
        try:
            _write_all(active, data)
        except OSError:
            try:
                # Bytes of a group that was refused must not be found by a later recovery.
                active.truncate(offset)
            except OSError:
                self._abandon(active)
            raise
        if not self._sync:
            return
        try:
            active.sync()
        except OSError:
            # The kernel may have dropped the dirty pages and cleared the error: a second fdatasync
            # would succeed and say nothing about this one.
            self._abandon(active)
            raise

    def _abandon(self, active: File) -> None:
        self._active = None
        active.close()


def _runs(pointers: Sequence[Pointer]) -> Iterator[list[int]]:
    """The indexes of `pointers` in groups; the records of a group are near each other in one
    segment, and are read by one call.
    """
    run: list[int] = []
    for number in sorted(range(len(pointers)), key=pointers.__getitem__):
        fid, offset, length = pointers[number]
        if run:
            first, last = pointers[run[0]], pointers[run[-1]]
            near = offset - last.offset - last.length <= _NEAR_BYTES
            if fid != first.fid or not near or offset + length - first.offset > _RUN_BYTES:
                yield run
                run = []
        run.append(number)
    if run:
        yield run


def _layout(payloads: Sequence[bytes], fid: int, offset: int) -> tuple[bytes, list[Pointer]]:
    """The bytes of a group of records that begins at `offset` of segment `fid`, and the pointer to
    each.
    """
    parts: list[bytes] = []
    pointers: list[Pointer] = []
    for payload in payloads:
        length = HEADER_BYTES + len(payload)
        parts += (record.encode(payload, offset), payload)
        pointers.append(Pointer(fid, offset, length))
        offset += length
    return b"".join(parts), pointers


def _write_all(file: File, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = file.append(view)
        # write(2) took nothing and reported nothing: without an error this would loop for ever.
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[written:]


def _footer(max_ts: int, offset: int) -> bytes:
    """The record that finalises a segment of `offset` bytes."""
    payload = _FOOTER.pack(max_ts)
    return record.encode(payload, offset, FOOTER) + payload


class SegmentFiles:
    """The segment files in one directory; safe to read from several threads."""

    def __init__(self, fs: FS, directory: Path) -> None:
        self._fs = fs
        self._directory = directory
        self._readers: OrderedDict[int, File] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, fid: int) -> Path:
        """The file of segment `fid`."""
        return self._directory / f"{fid:06d}.vlog"

    def numbers(self) -> list[int]:
        """The segments on disk, in order; makes the directory when it is missing."""
        self._fs.make_directories(self._directory)
        matches = (_NAME.fullmatch(name) for name in self._fs.names(self._directory))
        return sorted(int(match[1]) for match in matches if match)

    def create(self, fid: int) -> File:
        """A new segment whose name is durable."""
        file = self._fs.create(self.path(fid))
        try:
            # A crash may lose a file whose name was never synced, with every record in it.
            self._fs.sync_directory(self._directory)
        except OSError:
            file.close()
            # The name may or may not be durable; the next attempt uses the same number and must
            # find it free.
            self._fs.remove(self.path(fid))
            raise
        return file

    def open(self, fid: int) -> File:
        """A handle of its own to an existing segment, for its writer."""
        return self._fs.open(self.path(fid))

    def inspect(self, fid: int, ts_of: Callable[[bytes], int]) -> Segment:
        """The content of a segment: from its footer, else from all of its records."""
        file = self._fs.open(self.path(fid))
        try:
            size = file.size()
            max_ts = _sealed_max_ts(file, size)
            if max_ts is None:
                return _rescan(file, size, ts_of)
            return Segment(max_ts, size, sealed=True)
        finally:
            file.close()

    def read(self, fid: int, offset: int, size: int) -> bytes:
        """Return up to `size` bytes of a segment.

        Raises:
            SegmentMissingError: there is no such file.
            ValueLogOpenError: the disk cannot be read.
        """
        try:
            with self._lock:
                return self._reader(fid).read(offset, size)
        except FileNotFoundError as err:
            raise self.missing(fid) from err
        except OSError as err:
            raise ValueLogOpenError(
                f"cannot read {self.path(fid)}: {err.strerror}; check the disk"
            ) from err

    def records(self, fid: int, start: int, end: int) -> Iterator[Record | Gap]:
        """The records of a segment in `[start, end)`, as `record.scan` finds them."""
        return record.scan(lambda offset, size: self.read(fid, offset, size), start, end)

    def remove(self, fid: int) -> None:
        """Remove a segment, durably; its space comes back at once. A file that is gone already is
        no error: an earlier call may have failed after it removed the name.
        """
        with self._lock:
            # An open descriptor would keep the blocks of the removed file in use.
            reader = self._readers.pop(fid, None)
            if reader is not None:
                reader.close()
        with suppress(FileNotFoundError):
            self._fs.remove(self.path(fid))
        self._fs.sync_directory(self._directory)

    def close(self) -> None:
        """Close the readers."""
        with self._lock:
            while self._readers:
                self._readers.popitem()[1].close()

    def missing(self, fid: int) -> SegmentMissingError:
        """The error for a segment that is not there."""
        return SegmentMissingError(
            f"{self.path(fid)} is missing; it was removed by GC, or lost: then restore it"
        )

    def _reader(self, fid: int) -> File:
        reader = self._readers.get(fid)
        if reader is None:
            reader = self._readers[fid] = self._fs.open(self.path(fid))
            if len(self._readers) > _OPEN_READERS:
                self._readers.popitem(last=False)[1].close()
        self._readers.move_to_end(fid)
        return reader


def _sealed_max_ts(file: File, size: int) -> int | None:
    """The largest timestamp of a segment by its footer; None: it has no footer."""
    start = size - _FOOTER_BYTES
    last = next(record.scan(file.read, start, size)) if start >= 0 else None
    if isinstance(last, Record) and last.kind == FOOTER:
        return int(_FOOTER.unpack(last.payload)[0])
    return None


def _rescan(file: File, size: int, ts_of: Callable[[bytes], int]) -> Segment:
    """A segment without a footer, from all of its records."""
    segment = Segment(size=size)
    for part in record.scan(file.read, 0, size):
        if isinstance(part, Gap):
            segment.gaps.append(part)
        elif part.kind != FOOTER:
            segment.max_ts = max(segment.max_ts, ts_of(part.payload))
    return segment
