"""The puller of one table span: finds its regions, subscribes to each,
and feeds their changes to the sorter in order.

Invariants:
1. A resolved_ts goes to the sorter only after every change it promises: both pass through one
   inbox, in one order.
2. After a fault the range is subscribed to again from the region's last resolved_ts: rows may come
   twice, never less.
3. Nothing is kept here that the upstream cannot send again: what is on disk (`open_transactions`)
   is a cache.

`StuckLocks` looks after all pullers of a process. A region's resolved_ts cannot pass an open lock,
and a store never ends a transaction by itself, so a dead client's locks would stop the table for
ever. Whoever waits for the region must ask the lock's primary, as a reader would; live transactions
are left alone.
"""

import asyncio
import heapq
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa
import structlog
from kvproto import cdcpb_pb2 as cdcpb

from server.puller import metrics
from server.puller.open_transactions import SPILL_DAMAGE, OpenTransactions
from server.puller.tikv.changes import Changes
from server.puller.tikv.feed import (
    Delivery,
    EventFeeds,
    Fault,
    Inbox,
    Subscription,
    fault_of,
    next_request_id,
)
from server.puller.tikv.frontier import Frontier
from server.puller.tikv.matcher import Matcher, UnmatchedCommitError
from server.rpc.lock_resolver import LockResolver
from server.rpc.pd import PdClient
from server.rpc.region_cache import RegionRoute
from server.rpc.tikv import KvClient
from storage.backoff import jittered
from storage.codec import decode_bytes, encode_bytes
from storage.model.errors import TidemarkError
from storage.model.span import KeyRange, Span
from storage.model.ts import physical_ms

_INBOX_BYTES = 32 << 20
_TAKE_BYTES = 8 << 20
# a take costs as much as hundreds of rows: in the executor, the sorter, and for readers
_GATHER_S = 0.05
# of what goes to the sorter at once: small commits bring large rows
_BATCH_BYTES = 8 << 20
_SCAN_LIMIT = 128
_BACKOFF_MS = (20, 2_000)
# after so long without a failure, the next one is the first again
_CALM_S = 5.0
_STUCK_EVERY_S = 1.0
_STUCK_LAG_MS = 2_000
_LOCKS_PAGE = 256
_LOCKS_RANGE_S = 30.0

_log = structlog.get_logger(__name__)


class Sorter(Protocol):
    """Receives the changes; both calls may block on disk."""

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """Take changes of RAW_SCHEMA."""
        ...

    def resolve(self, span: Span, ts: int) -> None:
        """Note that all changes up to `ts` were added."""
        ...


@dataclass(frozen=True, slots=True)
class Upstream:
    """The parts that the pullers of a process share."""

    pd: PdClient
    feeds: EventFeeds
    executor: Executor
    open_transactions: OpenTransactions = field(default_factory=OpenTransactions)
    """The changefeed's open transactions; without a directory they all stay in memory."""


