"""etcd's services on the coordinator's port, answered by the embedded metadata server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import grpc
from etcdpb import election_pb2, lock_pb2, rpc_pb2

from server.coordinator.etcd import metrics
from server.coordinator.etcd.election import ElectionService
from server.coordinator.etcd.maintenance import MaintenanceService, Unsupported
from server.coordinator.etcd.own_keys import check_request
from server.coordinator.etcd.watch import WatchService
from server.coordinator.leadership.members import Members
from server.rpc.errors import StatusError
from server.rpc.server import RpcServer
from storage.meta.embedded import EmbeddedEtcd
from storage.meta.errors import EtcdError
from storage.model.errors import TidemarkError


class EtcdService:
    """All of etcd's services put together; `tasks` owns the readers of client streams."""

    def __init__(self, etcd: EmbeddedEtcd, cluster_id: int, members: Members, tasks: asyncio.TaskGroup) -> None:
        self._etcd = etcd
        self._cluster_id = cluster_id
        self._election = ElectionService(etcd)
        self._maintenance = MaintenanceService(etcd, cluster_id, members, self._header)
        self._watch = WatchService(etcd, tasks, self._complete)

    def add_to(self, server: RpcServer) -> None:
        """Serve them; what is not there is refused with what to do instead."""
        metrics.expose(self._etcd)
        unary = self._kv_calls() | self._maintenance_calls() | self._election_calls()
        calls: dict[str, Any] = {name: self._call(function) for name, function in unary.items()}
        calls |= {"LeaseKeepAlive": self.keep_alive, "Watch": self._watch.watch, "Observe": self.observe}
        for stubs in (rpc_pb2, election_pb2, lock_pb2):
            for service in stubs.DESCRIPTOR.services_by_name.values():
                server.add_service(service, SimpleNamespace(**calls))
        server.add_proxy(Unsupported())

    async def keep_alive(
        self, requests: AsyncIterator[rpc_pb2.LeaseKeepAliveRequest], _context: Any
    ) -> AsyncIterator[rpc_pb2.LeaseKeepAliveResponse]:
        """Renew a lease for each request; TTL 0 says it is over."""
        async for request in requests:
            ttl_s = await self._etcd.keep_alive(request.ID)
            yield rpc_pb2.LeaseKeepAliveResponse(header=self._header(), ID=request.ID, TTL=ttl_s)

    async def observe(
        self, asked: election_pb2.LeaderRequest, _context: Any
    ) -> AsyncIterator[election_pb2.LeaderResponse]:
        """See `ElectionService.observe`."""
        async for response in self._election.observe(asked):
            self._complete(response.header)
            yield response

    def _kv_calls(self) -> dict[str, Callable[[Any], Awaitable[Any]]]:
        etcd = self._etcd
        return {
            "Range": etcd.read,
            "Put": etcd.put,
            "DeleteRange": etcd.delete_range,
            "Txn": etcd.txn,
            "Compact": etcd.compact,
            "LeaseGrant": etcd.lease_grant,
            "LeaseRevoke": etcd.lease_revoke,
            "LeaseTimeToLive": etcd.lease_time_to_live,
            "LeaseLeases": etcd.lease_leases,
        }

    def _maintenance_calls(self) -> dict[str, Callable[[Any], Awaitable[Any]]]:
        maintenance = self._maintenance
        return {
            "MemberList": maintenance.member_list,
            "Status": maintenance.status,
            "Alarm": maintenance.alarm,
            "Defragment": maintenance.defragment,
            "Hash": maintenance.hash,
            "HashKV": maintenance.hash_kv,
            "AuthStatus": maintenance.auth_status,
            "Authenticate": maintenance.authenticate,
        }

    def _election_calls(self) -> dict[str, Callable[[Any], Awaitable[Any]]]:
        election = self._election
        return {
            "Campaign": election.campaign,
            "Proclaim": election.proclaim,
            "Leader": election.leader,
            "Resign": election.resign,
            "Lock": election.lock,
            "Unlock": election.unlock,
        }

    def _call(self, function: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, _context: Any) -> Any:
            try:
                check_request(request)
                answer = await function(request)
            except TidemarkError as err:
                raise status_of(err) from err
            self._complete(answer.header)
            return answer

        return call

    def _header(self) -> rpc_pb2.ResponseHeader:
        header = rpc_pb2.ResponseHeader(revision=self._etcd.revision)
        self._complete(header)
        return header

    def _complete(self, header: rpc_pb2.ResponseHeader) -> None:
        header.cluster_id = header.member_id = self._cluster_id
        header.raft_term = 1


def status_of(err: TidemarkError) -> TidemarkError:
    """An error of the metadata with the status and the text etcd gives it."""
    if isinstance(err, EtcdError):
        return StatusError(grpc.StatusCode[err.status], err.text)
    return err
