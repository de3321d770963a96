"""The plan for reading a table of the cluster: its ranges, an estimate of the remaining rows, and
the number of rows of a chunk. Pure.

Several readers read the ranges at the same time. Bounds may be any bytes: bad bounds make a dump
slow, but never wrong. If the table has several regions, which are about equally large, ranges end
where regions do. Within a region, or if there is one only, keys are taken as numbers and split in
equal steps.
"""

import bisect
import itertools
import string
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from server.dump.job import Job
from server.dump.progress import Cell, Cursor, Range
from storage.model.span import KeyRange, Span
from storage.tidb.record import record_key

RANGES_MAX: Final = 32
"""The greatest number of ranges of a table with fewer partitions; the cursors of all are written
together.
"""
_DIGITS: Final = 12
_NUMBER_BYTES: Final = len(record_key(0, 0))
_ALL: Final = bytes(range(256))
_LETTERS: Final = (
    string.digits,
    string.hexdigits[:16],
    string.digits + "ABCDEF",
    string.ascii_lowercase,
)
_ALPHABETS: Final = [
    bytes(sorted(letters.encode()))
    for letters in (*_LETTERS, string.ascii_uppercase, string.digits + string.ascii_letters)
]
_ROWS_MAX: Final = 65_536
_TARGET_S: Final = 0.25
_TARGET_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Extent:
    """The keys and size of one part of a table at one moment; all but `part` are hints."""

    part: Span
    scale: "KeyScale"
    bounds: tuple[bytes, ...] = ()
    """The region bounds within the part."""
    rows: int | None = None
    """The number of rows of a part too small to split; None: there were more than were counted."""


def cursor_of(key: bytes) -> Cursor:
    """A record key as progress has it."""
    return (Cell(0, key),)


def planned_ranges(extents: Sequence[Extent]) -> tuple[Range, ...]:
    """The ranges of a table, in key order; the last one of each part ends where the part does."""
    pieces = RANGES_MAX // max(sum(each.rows is None for each in extents), 1)
    ends: list[bytes] = []
    for each in extents:
        ends += cuts(each.scale, each.bounds, pieces) if each.rows is None else []
        ends.append(each.part.end_key)
    return tuple(Range(None, cursor_of(end)) for end in ends)


def key_ranges(ranges: Sequence[Range], parts: Sequence[Span]) -> list[KeyRange] | None:
    """Return the key ranges of a progress's ranges within the parts, both in key order; None: the
    progress is of other parts.
    """
    key_spans: list[KeyRange] = []
    left = list(ranges)
    for part in parts:
        begin = part.start_key
        while begin < part.end_key:
            until = left.pop(0).until if left else None
            end = until[0].data if until else b""
            if not begin < end <= part.end_key:
                return None
            key_spans.append(KeyRange(begin, end))
            begin = end
    return None if left else key_spans


