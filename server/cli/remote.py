"""The cluster that a `tidemark cli` command calls, and the errors of failed calls.

A `Remote` knows addresses; it connects for the block of one `async with`, to a capture, to the
coordinator that leads, to the metadata, or to the GC worker that leads.
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from tidemarkpb.v1.gc_pb2_grpc import GCServiceStub

from gcsafepoint.worker.election import read_leader
from gcsafepoint.worker.records import Records
from server.gc_worker.view import MetaRecords
from server.rpc.client import connect, metadata_at
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient
from storage.meta.client import EtcdMeta
from storage.model.errors import InvalidError, TidemarkError, UnavailableError

if TYPE_CHECKING:
    from tidemarkpb.v1.gc_pb2_grpc import GCServiceAsyncStub


CALL_S = 30.0


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


@dataclass(frozen=True, slots=True)
class Remote:
    """The cluster a command talks to."""

    server: str
    pd: str
    security: SecurityConfig
    token_file: str = ""
    """Sent to captures and GC workers only; other daemons do not use it."""

    @asynccontextmanager
    async def capture(self) -> AsyncIterator[grpc.aio.Channel]:
        """A channel to the capture for the block.

        Raises:
            CaptureUnavailableError: nobody listens there.
            RemoteError: it refused, and says why.
        """
        try:
            async with connect(self.server, self.security, self.token_file) as channel:
                yield channel
        except grpc.aio.AioRpcError as err:
            if _is_silent(err):
                raise CaptureUnavailableError(
                    f"no capture answers at {self.server}; start one with `tidemark capture` (or "
                    "`tidemark up`), or name its address with --server"
                ) from err
            raise RemoteError(_details(err)) from err

    @asynccontextmanager
    async def coordinator(self) -> AsyncIterator[PdClient]:
        """A coordinator's client for the block; raises PdUnavailableError if none answers."""
        async with PdClient.open(self.pd, self.security) as pd:
            yield pd

    def metadata(self) -> AbstractAsyncContextManager[EtcdMeta]:
        """The cluster's metadata for the block."""
        return metadata_at(self.pd, self.security)

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
                if err.code() == grpc.StatusCode.UNIMPLEMENTED:
                    raise NotServedError(
                        f"the coordinator at {address} does not have this call: {_details(err)}"
                    ) from err
                raise RemoteError(_details(err)) from err

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
            raise RemoteError(_details(err)) from err


def add_gc_worker_address(verb: argparse.ArgumentParser) -> None:
    """Add the flag that gives the GC leader's address."""
    verb.add_argument(
        "--gc-worker",
        default="",
        help="the GC leader's address (default: where it says it listens)",
    )


def _details(err: grpc.aio.AioRpcError) -> str:
    return err.details() or err.code().name


def _is_silent(err: grpc.aio.AioRpcError) -> bool:
    # A daemon that answers UNAVAILABLE says why, with a code of ours; gRPC's own has none.
    return err.code() == grpc.StatusCode.UNAVAILABLE and not _details(err).startswith("[TM:")
