"""The coordinators of a cluster: their list, their leader, and how each stays listed.

`Membership` lists this coordinator as `/pd/<cluster>/member/<id>/tidemark`, with a lease of
minutes: clients keep the list and try all members on it, so a restart, or an etcd that is away for
a while, must not shorten it. It reads leader and members from the metadata every second and
whenever the leader's key changes, and updates `Members`. `MemberService` answers clients from
there, on every coordinator, whether it leads or not. A reading older than `STALE_AFTER_S` names no
leader: the coordinator then says that it does not know, and the client tries another member.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from google.protobuf.message import DecodeError
from kvproto import pdpb_pb2

from server.coordinator.errors import NotLeaderError
from server.coordinator.keys import ClusterKeys
from server.coordinator.leadership.leadership import Leadership
from storage.codec import prefix_end
from storage.meta.errors import CompactedError, LeaseNotFoundError, MetaUnavailableError
from storage.meta.meta import Get, Meta

STALE_AFTER_S = 3.0
_LISTED_S = 300
_POLL_S = 1.0

_log = structlog.get_logger(__name__)


def member_at(address: str, *, tls: bool) -> pdpb_pb2.Member:
    """The member that is reached at `host:port`; its id stays when it restarts."""
    member_id = int.from_bytes(hashlib.sha256(address.encode()).digest()[:8])
    url = f"{'https' if tls else 'http'}://{address}"
    return pdpb_pb2.Member(
        name=f"tidemark-{address}", member_id=member_id, peer_urls=[url], client_urls=[url]
    )


class Members:
    """The coordinators of one cluster as one of them, `me`, knows them;
    before the first `update` only itself.
    """

    def __init__(self, me: pdpb_pb2.Member, clock: Callable[[], float] | None = None) -> None:
        self.me = me
        self.leadership: Leadership | None = None
        """Our own, while we lead: it is newer than any reading of the metadata."""
        self.listed: Sequence[pdpb_pb2.Member] = (me,)
        """All members; for some minutes also those that are gone."""
        self._leader: pdpb_pb2.Member | None = None
        self._stale_at = 0.0
        self._clock = clock or time.monotonic
        self._updated = asyncio.Event()

    def set_own(self, me: pdpb_pb2.Member) -> None:
        """Set the member that this coordinator is, once its address is known."""
        self.me, self.listed = me, (me,)

    @property
    def url(self) -> str:
        """The URL at which clients reach this coordinator."""
        return str(self.me.client_urls[0])

    @property
    def leader(self) -> pdpb_pb2.Member | None:
        """The present leader; None when there is none, or it is not known."""
        if self.leadership is not None and self.leadership.held:
            return self.me
        if (
            self._clock() >= self._stale_at
            or self._leader is None
            or self._leader.member_id == self.me.member_id
        ):
            return None
        return self._leader

    def update(
        self, leader: pdpb_pb2.Member | None, listed: Sequence[pdpb_pb2.Member], read_at: float
    ) -> None:
        """Take over a reading of the metadata, made since `read_at` (monotonic s).

        It ends a leadership of ours that it does not show.
        """
        ours = self.leadership
        # A reading from before we led says nothing of our leadership; `read_at` is taken before the
        # request is sent.
        if (
            ours is not None
            and read_at >= ours.since
            and (leader is None or leader.member_id != self.me.member_id)
        ):
            ours.end("the leader's key is gone, or another coordinator's")
        self._leader = leader
        self.listed = tuple(listed) or (self.me,)
        self._stale_at = read_at + STALE_AFTER_S
        self._updated.set()

    async def wait_leaderless(self) -> None:
        """Wait for a new reading that shows no leader."""
        while True:
            # Cleared before the wait: a reading that was made before the last term ended must not
            # start the next campaign.
            self._updated.clear()
            await self._updated.wait()
            if self._leader is None:
                return

    def not_leader(self) -> NotLeaderError:
        """The error for an RPC that only the leader answers."""
        leader = self.leader
        return NotLeaderError(leader.client_urls[0] if leader and leader.client_urls else "")


class Membership:
    """Keeps this coordinator listed, and `members` up to date."""

    def __init__(self, meta: Meta, keys: ClusterKeys, members: Members) -> None:
        self._meta = meta
        self._keys = keys
        self._members = members
        self._poll_now = asyncio.Event()

    async def run(self) -> None:
        """Run until cancelled; then this coordinator is no longer listed."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_listed(), name="member-listed")
            tasks.create_task(self._watch_leader(), name="member-leaders")
            tasks.create_task(self._poll_members(), name="member-poll")

    async def _keep_listed(self) -> None:
        me = self._members.me
        while True:
            try:
                async with await self._meta.grant_lease(_LISTED_S) as lease:
                    await self._meta.put(
                        self._keys.member(me.member_id), me.SerializeToString(), lease.id
                    )
                    await lease.lost.wait()
            except (MetaUnavailableError, LeaseNotFoundError) as err:
                _log.warning("this coordinator is not listed yet", reason=err.message)
            await asyncio.sleep(_POLL_S)

    async def _watch_leader(self) -> None:
        while True:
            try:
                # A watch tells of a change at once; the poll each second is there because a watch
                # on a dead connection says nothing.
                async for _ in self._meta.watch(self._keys.path("leader")):
                    self._poll_now.set()
            except CompactedError:
                continue

    async def _poll_members(self) -> None:
        prefix = self._keys.path("member/")
        reads = [Get(self._keys.path("leader")), Get(prefix, prefix_end(prefix))]
        while True:
            self._poll_now.clear()
            read_at = time.monotonic()
            try:
                leaders, members = (await self._meta.txn((), reads)).pairs
                listed = [
                    _member(pair.value)
                    for pair in members
                    if pair.key == self._listed_key(pair.value)
                ]
                self._members.update(
                    _member(leaders[0].value) if leaders else None, listed, read_at
                )
            except MetaUnavailableError as err:
                _log.warning("it is not known who leads", reason=err.message)
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._poll_now.wait()
            except TimeoutError:
                continue

    def _listed_key(self, value: bytes) -> bytes:
        return self._keys.member(_member(value).member_id)


def _member(value: bytes) -> pdpb_pb2.Member:
    try:
        return pdpb_pb2.Member.FromString(value)
    except DecodeError:
        return pdpb_pb2.Member()


class MemberService:
    """The servicer of GetMembers and GetClusterInfo, which every coordinator answers."""

    def __init__(self, cluster_id: int, members: Members) -> None:
        self._header = pdpb_pb2.ResponseHeader(cluster_id=cluster_id)
        self._members = members

    async def GetMembers(
        self, _request: pdpb_pb2.GetMembersRequest, _context: Any
    ) -> pdpb_pb2.GetMembersResponse:
        """GetMembers: asked before a client knows the cluster id;
        without a leader it asks again, or another member.
        """
        leader = self._members.leader
        return pdpb_pb2.GetMembersResponse(
            header=self._header, members=self._members.listed, leader=leader, etcd_leader=leader
        )

    async def GetClusterInfo(
        self, _request: pdpb_pb2.GetClusterInfoRequest, _context: Any
    ) -> pdpb_pb2.GetClusterInfoResponse:
        """GetClusterInfo: all services are in this process."""
        return pdpb_pb2.GetClusterInfoResponse(
            header=self._header, serviceModes=[pdpb_pb2.PD_SVC_MODE]
        )
