"""The queue of one feed connection, in order and bounded in bytes, and the region subscriptions
whose events it holds.

There are two limits, the connection's own and one for all connections of the store (`memory`). Live
changes are refused when one of them is reached (the subscription is then cut as congested); a scan
waits until half of both is free; control events are small and always taken, but no request is read
while they fill the connection's limit. What an empty outbox is offered is always taken, so that one
connection's backlog slows the others down and never stops them. Rows are kept as the shared
`Change` tuples and become messages only when they are sent.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvproto import cdcpb_pb2 as cdcpb

from storage.mvcc.engine import COMMITTED, PREWRITE, Change
from storage.mvcc.record import PUT
from storage.mvcc.region import Region
from storage.queue import ByteBudget

_CONTROL_BYTES = 64
_REGION_BYTES = 16
MAX_EVENT_BYTES = 1 << 20
MAX_EVENT_ROWS = 1024
_ROW_BYTES = 64
# these bits of a txn_source are set by a changefeed that writes here (TiKV's TxnSource)
_CDC_SOURCE = 0xFF


@dataclass(slots=True, eq=False, kw_only=True)
class Subscription:
    """A client's subscription to `region` within the encoded range `[lower, upper)`, under its
    `request_id`.
    """

    region: Region
    request_id: int
    checkpoint_ts: int
    lower: bytes
    upper: bytes
    old_values: bool
    filter_loop: bool = False
    initialized: bool = False
    ended: bool = False
    resolved_ts: int = field(default=0)

    def covers(self, change: Change) -> bool:
        """Whether the client requested this key and this writer."""
        if self.filter_loop and change.txn_source & _CDC_SOURCE:
            return False
        return self.lower <= change.encoded and (not self.upper or change.encoded < self.upper)


def chunks(changes: Iterable[Change]) -> Iterator[tuple[list[Change], int]]:
    """Changes in pieces of at most 1024 and about 1 MiB, with their sizes in bytes;
    takes one piece at a time.
    """
    piece: list[Change] = []
    size = 0
    for change in changes:
        piece.append(change)
        size += len(change.key) + len(change.value) + len(change.old_value) + _ROW_BYTES
        if size >= MAX_EVENT_BYTES or len(piece) >= MAX_EVENT_ROWS:
            yield piece, size
            piece, size = [], 0
    if piece:
        yield piece, size


@dataclass(frozen=True, slots=True)
class Rows:
    """Changes of one subscription."""

    subscription: Subscription
    changes: Sequence[Change]
    size: int


@dataclass(frozen=True, slots=True)
class Initialized:
    """The end of a subscription's scan."""

    subscription: Subscription
    size: int = _CONTROL_BYTES


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a region under a request id."""

    region_id: int
    request_id: int
    error: cdcpb.Error
    size: int = _CONTROL_BYTES


@dataclass(frozen=True, slots=True)
class Resolved:
    """One tick: (request_id, resolved_ts) -> region ids."""

    regions: dict[tuple[int, int], list[int]]

    @property
    def size(self) -> int:
        """Its approximate size in memory."""
        return _CONTROL_BYTES + _REGION_BYTES * sum(
            len(regions) for regions in self.regions.values()
        )


Item = Rows | Initialized | Failure | Resolved


class Outbox:
    """The queue of one connection; belongs to one event loop.

    `multiplexed`: resolved timestamps name their request.
    """

    def __init__(self, max_bytes: int, memory: ByteBudget, *, multiplexed: bool = True) -> None:
        self.multiplexed = multiplexed
        self._max_bytes = max_bytes
        self._memory = memory
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()
        self._closed = False

    def offer(self, rows: Rows) -> bool:
        """Queue live changes; False when the reader is too far behind."""
        if not self._fits(rows.size, self._max_bytes, self._memory.limit_bytes):
            return False
        self._append(rows)
        return True

    async def put(self, rows: Rows) -> None:
        """Queue changes of a scan, as soon as half of the limits is free;
        dropped when the connection has ended.
        """
        while not self._closed and not self._fits(
            rows.size, self._max_bytes // 2, self._memory.limit_bytes // 2
        ):
            await self._memory.wait_freed()
        self._append(rows)

    async def wait_room(self) -> None:
        """Until this connection is within its limit."""
        while not self._closed and self._bytes > self._max_bytes:
            await self._memory.wait_freed()

    def control(self, item: Initialized | Failure) -> None:
        """Queue an event that must not be lost."""
        self._append(item)

    def resolve(self, item: Resolved) -> None:
        """Queue resolved timestamps; they replace those of the last tick if nothing came
        between.
        """
        # A reader that is behind needs only the newest tick; without this ticks alone would fill
        # its memory.
        if self._items and isinstance(self._items[-1], Resolved):
            self._count(-self._items.pop().size)
        self._append(item)

    def close(self) -> None:
        """End the stream after the queued events."""
        self._closed = True
        self._filled.set()
        # Wakes whoever waits for room here, to see that the connection has ended.
        self._memory.free(0)

    def drop(self) -> None:
        """Drop the queued events, as the connection is gone."""
        self.close()
        self._items.clear()
        self._count(-self._bytes)

    async def messages(self) -> AsyncIterator[cdcpb.ChangeDataEvent]:
        """Everything queued, as messages of about 1 MiB, until `close`."""
        while True:
            while self._items:
                for message in self._next_messages():
                    yield message
            if self._closed:
                return
            self._filled.clear()
            await self._filled.wait()

    def _fits(self, size: int, own_max: int, all_max: int) -> bool:
        # An empty queue takes anything, so a change larger than the limit still gets through.
        return not self._items or (
            self._bytes + size <= own_max and self._memory.used_bytes + size <= all_max
        )

    def _append(self, item: Item) -> None:
        if self._closed:
            return
        self._items.append(item)
        self._count(item.size)
        self._filled.set()

    def _pop(self) -> Item:
        item = self._items.popleft()
        self._count(-item.size)
        return item

    def _count(self, size: int) -> None:
        self._bytes += size
        if size < 0:
            self._memory.free(-size)
        else:
            self._memory.take(size)

    def _next_messages(self) -> list[cdcpb.ChangeDataEvent]:
        if isinstance(self._items[0], Resolved):
            return _resolved(self._pop())
        message, size = cdcpb.ChangeDataEvent(), 0
        while self._items and size < MAX_EVENT_BYTES and not isinstance(self._items[0], Resolved):
            item = self._pop()
            size += item.size
            _add(message, item)
        return [message]


def _resolved(item: Item) -> list[cdcpb.ChangeDataEvent]:
    assert isinstance(item, Resolved)
    return [
        cdcpb.ChangeDataEvent(
            resolved_ts=cdcpb.ResolvedTs(regions=regions, ts=ts, request_id=request_id)
        )
        for (request_id, ts), regions in item.regions.items()
    ]


def _add(message: cdcpb.ChangeDataEvent, item: Item) -> None:
    if isinstance(item, Failure):
        message.events.add(region_id=item.region_id, request_id=item.request_id, error=item.error)
        return
    assert isinstance(item, Rows | Initialized)
    subscription = item.subscription
    event = message.events.add(
        region_id=subscription.region.region_id, request_id=subscription.request_id
    )
    rows = event.entries.entries
    if isinstance(item, Initialized):
        rows.add(type=cdcpb.Event.INITIALIZED)
        return
    for change in item.changes:
        with_values = change.event in (PREWRITE, COMMITTED)
        rows.add(
            start_ts=change.start_ts,
            commit_ts=change.commit_ts,
            type=change.event,
            op_type=cdcpb.Event.Row.PUT if change.op == PUT else cdcpb.Event.Row.DELETE,
            key=change.key,
            value=change.value if with_values else b"",
            old_value=change.old_value if with_values and subscription.old_values else b"",
            txn_source=change.txn_source,
        )
