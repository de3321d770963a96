"""The demo's foreign client: one that fails at every call is replaced, and a busy one is not."""

import pytest

from server.demo.client import ForeignClient, TransactionFailedError
from storage.model.errors import ConflictError


class Rust:
    """The half that panics at each call from some time on."""

    def __init__(self, *, panics=False):
        self.panics = panics

    async def current_timestamp(self):
        if self.panics:
            raise RuntimeError("called `Option::unwrap()` on a `None` value")
        return 7


async def test_a_client_that_fails_each_time_is_replaced_once_the_cluster_can_be_reached():
    reached = [TransactionFailedError("nobody answers"), Rust()]

    async def connect():
        inner = reached.pop(0)
        if isinstance(inner, Exception):
            raise inner
        return inner

    broken = Rust(panics=True)
    client = ForeignClient(broken, connect)
    for _ in range(9):
        with pytest.raises(ConflictError):
            await client.now()
    assert reached == []
    assert await client.now() == 7


async def test_failures_between_answers_replace_nothing():
    async def connect():
        raise AssertionError("it is not replaced")

    rust = Rust()
    client = ForeignClient(rust, connect)
    for number in range(40):
        rust.panics = number % 3 != 0
        if rust.panics:
            with pytest.raises(ConflictError):
                await client.now()
        else:
            assert await client.now() == 7
