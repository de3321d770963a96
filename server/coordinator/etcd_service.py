"""etcd's services on the coordinator's port, answered by the embedded metadata server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import grpc
from etcdpb import rpc_pb2
from kvproto import meta_storagepb_pb2

from server.coordinator.cluster_service import ClusterService
from server.rpc.errors import StatusError
from server.rpc.server import RpcServer
from storage.meta.embedded import EmbeddedEtcd
from storage.meta.errors import (
    CompactedError,
    FutureRevisionError,
    LeaseExistsError,
    LeaseNotFoundError,
    LeaseTtlError,
    MetaRequestError,
    MetaUnavailableError,
)
from storage.model.errors import TidemarkError

VERSION = "3.4.0"
_INBOX = 16
_STATUS: dict[type[TidemarkError], grpc.StatusCode] = {
    MetaRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    CompactedError: grpc.StatusCode.OUT_OF_RANGE,
    FutureRevisionError: grpc.StatusCode.OUT_OF_RANGE,
    LeaseTtlError: grpc.StatusCode.OUT_OF_RANGE,
    LeaseNotFoundError: grpc.StatusCode.NOT_FOUND,
    LeaseExistsError: grpc.StatusCode.FAILED_PRECONDITION,
    MetaUnavailableError: grpc.StatusCode.UNAVAILABLE,
}


class EtcdService:
    """KV, Watch, Lease, Cluster and Maintenance; `tasks` owns the readers of client streams."""

    def __init__(self, etcd: EmbeddedEtcd, cluster_id: int, members: ClusterService, tasks: asyncio.TaskGroup) -> None:
        self._etcd = etcd
        self._cluster_id = cluster_id
        self._members = members
        self._tasks = tasks

    def add_to(self, server: RpcServer) -> None:
        """Serve the five services, and PD's MetaStorage."""
        etcd = self._etcd
        calls = {
            "Range": self._call(etcd.read),
            "Put": self._call(etcd.put),
            "DeleteRange": self._call(etcd.delete_range),
            "Txn": self._call(etcd.txn),
            "Compact": self._call(etcd.compact),
            "LeaseGrant": self._call(etcd.lease_grant),
            "LeaseRevoke": self._call(etcd.lease_revoke),
            "LeaseTimeToLive": self._call(etcd.lease_time_to_live),
            "LeaseKeepAlive": self.keep_alive,
            "Watch": self.watch,
            "MemberList": self._call(self.member_list),
            "Status": self._call(self.status),
        }
        for service in rpc_pb2.DESCRIPTOR.services_by_name.values():
            server.add_service(service, SimpleNamespace(**calls))

    async def member_list(self, _asked: rpc_pb2.MemberListRequest) -> rpc_pb2.MemberListResponse:
        """One member: this coordinator."""
        urls = [self._members.url]
        member = rpc_pb2.Member(ID=self._cluster_id, name="embedded", peerURLs=urls, clientURLs=urls)
        return rpc_pb2.MemberListResponse(header=self._header(), members=[member])

    async def status(self, _asked: rpc_pb2.StatusRequest) -> rpc_pb2.StatusResponse:
        """Which etcd this is like, and how far it is."""
        revision = self._etcd.revision
        return rpc_pb2.StatusResponse(
            header=self._header(),
            version=VERSION,
            leader=self._cluster_id,
            raftIndex=revision,
            raftAppliedIndex=revision,
            raftTerm=1,
        )

    async def keep_alive(
        self, requests: AsyncIterator[rpc_pb2.LeaseKeepAliveRequest], _context: Any
    ) -> AsyncIterator[rpc_pb2.LeaseKeepAliveResponse]:
        """Renew a lease for each request; TTL 0 says it is over."""
        async for request in requests:
            ttl_s = await self._etcd.keep_alive(request.ID)
            yield rpc_pb2.LeaseKeepAliveResponse(header=self._header(), ID=request.ID, TTL=ttl_s)

    async def watch(
        self, requests: AsyncIterator[rpc_pb2.WatchRequest], _context: Any
    ) -> AsyncIterator[rpc_pb2.WatchResponse]:
        """All watches of one client; what they have not seen waits in the kept events, not in memory of theirs."""
        watchers = self._etcd.watchers()
        inbox: asyncio.Queue[rpc_pb2.WatchRequest | None] = asyncio.Queue(_INBOX)
        with self._etcd.woken() as woken:
            reader = self._tasks.create_task(_read(requests, inbox, woken), name="etcd-watch-reader")
            try:
                while True:
                    revision = self._etcd.revision
                    responses = watchers.advance(revision)
                    while not inbox.empty():
                        request = inbox.get_nowait()
                        if request is None:
                            return
                        responses += watchers.handle(request, revision)
                    for response in responses:
                        self._complete(response.header)
                        yield response
                    if not responses:
                        await woken.wait()
                        woken.clear()
            finally:
                reader.cancel()

    def _call(self, function: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, _context: Any) -> Any:
            try:
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


async def _read(
    requests: AsyncIterator[rpc_pb2.WatchRequest],
    inbox: asyncio.Queue[rpc_pb2.WatchRequest | None],
    woken: asyncio.Event,
) -> None:
    try:
        async for request in requests:
            await inbox.put(request)
            woken.set()
    except (grpc.RpcError, grpc.aio.UsageError):
        return  # the client broke the stream; gRPC cancels the answering half
    await inbox.put(None)
    woken.set()


class MetaStorageService:
    """PD's small read-only door to the metadata."""

    def __init__(self, etcd: Any, cluster_id: int) -> None:
        self._etcd = etcd
        self._cluster_id = cluster_id

    async def Get(  # noqa: N802 - PD's name
        self, request: meta_storagepb_pb2.GetRequest, _context: Any
    ) -> meta_storagepb_pb2.GetResponse:
        """Read a key or range."""
        asked = rpc_pb2.RangeRequest(
            key=request.key, range_end=request.range_end, limit=request.limit, revision=request.revision
        )
        try:
            found = await self._etcd.read(asked)
        except TidemarkError as err:
            raise status_of(err) from err
        header = meta_storagepb_pb2.ResponseHeader(cluster_id=self._cluster_id, revision=found.header.revision)
        pairs = [meta_storagepb_pb2.KeyValue.FromString(pair.SerializeToString()) for pair in found.kvs]
        return meta_storagepb_pb2.GetResponse(header=header, kvs=pairs, more=found.more, count=found.count)


def status_of(err: TidemarkError) -> TidemarkError:
    """An error of the metadata with the status and the text etcd gives it."""
    status = _STATUS.get(type(err))
    return StatusError(status, err.message) if status else err
