"""The files of a value log: their names, what their footers say,
and a bounded set of open readers.
"""

import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from storage import record
from storage.model.errors import CorruptError, UnavailableError
from storage.record import FOOTER, HEADER_BYTES, Gap, Record
from storage.vfs import FS, File

_NAME = re.compile(r"(\d{6,})\.vlog")
_FOOTER = struct.Struct("<Q")
_FOOTER_BYTES = HEADER_BYTES + _FOOTER.size
_OPEN_READERS = 64


class ValueLogOpenError(UnavailableError):
    """The files of the log cannot be opened or read."""

    code = "ErrValueLogOpen"


class SegmentMissingError(CorruptError):
    """A pointer names a segment that is not there."""

    code = "ErrSegmentMissing"


@dataclass(slots=True)
class Segment:
    """What is known of a segment without reading it; `size` counts acknowledged bytes only."""

    max_ts: int = 0
    size: int = 0
    sealed: bool = False
    gaps: list[Gap] = field(default_factory=list)


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
        """What a segment holds: from its footer, else from all of its records."""
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
        """Up to `size` bytes of a segment.

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
        """Remove a segment; its space comes back at once, its name is gone durably."""
        with self._lock:
            # An open descriptor would keep the blocks of the removed file in use.
            reader = self._readers.pop(fid, None)
            if reader is not None:
                reader.close()
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


def footer(max_ts: int, offset: int) -> bytes:
    """The record that finalises a segment of `offset` bytes."""
    payload = _FOOTER.pack(max_ts)
    return record.encode(payload, offset, FOOTER) + payload


def _sealed_max_ts(file: File, size: int) -> int | None:
    at = size - _FOOTER_BYTES
    last = next(record.scan(file.read, at, size)) if at >= 0 else None
    if isinstance(last, Record) and last.kind == FOOTER:
        return int(_FOOTER.unpack(last.payload)[0])
    return None


def _rescan(file: File, size: int, ts_of: Callable[[bytes], int]) -> Segment:
    segment = Segment(size=size)
    for part in record.scan(file.read, 0, size):
        if isinstance(part, Gap):
            segment.gaps.append(part)
        elif part.kind != FOOTER:
            segment.max_ts = max(segment.max_ts, ts_of(part.payload))
    return segment
