"""Who reads, and how far: GC stays behind the slowest of them. Pure."""

from collections.abc import Iterator
from contextlib import contextmanager

from storage.model.ts import MAX_TS


class Position:
    """A reader's place: everything up to `commit_ts` was handed to it, and it asked for more since."""

    __slots__ = ("commit_ts",)

    def __init__(self, commit_ts: int) -> None:
        self.commit_ts = commit_ts


class Readers:
    """The open pulls of a storage."""

    def __init__(self) -> None:
        self._positions: set[Position] = set()

    @contextmanager
    def registered(self, commit_ts: int) -> Iterator[Position]:
        """Count a reader that has everything up to `commit_ts` for the block; it moves its position itself."""
        position = Position(commit_ts)
        self._positions.add(position)
        try:
            yield position
        finally:
            self._positions.discard(position)

    @property
    def lowest_ts(self) -> int:
        """The slowest reader's commit_ts; MAX_TS when nobody reads."""
        return min((position.commit_ts for position in self._positions), default=MAX_TS)

    def behind(self, ts: int) -> int:
        """How many have not had everything up to `ts`."""
        return sum(position.commit_ts < ts for position in self._positions)
