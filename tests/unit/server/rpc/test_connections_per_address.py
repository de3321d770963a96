"""One address has a share of a listener's connections, whichever engine accepts them;
the others find room.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb
from kvproto.tikvpb_pb2_grpc import TikvStub

from server.rpc.client import connect
from server.rpc.config import (
    ConnectionShareError,
    Engine,
    Limits,
    RpcConfig,
    choose,
    connections_per_address,
)
from server.rpc.connection_guard import ConnectionGuard, _count_open_files, allowed_each
from server.rpc.http2 import frames
from server.rpc.listener import client_address
from server.rpc.server import RpcServer
from tests.unit.server.rpc.http2.wire import Client, data, message

TIKV = tikvpb.DESCRIPTOR.services_by_name["Tikv"]
PREFACE = frames.PREFACE + frames.settings({})
GREEDY, OTHERS = "127.0.0.2", "127.0.0.3"
DEADLINE_S = 60

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Servicer:
    """RawGet answers at once, RawPut never."""

    def __init__(self) -> None:
        self.waiting = 0

    async def RawGet(self, request: kvrpcpb.RawGetRequest, _: Any) -> kvrpcpb.RawGetResponse:
        return kvrpcpb.RawGetResponse(value=request.key)

    async def RawPut(self, _request: Any, _: Any) -> None:
        self.waiting += 1
        await asyncio.Event().wait()


@asynccontextmanager
async def serving(limits: Limits) -> AsyncIterator[tuple[Servicer, str]]:
    servicer = Servicer()
    server = RpcServer(limits=limits)
    server.add_service(TIKV, servicer)
    async with server.listen("127.0.0.1:0") as bound:
        yield servicer, bound


@asynccontextmanager
async def connected(
    bound: str, source: str, count: int, first: bytes = PREFACE
) -> AsyncIterator[Sequence[Connection]]:
    host, _, port = bound.rpartition(":")
    opened: list[Connection] = []
    try:
        for _ in range(count):
            opened.append(await asyncio.open_connection(host, int(port), local_addr=(source, 0)))
            opened[-1][1].write(first)
        yield opened
    finally:
        for _, writer in opened:
            writer.transport.abort()
        for _, writer in opened:
            with suppress(OSError):
                await writer.wait_closed()


async def answered(bound: str) -> None:
    async with connect(bound) as channel:
        answer = await TikvStub(channel).RawGet(
            kvrpcpb.RawGetRequest(key=b"k"), timeout=DEADLINE_S, wait_for_ready=True
        )
        assert answer.value == b"k"


class Ends:
    """How many of some connections the server has ended, and what it said before."""

    def __init__(self, tasks: asyncio.TaskGroup, connections: Sequence[Connection]) -> None:
        self.count = 0
        self.said = b""
        self._changed = asyncio.Condition()
        self._readers = [tasks.create_task(self._read(reader)) for reader, _ in connections]

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(lambda: self.count >= count)

    def stop(self) -> None:
        for reader in self._readers:
            reader.cancel()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while part := await reader.read(1000):
                self.said += part
        async with self._changed:
            self.count += 1
            self._changed.notify_all()


@pytest.mark.usefixtures("engine")
async def test_idle_connections_of_one_address_give_way_at_its_share() -> None:
    async with (
        serving(Limits(connections=200, connections_per_address=40)) as (_, bound),
        connected(bound, OTHERS, 30) as others,
        connected(bound, GREEDY, 100) as greedy,
        asyncio.TaskGroup() as tasks,
    ):
        spared, ended = Ends(tasks, others), Ends(tasks, greedy)
        await ended.reach(60)
        await answered(bound)
        assert spared.count == 0
        assert 60 <= ended.count <= 100 - 40 + 32  # the native engine ends 32 at once
        spared.stop()
        ended.stop()


@pytest.mark.usefixtures("engine")
async def test_all_connections_are_used_up_by_many_and_one_more_is_answered() -> None:
    async with (
        serving(Limits(connections=128)) as (_, bound),
        connected(bound, "127.0.0.1", 1) as before,
        connected(bound, GREEDY, 64),
        connected(bound, OTHERS, 64),
        connected(bound, "127.0.0.4", 40),
        asyncio.TaskGroup() as tasks,
    ):
        spared = Ends(tasks, before)
        await answered(bound)
        assert spared.count == 0  # its address has fewer than the others
        spared.stop()


@pytest.mark.parametrize("engine", [Engine.NATIVE], indirect=True)
async def test_connections_with_calls_stay_and_the_next_one_is_told_why(engine: Engine) -> None:
    del engine
    call = (
        PREFACE
        + Client(ready=False).headers(1, path="/tikvpb.Tikv/RawPut")
        + data(1, message(b""), end_stream=True)
    )
    async with (
        serving(Limits(connections=20, connections_per_address=10)) as (servicer, bound),
        connected(bound, GREEDY, 10, call) as busy,
        asyncio.TaskGroup() as tasks,
    ):
        async with asyncio.timeout(DEADLINE_S):
            while servicer.waiting < 10:  # noqa: ASYNC110 - handlers tell nobody else
                await asyncio.sleep(0.01)
        spared = Ends(tasks, busy)
        async with connected(bound, GREEDY, 1) as refused:
            ended = Ends(tasks, refused)
            await ended.reach(1)
            assert b"your address has 10 connections with calls" in ended.said
        await answered(bound)
        assert spared.count == 0
        spared.stop()


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (("10.0.0.7", 5), "10.0.0.7"),
        (("::ffff:10.0.0.7", 5, 0, 0), "10.0.0.7"),
        (("2001:db8:1:2:3::4", 5, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        (("::1", 5, 0, 0), "::/64"),
        ("", ""),
        ("/tmp/socket", ""),
    ],
)
def test_a_host_is_one_address_of_ipv4_or_64_bits_of_ipv6(peer: object, expected: str) -> None:
    assert client_address(peer) == expected


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=50),
    st.integers(1, 1000),
    st.integers(1, 500),
)
def test_what_each_address_keeps_fits_and_no_more_would(
    counts: list[int], most: int, share: int
) -> None:
    allowed = allowed_each(counts, most, share)
    kept = [min(count, allowed) for count in counts]
    assert 1 <= allowed <= share
    assert sum(kept) <= max(most, len(counts))
    more = sum(min(count, allowed + 1) for count in counts)
    assert allowed == share or more > most


def test_files_that_are_no_connections_cost_no_look(tmp_path: Path) -> None:
    guard = ConnectionGuard(1, Limits(connections=200, connections_per_address=100))
    with ExitStack() as stack:
        for number in range(300):
            stack.enter_context((tmp_path / str(number)).open("w"))
        files = len(list(Path("/proc/self/fd").iterdir()))
        assert guard._may_be_too_many(files)
        assert guard.look() == 0
        assert not guard._may_be_too_many(files)
        assert guard._may_be_too_many(files + 102)


@pytest.mark.parametrize("directory", ["/proc/self/fd", "/proc/self/fdinfo"])
def test_open_files_are_counted_also_where_the_directory_has_no_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    monkeypatch.setattr("server.rpc.connection_guard._FILES", directory)
    with ExitStack() as stack:
        for number in range(300):
            stack.enter_context((tmp_path / str(number)).open("w"))
        # Threads of other tests may open and close some meanwhile.
        assert abs(_count_open_files() - len(list(Path("/proc/self/fd").iterdir()))) < 100


def test_connections_that_were_reset_hide_no_new_ones() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        guard = ConnectionGuard(
            listener.getsockname()[1], Limits(connections=200, connections_per_address=20)
        )
        with accepted(listener, 200) as clients:
            for client in clients:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
            assert guard.look() == 0
        with accepted(listener, 50):
            assert guard._may_be_too_many(len(list(Path("/proc/self/fd").iterdir())))
            assert guard.look() == 30


@contextmanager
def accepted(listener: socket.socket, count: int) -> Iterator[Sequence[socket.socket]]:
    """The clients of connections that are open in this process."""
    with ExitStack() as stack:
        clients = []
        for _ in range(count):
            clients.append(stack.enter_context(socket.create_connection(listener.getsockname())))
            stack.enter_context(listener.accept()[0])
        yield clients


def test_half_of_all_connections_is_the_default_where_there_are_many() -> None:
    assert Limits(connections=200).most_connections_per_address == 100
    assert Limits(connections=20).most_connections_per_address == 20
    assert Limits(connections=200, connections_per_address=7).most_connections_per_address == 7
    assert Limits(connections=20, connections_per_address=50).most_connections_per_address == 20


def test_the_setting_is_the_processs_and_numbers_out_of_range_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIDEMARK_RPC_RPC_ENGINE", "auto")  # what `choose` sets is put back
    monkeypatch.setenv("TIDEMARK_RPC_MAX_CONNECTIONS_PER_ADDRESS", "0")
    choose(RpcConfig(max_connections_per_address=100))
    assert connections_per_address() == 100
    with pytest.raises(ConnectionShareError, match="from 0 to 8192, not '8193'"):
        choose(RpcConfig(max_connections_per_address=8193))
    monkeypatch.setenv("TIDEMARK_RPC_MAX_CONNECTIONS_PER_ADDRESS", "-1")
    with pytest.raises(ConnectionShareError):
        connections_per_address()
