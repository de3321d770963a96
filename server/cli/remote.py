"""The cluster that a `tidemark cli` command calls, and the errors of failed calls.

A `Remote` knows addresses; it connects for the block of one `async with`, to a capture, to the
coordinator that leads, to the metadata, or to the GC worker that leads. Several clusters may run on
one machine: where only coordinators are named, the capture is one of theirs, and where a capture is
named, the coordinators must be those of its cluster.
"""

import argparse
import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio
from tidemarkpb.v1 import capture_pb2
from tidemarkpb.v1.capture_pb2_grpc import CaptureServiceStub
from tidemarkpb.v1.gc_pb2_grpc import GCServiceStub

from gcsafepoint.worker.election import read_leader
from gcsafepoint.worker.records import Records
from server.changefeed.captures import OtherClusterError, registered_captures
from server.gc_worker.view import MetaRecords
from server.rpc.client import connect, connection_fault, diagnose, metadata_at
from server.rpc.credentials import SecurityConfig
from server.rpc.members import addresses_of
from server.rpc.pd import PdClient, PdUnavailableError
from storage.meta.client import EtcdMeta
from storage.meta.errors import MetaUnavailableError
from storage.model.errors import InvalidError, TidemarkError, UnavailableError

if TYPE_CHECKING:
    from tidemarkpb.v1.gc_pb2_grpc import GCServiceAsyncStub


CALL_S = 30.0
DEFAULT_SERVER: Final = "127.0.0.1:8300"
DEFAULT_PD: Final = "127.0.0.1:2379"
_LOOKUP_S = 5.0
_REPEATS: Final = 2
_CONNECT_S = 2.0
_CAPTURE_CONNECTION_MS: Final = 10_000
"""A capture on a machine that is overloaded is called silent only after this time."""


class CaptureUnavailableError(UnavailableError):
    """No capture answers."""

    code = "ErrCaptureUnavailable"


class GCLeaderUnavailableError(UnavailableError):
    """No GC worker leads now."""

    code = "ErrGCLeaderUnavailable"


class NotServedError(InvalidError):
    """The daemon does not have the call: it is a real PD, or another version."""

    code = "ErrNotServed"


class RemoteError(TidemarkError):
    """The daemon's error, whose text begins with the daemon's code if it has one."""

    code = "ErrRemote"

    def __init__(self, message: str) -> None:
        super().__init__(message if message.startswith("[") else f"[TM:{self.code}] {message}")

    def __str__(self) -> str:
        return self.message


