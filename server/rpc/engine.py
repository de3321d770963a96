"""How a process serves gRPC: which engine its listeners use,
and how many connections one client address may have.

The engine is gRPC's own (`grpcio`), or the one of this house (`native`, `server.rpc.http2`). If it
is `auto`, each listener has the engine that suits it: native where calls are many and small and the
process computes little besides. Both settings are those of the process and of those it starts: the
environment carries them.
"""

import os
from dataclasses import dataclass
from enum import Enum

from server.config import setting
from storage.model.errors import InvalidError

MOST_CONNECTIONS = 8192
_VARIABLE = "TIDEMARK_RPC_RPC_ENGINE"
_SHARE_VARIABLE = "TIDEMARK_RPC_MAX_CONNECTIONS_PER_ADDRESS"


class Engine(Enum):
    """What speaks HTTP/2."""

    GRPCIO = "grpcio"
    NATIVE = "native"
    AUTO = "auto"


class EngineError(InvalidError):
    """There is no such engine."""

    code = "ErrRpcEngine"


class ConnectionShareError(InvalidError):
    """The number of connections for one client address is out of range."""

    code = "ErrMaxConnectionsPerAddress"


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcConfig:
    """How a daemon serves gRPC."""

    rpc_engine: str = setting(
        Engine.AUTO.value,
        "grpcio, native, or auto: native for coordinator and pump "
        "(docs/design/0026-native-front.md)",
    )
    max_connections_per_address: int = setting(
        0,
        f"connections that one client address may have to a port, up to {MOST_CONNECTIONS}; 0: "
        "half of the port's",
    )


def choose(config: RpcConfig) -> None:
    """Let all listeners of this process, and of processes it starts, use these settings.

    Raises:
        EngineError: there is no such engine.
        ConnectionShareError: the number is out of range.
    """
    os.environ[_VARIABLE] = _checked(config.rpc_engine).value
    os.environ[_SHARE_VARIABLE] = str(_checked_share(str(config.max_connections_per_address)))


def chosen(suited: Engine) -> Engine:
    """The engine of a listener for which `suited` is the best.

    Raises:
        EngineError: the environment variable holds no engine's name.
    """
    engine = _checked(os.environ.get(_VARIABLE, Engine.AUTO.value))
    return suited if engine is Engine.AUTO else engine


def connections_per_address() -> int:
    """Connections that one client address may have; 0: half of what the port allows.

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
