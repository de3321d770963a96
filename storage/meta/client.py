"""`Meta` over the etcd API: a real etcd, a coordinator, or the embedded server in this process.

`EtcdApi` is the calls that each of them answers. `EtcdMeta` makes `Meta` of these: typed values
instead of messages, watches that reconnect without missing a change, elections (`campaign`), and
leases that renew themselves.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Protocol, Self

import grpc.aio
from etcdpb import kv_pb2, rpc_pb2

from storage.backoff import Backoff
from storage.codec import prefix_end
from storage.meta.errors import (
    CompactedError,
    EtcdError,
    LeaseNotFoundError,
    MetaUnavailableError,
    MetaUrlError,
    TooManyOpsError,
    error_of,
)
from storage.meta.meta import Compare, Delete, Get, KeyValue, Lease, Op, Put, TxnResult, WatchEvent
from storage.meta.remote import RemoteEtcd
from storage.meta.store.request import MAX_REQUEST_BYTES, MAX_TXN_OPS

_BACKOFF_SECONDS = (0.05, 2.0)
_REVOKE_SECONDS = 2.0
_PART_BYTES = MAX_REQUEST_BYTES * 2 // 3
_PAGE_KEYS = 8192

_RESULT: dict[str, Any] = {
    "==": rpc_pb2.Compare.EQUAL,
    "!=": rpc_pb2.Compare.NOT_EQUAL,
    ">": rpc_pb2.Compare.GREATER,
    "<": rpc_pb2.Compare.LESS,
}
_TARGET: dict[str, Any] = {
    "version": rpc_pb2.Compare.VERSION,
    "create_revision": rpc_pb2.Compare.CREATE,
    "mod_revision": rpc_pb2.Compare.MOD,
    "value": rpc_pb2.Compare.VALUE,
    "lease": rpc_pb2.Compare.LEASE,
}


class EtcdApi(Protocol):
    """The calls of the etcd v3 API that `EtcdMeta` makes.

    Errors are those of `storage.meta.errors`.
    """

    async def read(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        """Read a key or range."""
        ...

    async def txn(self, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        """Compare and write; a transaction without compares may be sent again after a failure."""
        ...

    async def lease_grant(self, request: rpc_pb2.LeaseGrantRequest) -> rpc_pb2.LeaseGrantResponse:
        """Create a lease."""
        ...

    async def lease_revoke(
        self, request: rpc_pb2.LeaseRevokeRequest
    ) -> rpc_pb2.LeaseRevokeResponse:
        """End a lease and delete its keys."""
        ...

    async def keep_alive(self, lease: int, within_s: float) -> int:
        """Renew a lease; returns its TTL in seconds, 0 if it has expired.

        A server that does not answer within `within_s` is given up for another one.
        """
        ...

    def watch(
        self, request: rpc_pb2.WatchCreateRequest
    ) -> AsyncGenerator[rpc_pb2.WatchResponse, None]:
        """One watch, until the connection breaks (`MetaUnavailableError`) or the server cancels
        it.
        """
        ...


@asynccontextmanager
async def open_meta(
    url: str, channel: Callable[[str], grpc.aio.Channel]
) -> AsyncIterator["EtcdMeta"]:
    """Connect to `etcd://host:port[,host:port…]` for the block;
    `channel` makes a channel to one `host:port`.

    Raises:
        MetaUrlError: not such a URL.
    """
    scheme, _, rest = url.partition("://")
    endpoints = [endpoint.strip() for endpoint in rest.split(",") if endpoint.strip()]
    if scheme != "etcd" or not endpoints:
        raise MetaUrlError(f"{url!r} is not a metadata URL; write etcd://host:port[,host:port…]")
    async with RemoteEtcd.open(endpoints, channel) as api:
        yield EtcdMeta(api)


class EtcdMeta:
    """Implements `storage.meta.meta.Meta`."""

    def __init__(self, api: EtcdApi) -> None:
        self._api = api

    async def get(self, key: bytes) -> KeyValue | None:
        """See `Meta.get`."""
        answer = await self._api.read(rpc_pb2.RangeRequest(key=key))
        return _pair_of(answer.kvs[0]) if answer.kvs else None

    async def get_prefix(self, prefix: bytes) -> list[KeyValue]:
        """See `Meta.get_prefix`."""
        while True:
            try:
                return [pair async for page in self._pages(prefix) for pair in page]
            except CompactedError:
                # Between two pages; the next attempt reads a newer revision.
                continue

    async def _pages(self, prefix: bytes) -> AsyncGenerator[list[KeyValue], None]:
        """The pairs of a prefix as of one revision: the records of very many tables are more than
        one message may hold.
        """
        request = rpc_pb2.RangeRequest(
            key=prefix or b"\0", range_end=_end(prefix), limit=_PAGE_KEYS
        )
        while True:
            answer = await self._api.read(request)
            yield [_pair_of(pair) for pair in answer.kvs]
            if not answer.more:
                return
            request.key = answer.kvs[-1].key + b"\0"
            request.revision = request.revision or answer.header.revision

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        """See `Meta.put`."""
        return (await self.txn((), [Put(key, value, lease)])).revision

    async def delete(self, key: bytes) -> int:
        """See `Meta.delete`."""
        return (await self.txn((), [Delete(key)])).revision

    async def delete_prefix(self, prefix: bytes) -> int:
        """See `Meta.delete_prefix`."""
        answer = await self._api.txn(_request((), [Delete(prefix or b"\0", _end(prefix))], ()))
        return answer.responses[0].response_delete_range.deleted

    async def write_all(self, ops: Iterable[Op]) -> int:
        """See `Meta.write_all`."""
        revision = 0
        for part in _split(map(_op_message, ops)):
            revision = (await self._api.txn(rpc_pb2.TxnRequest(success=part))).header.revision
        return revision

    async def txn(
        self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()
    ) -> TxnResult:
        """See `Meta.txn`."""
        request = _request(compares, success, failure)
        if max(len(compares), len(success), len(failure)) > MAX_TXN_OPS:
            raise TooManyOpsError
        answer = await self._api.txn(request)
        ran = success if answer.succeeded else failure
        pairs = [
            [_pair_of(pair) for pair in response.response_range.kvs]
            for op, response in zip(ran, answer.responses, strict=True)
            if isinstance(op, Get)
        ]
        return TxnResult(answer.succeeded, answer.header.revision, pairs)

    async def grant_lease(self, ttl_s: int) -> Lease:
        """See `Meta.grant_lease`."""
        sent_at = asyncio.get_running_loop().time()
        granted = await self._api.lease_grant(rpc_pb2.LeaseGrantRequest(TTL=ttl_s))
        return KeepAliveLease(self._api, granted.ID, granted.TTL, sent_at)

    async def watch(
        self, prefix: bytes, start_revision: int = 0
    ) -> AsyncGenerator[list[WatchEvent], None]:
        """See `Meta.watch`."""
        # Progress moves a quiet watch on, too: after a break it must not ask for a revision that
        # has been compacted.
        request = rpc_pb2.WatchCreateRequest(
            key=prefix or b"\0",
            range_end=_end(prefix),
            start_revision=start_revision,
            progress_notify=True,
            fragment=True,
        )
        # `_watch_once` moves the request's start on: a new watch goes on where the last one broke.
        backoff = Backoff(*_BACKOFF_SECONDS)
        while True:
            try:
                async with aclosing(self._watch_once(request)) as changes:
                    async for events in changes:
                        backoff.reset()
                        yield events
            except MetaUnavailableError:
                pass  # watch again, from the next revision
            await asyncio.sleep(backoff.next_s())

    async def _watch_once(
        self, request: rpc_pb2.WatchCreateRequest
    ) -> AsyncGenerator[list[WatchEvent], None]:
        """One watch until it breaks; moves `request.start_revision` behind all events and progress
        that it received.
        """
        received: list[WatchEvent] = []
        async with aclosing(self._api.watch(request)) as responses:
            async for response in responses:
                if response.canceled:
                    raise _cancelled(response)
                received += map(_event_of, response.events)
                if response.fragment:
                    continue
                if received:
                    request.start_revision = received[-1].pair.mod_revision + 1
                    yield received
                    received = []
                # A watch that asked for a revision has yet to get what lies before the one of the
                # answer that it was created.
                elif not response.created or not request.start_revision:
                    request.start_revision = response.header.revision + 1

    async def campaign(self, key: bytes, value: bytes, lease: int) -> int:
        """See `Meta.campaign`."""
        while True:
            result = await self.txn([Compare.absent(key)], [Put(key, value, lease)], [Get(key)])
            if result.succeeded:
                return result.revision
            holder = result.pairs[0][0]
            # Our own attempt, whose answer was lost.
            if holder.lease == lease:
                return holder.create_revision
            await self._wait_deleted(key, result.revision + 1)

    async def _wait_deleted(self, key: bytes, start_revision: int) -> None:
        # The watch begins behind the look that found the key, so no deletion is missed. It is by
        # prefix: other keys may be told, too.
        try:
            async with aclosing(self.watch(key, start_revision)) as changes:
                async for events in changes:
                    if any(event.deleted and event.pair.key == key for event in events):
                        return
        except CompactedError:
            return  # the caller looks again


class KeepAliveLease:
    """A lease that renews itself every third of its TTL,
    and sets `lost` when that fails for a whole TTL.

    Implements `storage.meta.meta.Lease`. A server that is silent for a third of the TTL is given up
    for another one: there is time for two more attempts.
    """

    def __init__(self, api: EtcdApi, lease: int, ttl_s: int, granted_at: float) -> None:
        """`granted_at` is the loop time before the request for the lease was sent."""
        self.id = lease
        self.ttl_s = ttl_s
        self.lost = asyncio.Event()
        self._api = api
        self.deadline = granted_at + ttl_s
        self._tasks = asyncio.TaskGroup()
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start renewing."""
        await self._tasks.__aenter__()
        self._renewing = self._tasks.create_task(self._renew(), name=f"lease-{self.id:x}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop renewing, and revoke the lease, so that its TTL need not pass."""
        assert self._renewing is not None
        self._renewing.cancel()
        try:
            if not self.lost.is_set():
                async with asyncio.timeout(_REVOKE_SECONDS):
                    await self._api.lease_revoke(rpc_pb2.LeaseRevokeRequest(ID=self.id))
        except (TimeoutError, MetaUnavailableError, LeaseNotFoundError):
            pass  # it expires by itself
        finally:
            # its one task is cancelled: nothing to report
            await self._tasks.__aexit__(None, None, None)

    async def _renew(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while loop.time() < self.deadline:
                # The server counts the TTL from when it gets this: our deadline is never later.
                sent_at = loop.time()
                try:
                    async with asyncio.timeout_at(self.deadline):
                        ttl_s = await self._api.keep_alive(self.id, self.ttl_s / 3)
                except (TimeoutError, MetaUnavailableError):
                    await asyncio.sleep(min(0.2, max(0.0, self.deadline - loop.time())))
                    continue
                if ttl_s <= 0:
                    break
                self.deadline = sent_at + ttl_s
                await asyncio.sleep(ttl_s / 3)
        finally:
            self.lost.set()  # however this ended, the lease is renewed no more


def _pair_of(pair: kv_pb2.KeyValue) -> KeyValue:
    """Our value for etcd's pair."""
    return KeyValue(
        pair.key, pair.value, pair.create_revision, pair.mod_revision, pair.version, pair.lease
    )


def _event_of(event: kv_pb2.Event) -> WatchEvent:
    """Our value for etcd's event."""
    return WatchEvent(event.type == kv_pb2.Event.DELETE, _pair_of(event.kv))


def _compare_message(compare: Compare) -> rpc_pb2.Compare:
    """The message for our condition."""
    operand: dict[str, Any] = {compare.target: compare.operand}
    return rpc_pb2.Compare(
        key=compare.key, result=_RESULT[compare.result], target=_TARGET[compare.target], **operand
    )


def _op_message(op: Op) -> rpc_pb2.RequestOp:
    """The message for our operation."""
    if isinstance(op, Put):
        return rpc_pb2.RequestOp(
            request_put=rpc_pb2.PutRequest(key=op.key, value=op.value, lease=op.lease)
        )
    if isinstance(op, Delete):
        return rpc_pb2.RequestOp(
            request_delete_range=rpc_pb2.DeleteRangeRequest(key=op.key, range_end=op.range_end)
        )
    return rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=op.key, range_end=op.range_end))


def _split(ops: Iterable[rpc_pb2.RequestOp]) -> Iterator[list[rpc_pb2.RequestOp]]:
    """The operations in order, in parts that fit one transaction each, by number and,
    where possible, by bytes.
    """
    part: list[rpc_pb2.RequestOp] = []
    size = 0
    for op in ops:
        if part and (len(part) == MAX_TXN_OPS or size + op.ByteSize() > _PART_BYTES):
            yield part
            part, size = [], 0
        part.append(op)
        size += op.ByteSize()
    if part:
        yield part


def _cancelled(response: rpc_pb2.WatchResponse) -> EtcdError:
    if response.compact_revision:
        return CompactedError(response.compact_revision)
    return error_of("UNAVAILABLE", response.cancel_reason)


def _request(
    compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op]
) -> rpc_pb2.TxnRequest:
    return rpc_pb2.TxnRequest(
        compare=[_compare_message(compare) for compare in compares],
        success=[_op_message(op) for op in success],
        failure=[_op_message(op) for op in failure],
    )


def _end(prefix: bytes) -> bytes:
    return prefix_end(prefix) or b"\0"
