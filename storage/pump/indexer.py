"""Feeding the index of a Pump: from the queue while the index keeps up,
and from the log when it did not.

A stalled or failing index delays readers, never writers: what is acknowledged is in the log, and
the index is derived from it. `recover` replays the log at a start, from the index's handle.
`Indexer` runs after that. When it falls behind, it catches up by reading the log (tidb-binlog's
SlowChaser). After a failed write the state of the index in memory is unknown, so it is loaded again
and fed from its handle, as after a restart. When the daemon stops, it does not finish catching up:
the next start replays the rest.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TypeAlias

from storage.kv import KV
from storage.model.errors import UnavailableError
from storage.pump.binlog import parse
from storage.pump.group_commit import IndexQueue
from storage.pump.index import START, Entry, Index
from storage.pump.threads import Threads
from storage.segment import SegmentMissingError
from storage.value_log import Pointer, Skipped, ValueLog

RETRY_SECONDS = 1.0
CATCH_UP_SECONDS = 1.0
REPLAY_BATCH = 1024

IndexedRecord: TypeAlias = tuple[Pointer, Entry]
"""What the index needs of a record of the log: where it is, and its entry."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a start did: binlogs replayed, damaged bytes skipped,
    and whether the index was rebuilt.
    """

    replayed: int
    skipped: tuple[Skipped, ...]
    rebuilt: bool


def recover(
    open_log: Callable[[], ValueLog], open_kv: Callable[[], KV], stack: ExitStack
) -> tuple[ValueLog, Index, Recovery]:
    """Open log and index, rebuild the index if it does not fit the log, and replay;
    `stack` closes them.

    Raises:
        SegmentMissingError: a segment that is still needed is gone.
        TidemarkError: the log or LevelDB cannot be opened.
    """
    # LevelDB comes first: its lock keeps a second process off the log, too.
    kv = open_kv()
    stack.callback(kv.close)
    log = open_log()
    stack.callback(log.close)
    index = Index(kv)
    rebuilt = _rebuild_if_unfit(log, index)
    skipped = list(log.skipped)
    replayed = 0
    records = _records(log.scan(index.replay_from), skipped)
    while batch := _take_batch(records):
        replayed += _apply(index, batch)
    return log, index, Recovery(replayed, tuple(dict.fromkeys(skipped)), rebuilt)


class Indexer:
    """The loop between the index queue and the index."""

    def __init__(
        self,
        log: ValueLog,
        index: Index,
        queue: IndexQueue,
        threads: Threads,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called whenever max_commit_ts may have moved."""
        self.failures = 0
        self.last_failure: UnavailableError | None = None
        self.skipped: list[Skipped] = []
        self._log = log
        self._index = index
        self._queue = queue
        self._threads = threads
        self._on_change = on_change
        self._must_reload = False

    async def run(self) -> None:
        """Index until the queue is closed and empty;
        a disk that refuses is tried again every `RETRY_SECONDS`.
        """
        while True:
            try:
                group = await self._queue.get()
                if group is not None:
                    await self._threads.index(self._index.apply, group.entries, group.pointers)
                elif self._queue.closed:
                    return
                else:
                    await self._catch_up()
            except UnavailableError as err:
                self.failures += 1
                self.last_failure = err
                # A failed batch may have changed the matcher in memory but not the index on disk.
                self._must_reload = True
                # The queue would go on after the group that failed; the log still has it.
                self._queue.fall_behind()
                await asyncio.sleep(RETRY_SECONDS)
            self._on_change()

    async def _catch_up(self) -> None:
        """Read the log until a pass takes less than `CATCH_UP_SECONDS`,
        then up to where the queue resumes.
        """
        if self._must_reload:
            await self._threads.index(self._index.reload)
            self._must_reload = False
        loop = asyncio.get_running_loop()
        while not self._queue.closed:
            began = loop.time()
            await self._replay(self._queue.end)
            if loop.time() - began < CATCH_UP_SECONDS:
                # The queue takes groups again from where it ends now, so this last pass closes the
                # gap between the log and the queue.
                await self._replay(self._queue.resume())
                return

    async def _replay(self, upto: Pointer) -> None:
        records = takewhile(
            lambda item: item[0] < upto,
            _records(self._log.scan(self._index.replay_from), self.skipped),
        )
        while batch := await self._threads.read(_take_batch, records):
            await self._threads.index(_apply, self._index, batch)
            self._on_change()


def _take_batch(records: Iterator[IndexedRecord]) -> list[IndexedRecord]:
    return list(islice(records, REPLAY_BATCH))


def _records(
    scan: Iterator[tuple[Pointer, bytes] | Skipped], skipped: list[Skipped]
) -> Iterator[IndexedRecord]:
    """The records of a scan as the index needs them; damaged bytes are added to `skipped`."""
    for item in scan:
        if isinstance(item, Skipped):
            skipped.append(item)
        else:
            yield item[0], parse(item[1])[:3]


def _apply(index: Index, batch: Sequence[IndexedRecord]) -> int:
    """Index records of the log; returns how many."""
    index.apply([entry for _, entry in batch], [pointer for pointer, _ in batch])
    return len(batch)


def _rebuild_if_unfit(log: ValueLog, index: Index) -> bool:
    """Empty the index when it is new, or has records that the disk has lost;
    returns whether it was emptied.
    """
    segments = log.segments()
    if index.head.fid not in segments and index.head != START:
        raise SegmentMissingError(
            f"segment {index.head.fid} of the value log is missing; restore its file"
        )
    first = next(iter(segments), 0)
    # An index ahead of its log: the disk has lost records, or the log was written without sync.
    unfit = log.end < index.head or (index.head == START and first > 0)
    if unfit:
        index.reset(first)
    return unfit
