"""What happens before anything is served: the log is replayed into the index from the index's handle."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from storage.kv import KV
from storage.pump.binlog import parse
from storage.pump.index import START, Entry, Index
from storage.segment import SegmentMissingError
from storage.value_log import Pointer, Skipped, ValueLog

REPLAY_BATCH = 1024
Entered: TypeAlias = tuple[Pointer, Entry]
"""A record of the log as the index sees it; its payload is not kept."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a start found: binlogs replayed, bytes that had to be skipped, and whether the index was built anew."""

    replayed: int
    skipped: tuple[Skipped, ...]
    rebuilt: bool


def recover(
    open_log: Callable[[], ValueLog], open_kv: Callable[[], KV], stack: ExitStack
) -> tuple[ValueLog, Index, Recovery]:
    """Open both, fit the index to the log, and replay; `stack` closes them.

    Raises:
        SegmentMissingError: a segment that is still needed is gone.
        TidemarkError: the log or LevelDB cannot be opened.
    """
    kv = open_kv()  # first: LevelDB's lock keeps a second process off the log too
    stack.callback(kv.close)
    log = open_log()
    stack.callback(log.close)
    index = Index(kv)
    rebuilt = _rebuild(log, index)
    skipped = list(log.skipped)
    replayed = 0
    found = entries(log.scan(index.replay_from), skipped)
    while batch := list(islice(found, REPLAY_BATCH)):
        replayed += apply(index, batch)
    return log, index, Recovery(replayed, tuple(dict.fromkeys(skipped)), rebuilt)


def entries(found: Iterator[tuple[Pointer, bytes] | Skipped], skipped: list[Skipped]) -> Iterator[Entered]:
    """What the index wants to know of the records of a scan; adds the damaged bytes it passes over to `skipped`."""
    for item in found:
        if isinstance(item, Skipped):
            skipped.append(item)
        else:
            yield item[0], parse(item[1])[:3]


def apply(index: Index, batch: Sequence[Entered]) -> int:
    """Index records of the log; returns how many."""
    index.apply([entry for _, entry in batch], [pointer for pointer, _ in batch])
    return len(batch)


def _rebuild(log: ValueLog, index: Index) -> bool:
    """Empty the index when it does not fit the log: it is new, or knows records that the disk has lost."""
    segments = log.segments()
    if index.head.fid not in segments and index.head != START:
        raise SegmentMissingError(f"segment {index.head.fid} of the value log is missing; restore its file")
    first = next(iter(segments), 0)
    unfit = log.end < index.head or (index.head == START and first > 0)
    if unfit:
        index.reset(first)
    return unfit
