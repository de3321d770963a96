"""Committed transactions of one buffer of events, gathered so that their rows are decoded together.

Pure.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from storage.mysql.event import Events, join_events


@dataclass(frozen=True, slots=True)
class Commits:
    """Events of committed transactions; `commit_ts` has that of each event's transaction."""

    events: Events
    commit_ts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    """How many of the events each transaction ends after; without its last one where it goes on."""
    part: int = 0
    """The part's number, from 1 on, if a transaction's rows are given before its end; else 0."""


class Runs:
    """Stretches of committed events of one buffer, gathered so that they are decoded together."""

    def __init__(self) -> None:
        self._events: Events | None = None
        self._begin: list[npt.NDArray[np.int64]] = []
        self._end: list[npt.NDArray[np.int64]] = []
        self._ts: list[npt.NDArray[np.int64]] = []
        self._opened_at = 0

    def begin(self, events: Events) -> None:
        """Begin another buffer; an open transaction goes on at its first event."""
        self._events = events

    def open(self, event_number: int) -> None:
        """Begin a transaction with that event."""
        self._opened_at = event_number

    def close(self) -> int:
        """Where the open transaction's part in this buffer begins."""
        return self._opened_at

    def add(
        self,
        begin: npt.NDArray[np.int64],
        end: npt.NDArray[np.int64],
        commit_ts: npt.NDArray[np.int64],
    ) -> None:
        """Add committed transactions, each the events `[begin, end)`."""
        if len(begin):
            self._begin.append(begin)
            self._end.append(end)
            self._ts.append(commit_ts)

    def flush(self) -> Iterator[Commits]:
        """Yield the transactions gathered so far, as one batch."""
        if not self._begin or self._events is None:
            return
        begin, end, ts = (np.concatenate(each) for each in (self._begin, self._end, self._ts))
        self._begin, self._end, self._ts = [], [], []
        sizes = end - begin
        ends = np.cumsum(sizes)
        numbers = np.arange(int(ends[-1])) + np.repeat(begin - (ends - sizes), sizes)
        events = Events(self._events.data, self._events.begin[numbers], self._events.end[numbers])
        yield Commits(events, np.repeat(ts, sizes), ends)


def joined(parts: Sequence[Events]) -> Events:
    """Copy the events into a buffer of their own."""
    return join_events(
        [
            events.header(number) + events.body(number)
            for events in parts
            for number in range(len(events))
        ]
    )


def pieces(events: Events, size: int) -> Iterator[Events]:
    """Divide the events into pieces of about `size` bytes; an event is never divided."""
    numbers = np.cumsum(events.end - events.begin) // size
    borders = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
    return (events[first:last] for first, last in itertools.pairwise([0, *borders, len(events)]))


def size_of(events: Events) -> int:
    """Bytes of all the events."""
    return int((events.end - events.begin).sum()) if len(events) else 0
