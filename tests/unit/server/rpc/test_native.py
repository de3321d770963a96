"""The native listener over real sockets: what gRPC's own one does otherwise, or not at all."""

import asyncio
import gc
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb

from server.rpc.client import connect
from server.rpc.config import Engine, EngineError, Limits, RpcConfig, choose, chosen
from server.rpc.credentials import CredentialsError, SecurityConfig
from server.rpc.front import Answer, Messages
from server.rpc.http2 import frames
from server.rpc.http2.connection import Connection
from server.rpc.http2.link import ServerProtocol
from server.rpc.http2.stream import Stream
from server.rpc.listener import EVICTED, open_listeners
from server.rpc.server import PortInUseError, RpcServer
from tests.unit.server.certificates import Certificates
from tests.unit.server.rpc.http2.wire import Client, data

TIKV = tikvpb.DESCRIPTOR.services_by_name["Tikv"]
GET, COMMANDS = "/tikvpb.Tikv/RawGet", "/tikvpb.Tikv/BatchCommands"


async def echo(requests: Any) -> list[Answer]:
    return list(requests)


@asynccontextmanager
async def serving(
    address: str = "127.0.0.1:0",
    security: SecurityConfig | None = None,
    limits: Limits | None = None,
    servicer: object = None,
) -> AsyncIterator[str]:
    """`KvGet` echoes in batches; the rest is the servicer's."""
    server = RpcServer(security, limits, Engine.NATIVE)
    server.add_service(TIKV, servicer or object(), {"KvGet": echo})
    async with server.listen(address) as bound:
        yield bound


async def get(channel: grpc.aio.Channel, body: bytes = b"k") -> bytes:
    found: bytes = await channel.unary_unary("/tikvpb.Tikv/KvGet")(body, timeout=60)
    return found


async def test_a_reader_that_does_not_read_holds_its_writer_up_and_nobody_else() -> None:
    written = 0

    class Endless:
        async def BatchCommands(self, _requests: Any, _: Any) -> AsyncIterator[Any]:
            nonlocal written
            while True:
                yield tikvpb.BatchCommandsResponse(request_ids=range(1 << 14))
                written += 1

    async with serving(servicer=Endless()) as bound, connect(bound) as channel:
        call = channel.stream_stream(COMMANDS)()
        before = -1
        while written != before:
            before = written
            await asyncio.sleep(0.1)
        assert written < 10_000
        assert await get(channel) == b"k"
        for _ in range(3):
            assert (
                len(tikvpb.BatchCommandsResponse.FromString(await call.read()).request_ids)
                == 1 << 14
            )
        call.cancel()


async def test_many_answers_at_a_time_are_held_up_like_single_ones() -> None:
    written = 0

    class Endless:
        async def BatchCommands(self, _requests: Any, _: Any) -> AsyncIterator[Any]:
            nonlocal written
            answer = tikvpb.BatchCommandsResponse(request_ids=range(1 << 12)).SerializeToString()
            while True:
                yield Messages([answer] * 100)
                written += 100

    async with serving(servicer=Endless()) as bound, connect(bound) as channel:
        call = channel.stream_stream(COMMANDS)()
        before = -1
        while written != before:
            before = written
            await asyncio.sleep(0.1)
        assert written < 40_000
        assert await get(channel) == b"k"
        call.cancel()


async def test_requests_that_nobody_reads_hold_their_writer_up() -> None:
    class Deaf:
        async def BatchCommands(self, _requests: Any, _: Any) -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield tikvpb.BatchCommandsResponse()

    async with serving(servicer=Deaf()) as bound, connect(bound) as channel:
        call = channel.stream_stream(COMMANDS)()
        sent = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                while sent < 1000:
                    await call.write(bytes(1 << 16))
                    sent += 1
        assert sent < 1000
        call.cancel()


