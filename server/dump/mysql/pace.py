"""What is read next of a table, in what steps, and how often in vain. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from server.dump.job import Job
from server.dump.mysql.chunk import ChunkQuery, ChunkSize
from server.dump.progress import Range
from server.dump.table_dump import TableDump
from storage.model.errors import TidemarkError

ATTEMPTS: Final = 3


@dataclass(frozen=True, slots=True)
class Pick:
    """A range of a table that is next."""

    table_id: int
    place: int
    part: Range
    epoch: int


def picked(dumps: Iterable[TableDump], most: int) -> Sequence[Pick]:
    """The next ranges, so many at most: of each table one, then more of each."""
    picks: list[Pick] = []
    dumping = {dump.durable.table_id: dump for dump in dumps}
    taken: dict[int, frozenset[int]] = {}
    while dumping and len(picks) < most:
        for table_id, dump in list(dumping.items()):
            place = dump.next_range(taken.get(table_id, frozenset()))
            if place is None or len(picks) == most:
                dumping.pop(table_id)
                continue
            taken[table_id] = taken.get(table_id, frozenset()) | {place}
            picks.append(Pick(table_id, place, *dump.ahead(place)))
    return picks


@dataclass(slots=True)
class Pace:
    """How a table is read; made anew when it is another one."""

    version: int
    query: ChunkQuery
    size: ChunkSize
    epoch: int = -1
    """Of the last range that was read; -1: none was."""

    def begin(self, epoch: int) -> None:
        """A chunk of this epoch is read next; a later one than before comes of chunks that were
        lost: smaller, then.
        """
        if 0 <= self.epoch < epoch:
            self.size.halve()
        self.epoch = max(self.epoch, epoch)


@dataclass(frozen=True, slots=True)
class Refused:
    """A table in this version cannot be read."""

    table_id: int
    version: int
    error: TidemarkError


class Refusals:
    """How often each table was refused in a row, as it is now."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, int]] = {}

    def last(self, refused: Iterable[Refused]) -> list[Refused]:
        """Count those of one round; gives tables for which it was the last attempt in this
        version.
        """
        final = []
        for each in {each.table_id: each for each in refused}.values():
            version, count = self._found.get(each.table_id, (each.version, 0))
            count = count + 1 if version == each.version else 1
            self._found[each.table_id] = each.version, count
            final += [each] if count >= ATTEMPTS else []
        return final

    def over(self, table_id: int) -> None:
        """It was read."""
        self._found.pop(table_id, None)

    def clear(self) -> None:
        """All are tried anew."""
        self._found.clear()


@dataclass(frozen=True, slots=True)
class Paid:
    """The round before, which is paid for by a rest; times are of one clock, in seconds."""

    began_s: float = 0.0
    rows: int = 0
    bytes: int = 0
    rest_until_s: float = 0.0
    """For the log's sake, whatever the job allows."""

    def until_s(self, job: Job) -> float:
        """When the next one may begin, at the pace that the job allows now."""
        rows_s = self.rows / job.rows_per_s if job.rows_per_s else 0.0
        bytes_s = self.bytes / job.bytes_per_s if job.bytes_per_s else 0.0
        return max(self.began_s + max(rows_s, bytes_s), self.rest_until_s)
