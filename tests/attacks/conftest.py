"""Every attack is made on both engines."""

import pytest

from server.rpc.config import Engine


@pytest.fixture(
    scope="module", params=[Engine.GRPCIO, Engine.NATIVE], ids=lambda engine: engine.value
)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Which one the daemon uses."""
    chosen: Engine = request.param
    return chosen