async def test_a_stream_may_end_before_its_requests_do() -> None:
    class Once:
        async def BatchCommands(self, requests: Any, _: Any) -> AsyncIterator[Any]:
            async for request in requests:
                yield tikvpb.BatchCommandsResponse(request_ids=request.request_ids)
                return

    async with serving(servicer=Once()) as bound, connect(bound) as channel:
        call = channel.stream_stream(COMMANDS)()
        message = tikvpb.BatchCommandsRequest(request_ids=[7]).SerializeToString()
        await call.write(message)
        assert [
            tikvpb.BatchCommandsResponse.FromString(one).request_ids[0] async for one in call
        ] == [7]
        assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    "address", ["127.0.0.1:0", "localhost:0", "[::]:0", "[::1]:0", "0.0.0.0:0"]
)
async def test_addresses_are_written_as_grpcs_users_do(address: str) -> None:
    async with serving(address) as bound:
        port = bound.rpartition(":")[2]
        host = address.rpartition(":")[0].replace("0.0.0.0", "127.0.0.1")
        targets = [f"127.0.0.1:{port}", f"[::1]:{port}"] if host == "[::]" else [f"{host}:{port}"]
        for target in targets:
            async with connect(target) as channel:
                assert await get(channel) == b"k"


async def test_a_path_is_an_address_and_a_stale_socket_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    async with serving(f"unix:{path}"), connect(f"unix:{path}") as channel:
        assert await get(channel) == b"k"
    assert not path.exists()


@pytest.mark.parametrize("address", ["127.0.0.1:nine", "nowhere.invalid:0", "8.8.8.8:0"])
async def test_an_address_that_cannot_be_used_is_one_clear_error(address: str) -> None:
    with pytest.raises(PortInUseError, match="choose another address"):
        async with serving(address):
            pass


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("ca", [False, True])
async def test_tls_with_and_without_client_certificates(
    certificates: Certificates, *, ca: bool
) -> None:
    seen: dict[str, Any] = {}

    class Asks:
        async def RawGet(self, request: Any, context: Any) -> Any:
            seen.update(context.auth_context(), peers=context.peer_identities())
            return kvrpcpb.RawGetResponse()

    client = certificates.security(ca=True)
    async with serving(security=certificates.security(ca=ca), servicer=Asks()) as bound:
        async with connect(bound, client) as channel:
            assert await get(channel, bytes(1 << 20)) == bytes(1 << 20)
            await channel.unary_unary(GET)(b"")
        assert seen["transport_security_type"] == (b"ssl",)
        assert seen.get("x509_common_name") == ((b"node",) if ca else None)
        assert (seen["peers"] == (b"127.0.0.1",)) == ca


async def test_clients_without_a_certificate_or_in_plain_text_are_turned_away(
    certificates: Certificates,
) -> None:
    async with serving(security=certificates.security(ca=True)) as bound:
        ours = SecurityConfig(ca_path=str(certificates.directory / "ca.pem"))
        for security in (ours, SecurityConfig()):
            async with connect(bound, security) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await get(channel)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        async with connect(bound, certificates.security(ca=True)) as channel:
            assert await get(channel) == b"k"


async def test_tls_without_http2_is_closed(certificates: Certificates) -> None:
    async with serving(security=certificates.security(ca=False)) as bound:
        host, _, port = bound.rpartition(":")
        for protocols in ([], ["http/1.1"]):
            context = certificates.client(certificate=False)
            if protocols:
                context.set_alpn_protocols(protocols)
            with suppress(ssl.SSLError, ConnectionError):
                reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
                async with asyncio.timeout(60):
                    assert await reader.read() == b""
                writer.close()


def test_tls_files_that_cannot_be_used_are_one_clear_error(
    certificates: Certificates, tmp_path: Path
) -> None:
    good = certificates.security(ca=True)
    (tmp_path / "junk").write_text("junk")
    for wrong in (
        SecurityConfig(cert_path=good.cert_path),
        SecurityConfig(cert_path=str(tmp_path / "none"), key_path=good.key_path),
        SecurityConfig(cert_path=str(tmp_path / "junk"), key_path=good.key_path),
        SecurityConfig(
            cert_path=good.cert_path, key_path=good.key_path, ca_path=str(tmp_path / "junk")
        ),
    ):
        with pytest.raises(CredentialsError):
            RpcServer(wrong, suited=Engine.NATIVE)


def test_an_engine_nobody_has_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMARK_RPC_RPC_ENGINE", "native")
    assert chosen(suited=Engine.GRPCIO) is Engine.NATIVE
    choose(RpcConfig())
    assert chosen(suited=Engine.NATIVE) is Engine.NATIVE
    assert chosen(suited=Engine.GRPCIO) is Engine.GRPCIO
    with pytest.raises(
        EngineError, match="--rpc-engine is one of grpcio, native, auto, not 'twisted'"
    ):
        choose(RpcConfig(rpc_engine="twisted"))


