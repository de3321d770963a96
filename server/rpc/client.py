"""Channels to peers: one way to make them, with TLS, limits and keepalive;
and the way to the cluster's metadata.

Every coordinator serves the metadata, by etcd's API, at its own address.
"""

from contextlib import AbstractAsyncContextManager

import grpc.aio

from server.rpc.credentials import SecurityConfig, channel_credentials
from server.rpc.limits import MAX_MESSAGE_BYTES
from storage.meta.client import EtcdMeta, open_meta

# without it a silent peer is only noticed after a minute
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    (
        "grpc.http2.ping_timeout_ms",
        3_000,
    ),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    (
        "grpc.min_reconnect_backoff_ms",
        2_000,
    ),  # how long a connection may take; a busy loop answers late
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def connect(address: str, security: SecurityConfig | None = None) -> grpc.aio.Channel:
    """A channel to `host:port`; connects lazily and reconnects by itself.

    A scheme in front is dropped.
    """
    target = address.rpartition("//")[2]
    credentials = channel_credentials(security or SecurityConfig())
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=_OPTIONS)


def metadata_at(
    coordinator: str, security: SecurityConfig
) -> AbstractAsyncContextManager[EtcdMeta]:
    """A client of the metadata at `coordinator` (host:port) for the block;
    nobody is asked before its first call.
    """
    return open_meta(f"etcd://{coordinator}", lambda address: connect(address, security))
