"""The phase Do GC: old versions go.

The coordinator is told the safepoint first, for no store collects beyond it. Distributed: every store polls it and
works by itself; the round ends. Central (legacy: TiDB gave it up in 5.0): this worker asks every region as well. What a
store that polls would then do a second time it skips, for the region has no old versions left.
"""

from collections.abc import Callable, Mapping, Sequence

from gcsafepoint.worker.cluster import Cluster, KeyRange
from gcsafepoint.worker.config import GCConfig
from gcsafepoint.worker.position import Course, Position
from gcsafepoint.worker.records import DO_GC, Records
from gcsafepoint.worker.variables import CENTRAL
from gcsafepoint.worker.walk import walk
from storage.model.errors import InvalidError, TidemarkError

Fence = Callable[[], Mapping[str, int]]
Report = Callable[[TidemarkError | None], None]
"""Told of every region: collected, or why not."""


class CollectUnsupportedError(InvalidError):
    """The stores do not take GC requests."""

    code = "ErrGCModeUnsupported"


class CentralGC:
    """One round's walk; it starts where an earlier one broke off, and records how far it has come."""

    def __init__(self, cluster: Cluster, records: Records, fence: Fence, superseded: Callable[[], bool]) -> None:
        self._cluster = cluster
        self._records = records
        self._fence = fence
        self._superseded = superseded

    async def course(self, stores: Mapping[int, Sequence[KeyRange]], safe_point: int) -> Course:
        """What is left to do at `safe_point`, in order."""
        held = await self._records.read(DO_GC)
        broke_off = Position.from_json(held[DO_GC].value) if held else None
        return Course.plan(stores, broke_off, safe_point)

    async def run(self, course: Course, config: GCConfig, report: Report) -> bool:
        """Have every region of the course drop its old versions; False if a newer round took over.

        Raises:
            CollectUnsupportedError: the stores collect by themselves only.
        """

        async def step(within: KeyRange) -> bytes | None:
            if self._superseded():
                return None
            try:
                key = await self._cluster.collect(within, course.safe_point)
            except TidemarkError as err:
                report(err)
                raise
            report(None)
            return key

        async def ended(within: KeyRange) -> None:
            if not self._superseded() and course.reached(within):
                await self._records.write({DO_GC: course.position.to_json()}, self._fence())

        stores = course.by_store()
        await walk(stores, config.workers(len(stores)), step, ended)
        if self._superseded():
            return False
        await self._records.write({DO_GC: None}, self._fence())
        return True


async def check_mode(cluster: Cluster, config: GCConfig) -> None:
    """Try mode central with a safepoint before all history, which collects nothing. Raises as `CentralGC.run`."""
    if config.mode == CENTRAL:
        await cluster.collect(KeyRange(b"", b""), 0)
