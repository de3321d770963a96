"""One leader at a time: follow until the leader key is free, take it under a lease,
serve a term, and again.

The lease is granted only when the key is free, as in PD: who follows keeps nothing alive.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from server.coordinator.errors import NotLeaderError
from server.coordinator.leadership.leadership import Leadership
from server.coordinator.leadership.members import Members
from server.coordinator.term import CurrentTerm, LeaderTerm
from storage.meta.errors import LeaseNotFoundError, MetaUnavailableError
from storage.meta.meta import Compare, Delete, Lease, Meta, Put
from storage.tasks import beside

LoadTerm = Callable[[Leadership], Awaitable[LeaderTerm]]

_RETRY_S = 0.2

_log = structlog.get_logger(__name__)


class Election:
    """One coordinator's part in the election: a candidate, and the leader while it is elected."""

    def __init__(
        self, meta: Meta, key: bytes, members: Members, current: CurrentTerm, load: LoadTerm
    ) -> None:
        self._meta = meta
        self._key = key
        self._load = load
        self._members = members
        self._current = current
        self._last_key: Compare | None = None

    async def run(self, lease_s: int) -> None:
        """Follow and lead until cancelled; a leader then gives its key up,
        so that nobody waits for the lease.
        """
        while True:
            await self._delete_last_key()
            await self._members.wait_leaderless()
            try:
                async with await self._meta.grant_lease(lease_s) as lease:
                    await self._campaign(lease)
            except* NotLeaderError:
                _log.warning("this coordinator led, and does no longer")
            except* (MetaUnavailableError, LeaseNotFoundError) as errors:
                _log.warning("this coordinator cannot lead now", reason=str(errors.exceptions[0]))
                await asyncio.sleep(_RETRY_S)

    async def _campaign(self, lease: Lease) -> None:
        me = self._members.me.SerializeToString()
        # The key exists once: of several candidates the first transaction wins, and the key goes
        # with its lease.
        result = await self._meta.txn([Compare.absent(self._key)], [Put(self._key, me, lease.id)])
        if not result.succeeded:
            return
        # The create revision tells this term's key from that of any later term, even from one of
        # our own.
        self._last_key = fence = Compare.created_at(self._key, result.revision)
        leadership = Leadership((fence,), lambda: lease.deadline, self._members.not_leader)
        async with beside(_end_with(lease, leadership)):
            async with leadership.while_held():
                # Read after the election: what an earlier leader wrote last is durable and seen.
                term = await self._load(leadership)
            _log.info("leading", revision=result.revision, lease=lease.id)
            async with self._current.serving(term):
                await leadership.ended.wait()
            _log.warning(
                "leading no longer",
                revision=result.revision,
                reason=leadership.reason or "the lease is over",
            )

    async def _delete_last_key(self) -> None:
        """Delete the key of our last term, if it is still there:
        an etcd that comes back gives old leases new time.
        """
        while self._last_key is not None:
            try:
                await self._meta.txn([self._last_key], [Delete(self._key)])
                self._last_key = None
            except MetaUnavailableError as err:
                _log.warning("the last term's key cannot be given up", reason=err.message)
                await asyncio.sleep(_RETRY_S)


async def _end_with(lease: Lease, leadership: Leadership) -> None:
    """End it when the lease is lost, and by the clock even if nothing says so."""
    while leadership.held:
        try:
            async with asyncio.timeout_at(lease.deadline):
                await lease.lost.wait()
                break
        except TimeoutError:
            continue
    leadership.end()
