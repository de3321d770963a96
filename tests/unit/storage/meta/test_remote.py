"""A metadata server that takes connections and answers no request for a token."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from etcdpb import rpc_pb2, rpc_pb2_grpc

from storage.meta import remote
from storage.meta.errors import MetaUnavailableError
from storage.meta.remote import RemoteEtcd, User
from storage.tasks import gather


class Auth(rpc_pb2_grpc.AuthServicer):
    def __init__(self, *, silent: bool) -> None:
        self._silent = silent

    async def Authenticate(self, request: Any, context: Any) -> rpc_pb2.AuthenticateResponse:
        if self._silent:
            await asyncio.Event().wait()
        return rpc_pb2.AuthenticateResponse(token="token")


class KV(rpc_pb2_grpc.KVServicer):
    async def Range(self, request: Any, context: Any) -> rpc_pb2.RangeResponse:
        return rpc_pb2.RangeResponse(count=1)

    async def Txn(self, request: Any, context: Any) -> rpc_pb2.TxnResponse:
        return rpc_pb2.TxnResponse(succeeded=True)


@asynccontextmanager
async def member(*, silent: bool) -> AsyncIterator[str]:
    server = grpc.aio.server()
    rpc_pb2_grpc.add_AuthServicer_to_server(Auth(silent=silent), server)
    rpc_pb2_grpc.add_KVServicer_to_server(KV(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.fixture(autouse=True)
def short_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_ATTEMPT_SECONDS", 0.3)
    monkeypatch.setattr(remote, "_CALL_SECONDS", 1.0)


async def test_a_call_whose_token_never_comes_fails_in_time() -> None:
    async with member(silent=True) as address:
        opened = RemoteEtcd.open([address], grpc.aio.insecure_channel, User("root", "pw"))
        async with opened as api, asyncio.timeout(20):
            calls = [api.read(rpc_pb2.RangeRequest(key=b"a")) for _ in range(20)]
            with pytest.raises(MetaUnavailableError, match="did not answer in time"):
                await gather(calls)


async def test_the_token_is_then_requested_from_the_next_member() -> None:
    conditional = rpc_pb2.TxnRequest(compare=[rpc_pb2.Compare(key=b"a")])
    async with member(silent=True) as first, member(silent=False) as second:
        opened = RemoteEtcd.open([first, second], grpc.aio.insecure_channel, User("root", "pw"))
        async with opened as api, asyncio.timeout(20):
            # Not repeatable once it was sent; it was not.
            assert (await api.txn(conditional)).succeeded
            assert api.address == second
