"""The contract of a listener is tested with each engine."""

import pytest

from server.rpc.client import connect
from server.rpc.config import Engine, RpcConfig, choose


@pytest.fixture(autouse=True)
def patient_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that others share may take longer to accept a connection than a daemon allows."""
    monkeypatch.setitem(connect.__kwdefaults__, "connection_ms", 20_000)


@pytest.fixture(params=[Engine.GRPCIO, Engine.NATIVE], ids=lambda engine: engine.value)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Each engine in turn, chosen for the process."""
    chosen: Engine = request.param
    monkeypatch.setenv("TIDEMARK_RPC_RPC_ENGINE", chosen.value)  # what `choose` sets is put back
    monkeypatch.setenv("TIDEMARK_RPC_MAX_CONNECTIONS_PER_ADDRESS", "0")
    choose(RpcConfig(rpc_engine=chosen.value))
    return chosen
