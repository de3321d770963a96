"""The settings by which a process serves gRPC, and the limits of one listener.

The engine is gRPC's own (`grpcio`), or the one of this house (`native`, `server.rpc.http2`). If it
is `auto`, each listener has the engine that suits it: native, but for the Unix sockets between a
capture and its workers. Both settings are those of the process and of those it starts: the
environment carries them.

`Limits` bounds messages, calls, connections and pings. Calls beyond them are refused, connections
beyond them closed. gRPC refuses calls beyond `calls` with RESOURCE_EXHAUSTED. Its own bound of
pending calls is lifted above that: it drops calls of a burst of more than 1000 at random, without a
word. What one connection has beyond half of `calls` waits in the client: shares that depend on what
is free, as the native engine has them, gRPC's engine does not have. A stream costs some 25 KiB, so
the bounds hold a daemon's memory even when they are used up.
"""

import os
import resource
from dataclasses import dataclass
from enum import Enum

from server.config import setting
from storage.model.errors import InvalidError

MOST_CONNECTIONS = 8192
_VARIABLE = "TIDEMARK_RPC_RPC_ENGINE"
_SHARE_VARIABLE = "TIDEMARK_RPC_MAX_CONNECTIONS_PER_ADDRESS"

MAX_MESSAGE_BYTES = 256 << 20  # what TiKV's clients allow
_HANDSHAKE_MS = 20_000  # the listener in front of it ends late ones after 10 s
_IDLE_MS = 30 * 60_000
METADATA_BYTES = 16 << 10
"""The limit of one call's metadata, as HTTP/2 counts them."""

# Peers that vanished are found by pings; peers that ping more than once a second for long are cut
# off. client-go pings every 10 s, TiCDC and etcd's clients as often, all of them without calls,
# too.
_PING_MS, _PING_TIMEOUT_MS = 30_000, 10_000
_MIN_PING_INTERVAL_MS, PING_STRIKES = 1000, 20
PINGS_PER_S = 1000 / _MIN_PING_INTERVAL_MS
_LEAST_HELD_BYTES = 64 << 20
_LEAST_BUFFERED_BYTES = 256 << 20
_SHARED_CALLS = _SHARED_CONNECTIONS = 128


class Engine(Enum):
    """The implementation of HTTP/2 that serves a listener."""

    GRPCIO = "grpcio"
    NATIVE = "native"
    AUTO = "auto"


class EngineError(InvalidError):
    """The engine does not exist."""

    code = "ErrRpcEngine"


class ConnectionShareError(InvalidError):
    """The number of connections for one client address is out of range."""

    code = "ErrMaxConnectionsPerAddress"


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcConfig:
    """Settings of a daemon's gRPC server."""

    rpc_engine: str = setting(
        Engine.AUTO.value,
        "grpcio, native, or auto: the one that suits it, native (docs/design/0026-native-front.md)",
    )
    max_connections_per_address: int = setting(
        0,
        f"connections that one client address may have to a port, up to {MOST_CONNECTIONS}; 0: "
        "half of the port's",
    )

    def checked(self) -> "RpcConfig":
        """This configuration.

        Raises:
            EngineError: there is no such engine.
            ConnectionShareError: the number is out of range.
        """
        _checked(self.rpc_engine)
        _checked_share(str(self.max_connections_per_address))
        return self


def choose(config: RpcConfig) -> None:
    """Let all listeners of this process, and of processes it starts, use these settings.

    Raises:
        EngineError: there is no such engine.
        ConnectionShareError: the number is out of range.
    """
    config.checked()
    os.environ[_VARIABLE] = config.rpc_engine
    os.environ[_SHARE_VARIABLE] = str(config.max_connections_per_address)


def chosen(suited: Engine) -> Engine:
    """The engine of a listener for which `suited` is the best.

    Raises:
        EngineError: the environment variable holds no engine's name.
    """
    engine = _checked(os.environ.get(_VARIABLE, Engine.AUTO.value))
    return suited if engine is Engine.AUTO else engine


def connections_per_address() -> int:
    """Return how many connections one client address may have; 0: half of what the port allows.

    Raises:
        ConnectionShareError: the environment names a number out of range.
    """
    return _checked_share(os.environ.get(_SHARE_VARIABLE, "0"))


def _checked_share(text: str) -> int:
    if not text.isdecimal() or int(text) > MOST_CONNECTIONS:
        raise ConnectionShareError(
            f"--max-connections-per-address is from 0 to {MOST_CONNECTIONS}, not {text!r}"
        )
    return int(text)


def _checked(name: str) -> Engine:
    try:
        return Engine(name)
    except ValueError:
        names = ", ".join(engine.value for engine in Engine)
        raise EngineError(f"--rpc-engine is one of {names}, not {name!r}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one listener, over all its connections unless said otherwise."""

    message_bytes: int = MAX_MESSAGE_BYTES
    """The limit of one received message."""
    calls: int = 16_384
    """Unary calls and streams that are open at once."""
    connections: int = MOST_CONNECTIONS
    """The greatest number of connections; half of the files that the process may open, if that is
    less.
    """
    connections_per_address: int = 0
    """The limit for one client address (`server.rpc.listener`); 0: half of all connections."""

    unsent_bytes: int = 64 << 20
    """The limit of answers that wait for one connection's client to read them; the native engine
    only.
    """

    @property
    def buffered_bytes(self) -> int:
        """The bytes of answers that wait for clients and of received messages that wait for their
        turn, over all connections; the native engine only.

        Of all connections: those that have the most are closed.
        """
        return max(_LEAST_BUFFERED_BYTES, 2 * self.message_bytes)

    @property
    def streams(self) -> int:
        """The streams of one connection, with grpcio: half of all calls, so that no connection
        alone uses them up.
        """
        return self.calls // 2 if self.calls >= _SHARED_CALLS else 2 * self.calls

    @property
    def most_connections(self) -> int:
        """Return `connections`, or fewer if the process may not open enough files."""
        return min(self.connections, self.spare_files)

    @property
    def spare_files(self) -> int:
        """The files that the process may open for connections."""
        return _open_files() // 2

    @property
    def most_connections_per_address(self) -> int:
        """`connections_per_address`, or half of `most_connections`:
        no host alone locks the others out.
        """
        most = self.most_connections
        if self.connections_per_address:
            return min(self.connections_per_address, most)
        return most // 2 if most >= _SHARED_CONNECTIONS else most

    @property
    def held_bytes(self) -> int:
        """The bytes of all requests that are not complete, or not read; the native engine only."""
        return max(_LEAST_HELD_BYTES, 4 * self.message_bytes)

    def options(self) -> list[tuple[str, int]]:
        """The limits as options of a gRPC server."""
        return [
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", self.streams),
            # Lifted above `calls`: beyond its default of 1000, gRPC's core drops calls at random,
            # without a status.
            ("grpc.server.max_pending_requests", 4 * self.calls),
            ("grpc.server.max_pending_requests_hard_limit", 4 * self.calls),
            ("grpc.max_allowed_incoming_connections", self.most_connections),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
            ("grpc.max_metadata_size", METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES),
            ("grpc.keepalive_time_ms", _PING_MS),
            ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
            (
                "grpc.http2.ping_timeout_ms",
                _PING_TIMEOUT_MS,
            ),  # gRPC's core waits a minute without it
            ("grpc.keepalive_permit_without_calls", 1),
            # 0 means no bound of our own pings: keepalive has to go on while nothing is said.
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ("grpc.http2.max_ping_strikes", PING_STRIKES),
        ]


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (1 << 20) if soft == resource.RLIM_INFINITY else soft
