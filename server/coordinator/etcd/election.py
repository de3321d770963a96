"""etcd's election and lock services on the coordinator's port,
by the recipe of etcd's `concurrency` package.

Who wants a name puts `<name>/<lease in hex>` under its lease and waits until no older key is left
under `<name>/`. So a candidate of a client library and one of these calls stand in one line.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from etcdpb import election_pb2, kv_pb2, lock_pb2, rpc_pb2

from server.rpc.errors import StatusError
from storage.codec import prefix_end
from storage.meta.embedded import EmbeddedEtcd

_SESSION_S = 60
_OLDEST = rpc_pb2.RangeRequest.SortOrder.ASCEND
_NEWEST = rpc_pb2.RangeRequest.SortOrder.DESCEND


class ElectionService:
    """The calls of v3electionpb and v3lockpb."""

    def __init__(self, etcd: EmbeddedEtcd) -> None:
        self._etcd = etcd

    async def Campaign(
        self, request: election_pb2.CampaignRequest
    ) -> election_pb2.CampaignResponse:
        """Wait until the candidate leads; it does as long as its lease lives and it does not
        resign.
        """
        key, revision = await self._join_queue(request.name, request.lease, request.value)
        leader = election_pb2.LeaderKey(
            name=request.name, key=key, rev=revision, lease=int(key.rpartition(b"/")[2], 16)
        )
        return election_pb2.CampaignResponse(header=self._header(), leader=leader)

    async def Proclaim(
        self, request: election_pb2.ProclaimRequest
    ) -> election_pb2.ProclaimResponse:
        """Change the leader's value."""
        leader = request.leader
        put = rpc_pb2.PutRequest(key=leader.key, value=request.value, lease=leader.lease)
        done = await self._if_created(leader, rpc_pb2.RequestOp(request_put=put))
        if not done.succeeded:
            raise StatusError(grpc.StatusCode.UNKNOWN, "election: not leader")
        return election_pb2.ProclaimResponse(header=done.header)

    async def Leader(self, request: election_pb2.LeaderRequest) -> election_pb2.LeaderResponse:
        """The leader's pair."""
        response = await self._first(request.name + b"/", _OLDEST)
        if not response.kvs:
            raise StatusError(grpc.StatusCode.UNKNOWN, "election: no leader")
        return election_pb2.LeaderResponse(header=response.header, kv=response.kvs[0])

    async def Observe(
        self, request: election_pb2.LeaderRequest
    ) -> AsyncIterator[election_pb2.LeaderResponse]:
        """Every leader and every value it proclaims, from now on."""
        prefix, announced = request.name + b"/", kv_pb2.KeyValue()
        whole = rpc_pb2.WatchCreateRequest(key=prefix, range_end=prefix_end(prefix))
        async with aclosing(self._etcd.watch(whole)) as changes:
            async for _ in changes:
                response = await self._first(prefix, _OLDEST)
                if response.kvs and response.kvs[0] != announced:
                    announced = response.kvs[0]
                    yield election_pb2.LeaderResponse(header=response.header, kv=announced)

    async def Resign(self, request: election_pb2.ResignRequest) -> election_pb2.ResignResponse:
        """Let the next one lead; nothing happens if this one does not stand any more."""
        delete = rpc_pb2.DeleteRangeRequest(key=request.leader.key)
        done = await self._if_created(
            request.leader, rpc_pb2.RequestOp(request_delete_range=delete)
        )
        return election_pb2.ResignResponse(header=done.header)

    async def Lock(self, request: lock_pb2.LockRequest) -> lock_pb2.LockResponse:
        """Wait for the lock; it is held until `Unlock` or the end of the lease."""
        key, _ = await self._join_queue(request.name, request.lease, b"")
        return lock_pb2.LockResponse(header=self._header(), key=key)

    async def Unlock(self, request: lock_pb2.UnlockRequest) -> lock_pb2.UnlockResponse:
        """Give the lock to the next one."""
        done = await self._etcd.delete_range(rpc_pb2.DeleteRangeRequest(key=request.key))
        return lock_pb2.UnlockResponse(header=done.header)

    async def _join_queue(self, name: bytes, lease: int, value: bytes) -> tuple[bytes, int]:
        """Join the line and wait to be its head; returns the key and its create revision."""
        if not lease:
            lease = (await self._etcd.lease_grant(rpc_pb2.LeaseGrantRequest(TTL=_SESSION_S))).ID
        prefix = name + b"/"
        # etcd's concurrency package names its keys so, and waits for older create revisions: both
        # kinds of candidates stand in one line.
        key = prefix + b"%x" % lease
        put = rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=value, lease=lease))
        get = rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=key))
        absent = rpc_pb2.Compare(key=key, target=rpc_pb2.Compare.CREATE, create_revision=0)
        done = await self._etcd.txn(
            rpc_pb2.TxnRequest(compare=[absent], success=[put], failure=[get])
        )
        revision = done.header.revision
        if not done.succeeded:
            # The key exists: the same lease campaigns again, after a broken connection, and keeps
            # its place.
            joined = done.responses[0].response_range.kvs[0]
            revision = joined.create_revision
            if joined.value != value:
                await self._etcd.put(put.request_put)
        while (ahead := await self._first(prefix, _NEWEST, revision - 1)).kvs:
            await self._wait_deleted(ahead.kvs[0].key, ahead.header.revision + 1)
        return key, revision

    async def _first(
        self, prefix: bytes, order: Any, max_create_revision: int = 0
    ) -> rpc_pb2.RangeResponse:
        return await self._etcd.read(
            rpc_pb2.RangeRequest(
                key=prefix,
                range_end=prefix_end(prefix),
                limit=1,
                sort_order=order,
                sort_target=rpc_pb2.RangeRequest.CREATE,
                max_create_revision=max_create_revision,
            )
        )

    async def _if_created(
        self, leader: election_pb2.LeaderKey, op: rpc_pb2.RequestOp
    ) -> rpc_pb2.TxnResponse:
        if not leader.key:
            raise StatusError(grpc.StatusCode.UNKNOWN, '"leader" field must be provided')
        # By the create revision: a leader that lost its key and came back is another one.
        ours = rpc_pb2.Compare(
            key=leader.key, target=rpc_pb2.Compare.CREATE, create_revision=leader.rev
        )
        return await self._etcd.txn(rpc_pb2.TxnRequest(compare=[ours], success=[op]))

    async def _wait_deleted(self, key: bytes, start_revision: int) -> None:
        watch_request = rpc_pb2.WatchCreateRequest(key=key, start_revision=start_revision)
        async with aclosing(self._etcd.watch(watch_request)) as changes:
            async for response in changes:
                if response.canceled or any(
                    event.type == kv_pb2.Event.DELETE for event in response.events
                ):
                    return

    def _header(self) -> rpc_pb2.ResponseHeader:
        return rpc_pb2.ResponseHeader(revision=self._etcd.revision)
