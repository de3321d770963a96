"""What is read next of a table, and in what steps. Pure."""

from dataclasses import dataclass

from server.dump.chunk import ChunkQuery, ChunkSize
from server.dump.progress import Range


@dataclass(frozen=True, slots=True)
class Pick:
    """A range of a table that is next."""

    table_id: int
    place: int
    part: Range
    epoch: int


@dataclass(slots=True)
class Pace:
    """How a table is read; made anew when it is another one."""

    version: int
    query: ChunkQuery
    size: ChunkSize
    refusals: int = 0
    epoch: int = -1
    """Of the last range that was read; -1: none was."""

    def begin(self, epoch: int) -> None:
        """A chunk of this epoch is read next; a later one than before comes of chunks that were lost: smaller, then."""
        if 0 <= self.epoch < epoch:
            self.size.halve()
        self.epoch = max(self.epoch, epoch)
