"""The metadata: our embedded server of etcd's API on a disk of its own, which stops and comes back.

As an etcd does it, leases have all of their time again after a restart, and whoever watches learns
that the connection broke.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

from etcdpb import rpc_pb2

from storage.meta.embedded import EmbeddedEtcd
from storage.meta.errors import MetaUnavailableError
from tests.sim.whole.disk import DiskKV


class Metadata:
    """Implements `storage.meta.client.EtcdApi`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.is_up = False
        self._clock = clock
        self._disk = DiskKV()
        self._server: Any = None
        self._ended = asyncio.Event()
        self._running: list[asyncio.Task[None]] = []

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Run it, from what its disk holds."""
        self._server = EmbeddedEtcd(self._disk, clock=self._clock)
        self._ended = asyncio.Event()
        self._running = [
            tasks.create_task(self._server.run()),
            tasks.create_task(self._server.run_expiry()),
        ]
        self.is_up = True

    async def stop(self, chance: Random) -> None:
        """It loses its power."""
        self.is_up = False
        self._disk = self._disk.crashed(chance)
        for task in self._running:
            task.cancel()
        await asyncio.wait(self._running)
        self._server.close()
        self._ended.set()

    def _there(self) -> Any:
        if not self.is_up:
            raise MetaUnavailableError("etcd is down")
        return self._server

    async def read(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        """See `EtcdApi`."""
        return await self._there().read(request)

    async def txn(self, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        """See `EtcdApi`."""
        return await self._there().txn(request)

    async def lease_grant(self, request: rpc_pb2.LeaseGrantRequest) -> rpc_pb2.LeaseGrantResponse:
        """See `EtcdApi`."""
        return await self._there().lease_grant(request)

    async def lease_revoke(
        self, request: rpc_pb2.LeaseRevokeRequest
    ) -> rpc_pb2.LeaseRevokeResponse:
        """See `EtcdApi`."""
        return await self._there().lease_revoke(request)

    async def keep_alive(self, lease: int, within_s: float) -> int:
        """See `EtcdApi`."""
        answer: int = await self._there().keep_alive(lease, within_s)
        return answer

    async def watch(
        self, request: rpc_pb2.WatchCreateRequest
    ) -> AsyncIterator[rpc_pb2.WatchResponse]:
        """See `EtcdApi`."""
        loop, ended = asyncio.get_running_loop(), self._ended
        async with contextlib.aclosing(self._there().watch(request)) as responses:
            broken = loop.create_task(ended.wait())
            try:
                while True:
                    following = loop.create_task(anext(responses))
                    try:
                        await asyncio.wait({following, broken}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        if not following.done():
                            following.cancel()
                            await asyncio.wait({following})
                    if ended.is_set():
                        raise MetaUnavailableError("etcd went down")
                    yield following.result()
            finally:
                broken.cancel()
