"""meta_storagepb.MetaStorage: PD's simple API of the metadata, for clients that do not speak etcd.

The messages are etcd's with another header, so they are passed through their bytes. Refusals travel
in the header.
"""

from collections.abc import AsyncIterator
from typing import Any

from etcdpb import kv_pb2, rpc_pb2
from kvproto import meta_storagepb_pb2 as pb

from server.coordinator.keys import check_request
from storage.meta.embedded import EmbeddedEtcd
from storage.meta.errors import EtcdError
from storage.meta.remote import RemoteEtcd


class MetaStorageService:
    """Get, Put, Delete and Watch; any coordinator answers, leader or not."""

    def __init__(self, etcd: EmbeddedEtcd | RemoteEtcd, cluster_id: int) -> None:
        self._etcd = etcd
        self._cluster_id = cluster_id

    async def Get(self, request: pb.GetRequest, _context: Any) -> pb.GetResponse:
        """Read a key or range."""
        etcd_request = rpc_pb2.RangeRequest(
            key=request.key,
            range_end=request.range_end,
            limit=request.limit,
            revision=request.revision,
        )
        try:
            response = await self._etcd.read(etcd_request)
        except EtcdError as err:
            return pb.GetResponse(header=self._refused(err))
        pairs = [_pair(pair) for pair in response.kvs]
        header = self._header(response.header.revision)
        return pb.GetResponse(header=header, kvs=pairs, more=response.more, count=response.count)

    async def Put(self, request: pb.PutRequest, _context: Any) -> pb.PutResponse:
        """Set a key; durable when it returns."""
        etcd_request = rpc_pb2.PutRequest(
            key=request.key, value=request.value, lease=request.lease, prev_kv=request.prev_kv
        )
        try:
            done, revision = await self._apply(rpc_pb2.RequestOp(request_put=etcd_request))
        except EtcdError as err:
            return pb.PutResponse(header=self._refused(err))
        answer = pb.PutResponse(header=self._header(revision))
        if done.response_put.HasField("prev_kv"):
            answer.prev_kv.CopyFrom(_pair(done.response_put.prev_kv))
        return answer

    async def Delete(self, request: pb.DeleteRequest, _context: Any) -> pb.DeleteResponse:
        """Delete a key or range; durable when it returns."""
        etcd_request = rpc_pb2.DeleteRangeRequest(
            key=request.key, range_end=request.range_end, prev_kv=request.prev_kv
        )
        try:
            done, revision = await self._apply(rpc_pb2.RequestOp(request_delete_range=etcd_request))
        except EtcdError as err:
            return pb.DeleteResponse(header=self._refused(err))
        deleted = done.response_delete_range
        before = [_pair(pair) for pair in deleted.prev_kvs]
        return pb.DeleteResponse(
            header=self._header(revision), deleted=deleted.deleted, prev_kvs=before
        )

    async def Watch(
        self, request: pb.WatchRequest, _context: Any
    ) -> AsyncIterator[pb.WatchResponse]:
        """Changes from `start_revision` on (0: from now);
        the stream ends when they are no longer kept.
        """
        etcd_request = rpc_pb2.WatchCreateRequest(
            key=request.key,
            range_end=request.range_end,
            start_revision=request.start_revision,
            prev_kv=request.prev_kv,
        )
        async for response in self._etcd.watch(etcd_request):
            if response.canceled:
                yield self._cancelled(response, request.start_revision)
                return
            if response.events:
                events = [
                    pb.Event.FromString(event.SerializeToString()) for event in response.events
                ]
                yield pb.WatchResponse(header=self._header(response.header.revision), events=events)

    async def _apply(self, operation: rpc_pb2.RequestOp) -> tuple[rpc_pb2.ResponseOp, int]:
        request = rpc_pb2.TxnRequest(success=[operation])
        check_request(request)
        answer = await self._etcd.txn(request)
        return answer.responses[0], answer.header.revision

    def _cancelled(self, response: rpc_pb2.WatchResponse, start_revision: int) -> pb.WatchResponse:
        oldest = response.compact_revision
        text, kind = response.cancel_reason, pb.UNKNOWN
        if oldest:
            text = (
                f"required watch revision: {start_revision} is smaller than current compact/min "
                f"revision {oldest}."
            )
            kind = pb.DATA_COMPACTED
        header = self._header(response.header.revision)
        header.error.CopyFrom(pb.Error(type=kind, message=text))
        return pb.WatchResponse(header=header, compact_revision=oldest)

    def _header(self, revision: int) -> pb.ResponseHeader:
        return pb.ResponseHeader(cluster_id=self._cluster_id, revision=revision)

    def _refused(self, err: EtcdError) -> pb.ResponseHeader:
        return pb.ResponseHeader(
            cluster_id=self._cluster_id, error=pb.Error(type=pb.UNKNOWN, message=err.text)
        )


def _pair(pair: kv_pb2.KeyValue) -> pb.KeyValue:
    return pb.KeyValue.FromString(pair.SerializeToString())
