"""The etcd v3 calls this house makes, behind one Protocol: answered over the network, or by the embedded server."""

from collections.abc import AsyncGenerator
from typing import Protocol

from etcdpb import rpc_pb2


class EtcdApi(Protocol):
    """Errors are those of `storage.meta.errors`."""

    async def read(self, asked: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        """Read a key or range."""
        ...

    async def txn(self, asked: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        """Compare and write; one that has no compares may be sent again after a failure."""
        ...

    async def lease_grant(self, asked: rpc_pb2.LeaseGrantRequest) -> rpc_pb2.LeaseGrantResponse:
        """Create a lease."""
        ...

    async def lease_revoke(self, asked: rpc_pb2.LeaseRevokeRequest) -> rpc_pb2.LeaseRevokeResponse:
        """End a lease and delete its keys."""
        ...

    async def keep_alive(self, lease: int, within_s: float) -> int:
        """Renew a lease; returns its TTL in seconds, 0 if it is over. A server silent for `within_s` is left."""
        ...

    def watch(self, asked: rpc_pb2.WatchCreateRequest) -> AsyncGenerator[rpc_pb2.WatchResponse, None]:
        """One watch, until the connection breaks (`MetaUnavailableError`) or the server cancels it."""
        ...
