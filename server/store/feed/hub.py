"""The observer of the engine: routes durable changes to subscriptions and resolves timestamps.

Why no change can ever come with commit_ts <= a resolved_ts that was sent (all of this runs on one event loop):
1. A tick takes a fresh timestamp T from the coordinator first, and looks at the open locks only after T has come.
2. In an ordinary commit, a client takes its commit_ts C from the same oracle only after every prewrite was answered.
3. A prewrite is answered only after its group is durable and `observe` has put its locks into `OpenLocks` (see
   `group_commit`). So if C <= T, then C was taken before T, and the lock was in `OpenLocks` before the tick looked.
4. Then either the lock is still open, and resolved_ts <= start_ts - 1 < C; or its commit was observed, and then the
   COMMIT row was queued on the same connection, before this resolved_ts.
5. A pessimistic lock is no data lock; it turns into one by a prewrite, and rules 2 and 3 hold for that one.
6. Async commit and 1PC compute C in the store. `OpenLocks.settle` makes every C that is reserved after the tick greater
   than T; one reserved before is either still in flight, and then resolved_ts < C, or it was observed: as a COMMITTED row
   that was queued before, or as a lock, which rule 4 covers (see `storage.mvcc.read_fence`).
7. Locks that were open when the store started are read from disk before the first request is served.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence

import structlog
from kvproto import cdcpb_pb2 as cdcpb

from server.rpc.pd import PdClient, PdRefusedError
from server.store import metrics
from server.store.feed.outbox import Failure, Outbox, Resolved, Rows
from server.store.feed.subscription import Subscription, chunks
from server.store.region_check import RegionGate
from storage.model.errors import UnavailableError
from storage.mvcc.change import Change
from storage.mvcc.open_locks import OpenLocks
from storage.mvcc.region import Region

_log = structlog.get_logger(__name__)


class FeedHub:
    """All subscriptions of this store, by region."""

    def __init__(self, gate: RegionGate, locks: OpenLocks) -> None:
        self._gate = gate
        self._locks = locks
        self._by_region: dict[int, list[tuple[Subscription, Outbox]]] = {}

    @property
    def wants_old_values(self) -> bool:
        """Whether a subscription wants to know what a prewrite replaces."""
        return any(wanted.old_values for listed in self._by_region.values() for wanted, _ in listed)

    def attach(self, wanted: Subscription, outbox: Outbox) -> None:
        """Send `wanted` all changes from now on; call it between two groups."""
        self._by_region.setdefault(wanted.region.region_id, []).append((wanted, outbox))
        metrics.FEED_REGIONS.inc()

    def detach(self, wanted: Subscription) -> None:
        """Send nothing more."""
        wanted.ended = True
        listed = self._by_region.get(wanted.region.region_id, [])
        remaining = [entry for entry in listed if entry[0] is not wanted]
        metrics.FEED_REGIONS.dec(len(listed) - len(remaining))
        if remaining:
            self._by_region[wanted.region.region_id] = remaining
        else:
            self._by_region.pop(wanted.region.region_id, None)

    def observe(self, changes: Sequence[Change]) -> None:
        """Follow a group that is durable, before its writers are answered."""
        by_region: dict[int, list[Change]] = defaultdict(list)
        for change in changes:
            self._locks.apply(change)
            if self._by_region:
                by_region[self._gate.regions.at(change.encoded).region_id].append(change)
        metrics.OPEN_LOCKS.set(len(self._locks))
        for region_id, part in by_region.items():
            for wanted, outbox in tuple(self._by_region.get(region_id, ())):
                self._send(wanted, outbox, part)

    def forget_locks(self, lower: bytes, upper: bytes) -> None:
        """Follow the destruction of an encoded range."""
        self._locks.forget(lower, upper)

    def split(self, old: Region, parts: Sequence[Region]) -> None:
        """End the subscriptions of a region that is no more, and take over the new borders."""
        self._locks.rebuild(self._gate.regions.starts)
        metrics.REGIONS.set(len(self._gate.regions))
        error = cdcpb.Error(epoch_not_match=self._gate.current(parts[-1]))
        for wanted, outbox in tuple(self._by_region.get(old.region_id, ())):
            self._fail(wanted, outbox, error)

    def refuse_stale(self, wanted: Subscription, outbox: Outbox) -> None:
        """End a subscription whose region was split before it was attached."""
        current = self._gate.regions.get(wanted.region.region_id)
        assert current is not None, "a split keeps the region's id"
        self._fail(wanted, outbox, cdcpb.Error(epoch_not_match=self._gate.current(current)))

    async def run(self, pd: PdClient, interval_s: float) -> None:
        """Send resolved timestamps until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            if not self._by_region:
                continue
            try:
                now_ts = await pd.tso()
            except (UnavailableError, PdRefusedError) as err:
                _log.warning("no timestamp to resolve with", error=err.message)
            else:
                self.resolve(now_ts)

    def resolve(self, now_ts: int) -> None:
        """Send resolved timestamps given `now_ts`, taken from the oracle before this call."""
        now_ts = self._locks.settle(now_ts)
        by_outbox: dict[Outbox, dict[tuple[int, int], list[int]]] = {}
        for region_id, listed in self._by_region.items():
            oldest = self._locks.min_start_ts(listed[0][0].region.start_key)
            resolved_ts = now_ts if oldest is None else min(now_ts, oldest - 1)
            for wanted, outbox in listed:
                if wanted.initialized:
                    wanted.resolved_ts = max(wanted.resolved_ts, resolved_ts)
                    tick = by_outbox.setdefault(outbox, defaultdict(list))
                    tick[wanted.request_id, wanted.resolved_ts].append(region_id)
        for outbox, tick in by_outbox.items():
            outbox.resolve(Resolved(tick))

    def _send(self, wanted: Subscription, outbox: Outbox, changes: Sequence[Change]) -> None:
        for piece, size in chunks(change for change in changes if wanted.covers(change)):
            if not outbox.offer(Rows(wanted, piece, size)):
                metrics.FEED_CONGESTED.inc()
                _log.warning("change feed reader is too slow", region_id=wanted.region.region_id)
                congested = cdcpb.Congested(region_id=wanted.region.region_id)
                self._fail(wanted, outbox, cdcpb.Error(congested=congested))
                return
            metrics.FEED_ROWS.inc(len(piece))

    def _fail(self, wanted: Subscription, outbox: Outbox, error: cdcpb.Error) -> None:
        self.detach(wanted)
        outbox.control(Failure(wanted.region.region_id, wanted.request_id, error))
