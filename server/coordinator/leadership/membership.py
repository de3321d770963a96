"""Being a member: listed in the metadata, and looking there who else is, every second and whenever the leader changes.

A coordinator is listed as `/pd/<cluster>/member/<id>/tidemark`, with a lease of minutes: clients keep the list they are
told and ask everybody on it, so a restart, or an etcd that is away for a while, must not shorten it.
"""

import asyncio
import time

import structlog
from google.protobuf.message import DecodeError
from kvproto import pdpb_pb2

from server.coordinator.keys import ClusterKeys
from server.coordinator.leadership.members import Members
from storage.codec import prefix_end
from storage.meta.errors import CompactedError, LeaseNotFoundError, MetaUnavailableError
from storage.meta.meta import Get, Meta

_LISTED_S = 300
_PICTURE_S = 1.0

_log = structlog.get_logger(__name__)


class Membership:
    """Keeps `members` true."""

    def __init__(self, meta: Meta, keys: ClusterKeys, members: Members) -> None:
        self._meta = meta
        self._keys = keys
        self._members = members
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled; then we are listed no longer."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stay_listed(), name="member-listed")
            tasks.create_task(self._hear_of_leaders(), name="member-leaders")
            tasks.create_task(self._take_pictures(), name="member-pictures")

    async def _stay_listed(self) -> None:
        me = self._members.me
        while True:
            try:
                async with await self._meta.grant_lease(_LISTED_S) as lease:
                    await self._meta.put(self._keys.member(me.member_id), me.SerializeToString(), lease.id)
                    await lease.lost.wait()
            except (MetaUnavailableError, LeaseNotFoundError) as err:
                _log.warning("this coordinator is not listed yet", reason=err.message)
            await asyncio.sleep(_PICTURE_S)

    async def _hear_of_leaders(self) -> None:
        while True:
            try:
                async for _ in self._meta.watch(self._keys.path("leader")):
                    self._wanted.set()
            except CompactedError:
                continue

    async def _take_pictures(self) -> None:
        prefix = self._keys.path("member/")
        wanted = [Get(self._keys.path("leader")), Get(prefix, prefix_end(prefix))]
        while True:
            self._wanted.clear()
            asked_at = time.monotonic()
            try:
                leaders, members = (await self._meta.txn((), wanted)).pairs
                listed = [_member(pair.value) for pair in members if pair.key == self._listed_key(pair.value)]
                self._members.show(_member(leaders[0].value) if leaders else None, listed, asked_at)
            except MetaUnavailableError as err:
                _log.warning("it is not known who leads", reason=err.message)
            try:
                async with asyncio.timeout(_PICTURE_S):
                    await self._wanted.wait()
            except TimeoutError:
                continue

    def _listed_key(self, value: bytes) -> bytes:
        return self._keys.member(_member(value).member_id)


def _member(value: bytes) -> pdpb_pb2.Member:
    try:
        return pdpb_pb2.Member.FromString(value)
    except DecodeError:
        return pdpb_pb2.Member()
