"""The cluster's metadata: every coordinator serves it, by etcd's API, at its own address."""

from contextlib import AbstractAsyncContextManager

from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from storage.meta.client import EtcdMeta, open_meta


def metadata_at(coordinator: str, security: SecurityConfig) -> AbstractAsyncContextManager[EtcdMeta]:
    """A client of the metadata at `coordinator` (host:port) for the block; nobody is asked before its first call."""
    return open_meta(f"etcd://{coordinator}", lambda address: connect(address, security))