@dataclass(slots=True)
class _Absorbed:
    """The progress that a batch of deliveries made, besides the rows."""

    resolved: dict[int, int] = field(default_factory=dict)
    faults: list[tuple[Subscription, Fault]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RegionProgress:
    """The progress of one region; id 0 and no store: a range that is being located."""

    region_id: int
    store: str
    resolved_ts: int
    part: KeyRange | None


class TablePuller:
    """Pulls `span` from `start_ts` (exclusive) into `sorter` until cancelled."""

    def __init__(self, span: Span, start_ts: int, upstream: Upstream, sorter: Sorter) -> None:
        self.span = span
        self.resolved_ts = start_ts
        self._upstream = upstream
        self._sorter = sorter
        end = encode_bytes(span.end_key) if span.end_key else b""
        self._frontier = Frontier(KeyRange(encode_bytes(span.start_key), end), start_ts)
        self._subscriptions: dict[int, Subscription] = {}
        self._inbox: Inbox[Delivery] = Inbox(
            _INBOX_BYTES, _TAKE_BYTES, upstream.open_transactions.arrived, gather_s=_GATHER_S
        )
        self._gap = asyncio.Event()
        self._gap.set()
        self._failures = 0
        self._failed_at = 0.0
        self._wait_ms = 0
        self._matching = threading.Lock()

    @property
    def regions(self) -> int:
        """Regions subscribed to at this moment."""
        return len(self._subscriptions)

    def stuck(self, now_ts: int, lag_ms: int) -> list[KeyRange]:
        """Initialized regions whose resolved_ts is more than `lag_ms` behind `now_ts`:
        a lock may hold them.
        """
        # Before INITIALIZED a region sends no resolved_ts, however well it is.
        before = physical_ms(now_ts) - lag_ms
        return [
            subscription.part
            for subscription in self._subscriptions.values()
            if subscription.matcher.initialized
            and physical_ms(subscription.matcher.resolved_ts) < before
        ]

    def slowest(self, most: int) -> list[RegionProgress]:
        """The regions that are furthest behind, the slowest first;
        ranges being located count as one.
        """
        regions = [
            RegionProgress(each.region_id, each.address, each.matcher.resolved_ts, each.part)
            for each in heapq.nsmallest(
                most, self._subscriptions.values(), key=lambda each: each.matcher.resolved_ts
            )
        ]
        gap = self._frontier.lowest_gap()
        if gap is not None:
            regions.append(RegionProgress(0, "", gap, None))
        return sorted(regions, key=lambda region: region.resolved_ts)[:most]

    async def run(self) -> None:
        """Pull until cancelled.

        Raises:
            LateCommitError, ClusterIdMismatchError, FeedRefusedError: the upstream cannot be pulled
                from.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._locate(), name=f"locate table {self.span.table_id}")
                tasks.create_task(self._receive(), name=f"receive table {self.span.table_id}")
        finally:
            # The inbox first: a feed that waits for room in it keeps all its other tables waiting.
            self._inbox.close()
            for subscription in list(self._subscriptions.values()):
                self._drop(subscription)

    async def _locate(self) -> None:
        """Subscribe to the regions of every gap, as soon as it opens."""
        while True:
            await self._gap.wait()
            await asyncio.sleep(self._pause_s())
            # Cleared before the gaps are looked at: one that opens meanwhile sets it again.
            self._gap.clear()
            try:
                for gap in self._frontier.gaps():
                    for route in await self._upstream.pd.scan_regions(
                        gap.start_key, gap.end_key, _SCAN_LIMIT
                    ):
                        self._subscribe(gap, route)
            except TidemarkError as err:
                _log.warning(
                    "regions cannot be located", table_id=self.span.table_id, error=str(err)
                )
            # The coordinator knows no region for some range, for example while one splits, or there
            # are more regions than one call returns.
            if self._frontier.gaps():
                self._failed()

    def _failed(self) -> None:
        """Locate again, after a pause that grows with each failure; after `_CALM_S` without one it
        is short again.
        """
        now = asyncio.get_running_loop().time()
        self._failures = 1 if now - self._failed_at > _CALM_S else self._failures + 1
        self._failed_at = now
        self._gap.set()

    def _pause_s(self) -> float:
        least, most = _BACKOFF_MS
        backoff = min(most, least << min(self._failures, 10)) if self._failures else 0
        wait_ms, self._wait_ms = max(self._wait_ms, backoff), 0
        return jittered(wait_ms / 1e3)

    def _subscribe(self, gap: KeyRange, route: RegionRoute) -> None:
        # A region without a leader, or whose store's address is not known, stays a gap.
        part = KeyRange(route.region.start_key, route.region.end_key).clip(gap)
        if part is None or not route.address:
            return
        request_id = next_request_id()
        matcher = Matcher(self._frontier.assign(part, request_id), self._upstream.open_transactions)
        subscription = Subscription(
            request_id,
            route.region.id,
            route.region.region_epoch,
            route.address,
            part,
            matcher,
            self._inbox,
        )
        self._subscriptions[request_id] = subscription
        metrics.REGIONS.inc()
        self._upstream.feeds.subscribe(subscription)

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            deliveries = await self._inbox.take()
            absorbed = await loop.run_in_executor(self._upstream.executor, self._absorb, deliveries)
            # After the rows: the sorter must have every row that these timestamps promise. Before
            # the faults, so that a range is pulled again from its last timestamp.
            for request_id, ts in absorbed.resolved.items():
                self._frontier.advance(request_id, ts)
            for subscription, fault in absorbed.faults:
                self._end(subscription, fault)
            resolved_ts = self._frontier.resolved_ts
            if resolved_ts > self.resolved_ts:
                await loop.run_in_executor(
                    self._upstream.executor, self._sorter.resolve, self.span, resolved_ts
                )
                self.resolved_ts = resolved_ts

    def _absorb(self, deliveries: Sequence[Delivery]) -> _Absorbed:
        """Match a batch and add its changes to the sorter; runs in the executor,
        one batch at a time.
        """
        absorbed, changes = _Absorbed(), Changes(_BATCH_BYTES, self._add)
        with self._matching:
            for subscription, content in deliveries:
                # After a fault that was found here, such as an unmatched commit, the store goes on
                # sending until the subscription is cancelled there.
                if subscription.ended:
                    continue
                fault = self._apply(subscription, content, changes, absorbed)
                if fault is not None:
                    subscription.ended = True
                    absorbed.faults.append((subscription, fault))
        if changes:
            self._add(changes.to_batch())
        return absorbed

    def _add(self, batch: pa.RecordBatch) -> None:
        metrics.ROWS.inc(batch.num_rows)
        self._sorter.add(self.span, batch)

    def _apply(
        self,
        subscription: Subscription,
        content: cdcpb.Event | int | Fault,
        changes: Changes,
        absorbed: _Absorbed,
    ) -> Fault | None:
        matcher = subscription.matcher
        if isinstance(content, Fault):
            return content
        if isinstance(content, int):
            resolved_ts = content
        elif content.HasField("error"):
            return fault_of(content.error)
        elif content.HasField("entries"):
            try:
                matcher.apply(content.entries.entries, changes)
                matcher.spill_if_short()
            except UnmatchedCommitError as err:
                _log.warning(
                    "region subscribed again", region_id=subscription.region_id, error=str(err)
                )
                return Fault("unmatched_commit")
            except SPILL_DAMAGE as err:
                _log.error("spilled rows are damaged, region is pulled again", error=str(err))
                return Fault("spill_damaged")
            return None
        else:
            resolved_ts = content.resolved_ts
        if matcher.resolve(resolved_ts):
            absorbed.resolved[subscription.request_id] = resolved_ts
        return None

    def _end(self, subscription: Subscription, fault: Fault) -> None:
        metrics.FAULTS.labels(fault.reason).inc()
        if fault.fatal is not None:
            raise fault.fatal
        self._drop(subscription)
        self._wait_ms = max(self._wait_ms, fault.wait_ms)
        self._failed()

    def _drop(self, subscription: Subscription) -> None:
        if self._subscriptions.pop(subscription.request_id, None) is not None:
            metrics.REGIONS.dec()
        self._frontier.release(subscription.request_id)
        self._upstream.feeds.unsubscribe(subscription)
        # A thread of the executor may wait for a full disk in it; the clearing queues behind.
        subscription.matcher.end()
        # The executor is shut down, and the changefeed's files are removed with it.
        with suppress(RuntimeError):
            self._upstream.executor.submit(self._clear, subscription.matcher)

    def _clear(self, matcher: Matcher) -> None:
        with self._matching, suppress(*SPILL_DAMAGE):
            matcher.clear()


class StuckLocks:
    """Frees the regions of all pullers of a process from locks that dead clients left."""

    def __init__(
        self, pd: PdClient, kv: KvClient, pullers: Callable[[], Iterable[TablePuller]]
    ) -> None:
        self._pd = pd
        self._kv = kv
        self._resolver = LockResolver(pd, kv)
        self._pullers = pullers

    async def run(self) -> None:
        """Look every second until cancelled."""
        while True:
            await asyncio.sleep(_STUCK_EVERY_S)
            try:
                await self._free_all()
            except (TidemarkError, TimeoutError) as err:
                _log.warning("stuck locks cannot be resolved now", error=str(err))

    async def _free_all(self) -> None:
        pullers = [puller for puller in self._pullers() if puller.regions]
        if not pullers:
            return
        now_ts = await self._pd.tso()
        # A set: several changefeeds may pull the same table.
        for part in {part for puller in pullers for part in puller.stuck(now_ts, _STUCK_LAG_MS)}:
            async with asyncio.timeout(_LOCKS_RANGE_S):
                await self._free(part, now_ts)

    async def _free(self, part: KeyRange, now_ts: int) -> None:
        key: bytes | None
        key, end_key = raw_bounds(part)
        while key is not None:
            page = await self._kv.scan_lock(key, end_key, now_ts, _LOCKS_PAGE)
            if page.locks:
                metrics.LOCKS_RESOLVED.inc(len(page.locks))
                # The primary decides: a lock whose TTL is not over is left to its client.
                await self._resolver.resolve(page.locks, 0)
            key = page.next_key


def raw_bounds(part: KeyRange) -> tuple[bytes, bytes]:
    """The raw keys of a range of encoded ones; an empty end key is no end."""
    return _raw(part.start_key), _raw(part.end_key)


def _raw(encoded: bytes) -> bytes:
    return decode_bytes(encoded)[0] if encoded else b""
