"""What lies between one capture and the metadata: calls are late, answers are lost, requests arrive
long after whoever sent them has given up or died, and links are cut.
"""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

from etcdpb import rpc_pb2

from storage.meta.client import EtcdApi
from storage.meta.errors import MetaUnavailableError

_QUICK_S = (0.001, 0.02)
_TIMEOUT_S = 3.0
_LATE_S = (2.0, 25.0)


class Link:
    """Implements `storage.meta.client.EtcdApi` over a server."""

    def __init__(self, server: EtcdApi, chance: Random) -> None:
        self.is_cut = False
        self.loses = 0.0
        """The share of calls without an answer: their requests arrive, arrive late, or never do."""
        self._server = server
        self._chance = chance
        self._arriving: set[asyncio.Task[Any]] = set()

    async def call(
        self, request: Callable[[], Awaitable[Any]], within_s: float = _TIMEOUT_S
    ) -> Any:
        """Make a request over the link.

        Raises:
            MetaUnavailableError: no answer came; the request may arrive later.
        """
        if self.is_cut:
            await asyncio.sleep(within_s)
            raise MetaUnavailableError("the link is cut")
        is_lost = self._chance.random() < self.loses
        arrives_in_s = self._chance.choice((_QUICK_S, _LATE_S, None)) if is_lost else _QUICK_S
        if arrives_in_s is None:
            await asyncio.sleep(within_s)
            raise MetaUnavailableError("the request is lost")
        # It is the network's, and arrives whatever becomes of the sender.
        arriving = asyncio.get_running_loop().create_task(
            self._arrive(request, self._chance.uniform(*arrives_in_s)),
            context=contextvars.Context(),
        )
        self._arriving.add(arriving)
        arriving.add_done_callback(self._arriving.discard)
        if is_lost:
            await asyncio.sleep(within_s)
            raise MetaUnavailableError("the answer is lost")
        answer = await asyncio.shield(arriving)
        await asyncio.sleep(self._chance.uniform(*_QUICK_S))
        if self.is_cut:
            raise MetaUnavailableError("the link was cut")
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _arrive(self, request: Callable[[], Awaitable[Any]], delay_s: float) -> Any:
        await asyncio.sleep(delay_s)
        try:
            return await request()
        except Exception as err:  # noqa: BLE001 - the answer, which the sender raises
            return err

    async def read(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        return await self.call(lambda: self._server.read(request))

    async def txn(self, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        return await self.call(lambda: self._server.txn(request))

    async def lease_grant(self, request: rpc_pb2.LeaseGrantRequest) -> rpc_pb2.LeaseGrantResponse:
        return await self.call(lambda: self._server.lease_grant(request))

    async def lease_revoke(
        self, request: rpc_pb2.LeaseRevokeRequest
    ) -> rpc_pb2.LeaseRevokeResponse:
        return await self.call(lambda: self._server.lease_revoke(request))

    async def keep_alive(self, lease: int, within_s: float) -> int:
        answer: int = await self.call(lambda: self._server.keep_alive(lease, within_s), within_s)
        return answer

    async def watch(
        self, request: rpc_pb2.WatchCreateRequest
    ) -> AsyncIterator[rpc_pb2.WatchResponse]:
        if self.is_cut:
            await asyncio.sleep(_TIMEOUT_S)
            raise MetaUnavailableError("the link is cut")
        async for response in self._server.watch(request):
            await asyncio.sleep(self._chance.uniform(*_QUICK_S))
            if self.is_cut:
                raise MetaUnavailableError("the link was cut")
            yield response