async def test_random_bytes_over_sockets_hurt_nobody_else() -> None:
    async with serving() as bound, connect(bound) as channel:
        host, _, port = bound.rpartition(":")
        for number in range(60):
            reader, writer = await asyncio.open_connection(host, int(port))
            junk = os.urandom(2000)
            writer.write((frames.PREFACE + frames.settings({})) * (number % 2) + junk)
            with suppress(ConnectionError):
                await writer.drain()
                if number % 3:
                    writer.write_eof()
                    async with asyncio.timeout(60):
                        await reader.read()
            writer.close()
        assert await get(channel) == b"k"


async def test_connections_that_end_in_any_way_leave_nothing_behind() -> None:
    class Waits:
        async def BatchCommands(self, requests: Any, _: Any) -> AsyncIterator[Any]:
            async for request in requests:
                yield tikvpb.BatchCommandsResponse(request_ids=request.request_ids)

    server = RpcServer(suited=Engine.NATIVE)
    server.add_service(TIKV, Waits(), {"KvGet": echo})
    async with server.listen("127.0.0.1:0") as bound:
        host, _, port = bound.rpartition(":")
        for number in range(20):
            client = Client(ready=False)
            calls = b"".join(
                client.headers(one, path=COMMANDS) + data(one, b"\0\0\0") for one in range(1, 41, 2)
            )
            resets = b"".join(
                frames.rst_stream(one, frames.ErrorCode.CANCEL) for one in range(1, 21, 2)
            )
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(frames.PREFACE + frames.settings({}) + calls + resets * (number % 2))
            await writer.drain()
            await reader.read(9)
            if number % 3:
                writer.transport.abort()
            writer.close()
        del client
        native: Any = server._server
        async with asyncio.timeout(60):
            while native._links or native._tasks or native._calls or native._admission.connections:  # noqa: ASYNC110 - nobody tells the last end
                await asyncio.sleep(0.01)
        assert (
            native._request_bytes,
            native._buffered,
            native._behind,
            native._admission.connections,
        ) == (
            0,
            0,
            0,
            0,
        )
        gc.collect()
        assert not [
            one for one in gc.get_objects() if isinstance(one, Stream | ServerProtocol | Connection)
        ]


async def test_a_peer_that_never_reads_is_not_read_either() -> None:
    async with serving(limits=Limits(message_bytes=1 << 20)) as bound, connect(bound) as channel:
        host, _, port = bound.rpartition(":")
        with socket.create_connection((host, int(port))) as greedy:
            greedy.setblocking(False)
            client = Client()
            windows = frames.settings({4: (1 << 31) - 1}) + frames.window_update(
                0, (1 << 31) - 1 - 65_535
            )
            sent, pending, number = 0, frames.PREFACE + windows, 1
            for _ in range(200):
                while len(pending) < 1 << 20:
                    pending += client.headers(number).replace(b"RawGet", b"KvGet")
                    pending += frames.frame(0, 1, number, struct.pack(">BI", 0, 8000) + bytes(8000))
                    number += 2
                with suppress(BlockingIOError):
                    taken = greedy.send(pending)
                    sent, pending = sent + taken, pending[taken:]
                await asyncio.sleep(0)
            assert sent < 64 << 20
            assert await get(channel) == b"k"


async def test_cancelled_calls_of_a_batch_are_not_answered_and_others_are() -> None:
    going, held = asyncio.Event(), asyncio.Event()

    async def slow(requests: Any) -> list[Answer]:
        held.set()
        await going.wait()
        return list(requests)

    server = RpcServer(suited=Engine.NATIVE)
    server.add_service(TIKV, object(), {"KvGet": slow})
    async with server.listen("127.0.0.1:0") as bound, connect(bound) as channel:
        leaving = channel.unary_unary("/tikvpb.Tikv/KvGet")(b"leaving")
        staying = channel.unary_unary("/tikvpb.Tikv/KvGet")(b"staying")
        await held.wait()
        leaving.cancel()
        await asyncio.sleep(0.05)
        going.set()
        assert await staying == b"staying"
        late = channel.unary_unary("/tikvpb.Tikv/KvGet")(b"late", timeout=60)
        assert await late == b"late"


