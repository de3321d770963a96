"""etcd's Cluster, Maintenance and Auth on the coordinator's port, as far as one embedded member has them."""

from collections.abc import Callable
from typing import Any

import grpc
from etcdpb import rpc_pb2

from server.coordinator.leadership.members import Members
from storage.meta.embedded import EmbeddedEtcd
from storage.meta.errors import AuthNotEnabledError

VERSION = "3.4.0"


class MaintenanceService:
    """One member that always leads; `header` makes a filled header."""

    def __init__(
        self, etcd: EmbeddedEtcd, member_id: int, members: Members, header: Callable[[], rpc_pb2.ResponseHeader]
    ) -> None:
        self._etcd = etcd
        self._member_id = member_id
        self._members = members
        self._header = header

    async def member_list(self, _asked: rpc_pb2.MemberListRequest) -> rpc_pb2.MemberListResponse:
        """One member: this coordinator."""
        urls = [self._members.url]
        member = rpc_pb2.Member(ID=self._member_id, name="embedded", peerURLs=urls, clientURLs=urls)
        return rpc_pb2.MemberListResponse(header=self._header(), members=[member])

    async def status(self, _asked: rpc_pb2.StatusRequest) -> rpc_pb2.StatusResponse:
        """Which etcd this is like, how far it is and how large."""
        revision = self._etcd.revision
        live = self._etcd.statistics().live_bytes
        return rpc_pb2.StatusResponse(
            header=self._header(),
            version=VERSION,
            dbSize=max(self._etcd.disk_bytes(), live),
            dbSizeInUse=live,
            leader=self._member_id,
            raftIndex=revision,
            raftAppliedIndex=revision,
            raftTerm=1,
            errors=[f"memberID:{told.memberID} alarm:{_name(told.alarm)}" for told in self._told(self._etcd.alarms)],
        )

    async def alarm(self, asked: rpc_pb2.AlarmRequest) -> rpc_pb2.AlarmResponse:
        """List alarms, or raise or take back one; what changed is told, as in etcd."""
        alarms = {int(asked.alarm)} - {int(rpc_pb2.NONE)}
        if asked.action == rpc_pb2.AlarmRequest.ACTIVATE:
            await self._etcd.set_alarms(self._etcd.alarms | alarms)
        elif asked.action == rpc_pb2.AlarmRequest.DEACTIVATE:
            alarms &= self._etcd.alarms
            await self._etcd.set_alarms(self._etcd.alarms - alarms)
        else:
            alarms = self._etcd.alarms & (alarms or self._etcd.alarms)
        return rpc_pb2.AlarmResponse(header=self._header(), alarms=self._told(alarms))

    async def defragment(self, _asked: rpc_pb2.DefragmentRequest) -> rpc_pb2.DefragmentResponse:
        """Give space back to the disk."""
        await self._etcd.defragment()
        return rpc_pb2.DefragmentResponse(header=self._header())

    async def hash_kv(self, asked: rpc_pb2.HashKVRequest) -> rpc_pb2.HashKVResponse:
        """A checksum of the pairs at a revision; comparable between embedded servers only."""
        return await self._etcd.hash_kv(asked.revision)

    async def hash(self, _asked: rpc_pb2.HashRequest) -> rpc_pb2.HashResponse:
        """A checksum of the pairs of now."""
        found = await self._etcd.hash_kv(0)
        return rpc_pb2.HashResponse(header=found.header, hash=found.hash)

    async def auth_status(self, _asked: rpc_pb2.AuthStatusRequest) -> rpc_pb2.AuthStatusResponse:
        """There are no users; mTLS says who may come in."""
        return rpc_pb2.AuthStatusResponse(header=self._header())

    async def authenticate(self, _asked: rpc_pb2.AuthenticateRequest) -> rpc_pb2.AuthenticateResponse:
        """Raises: AuthNotEnabledError: always; etcd's clients then go on without a token."""
        raise AuthNotEnabledError

    def _told(self, alarms: set[int]) -> list[rpc_pb2.AlarmMember]:
        numbers: list[Any] = sorted(alarms)
        return [rpc_pb2.AlarmMember(memberID=self._member_id, alarm=number) for number in numbers]


def _name(alarm: Any) -> str:
    return rpc_pb2.AlarmType.Name(alarm)


class Unsupported(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Answers etcd's calls that an embedded server has no use for: members, users, snapshots of bbolt files."""

    _PREFIXES = ("/etcdserverpb.", "/v3electionpb.", "/v3lockpb.")

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The refusal of a method, or None if it is not etcd's."""
        method: str = handler_call_details.method
        if not method.startswith(self._PREFIXES):
            return None

        async def refuse(_requests: object, context: Any) -> None:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED,
                f"etcdserver: embedded metadata has no {method.lstrip('/')}; for users, members and snapshots run etcd "
                "and start the coordinator with --metadata etcd://host:port (etcdctl make-mirror copies the keys)",
            )

        return grpc.stream_stream_rpc_method_handler(refuse)
