"""The phase Do GC: stores drop the old versions below the safepoint.

The safepoint is sent to the coordinator first, because no store collects beyond it. In mode
`distributed` every store polls the safepoint and works by itself, so the phase ends there. In mode
`central` (legacy: TiDB dropped it in 5.0) the GC leader also calls every region, through
`CentralGC`; a store that polls then finds no old versions left and skips them.

`RangeWalk` is the order in which central GC visits the key space. It can be resumed, as its
`Position` is recorded as it moves. The key space is a ring, as a TiKV walks it. The next walk
begins at the key where the last round broke off: at the same safepoint it does only the ranges that
were left, at a newer one it does these first and then all others.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile

from gcsafepoint.worker.cluster import Cluster, walk
from gcsafepoint.worker.config import CENTRAL, GCConfig
from gcsafepoint.worker.election import Fence, write_fenced
from gcsafepoint.worker.records import DO_GC, Records
from storage.model.errors import InvalidError, TidemarkError
from storage.model.span import KeyRange

Report = Callable[[TidemarkError | None], None]
"""Called once for every region: with None when it was collected, with the error when it was not."""


class CollectUnsupportedError(InvalidError):
    """The stores do not take GC requests."""

    code = "ErrGCModeUnsupported"


class CentralGC:
    """Central GC of one round: starts where an earlier round broke off,
    and records how far it has come.
    """

    def __init__(
        self, cluster: Cluster, records: Records, fence: Fence, superseded: Callable[[], bool]
    ) -> None:
        """`superseded` says whether a newer round has reached Do GC."""
        self._cluster = cluster
        self._records = records
        self._fence = fence
        self._superseded = superseded

    async def plan(self, stores: Mapping[int, Sequence[KeyRange]], safe_point: int) -> "RangeWalk":
        """The ranges left to collect at `safe_point`, in order."""
        records = await self._records.read(DO_GC)
        broke_off = Position.from_json(records[DO_GC].value) if records else None
        return RangeWalk.plan(stores, broke_off, safe_point)

    async def run(self, ranges: "RangeWalk", config: GCConfig, report: Report) -> bool:
        """Have every region of the walk drop its old versions; False if a newer round took over.

        Raises:
            CollectUnsupportedError: the stores collect by themselves only.
            LeaseLostError: another worker leads; what is left is its work.
        """

        async def step(within: KeyRange) -> bytes | None:
            # As if the range were at its end: the newer round collects it, too.
            if self._superseded():
                return None
            try:
                key = await self._cluster.collect(within, ranges.safe_point)
            except TidemarkError as err:
                report(err)
                raise
            report(None)
            return key

        async def ended(within: KeyRange) -> None:
            if not self._superseded() and ranges.reached(within):
                await self._write(ranges.position.to_json())

        stores = ranges.by_store()
        await walk(stores, config.workers(len(stores)), step, ended)
        # The position is the newer round's by now.
        if self._superseded():
            return False
        await self._write(None)
        return True

    async def _write(self, position: str | None) -> None:
        await write_fenced(self._records, self._fence, {DO_GC: position})


async def check_mode(cluster: Cluster, config: GCConfig) -> None:
    """Try mode `central` with a safepoint before all history, which collects nothing.

    Raises as `CentralGC.run`.
    """
    if config.mode == CENTRAL:
        await cluster.collect(KeyRange(b"", b""), 0)


@dataclass(frozen=True, slots=True)
class Position:
    """What a walk at `safe_point` has left: the ring from `key` to `until`; all of it if these are
    the same.
    """

    safe_point: int
    key: bytes
    until: bytes

    def to_json(self) -> str:
        """The record's value."""
        return json.dumps(asdict(self) | {"key": self.key.hex(), "until": self.until.hex()})

    @classmethod
    def from_json(cls, text: str) -> "Position | None":
        """Read what `to_json` wrote; None for anything else: doing everything again is harmless."""
        try:
            fields = json.loads(text)
            keys = {name: bytes.fromhex(fields[name]) for name in ("key", "until")}
            return cls(**(fields | keys))
        except (ValueError, TypeError, KeyError):
            return None


class RangeWalk:
    """The ranges of one walk in order, each with its store, and which of them are done."""

    def __init__(
        self, safe_point: int, until: bytes, store_ranges: Sequence[tuple[int, KeyRange]]
    ) -> None:
        self.safe_point = safe_point
        self.store_ranges = store_ranges
        self._until = until
        self._done: set[bytes] = set()
        self._first_left = 0

    @classmethod
    def plan(
        cls, stores: Mapping[int, Sequence[KeyRange]], broke_off: Position | None, safe_point: int
    ) -> "RangeWalk":
        """The order in which a round at `safe_point` goes, given where an earlier one broke off."""
        ordered = sorted(
            ((store, key_range) for store, ranges in stores.items() for key_range in ranges),
            key=lambda store_range: store_range[1].start_key,
        )
        if broke_off is None:
            return cls(safe_point, b"", ordered)
        key = broke_off.key
        # At a newer safepoint the whole ring is left, beginning where the earlier round stopped.
        until = broke_off.until if broke_off.safe_point == safe_point else key
        # Regions have split and merged since: the walk begins and ends at keys, not at borders.
        ordered = list(_cut(_cut(ordered, key), until))
        ring = [item for item in ordered if item[1].start_key >= key]
        ring += [item for item in ordered if item[1].start_key < key]
        # the first range may begin at `until` itself: then the whole ring is left
        left = ring[:1] + list(takewhile(lambda item: item[1].start_key != until, ring[1:]))
        return cls(safe_point, until, left)

    @property
    def position(self) -> Position:
        """The place to go on from: the first range in order that is not done."""
        left = self.store_ranges[self._first_left :]
        return Position(self.safe_point, left[0][1].start_key if left else self._until, self._until)

    def by_store(self) -> list[list[KeyRange]]:
        """The ranges, store by store, in order."""
        ranges: dict[int, list[KeyRange]] = {}
        for store, key_range in self.store_ranges:
            ranges.setdefault(store, []).append(key_range)
        return list(ranges.values())

    def reached(self, within: KeyRange) -> bool:
        """Note that a range is done; returns whether `position` moved, and is not the end yet."""
        # Stores are walked in parallel, so ranges end in any order; the position moves over those
        # only that have none left before them.
        self._done.add(within.start_key)
        before, count = self._first_left, len(self.store_ranges)
        while (
            self._first_left < count
            and self.store_ranges[self._first_left][1].start_key in self._done
        ):
            self._first_left += 1
        return before < self._first_left < count


def _cut(
    store_ranges: Iterable[tuple[int, KeyRange]], key: bytes
) -> Iterable[tuple[int, KeyRange]]:
    """The same ranges; the one that holds `key` is cut in two there."""
    for store, key_range in store_ranges:
        if key_range.start_key < key and (not key_range.end_key or key < key_range.end_key):
            yield store, KeyRange(key_range.start_key, key)
            yield store, KeyRange(key, key_range.end_key)
        else:
            yield store, key_range
