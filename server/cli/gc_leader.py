"""How the `gc` verbs reach GC's records, which need no worker, and the GC leader, who alone runs rounds."""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from tidemarkpb.v1.gc_pb2_grpc import GCServiceStub

from gcsafepoint.worker.election import read_leader
from gcsafepoint.worker.records import Records
from server.cli.remote import Remote, RemoteError
from server.gc_worker.cluster import MetaRecords
from server.rpc.client import connect
from storage.model.errors import UnavailableError

if TYPE_CHECKING:
    from tidemarkpb.v1.gc_pb2_grpc import GCServiceAsyncStub


class GCLeaderUnavailableError(UnavailableError):
    """There is no GC leader to ask."""

    code = "ErrGCLeaderUnavailable"


def add_address(verb: argparse.ArgumentParser) -> None:
    """Add the flag for those who know better where the leader is."""
    verb.add_argument("--gc-worker", default="", help="the GC leader's address (default: where it says it listens)")


@asynccontextmanager
async def gc_records(remote: Remote) -> AsyncIterator[Records]:
    """GC's records for the block."""
    async with remote.metadata() as meta:
        yield MetaRecords(meta)


@asynccontextmanager
async def gc_leader(remote: Remote, address: str = "") -> "AsyncIterator[GCServiceAsyncStub]":
    """The GC leader's service for the block.

    Raises:
        GCLeaderUnavailableError: nobody leads, or the leader does not answer.
        RemoteError: it refused, and says why.
    """
    until = ""
    if not address:
        async with gc_records(remote) as records:
            leader = await read_leader(records)
        if leader is None or not leader.address:
            raise GCLeaderUnavailableError("no gc worker leads; start one with `tidemark gc-worker`")
        address, until = leader.address, f"; its lease ends {leader.lease}, then another worker may take over"
    try:
        async with connect(address, remote.security) as channel:
            yield GCServiceStub(channel)
    except grpc.aio.AioRpcError as err:
        details = err.details() or err.code().name
        if err.code() == grpc.StatusCode.UNAVAILABLE and not details.startswith("[TM:"):
            raise GCLeaderUnavailableError(f"the gc leader does not answer at {address}{until}") from err
        raise RemoteError(details) from err
