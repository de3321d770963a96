"""Leadership over a real etcd: one coordinator holds the leader key, and fences all it writes with it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from kvproto import pdpb_pb2

from server.coordinator import metrics
from server.coordinator.errors import LeadershipLostError
from storage.meta.meta import Compare, Meta

LEASE_S = 5

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Leadership:
    """A held leader key; `fence` belongs into every transaction, `lost` ends the right to answer."""

    fence: tuple[Compare, ...]
    lost: asyncio.Event

    async def run(self) -> None:
        """Raises: LeadershipLostError: as soon as another coordinator may lead."""
        await self.lost.wait()
        raise LeadershipLostError("the leader's lease ended; this coordinator stops, restart it to follow")


@asynccontextmanager
async def leading(meta: Meta, key: bytes, member: pdpb_pb2.Member) -> AsyncIterator[Leadership]:
    """Wait until this coordinator leads, and lead for the block."""
    async with await meta.grant_lease(LEASE_S) as lease:
        _log.info("campaign started", lease=lease.id)
        revision = await meta.campaign(key, member.SerializeToString(), lease.id)
        _log.info("campaign won", revision=revision)
        metrics.LEADER.set(1)
        yield Leadership((Compare.created_at(key, revision),), lease.lost)


@asynccontextmanager
async def alone() -> AsyncIterator[Leadership]:
    """Leadership over metadata nobody else can reach."""
    metrics.LEADER.set(1)
    yield Leadership((), asyncio.Event())
