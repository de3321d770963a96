"""`Meta` over the etcd API, whoever answers it: a real etcd, a coordinator, or the embedded server in this process."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager

import grpc.aio
from etcdpb import rpc_pb2

from storage.codec import prefix_end
from storage.jitter import jittered
from storage.meta.api import EtcdApi
from storage.meta.convert import compare_message, event_of, op_message, pair_of, parts
from storage.meta.errors import (
    CompactedError,
    EtcdError,
    MetaUnavailableError,
    MetaUrlError,
    TooManyOpsError,
    error_of,
)
from storage.meta.lease import KeptLease
from storage.meta.meta import Compare, Delete, Get, KeyValue, Lease, Op, Put, TxnResult, WatchEvent
from storage.meta.remote import RemoteEtcd
from storage.meta.store.request import MAX_TXN_OPS

_BACKOFF_SECONDS = (0.05, 2.0)


@asynccontextmanager
async def open_meta(url: str, channel: Callable[[str], grpc.aio.Channel]) -> AsyncIterator["EtcdMeta"]:
    """Connect to `etcd://host:port[,host:port…]` for the block; `channel` makes a channel to one `host:port`.

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
    """See `storage.meta.meta.Meta`."""

    def __init__(self, api: EtcdApi) -> None:
        self._api = api

    async def get(self, key: bytes) -> KeyValue | None:
        """See `Meta.get`."""
        answer = await self._api.read(rpc_pb2.RangeRequest(key=key))
        return pair_of(answer.kvs[0]) if answer.kvs else None

    async def get_prefix(self, prefix: bytes) -> list[KeyValue]:
        """See `Meta.get_prefix`."""
        answer = await self._api.read(rpc_pb2.RangeRequest(key=prefix or b"\0", range_end=_end(prefix)))
        return [pair_of(pair) for pair in answer.kvs]

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
        for part in parts(map(op_message, ops)):
            revision = (await self._api.txn(rpc_pb2.TxnRequest(success=part))).header.revision
        return revision

    async def txn(self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()) -> TxnResult:
        """See `Meta.txn`."""
        asked = _request(compares, success, failure)
        if max(len(compares), len(success), len(failure)) > MAX_TXN_OPS:
            raise TooManyOpsError
        answer = await self._api.txn(asked)
        ran = success if answer.succeeded else failure
        pairs = [
            [pair_of(pair) for pair in response.response_range.kvs]
            for op, response in zip(ran, answer.responses, strict=True)
            if isinstance(op, Get)
        ]
        return TxnResult(answer.succeeded, answer.header.revision, pairs)

    async def grant_lease(self, ttl_s: int) -> Lease:
        """See `Meta.grant_lease`."""
        asked_at = asyncio.get_running_loop().time()
        granted = await self._api.lease_grant(rpc_pb2.LeaseGrantRequest(TTL=ttl_s))
        return KeptLease(self._api, granted.ID, granted.TTL, asked_at)

    async def watch(self, prefix: bytes, start_revision: int = 0) -> AsyncGenerator[list[WatchEvent], None]:
        """See `Meta.watch`."""
        asked = rpc_pb2.WatchCreateRequest(
            key=prefix or b"\0",
            range_end=_end(prefix),
            start_revision=start_revision,
            progress_notify=True,
            fragment=True,
        )
        pause, most = _BACKOFF_SECONDS
        while True:
            try:
                async with aclosing(self._watch_once(asked)) as shown:
                    async for events in shown:
                        pause, _ = _BACKOFF_SECONDS
                        yield events
            except MetaUnavailableError:
                pass  # the server is away: watch again, from the next revision
            await asyncio.sleep(jittered(pause))
            pause = min(pause * 2, most)

    async def _watch_once(self, asked: rpc_pb2.WatchCreateRequest) -> AsyncGenerator[list[WatchEvent], None]:
        """One watch until it breaks; moves `asked.start_revision` behind all that was shown, or told as progress."""
        pieces: list[WatchEvent] = []
        async with aclosing(self._api.watch(asked)) as responses:
            async for response in responses:
                if response.canceled:
                    raise _cancelled(response)
                pieces += map(event_of, response.events)
                if response.fragment:
                    continue
                if pieces:
                    asked.start_revision = pieces[-1].pair.mod_revision + 1
                    yield pieces
                    pieces = []
                elif not response.created or not asked.start_revision:
                    asked.start_revision = response.header.revision + 1

    async def campaign(self, key: bytes, value: bytes, lease: int) -> int:
        """See `Meta.campaign`."""
        while True:
            result = await self.txn([Compare.absent(key)], [Put(key, value, lease)], [Get(key)])
            if result.succeeded:
                return result.revision
            holder = result.pairs[0][0]
            if holder.lease == lease:
                return holder.create_revision
            await self._wait_deleted(key, result.revision + 1)

    async def _wait_deleted(self, key: bytes, start_revision: int) -> None:
        try:
            async with aclosing(self.watch(key, start_revision)) as shown:
                async for events in shown:
                    if any(event.deleted and event.pair.key == key for event in events):
                        return
        except CompactedError:
            return


def _cancelled(response: rpc_pb2.WatchResponse) -> EtcdError:
    if response.compact_revision:
        return CompactedError(response.compact_revision)
    return error_of("UNAVAILABLE", response.cancel_reason)


def _request(compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op]) -> rpc_pb2.TxnRequest:
    return rpc_pb2.TxnRequest(
        compare=[compare_message(compare) for compare in compares],
        success=[op_message(op) for op in success],
        failure=[op_message(op) for op in failure],
    )


def _end(prefix: bytes) -> bytes:
    return prefix_end(prefix) or b"\0"