@dataclass(slots=True)
class Remote:
    """The cluster a command talks to."""

    server: str
    """A capture's address; empty: not named."""
    pd: str
    """The coordinators' addresses; empty: not named."""
    security: SecurityConfig
    token_file: str = ""
    """Sent to captures and GC workers only; other daemons do not use it."""
    _is_checked: bool = field(default=False, init=False)

    @asynccontextmanager
    async def capture(self) -> AsyncIterator[grpc.aio.Channel]:
        """A channel to the capture for the block.

        Raises:
            CaptureUnavailableError: nobody listens there.
            OtherClusterError: `server` and `pd` name different clusters.
            RemoteError: it refused, and says why.
        """
        if self.server and self.pd:
            await self._check_cluster()
        address = self.server or (await self._registered_capture() if self.pd else DEFAULT_SERVER)
        async with self._capture_at(address) as channel:
            yield channel

    async def coordinators(self) -> str:
        """Return the coordinators' addresses.

        Raises:
            CaptureUnavailableError: only a capture is named, and it does not answer.
            OtherClusterError: they belong to another cluster than the capture that is named.
        """
        if self.server:
            await self._check_cluster()
        return self.pd or DEFAULT_PD

    @asynccontextmanager
    async def coordinator(self) -> AsyncIterator[PdClient]:
        """A coordinator's client for the block; raises PdUnavailableError if none answers."""
        addresses = await self.coordinators()
        async with self.reaching(addresses), PdClient.open(addresses, self.security) as pd:
            yield pd

    @asynccontextmanager
    async def metadata(self) -> AsyncIterator[EtcdMeta]:
        """The cluster's metadata for the block; raises PdUnavailableError if none answers."""
        addresses = await self.coordinators()
        async with self.reaching(addresses), metadata_at(addresses, self.security) as meta:
            yield meta

    @asynccontextmanager
    async def reaching(self, addresses: str) -> AsyncIterator[None]:
        """Have the block's error say why no connection to the coordinators is possible."""
        try:
            yield
        except (PdUnavailableError, MetaUnavailableError):
            checks = [connection_fault(each, self.security) for each in addresses_of(addresses)]
            faults = await asyncio.gather(*checks)
            if not all(faults):
                raise  # one can be connected to: the error says what it answers
            raise PdUnavailableError(
                f"no coordinator answers: {'; '.join(faults)}. Start one with `tidemark "
                "coordinator`, or name the coordinators with --pd"
            ) from None

    @asynccontextmanager
    async def _capture_at(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        try:
            async with connect(
                address, self.security, self.token_file, connection_ms=_CAPTURE_CONNECTION_MS
            ) as channel:
                yield channel
        except grpc.aio.AioRpcError as err:
            if _is_silent(err):
                raise CaptureUnavailableError(
                    f"no capture answers: {await diagnose(address, self.security)}. Start one "
                    "with `tidemark capture` (or `tidemark up`), or name its address with --server"
                ) from err
            raise _refused(err, "capture", address) from err

    async def _registered_capture(self) -> str:
        """Return the address of a capture that is registered at the coordinators that are named:
        the owner's, if it can be connected to. Captures in containers register addresses that mean
        nothing outside; there the default address counts, if a registered capture answers.
        """
        try:
            registered = await self._registered()
        except InvalidError as err:
            raise CaptureUnavailableError(
                f"the coordinator {self.pd} does not say where its captures are: {err}; name one "
                "with --server"
            ) from err
        if not registered:
            raise CaptureUnavailableError(
                f"no capture is registered at the coordinator {self.pd}; start one with `tidemark "
                f"capture --coordinator {self.pd}`, or name its address with --server"
            )
        for address in registered.values():
            async with connect(address, self.security) as channel:
                with suppress(TimeoutError):
                    await asyncio.wait_for(channel.channel_ready(), _CONNECT_S)
                    return address
        with suppress(TidemarkError, TimeoutError):
            if not registered.keys().isdisjoint(await self._captures_at(DEFAULT_SERVER)):
                return DEFAULT_SERVER
        return next(iter(registered.values()))

    async def _captures_at(self, address: str) -> set[str]:
        """Return the ids of all captures of the cluster of the capture at an address."""
        async with asyncio.timeout(_LOOKUP_S), self._capture_at(address) as channel:
            request = capture_pb2.ListCapturesRequest()
            answer = await CaptureServiceStub(channel).ListCaptures(request, timeout=CALL_S)
            return {capture.id for capture in answer.captures}

    async def _registered(self) -> dict[str, str]:
        """Return the addresses of the registered captures by their ids, the owner's first."""
        addresses = self.pd or DEFAULT_PD
        async with self.reaching(addresses), metadata_at(addresses, self.security) as meta:
            return await registered_captures(meta)

    async def _check_cluster(self) -> None:
        """Check that the capture that is named is registered at the coordinators.

        Where both are named and one does not answer, or may not be asked, nothing is checked: a
        cluster that is half down has answers, too.
        """
        if self._is_checked:
            return
        try:
            captures = await self._captures_at(self.server)
            async with asyncio.timeout(_LOOKUP_S):
                registered = await self._registered()
        except CaptureUnavailableError:
            if not self.pd:
                raise
            return
        except (TidemarkError, TimeoutError):
            return  # the call that follows says what is wrong there
        if captures and captures.isdisjoint(registered):
            default = "" if self.pd else " (the default)"
            raise OtherClusterError.of_capture(
                self.server, f"{self.pd or DEFAULT_PD}{default}", "--pd"
            )
        self._is_checked = True

    @asynccontextmanager
    async def leader(self) -> AsyncIterator[tuple[PdClient, grpc.aio.Channel]]:
        """A coordinator's client and a channel to the one that leads, for the block.

        Raises:
            PdUnavailableError: none answers.
            NotServedError: it is of another kind or version.
            RemoteError: it refused, and says why.
        """
        async with self.coordinator() as pd:
            # Only the leader gives timestamps: one that is wrongly believed to lead is left here.
            await pd.tso()
            address = await pd.leader_address()
            try:
                async with connect(address, self.security) as channel:
                    yield pd, channel
            except grpc.aio.AioRpcError as err:
                raise _refused(err, "coordinator", address) from err

    @asynccontextmanager
    async def gc_records(self) -> AsyncIterator[Records]:
        """GC's records for the block; they need no worker."""
        async with self.metadata() as meta:
            yield MetaRecords(meta)

    @asynccontextmanager
    async def gc_leader(self, address: str = "") -> "AsyncIterator[GCServiceAsyncStub]":
        """The service of the GC worker that leads, for the block; it alone runs rounds.

        Raises:
            GCLeaderUnavailableError: nobody leads, or the leader does not answer.
            RemoteError: it refused, and says why.
        """
        until = ""
        if not address:
            async with self.gc_records() as records:
                leader = await read_leader(records)
            # A TiDB that leads GC records no address: it has no such service.
            if leader is None or not leader.address:
                raise GCLeaderUnavailableError(
                    "no gc worker leads; start one with `tidemark gc-worker`"
                )
            address, until = (
                leader.address,
                f"; its lease ends {leader.lease}, then another worker may take over",
            )
        try:
            async with connect(address, self.security, self.token_file) as channel:
                yield GCServiceStub(channel)
        except grpc.aio.AioRpcError as err:
            if _is_silent(err):
                raise GCLeaderUnavailableError(
                    f"the gc leader does not answer at {address}{until}"
                ) from err
            raise _refused(err, "GC worker", address) from err


async def make_change(call: Any, request: Any) -> Any:
    """Call for a change of a changefeed. While no answer says whether it is made, the request is
    repeated: by its request_id it is made once, and not refused as its own duplicate.
    """
    request.request_id = uuid.uuid4().hex
    for _ in range(_REPEATS):
        try:
            return await call(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as err:
            is_late = err.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            if not (is_late or "ErrChangeInterrupted" in _details(err)):
                raise
    return await call(request, timeout=CALL_S)


def add_gc_worker_address(verb: argparse.ArgumentParser) -> None:
    """Add the flag that gives the GC leader's address."""
    verb.add_argument(
        "--gc-worker",
        default="",
        help="the GC leader's address (default: where it says it listens)",
    )


def _refused(err: grpc.aio.AioRpcError, kind: str, address: str) -> TidemarkError:
    if err.code() == grpc.StatusCode.UNIMPLEMENTED:
        return NotServedError(
            f"the server at {address} does not have this call; it is no {kind}, or one of another "
            f"version: {_details(err)}"
        )
    return RemoteError(_details(err))


def _details(err: grpc.aio.AioRpcError) -> str:
    return err.details() or err.code().name


def _is_silent(err: grpc.aio.AioRpcError) -> bool:
    # A daemon that answers UNAVAILABLE says why, with a code of ours; gRPC's own has none.
    return err.code() == grpc.StatusCode.UNAVAILABLE and not _details(err).startswith("[TM:")