def cuts(scale: "KeyScale", bounds: Iterable[bytes], pieces: int) -> list[bytes]:
    """Return at most `pieces` - 1 keys of a scale, ascending: region bounds first, then equal steps
    between them.
    """
    inner = [key for key in bounds if scale.first < key < scale.last]
    if len(inner) >= pieces - 1:
        return [inner[number * len(inner) // pieces] for number in range(1, pieces)]
    anchors = [scale.first, *inner, scale.last]
    steps = pieces // (len(anchors) - 1)
    keys = set(inner)
    for begin, end in itertools.pairwise(map(scale.at, anchors)):
        keys |= {scale.key(begin + number * (end - begin) // steps) for number in range(1, steps)}
    return sorted(key for key in keys if scale.first < key < scale.last)


class KeyScale:
    """Keys from the first to the last of some as numbers, in about the same order;
    others are taken as the nearest.

    Each byte is a digit. Text uses few of them: where all bytes that were seen at a place are of
    one of `_ALPHABETS`, its letters are the digits.
    """

    def __init__(self, seen: Sequence[bytes]) -> None:
        """`seen` ascends."""
        self.first, self.last = (seen[0], seen[-1]) if seen else (b"", b"")
        pairs = enumerate(zip(self.first, self.last, strict=False))
        shorter = min(len(self.first), len(self.last))
        self._same = next((place for place, (left, right) in pairs if left != right), shorter)
        is_number = len(self.first) == len(self.last) == _NUMBER_BYTES
        places = range(self._same, self._same + _DIGITS)
        self._digits = [_ALL if is_number else _alphabet(seen, place) for place in places]

    def at(self, key: bytes) -> int:
        """Return the position of a key on the scale; at least 0."""
        nearest = min(max(key, self.first), self.last)[self._same : self._same + _DIGITS].ljust(
            _DIGITS, b"\0"
        )
        number = 0
        for byte, digits in zip(nearest, self._digits, strict=True):
            number = number * len(digits) + min(bisect.bisect_left(digits, byte), len(digits) - 1)
        return number

    def key(self, at: int) -> bytes:
        """A key that is there."""
        tail = bytearray()
        for digits in reversed(self._digits):
            at, digit = divmod(at, len(digits))
            tail.append(digits[digit])
        return self.first[: self._same] + bytes(reversed(tail)).rstrip(b"\0")


def _alphabet(seen: Iterable[bytes], place: int) -> bytes:
    used = {key[place] for key in seen if len(key) > place}
    if len(used) <= 1:
        return bytes(used) or b"\0"
    return next((each for each in _ALPHABETS if used <= set(each)), _ALL)


class RowEstimate:
    """Estimates how many rows the ranges of a table still have, from the density of what was read
    of each or of all.
    """

    def __init__(self, ranges: Sequence[KeyRange], extents: Sequence[Extent]) -> None:
        self._ranges = ranges
        parts = [
            next(each for each in extents if _within(key_range, each.part)) for key_range in ranges
        ]
        self._scales = [each.scale for each in parts]
        self._seen: dict[int, tuple[int, int]] = {}
        self.counted: frozenset[int] = frozenset()
        """Ranges whose rows are known already."""
        for place, part in enumerate(parts):
            if part.rows is not None:
                self.note_rows(place, part.scale.first, part.scale.last, part.rows)
        self.counted = frozenset(place for place, part in enumerate(parts) if part.rows is not None)

    def note_rows(self, place: int, begin: bytes, last: bytes, rows: int) -> None:
        """Note that a range has `rows` rows from `begin` to `last`."""
        if rows and place not in self.counted:
            scale = self._scales[place]
            before, width = self._seen.get(place, (0, 0))
            self._seen[place] = before + rows, width + max(scale.at(last) - scale.at(begin), 1)

    def left(self, at: Collection[tuple[int, bytes]]) -> int:
        """Estimate how many rows there are from these keys on, in the ranges that are not done."""
        density = {place: rows / width for place, (rows, width) in self._seen.items()}
        usual = sum(density.values()) / max(len(density), 1)
        rows = 0.0
        for place, key in at:
            scale = self._scales[place]
            width = scale.at(self._ranges[place].end_key) - scale.at(key)
            rows += max(width, 0) * density.get(place, usual)
        return round(rows)


def _within(inner: KeyRange, part: Span) -> bool:
    return part.start_key <= inner.start_key and inner.end_key <= part.end_key


@dataclass(slots=True)
class ChunkPace:
    """Decides how many rows the chunks of one table have: as many as take about `_TARGET_S` and
    `_TARGET_BYTES`; it changes by a factor of two at most.
    """

    rows: int = 64
    row_bytes: float = 0.0
    """The average size of the last chunk's rows."""

    def limit(self, job: Job, pages: int) -> int:
        """Return how many rows each of so many pages may have; all together no more than the job
        allows in a second.
        """
        most = [self.rows]
        if job.rows_per_s:
            most.append(job.rows_per_s // pages)
        if job.bytes_per_s and self.row_bytes:
            most.append(int(job.bytes_per_s / self.row_bytes / pages))
        return max(min(most), 1)

    def took(self, rows: int, size_bytes: int, seconds: float) -> None:
        """A page of so many rows took so long."""
        if rows == 0:
            return
        self.row_bytes = size_bytes / rows
        target_rows = min(
            rows * _TARGET_S / max(seconds, 1e-4), _TARGET_BYTES / max(self.row_bytes, 1)
        )
        self.rows = int(min(max(target_rows, self.rows / 2, 1), self.rows * 2, _ROWS_MAX))

    def failed(self) -> None:
        """A page was not to be had: it may have been too large."""
        self.rows = max(self.rows // 4, 1)


def least_s(job: Job, rows: int, size_bytes: int) -> float:
    """Return the shortest time that reading this much may take at the job's rates."""
    by_rows = rows / job.rows_per_s if job.rows_per_s else 0.0
    return max(by_rows, size_bytes / job.bytes_per_s if job.bytes_per_s else 0.0)
