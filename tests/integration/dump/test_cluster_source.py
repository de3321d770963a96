"""The source that dumps of the cluster are tested with."""

import pytest

from server.rpc.members import NoAddressError
from tests.integration.dump.cluster_source import ClusterSource


class Failing(ClusterSource):
    """Fails when it is to change rows."""

    async def _write(self) -> None:
        self._ready.set()
        await self._churn.wait()
        raise ConnectionError("the store is gone")


def test_what_its_thread_fails_with_is_raised_by_each_call_of_the_test() -> None:
    source = Failing("").opened()
    source.settle()
    source.churn()
    for call in (source.settle, lambda: source.drop("t"), source.stop):
        with pytest.raises(ConnectionError, match="the store is gone") as raised:
            call()
        assert raised.traceback[-1].name == "_write"
    assert not source.is_alive()
    source.settle()


def test_what_it_cannot_begin_with_is_raised_at_once() -> None:
    with pytest.raises(NoAddressError):
        ClusterSource("").opened()
