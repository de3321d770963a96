"""The observer of the engine: routes durable changes to subscriptions and resolves timestamps.

Why no change can ever come with commit_ts <= a resolved_ts that was sent (all of this runs on one
event loop):
1. A tick takes a fresh timestamp T from the coordinator first, and looks at commits in flight and
   open locks only after T has come.
2. Ordinary commits: a client takes its commit_ts C from the same oracle only after every prewrite
   of the transaction was answered. A prewrite is answered only after its group is durable and
   `observe` has put its locks into `OpenLocks` (see `group_commit`). So if C <= T, then C was taken
   before T, and the lock was in `OpenLocks` before the tick looked.
3. Computed commits (async commit, 1PC): the writer reserves a min_commit_ts above every timestamp
   the fence knows, and commit_ts is never below it. `OpenLocks.settle` makes T known to the fence,
   and lowers it below every reservation. A prewrite that reserves later gets a min_commit_ts > T.
   One that reserved earlier is either still reserved, and the tick promises less than its
   min_commit_ts; or its group was released, which comes after `observe`: its locks are in
   `OpenLocks`, or, with 1PC, its COMMITTED rows are queued.
4. An open lock holds resolved_ts at start_ts - 1, below any commit_ts. Once its commit was
   observed, the COMMIT row was queued on the same connection, before this resolved_ts.
5. A pessimistic lock is no data lock; it turns into one by a prewrite, and rules 2 and 3 hold for
   that one.
6. Locks that were open when the store started are read from disk before the first request is
   served, and the fence starts with a fresh timestamp of the oracle.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence

import structlog
from kvproto import cdcpb_pb2 as cdcpb
from kvproto import errorpb_pb2 as errorpb

from server.rpc.pd import PdClient, PdRefusedError
from server.store import metrics
from server.store.feed.outbox import Failure, Outbox, Resolved, Rows, Subscription, chunks
from server.store.region_table import RegionGate
from storage.model.errors import UnavailableError
from storage.mvcc.change_feed import OpenLocks
from storage.mvcc.engine import Change
from storage.mvcc.region import Region

_log = structlog.get_logger(__name__)


class FeedHub:
    """All subscriptions of this store, by region."""

    def __init__(self, gate: RegionGate, locks: OpenLocks) -> None:
        self._gate = gate
        self._locks = locks
        self._by_region: dict[int, list[tuple[Subscription, Outbox]]] = {}
        self._resolved: dict[Region, int] = {}
        self._resolved_everywhere = 0

    @property
    def wants_old_values(self) -> bool:
        """Whether a subscription requests the values that prewrites replace."""
        return any(
            subscription.old_values
            for listed in self._by_region.values()
            for subscription, _ in listed
        )

    def attach(self, subscription: Subscription, outbox: Outbox) -> None:
        """Send `subscription` all changes from now on; call it between two groups."""
        self._by_region.setdefault(subscription.region.region_id, []).append((subscription, outbox))
        metrics.FEED_REGIONS.inc()

    def detach(self, subscription: Subscription) -> None:
        """End a subscription: send it nothing more."""
        subscription.ended = True
        listed = self._by_region.get(subscription.region.region_id, [])
        remaining = [entry for entry in listed if entry[0] is not subscription]
        metrics.FEED_REGIONS.dec(len(listed) - len(remaining))
        if remaining:
            self._by_region[subscription.region.region_id] = remaining
        else:
            self._by_region.pop(subscription.region.region_id, None)

    def observe(self, changes: Sequence[Change]) -> None:
        """Send the changes of a durable group to the subscriptions, before its writers are
        answered.
        """
        by_region: dict[int, list[Change]] = defaultdict(list)
        for change in changes:
            # Before any tick can look at the open locks: rule 2 above rests on it.
            self._locks.apply(change)
            if self._by_region:
                by_region[self._gate.regions.at(change.encoded).region_id].append(change)
        metrics.OPEN_LOCKS.set(len(self._locks))
        for region_id, part in by_region.items():
            for subscription, outbox in tuple(self._by_region.get(region_id, ())):
                self._send(subscription, outbox, part)

    def forget_locks(self, lower: bytes, upper: bytes) -> None:
        """Forget the locks of an encoded range that was destroyed."""
        self._locks.remove_range(lower, upper)

    def replaced(self, old: Sequence[Region], new: Sequence[Region]) -> None:
        """End the subscriptions of regions that were split, merged or handed over,
        and take over the new borders.
        """
        # Locks are grouped by region; with the old borders a lock would hold back the wrong one.
        self._locks.rebuild(self._gate.regions.starts)
        metrics.REGIONS.set(len(self._gate.regions))
        for region in old:
            error = cdcpb.Error(region_not_found=errorpb.RegionNotFound(region_id=region.region_id))
            if new:
                error = cdcpb.Error(epoch_not_match=self._gate.changed_to(new))
            for subscription, outbox in tuple(self._by_region.get(region.region_id, ())):
                self._fail(subscription, outbox, error)

    def refuse(self, subscription: Subscription, outbox: Outbox, error: cdcpb.Error) -> None:
        """End a subscription that is not initialized yet."""
        self._fail(subscription, outbox, error)

    def refuse_stale(self, subscription: Subscription, outbox: Outbox) -> None:
        """End a subscription whose region changed before it was attached."""
        region_id = subscription.region.region_id
        current = self._gate.regions.get(region_id)
        if current is None:
            missing = errorpb.RegionNotFound(region_id=region_id)
            self._fail(subscription, outbox, cdcpb.Error(region_not_found=missing))
        else:
            self._fail(
                subscription, outbox, cdcpb.Error(epoch_not_match=self._gate.current(current))
            )

    def safe_ts(self, lower: bytes, upper: bytes) -> int:
        """The safe timestamp of the encoded range: nothing will commit there at or before it; 0: it
        is not known, or the range is in no region of this store.
        """
        regions = [region for region in self._gate.regions if region.overlaps(lower, upper)]
        return min(
            (self._resolved.get(region, self._resolved_everywhere) for region in regions), default=0
        )

    async def run(self, pd: PdClient, interval_s: float) -> None:
        """Send resolved timestamps until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                now_ts = await pd.tso()
            except (UnavailableError, PdRefusedError) as err:
                _log.warning("no timestamp to resolve with", error=err.message)
            else:
                self.resolve(now_ts)

    def resolve(self, now_ts: int) -> None:
        """Send resolved timestamps given `now_ts`, taken from the oracle before this call."""
        # Rule 3: from here on computed commits land above `now_ts`, or are still reserved and lower
        # the result.
        settled_ts = self._locks.settle(now_ts)
        before, self._resolved = self._resolved, {}
        for region in self._gate.regions:
            oldest = self._locks.min_start_ts(region.start_key)
            resolved_ts = settled_ts if oldest is None else min(settled_ts, oldest - 1)
            self._resolved[region] = max(resolved_ts, before.get(region, 0))
        self._resolved_everywhere = max(
            self._resolved_everywhere, min(self._resolved.values(), default=0)
        )
        metrics.show_resolved_ts(self._resolved_everywhere)
        self._send_resolved()

    def _send_resolved(self) -> None:
        by_outbox: dict[Outbox, dict[tuple[int, int], list[int]]] = {}
        for region_id, listed in self._by_region.items():
            for subscription, outbox in listed:
                # Before INITIALIZED the scan may still send older rows.
                if subscription.initialized:
                    subscription.resolved_ts = max(
                        subscription.resolved_ts, self._resolved[subscription.region]
                    )
                    tick = by_outbox.setdefault(outbox, defaultdict(list))
                    request_id = subscription.request_id if outbox.multiplexed else 0
                    tick[request_id, subscription.resolved_ts].append(region_id)
        for outbox, tick in by_outbox.items():
            outbox.resolve(Resolved(tick))

    def _send(self, subscription: Subscription, outbox: Outbox, changes: Sequence[Change]) -> None:
        for piece, size in chunks(change for change in changes if subscription.covers(change)):
            # A slow reader must not slow down the writers: its subscription ends, and it subscribes
            # again from its checkpoint.
            if not outbox.offer(Rows(subscription, piece, size)):
                metrics.FEED_CONGESTED.inc()
                _log.warning(
                    "change feed reader is too slow", region_id=subscription.region.region_id
                )
                congested = cdcpb.Congested(region_id=subscription.region.region_id)
                self._fail(subscription, outbox, cdcpb.Error(congested=congested))
                return
            metrics.FEED_ROWS.inc(len(piece))

    def _fail(self, subscription: Subscription, outbox: Outbox, error: cdcpb.Error) -> None:
        self.detach(subscription)
        outbox.control(Failure(subscription.region.region_id, subscription.request_id, error))
