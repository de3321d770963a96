"""Append-only segment files that hold the blocks of all tables of a `BlockStore`.

A block is dead once no table's index has it; a segment is unlinked when its last block is dead.

The sorter's files are a cache of the upstream: nothing is synced, and everything is removed at
start. A file is open while it is written to and while a block is read, so a backlog of any size
costs neither memory nor open files. A read may finish after the file has been unlinked.

Blocks are read, not mapped. A mapping keeps a descriptor and the space of its whole file for as
long as any row of it is used; it ends the process when the disk fails; and it costs more CPU.
"""

import contextlib
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from sorter.block import ALIGNMENT
from sorter.errors import SorterDiskError

_SUFFIX: Final = ".segment"
_SPARSE_SHARE: Final = 4


@dataclass(frozen=True, slots=True)
class Pointer:
    """The place of a block."""

    segment: int
    offset: int
    length: int


class _OpenFile:
    """A file descriptor that is closed with the last reference to it."""

    def __init__(self, path: Path, flags: int) -> None:
        self.fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self.fd)


class Segment:
    """One file; readable as long as this object is referenced."""

    def __init__(self, path: Path, number: int) -> None:
        self.number = number
        self.size = 0
        self.live_bytes = 0
        self._shared: dict[int, int] = {}
        """Of blocks of several tables: offset -> the number of tables that still need it."""
        self._path = path
        self._file: _OpenFile | None = _OpenFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def append(self, header: bytes, payload: pa.Buffer, tables: int) -> Pointer:
        """Write a block at the end, for so many tables;
        a write that fails leaves nothing behind.
        """
        offset, length = self.size, len(header) + payload.size
        fd = self._open_file().fd
        try:
            written = os.pwritev(fd, [header, payload], offset)
            # write(2) may take less than it was given, as near the end of a full disk; only the
            # next call gets the error.
            if written < length:
                rest = memoryview(header + payload.to_pybytes())
                while written < length:
                    written += os.pwrite(fd, rest[written:], offset + written)
        except OSError:
            # The disk may be full: give back at once what was written in vain.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, offset)
            raise
        self.size = -(-(offset + length) // ALIGNMENT) * ALIGNMENT
        self.live_bytes += length
        if tables > 1:
            self._shared[offset] = tables
        return Pointer(self.number, offset, length)

    def release(self, pointer: Pointer) -> None:
        """Give up one table's rows in the block; it is dead once no table has rows in it."""
        tables = self._shared.pop(pointer.offset, 1)
        if tables > 1:
            self._shared[pointer.offset] = tables - 1
        else:
            self.live_bytes -= pointer.length

    @property
    def is_sparse(self) -> bool:
        """Whether at most a quarter of what was written is alive."""
        return self.live_bytes * _SPARSE_SHARE <= self.size

    def read(self, pointer: Pointer) -> pa.Buffer:
        """The block's bytes; fewer when the file ends before.

        Raises:
            OSError: the disk does not give them.
        """
        # The local name keeps the descriptor open: `seal` in another thread drops the other
        # reference.
        file, data = self._open_file(), pa.allocate_buffer(pointer.length)
        return data.slice(0, os.preadv(file.fd, [data], pointer.offset))

    def seal(self) -> None:
        """Close the file for writing; from now on each read opens it."""
        self._file = None

    def unlink(self) -> None:
        """Remove the file; its space returns when the last reader is done."""
        # Readers that hold this object go on with the open file; if it cannot be opened, they get
        # an error.
        with contextlib.suppress(OSError):
            self._file = self._open_file()
        self._path.unlink(missing_ok=True)

    def _open_file(self) -> _OpenFile:
        file = self._file
        if file is None:
            try:
                file = _OpenFile(self._path, os.O_RDONLY)
            except FileNotFoundError:
                # Unlinked since: `unlink` has opened it for readers before.
                file = self._file
                if file is None:
                    raise
        return file


class SegmentLog:
    """All segments of a sorter; safe to call from several threads."""

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self.created = 0
        self._active: Segment | None = None

    def append(self, header: bytes, payload: pa.Buffer, tables: int = 1) -> Pointer:
        """Write a block of so many tables; starts a new segment when the current one is full.

        Raises:
            SorterDiskError: the disk is full or broken.
        """
        with self._lock:
            try:
                if self._active is None:
                    self._active = self._create()
                pointer = self._active.append(header, payload, tables)
            except OSError as err:
                raise SorterDiskError(
                    f"cannot write rows to {self._directory}: {err.strerror}; free some space, "
                    "the rows wait in memory"
                ) from err
            if self._active.size >= self._segment_bytes:
                self._active.seal()
                self._active = None
            return pointer

    def segment(self, number: int) -> Segment:
        """The segment, to be held as long as its blocks are read."""
        with self._lock:
            return self._segments[number]

    def release(self, pointer: Pointer) -> None:
        """Give up one table's rows in a block; a segment whose last block dies is removed."""
        with self._lock:
            segment = self._segments[pointer.segment]
            segment.release(pointer)
            if not segment.live_bytes:
                del self._segments[pointer.segment]
                # Unlinked below: the next block must go to a new one, which can be opened by name.
                if segment is self._active:
                    self._active = None
                segment.unlink()

    def sparse(self) -> frozenset[int]:
        """Full segments of which little is alive."""
        with self._lock:
            return frozenset(
                number
                for number, segment in self._segments.items()
                if segment.is_sparse and segment is not self._active
            )

    def sizes(self) -> tuple[int, int]:
        """(number of segments, their bytes)."""
        with self._lock:
            return len(self._segments), sum(segment.size for segment in self._segments.values())

    def close(self) -> None:
        """Remove all files."""
        with self._lock:
            for segment in self._segments.values():
                segment.unlink()
            self._segments.clear()
            self._active = None

    def _create(self) -> Segment:
        number = self.created + 1
        segment = Segment(self._directory / f"{number:016d}{_SUFFIX}", number)
        # Only now: a file that could not be created is tried again under its number.
        self.created = number
        self._segments[number] = segment
        return segment
