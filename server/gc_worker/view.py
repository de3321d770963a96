"""What people are shown of GC, read from the metadata store: it is there whether or not a worker runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from gcsafepoint.worker import history
from gcsafepoint.worker.delete_range import KEPT_MS, DeleteRange
from gcsafepoint.worker.delete_ranges import load
from gcsafepoint.worker.election import Leader, read_leader
from gcsafepoint.worker.records import DONE, LAST_RUN_TIME, PENDING, SAFE_POINT_TS, Records, read_ts
from gcsafepoint.worker.round import Round


@dataclass(frozen=True, slots=True)
class ListedRange:
    """A delete range, and what is next for it; `redo_ms`: when it is destroyed once more, 0 if it was not yet."""

    it: DeleteRange
    state: str
    redo_ms: int


@dataclass(frozen=True, slots=True)
class Overview:
    """How GC stands."""

    leader: Leader | None
    last_run_time: str
    saved_safe_point: int
    newest: Round | None
    ranges: Sequence[ListedRange]

    @property
    def pending_ranges(self) -> int:
        """How many were not destroyed yet."""
        return sum(not listed.it.done_ms for listed in self.ranges)

    @property
    def failed_ranges(self) -> int:
        """How many could not be destroyed at the last attempt."""
        return sum(bool(listed.it.error) for listed in self.ranges)


async def overview(records: Records) -> Overview:
    """Read all of it."""
    held, newest = await records.read(LAST_RUN_TIME), await history.load(records, 1)
    return Overview(
        leader=await read_leader(records),
        last_run_time=held[LAST_RUN_TIME].value if held else "",
        saved_safe_point=await read_ts(records, SAFE_POINT_TS),
        newest=newest[0] if newest else None,
        ranges=await list_ranges(records),
    )


async def list_ranges(records: Records) -> list[ListedRange]:
    """All recorded ranges, those still to be destroyed first."""
    safe_point = await read_ts(records, SAFE_POINT_TS)
    pending = [ListedRange(it, _pending_state(it, safe_point), 0) for it in await load(records, PENDING)]
    done = [
        ListedRange(it, "redo failed" if it.error else "done", it.done_ms + KEPT_MS) for it in await load(records, DONE)
    ]
    return sorted(pending, key=lambda listed: listed.it.ts) + sorted(done, key=lambda listed: listed.it.done_ms)


def _pending_state(it: DeleteRange, safe_point: int) -> str:
    if it.error:
        return "failed"
    return "due" if it.ts < safe_point else "waiting"
