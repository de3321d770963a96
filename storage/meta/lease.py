"""A lease that renews itself: every third of its TTL, and `lost` when that fails for a whole TTL.

A server that is silent for a third of it is left for another one: there is time for two more attempts.
"""

import asyncio
from types import TracebackType
from typing import Self

from etcdpb import rpc_pb2

from storage.meta.api import EtcdApi
from storage.meta.errors import LeaseNotFoundError, MetaUnavailableError

_REVOKE_SECONDS = 2.0


class KeptLease:
    """See `storage.meta.meta.Lease`; `granted_at` is the loop time before the grant was asked for."""

    def __init__(self, api: EtcdApi, lease: int, ttl_s: int, granted_at: float) -> None:
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
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop renewing, and revoke so that nobody waits for the TTL."""
        assert self._renewing is not None
        self._renewing.cancel()
        try:
            if not self.lost.is_set():
                async with asyncio.timeout(_REVOKE_SECONDS):
                    await self._api.lease_revoke(rpc_pb2.LeaseRevokeRequest(ID=self.id))
        except (TimeoutError, MetaUnavailableError, LeaseNotFoundError):
            pass  # it ends by itself
        finally:
            await self._tasks.__aexit__(None, None, None)  # its one task is cancelled: nothing to report

    async def _renew(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while loop.time() < self.deadline:
                asked_at = loop.time()
                try:
                    async with asyncio.timeout_at(self.deadline):
                        ttl_s = await self._api.keep_alive(self.id, self.ttl_s / 3)
                except (TimeoutError, MetaUnavailableError):
                    await asyncio.sleep(min(0.2, max(0.0, self.deadline - loop.time())))
                    continue
                if ttl_s <= 0:
                    break
                self.deadline = asked_at + ttl_s
                await asyncio.sleep(ttl_s / 3)
        finally:
            self.lost.set()  # however it ended: nobody renews any more
