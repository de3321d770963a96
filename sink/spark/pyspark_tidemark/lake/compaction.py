"""Which files of a Delta or Iceberg table should be joined into one, and which of them the driver
may join now. Pure.

A file is joined with smaller ones only if it has at most twice their bytes. So each time a row is
rewritten its file grows by half at least, and a row is rewritten a logarithmic number of times. A
file with many masked rows is rewritten at once, since readers pay for these.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Protocol, TypeVar

from pyspark_tidemark.lake.target import Health


class DataFile(Protocol):
    """A file that a table's version shows."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def rows(self) -> int:
        """Masked ones included; 0: unknown."""

    @property
    def masked(self) -> int:
        """How many rows it has that the table does not show."""

    @property
    def ended(self) -> bool:
        """Whether no cut looks into it any more."""


File = TypeVar("File", bound=DataFile)

SMALL_FILE_BYTES = 16 << 20
"""Files below this size count as small in the metrics."""
FULL_FILE_BYTES = 64 << 20
"""Files of this size or more are not joined, unless they have many masked rows."""
MOST_BYTES = 64 << 20
"""About how much the driver rewrites at a time, while cuts wait: at most one such file more."""
_MASKED_SHARE = 0.2
"""A file with a larger share of masked rows is rewritten."""
_GROWTH = 2.0
"""A file is joined if it has at most so many times the bytes of all smaller ones."""


def chosen(files: Iterable[File]) -> list[list[File]]:
    """The files to be joined, in none, one or two groups, each of which becomes one file."""
    # Files with ended versions only (scd2) are not joined with others: no cut searches them.
    listed = list(files)
    parts = [[file for file in listed if file.ended is ended] for ended in (False, True)]
    return [group for part in parts if (group := _chosen(part))]


def _chosen(files: Iterable[File]) -> list[File]:
    listed = sorted(files, key=_live_bytes)
    masked = [file for file in listed if _is_masked(file)]
    others = [file for file in listed if not _is_masked(file) and file.size < FULL_FILE_BYTES]
    smaller = accumulate(map(_live_bytes, others), initial=sum(map(_live_bytes, masked)))
    worth = [
        _live_bytes(file) <= _GROWTH * before for file, before in zip(others, smaller, strict=False)
    ]
    last = max((number for number, good in enumerate(worth, 1) if good), default=0)
    worthwhile = masked + others[:last]
    return worthwhile if masked or len(worthwhile) > 1 else []


def affordable(groups: Iterable[Sequence[File]]) -> list[list[File]]:
    """What of the groups the driver may join now: the smallest files, until those of all groups
    have `MOST_BYTES`; the others wait for the next time.
    """
    left, parts = MOST_BYTES, []
    for group in groups:
        part = []
        for file in sorted(group, key=lambda file: file.size):
            if left > 0 and file.size <= MOST_BYTES:
                part.append(file)
                left -= file.size
        if len(part) > 1 or any(map(_is_masked, part)):
            parts.append(part)
    return parts


def too_large(groups: Iterable[Sequence[DataFile]]) -> bool:
    """Whether there is a file that the driver may never rewrite: a full one with many masked
    rows.
    """
    return any(file.size > MOST_BYTES for group in groups for file in group)


def health(files: Iterable[DataFile]) -> Health:
    """The health of a table with these files."""
    return sum(
        (Health(1, file.size < SMALL_FILE_BYTES, file.rows, file.masked) for file in files),
        Health(),
    )


def _is_masked(file: DataFile) -> bool:
    return file.masked > _MASKED_SHARE * file.rows


def _live_bytes(file: DataFile) -> float:
    return file.size * (1 - file.masked / max(file.rows, file.masked, 1))
