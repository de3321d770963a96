"""Which engine listeners use: gRPC's own (`grpcio`), or the one of this house (`native`, `server.rpc.http2`).

The choice is one of the process and of those it starts: the environment carries it. If it is `auto`, each listener has
the engine that suits it: native where calls are many and small and the process computes little besides.
"""

import os
from dataclasses import dataclass
from enum import Enum

from server.config import setting
from storage.model.errors import InvalidError

_VARIABLE = "TIDEMARK_RPC_RPC_ENGINE"


class Engine(Enum):
    """What speaks HTTP/2."""

    GRPCIO = "grpcio"
    NATIVE = "native"
    AUTO = "auto"


class EngineError(InvalidError):
    """There is no such engine."""

    code = "ErrRpcEngine"


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcConfig:
    """How a daemon serves gRPC."""

    rpc_engine: str = setting(
        Engine.AUTO.value, "grpcio, native, or auto: native for coordinator and pump (docs/design/0026-native-front.md)"
    )


def choose(config: RpcConfig) -> None:
    """Let all listeners of this process, and of processes it starts, use this engine.

    Raises:
        EngineError: it is none.
    """
    os.environ[_VARIABLE] = _checked(config.rpc_engine).value


def chosen(suited: Engine) -> Engine:
    """The engine of a listener for which `suited` is the best.

    Raises:
        EngineError: the environment names none.
    """
    engine = _checked(os.environ.get(_VARIABLE, Engine.AUTO.value))
    return suited if engine is Engine.AUTO else engine


def _checked(name: str) -> Engine:
    try:
        return Engine(name)
    except ValueError:
        names = ", ".join(engine.value for engine in Engine)
        raise EngineError(f"--rpc-engine is one of {names}, not {name!r}") from None