async def test_calls_whose_deadline_passed_in_the_queue_are_not_worked_on() -> None:
    batches: list[list[bytes]] = []
    begun, going = asyncio.Event(), asyncio.Event()

    async def slow(requests: Any) -> list[Answer]:
        batches.append(list(requests))
        begun.set()
        await going.wait()
        return list(requests)

    server = RpcServer(suited=Engine.NATIVE)
    server.add_service(TIKV, object(), {"KvGet": slow})
    async with server.listen("127.0.0.1:0") as bound, connect(bound) as channel:
        first = asyncio.ensure_future(get(channel, b"first"))  # noqa: TID251 - a client of its own, awaited below
        await begun.wait()
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await channel.unary_unary("/tikvpb.Tikv/KvGet")(b"late", timeout=0.1)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        going.set()
        assert await first == b"first"
        assert await get(channel, b"next") == b"next"
    assert batches == [[b"first"], [b"next"]]


async def test_small_answers_do_not_wait_for_acknowledgements_of_earlier_ones() -> None:
    for listener in open_listeners("localhost:0"):
        with listener, socket.create_connection(listener.getsockname()[:2]):
            listener.settimeout(60)
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_one_connection_gets_a_share_of_the_calls_and_something_is_left_for_others() -> None:
    class Waits:
        async def BatchCommands(self, _: Any, __: Any) -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield tikvpb.BatchCommandsResponse()

    server = RpcServer(limits=Limits(calls=400), suited=Engine.NATIVE)
    server.add_service(TIKV, Waits(), {"KvGet": echo})
    async with server.listen("127.0.0.1:0") as bound, connect(bound) as channel:
        native: Any = server._server
        host, _, port = bound.rpartition(":")
        writers = []
        for expected in (200, 300, 350):
            client = Client(ready=False)
            reader, writer = await asyncio.open_connection(host, int(port))
            streams = b"".join(
                client.headers(number, path=COMMANDS) for number in range(1, 2001, 2)
            )
            writer.write(frames.PREFACE + frames.settings({}) + streams)
            writers.append(writer)
            async with asyncio.timeout(60):
                while b"calls open" not in await reader.read(1 << 16):
                    pass  # until one is refused
                while native._calls < expected:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.01)
            assert native._calls <= expected + 1
        assert await get(channel) == b"k"
        for writer in writers:
            writer.close()


async def test_idle_connections_make_room_and_those_with_calls_stay() -> None:
    class Waits:
        async def BatchCommands(self, _: Any, __: Any) -> AsyncIterator[Any]:
            yield tikvpb.BatchCommandsResponse(request_ids=[1])
            await asyncio.Event().wait()

    async with (
        serving(servicer=Waits(), limits=Limits(connections=4)) as bound,
        connect(bound) as busy,
    ):
        call = busy.stream_stream(COMMANDS)()
        await call.write(b"")
        assert await call.read() is not grpc.aio.EOF
        host, _, port = bound.rpartition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
        async with grpc.aio.insecure_channel(
            bound, [("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            assert await get(channel) == b"k"
        assert not call.done()
        async with asyncio.timeout(60):
            assert await idle[0][0].read(1 << 16) is not None
        for _, writer in idle:
            writer.close()


async def test_connections_that_have_the_most_unread_answers_are_closed_when_all_have_too_much() -> (
    None
):
    class Large:
        async def RawGet(self, _: Any, __: Any) -> Any:
            return kvrpcpb.RawGetResponse(value=bytes(8 << 20))

    limits = Limits(message_bytes=1 << 20)
    server = RpcServer(limits=limits, suited=Engine.NATIVE)
    server.add_service(TIKV, Large(), {"KvGet": echo})
    async with server.listen("127.0.0.1:0") as bound, connect(bound) as channel:
        native: Any = server._server
        native._limits = SmallLimits(message_bytes=1 << 20)
        evicted = EVICTED.labels("unread")
        before = evicted._value.get()
        host, _, port = bound.rpartition(":")
        deaf = []
        for _ in range(8):
            client = Client(ready=False)
            _, writer = await asyncio.open_connection(host, int(port), limit=1)
            windows = frames.settings({4: (1 << 31) - 1}) + frames.window_update(
                0, (1 << 31) - 1 - 65_535
            )
            writer.write(
                frames.PREFACE
                + windows
                + b"".join(client.call(one, b"") for one in range(1, 41, 2))
            )
            deaf.append(writer)
        async with asyncio.timeout(60):
            while (  # noqa: ASYNC110
                evicted._value.get() == before or native._buffered > native._limits.buffered_bytes
            ):
                await asyncio.sleep(0.01)
        assert await get(channel) == b"k"
        for writer in deaf:
            writer.close()


class SmallLimits(Limits):
    buffered_bytes = 20 << 20
