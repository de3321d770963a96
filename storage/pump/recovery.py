"""What happens before anything is served: the log is replayed into the index from the index's handle."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

from storage.kv import KV
from storage.pump.binlog import parse
from storage.pump.index import START, Index
from storage.segment import SegmentMissingError
from storage.value_log import Pointer, Skipped, ValueLog

REPLAY_BATCH = 1024


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
    skipped = dict.fromkeys(log.skipped)
    replayed = 0
    found = log.scan(index.handle)
    while batch := list(islice(found, REPLAY_BATCH)):
        skipped |= dict.fromkeys(item for item in batch if isinstance(item, Skipped))
        replayed += apply(index, [item for item in batch if not isinstance(item, Skipped)])
    return log, index, Recovery(replayed, tuple(skipped), rebuilt)


def apply(index: Index, records: list[tuple[Pointer, bytes]]) -> int:
    """Index records of the log; returns how many."""
    if records:
        index.apply([parse(payload)[:3] for _, payload in records], [pointer for pointer, _ in records])
    return len(records)


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
