"""Certificates that clients show, and Flight's own, replaced while channels, streams and servers go
on.
"""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pyarrow.flight as fl
import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb
from kvproto import tikvpb_pb2_grpc
from pyspark_tidemark import connection
from pyspark_tidemark.options import Credentials
from structlog.testing import capture_logs

from server.capture import listener
from server.capture.listener import serving_flight
from server.rpc import reloaded
from server.rpc.client import connect
from server.rpc.config import Engine
from server.rpc.credentials import CredentialsError, SecurityConfig, channel_credentials
from server.rpc.renewed_channel import RenewedBlockingChannel
from server.rpc.server import RpcServer
from sink.flight.server import port_error
from tests.unit.server.certificates import Certificates

TIKV = tikvpb.DESCRIPTOR.services_by_name["Tikv"]
ROWS = pa.record_batch({"n": pa.array([1, 2, 3])})


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Certificates:
    monkeypatch.setattr(reloaded, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(listener, "_LOOK_EVERY_S", 0.01)
    return Certificates(tmp_path)


class Servicer:
    """Answers `RawGet` with the caller's common name, and streams until it is let go."""

    def __init__(self) -> None:
        self.arrived, self.go_on = asyncio.Event(), asyncio.Event()

    async def RawGet(self, _request: Any, context: Any) -> Any:
        return kvrpcpb.RawGetResponse(value=b",".join(context.auth_context()["x509_common_name"]))

    async def RawScan(self, _request: Any, _context: Any) -> Any:
        self.arrived.set()
        await self.go_on.wait()
        return kvrpcpb.RawScanResponse()


@asynccontextmanager
async def serving(security: SecurityConfig, servicer: Servicer) -> AsyncIterator[str]:
    server = RpcServer(security, suited=Engine.GRPCIO)
    server.add_service(TIKV, servicer, {})
    async with server.listen("127.0.0.1:0") as bound:
        yield bound


async def name_shown(stub: Any) -> bytes:
    return bytes((await stub.RawGet(kvrpcpb.RawGetRequest(), timeout=30)).value)


async def test_a_channel_shows_the_new_certificate_and_a_call_under_way_goes_on(
    certificates: Certificates,
) -> None:
    servicer = Servicer()
    own = certificates.sign("first", "own")
    async with (
        serving(certificates.security(ca=True), servicer) as bound,
        connect(bound, own) as channel,
    ):
        stub: Any = tikvpb_pb2_grpc.TikvStub(channel)
        assert await name_shown(stub) == b"first"
        under_way = stub.RawScan(kvrpcpb.RawScanRequest(), timeout=60)
        await servicer.arrived.wait()
        certificates.sign("second", "own")
        assert await name_shown(stub) == b"second"
        gc.collect()
        servicer.go_on.set()
        assert await under_way == kvrpcpb.RawScanResponse()
        # Half of a file changes nothing.
        cut_short(Path(own.cert_path))
        assert await name_shown(stub) == b"second"
        certificates.sign("third", "own")
        assert await name_shown(stub) == b"third"
        assert channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN


async def test_a_closed_channel_is_closed_in_all_its_times(certificates: Certificates) -> None:
    own, servicer = certificates.sign("first", "own"), Servicer()
    async with serving(certificates.security(ca=True), servicer) as bound:
        channel = connect(bound, own)
        stub: Any = tikvpb_pb2_grpc.TikvStub(channel)
        under_way = stub.RawScan(kvrpcpb.RawScanRequest(), timeout=60)
        await servicer.arrived.wait()
        certificates.sign("second", "own")
        assert await name_shown(stub) == b"second"
        await channel.close()
        with pytest.raises(asyncio.CancelledError):
            await under_way
        with pytest.raises(grpc.aio.UsageError):
            await name_shown(stub)


def test_files_that_do_not_fit_are_one_clear_error(certificates: Certificates) -> None:
    other = certificates.sign("other")
    with pytest.raises(CredentialsError, match="cannot be used"):
        connect("127.0.0.1:1", replace(certificates.security(ca=True), key_path=other.key_path))


@pytest.mark.parametrize("missing", ["cert_path", "key_path"])
def test_a_certificate_without_its_key_is_refused(certificates: Certificates, missing: str) -> None:
    with pytest.raises(CredentialsError, match="belong together"):
        connect("127.0.0.1:1", replace(certificates.security(ca=True), **{missing: ""}))


async def test_a_channel_of_threads_shows_the_new_certificate(certificates: Certificates) -> None:
    own = certificates.sign("first", "own")
    async with serving(certificates.security(ca=True), Servicer()) as bound:

        def asked() -> bytes:
            return bytes(method(kvrpcpb.RawGetRequest(), timeout=30).value)

        method = blocking_method(bound, own)
        assert await asyncio.to_thread(asked) == b"first"
        certificates.sign("second", "own")
        assert await asyncio.to_thread(asked) == b"second"


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def blocking_method(bound: str, own: SecurityConfig) -> Any:
    files = channel_credentials(own)
    assert files is not None
    channel = RenewedBlockingChannel(files, lambda made: grpc.secure_channel(bound, made))
    return tikvpb_pb2_grpc.TikvStub(channel).RawGet


class Feeds:
    """One changefeed, whose rows come when they are let go."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.go_on.set)

    def read(self, *_: object, before: bool = False) -> Any:
        del before

        def batches() -> Any:
            yield ROWS
            asyncio.run_coroutine_threadsafe(self.go_on.wait(), self.loop).result(60)
            yield ROWS

        return ROWS.schema, batches()


TICKET = fl.Ticket(b'{"changefeed": "c", "table": "t", "start": 1, "end": 2}')


async def test_flight_shows_a_new_certificate_and_ends_no_stream(
    certificates: Certificates,
) -> None:
    """The server's and the reader's files change; a stream that is open goes on to its end."""
    security = certificates.sign("first", "flight")
    reader = certificates.sign("reader", "reader")
    credentials = Credentials(
        ca_path=reader.ca_path, cert_path=reader.cert_path, key_path=reader.key_path
    )
    feeds: Any = Feeds()

    def opened(uri: str) -> Any:
        client = connection.client(uri, credentials)
        return client.do_get(TICKET, fl.FlightCallOptions(timeout=60))

    async with serving_flight(feeds, "127.0.0.1:0", security=security) as flight:
        uri = f"grpc+tls://{flight.bound}"
        stream = await asyncio.to_thread(opened, uri)
        assert (await asyncio.to_thread(stream.read_chunk)).data.equals(ROWS)
        first = flight._server
        certificates.sign("second", "flight")
        certificates.sign("reader-2", "reader")
        while flight._server is first:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        gc.collect()
        later = await asyncio.to_thread(opened, uri)
        feeds.go_on.set()
        for each in (stream, later):
            rows = await asyncio.to_thread(each.read_all)
            assert rows.num_rows == (3 if each is stream else 6)
        assert flight.bound == uri.removeprefix("grpc+tls://")


async def test_flight_that_cannot_begin_anew_tries_again(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are no files left, say; the capture goes on."""
    security = certificates.sign("first", "flight")
    feeds: Any = Feeds()
    failures, open_server = [1, 2], listener.open_server

    def opened(*arguments: Any) -> Any:
        if failures:
            failures.pop()
            raise port_error("127.0.0.1:0")
        return open_server(*arguments)

    async with serving_flight(feeds, "127.0.0.1:0", security=security) as flight:
        monkeypatch.setattr(listener, "open_server", opened)
        first = flight._server
        with capture_logs() as logs:
            certificates.sign("second", "flight")
            while flight._server is first:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
    assert not failures
    # one for each state of the files that was seen while openssl wrote them
    again = [line for line in logs if "it tries again" in line["event"]]
    assert 1 <= len(again) <= 2
