"""Which files of a Delta table are worth being joined, and whether the driver may join them itself.

Pure.

A file is joined with smaller ones only if it is not much larger than all of them together, so that
a row is rewritten as often as its file can grow by half, and not each time; but a file with many
masked rows at once, as readers pay for these.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from pyspark_tidemark.lake.delta.files import DataFile
from pyspark_tidemark.lake.target import Health

SMALL_FILE_BYTES = 16 << 20
"""What the metrics call small."""
FULL_FILE_BYTES = 64 << 20
"""What needs no company."""
MOST_BYTES = 64 << 20
"""So much the driver rewrites while the cuts wait, as much as of a cut."""
_MASKED_SHARE = 0.2
_GROWTH = 2.0


def chosen(files: Iterable[DataFile]) -> list[list[DataFile]]:
    """Files that are to become one, in none, one or two groups.

    Those with nothing but ended versions stay among themselves, as no cut needs to look into them.
    """
    listed = list(files)
    parts = [[file for file in listed if file.ended is ended] for ended in (False, True)]
    return [group for part in parts if (group := _chosen(part))]


def _chosen(files: Iterable[DataFile]) -> list[DataFile]:
    listed = sorted(files, key=_live_bytes)
    masked = [file for file in listed if file.masked > _MASKED_SHARE * file.rows]
    others = [
        file
        for file in listed
        if file.masked <= _MASKED_SHARE * file.rows and file.size < FULL_FILE_BYTES
    ]
    smaller = accumulate(map(_live_bytes, others), initial=sum(map(_live_bytes, masked)))
    worth = [
        _live_bytes(file) <= _GROWTH * before for file, before in zip(others, smaller, strict=False)
    ]
    last = max((number for number, good in enumerate(worth, 1) if good), default=0)
    worthwhile = masked + others[:last]
    return worthwhile if masked or len(worthwhile) > 1 else []


def affordable(groups: Sequence[Sequence[DataFile]]) -> bool:
    """Whether the driver may join them."""
    return sum(file.size for group in groups for file in group) <= MOST_BYTES


def health(files: Iterable[DataFile]) -> Health:
    """What maintenance tells of a table's files."""
    return sum(
        (Health(1, file.size < SMALL_FILE_BYTES, file.rows, file.masked) for file in files),
        Health(),
    )


def _live_bytes(file: DataFile) -> float:
    return file.size * (1 - file.masked / max(file.rows, file.masked, 1))
