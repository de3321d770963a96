"""etcd's Watch on the coordinator's port: one stream, many watches; the rules are in `storage.meta.store.watchers`."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
from etcdpb import rpc_pb2

from server.coordinator.etcd.metrics import SLOW_WATCHES_TOTAL
from storage.defect import request_error
from storage.meta.embedded import EmbeddedEtcd
from storage.meta.store.watchers import Watchers

PROGRESS_S = 60.0
_INBOX = 16

_Requests = AsyncIterator[rpc_pb2.WatchRequest]
_Inbox = asyncio.Queue[rpc_pb2.WatchRequest | None]


class WatchService:
    """`tasks` owns the readers of client streams; `complete` fills headers."""

    def __init__(
        self, etcd: EmbeddedEtcd, tasks: asyncio.TaskGroup, complete: Callable[[rpc_pb2.ResponseHeader], None]
    ) -> None:
        self._etcd = etcd
        self._tasks = tasks
        self._complete = complete

    async def watch(self, requests: _Requests, _context: object) -> AsyncIterator[rpc_pb2.WatchResponse]:
        """All watches of one client; what they have not seen waits in the kept events, not in memory of theirs."""
        inbox: _Inbox = asyncio.Queue(_INBOX)
        with self._etcd.watching() as (watchers, woken):
            reader = self._tasks.create_task(_read(requests, inbox, woken), name="etcd-watch-reader")
            try:
                async for response in self._responses(inbox, watchers, woken):
                    self._complete(response.header)
                    if response.compact_revision:
                        SLOW_WATCHES_TOTAL.inc()
                    yield response
            finally:
                reader.cancel()

    async def _responses(
        self, inbox: _Inbox, watchers: Watchers, woken: asyncio.Event
    ) -> AsyncIterator[rpc_pb2.WatchResponse]:
        loop = asyncio.get_running_loop()
        next_tick = loop.time() + PROGRESS_S
        while True:
            woken.clear()
            if self._take(inbox, watchers):
                return
            for response in watchers.responses(lambda: self._etcd.revision):
                yield response
            if loop.time() >= next_tick:
                watchers.tick(self._etcd.revision)
                next_tick = loop.time() + PROGRESS_S
                continue
            try:
                async with asyncio.timeout_at(next_tick):
                    await woken.wait()
            except TimeoutError:
                continue

    def _take(self, inbox: _Inbox, watchers: Watchers) -> bool:
        """Hand the waiting requests over; returns whether the client has ended the stream."""
        while not inbox.empty():
            request = inbox.get_nowait()
            if request is None:
                return True
            watchers.handle(request, self._etcd.revision)
        return False


async def _read(requests: _Requests, inbox: _Inbox, woken: asyncio.Event) -> None:
    try:
        async for request in requests:
            await inbox.put(request)
            woken.set()
    except (grpc.RpcError, grpc.aio.UsageError):
        return  # the client broke the stream; gRPC cancels the answering half
    except Exception as err:  # noqa: BLE001 - the stream ends; the coordinator, which owns this task, does not
        request_error(err, "etcdserverpb.Watch")
    await inbox.put(None)
    woken.set()
