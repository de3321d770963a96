"""The captures of the cluster as workers of the owner: each runs shares of changefeeds.

The owner reads their records every second. A capture gets tables if both of its ports can be
reached from here. Once a share of it was lost, it gets none for a while, each time twice as long:
otherwise a capture that only seems to live would stop the changefeeds again and again.
"""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import grpc.aio
import pyarrow.flight as fl
import structlog
from pyspark_tidemark.connection import call_options, client
from pyspark_tidemark.options import Credentials
from tidemarkpb.v1.worker_pb2_grpc import WorkerServiceStub

from server.capture import metrics
from server.capture.worker.local_share import LocalWorker
from server.capture.worker.pool import Worker, stub_at
from server.capture.worker.remote import RemoteShare
from server.capture.worker.share import ShareStart, WorkerShare
from server.changefeed.captures import CaptureRecord
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from storage.model.errors import UnavailableError
from storage.tasks import gather

SHARES: Final = "shares"
"""The name of the directory of shares' sorted rows within a capture's data directory."""
_LOOK_EVERY_S: Final = 1.0
_REACH_S: Final = 2.0
_KNOWN_S: Final = 3.0
"""How long to wait for the first look: an unreachable capture's timeout and the metadata's answer.
"""
_LEFT_OUT_S, _LEFT_OUT_MAX_S = 10.0, 600.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """Credentials for connections between captures; all captures have the same files."""

    security: SecurityConfig
    token_file: str = ""

    def connect(self, address: str) -> grpc.aio.Channel:
        """A channel to another capture."""
        return connect(address, self.security, self.token_file)

    @property
    def credentials(self) -> Credentials:
        """The same as a Flight reader takes it."""
        security = self.security
        return Credentials(security.ca_path, security.cert_path, security.key_path, self.token_file)


class PeerCapture:
    """Implements `Worker`, and `RemoteWorker` of its shares, by another capture of the cluster."""

    comes_back = False

    def __init__(self, record: CaptureRecord, access: PeerAccess) -> None:
        self.record = record
        self._access = access
        self._losses = 0
        self._left_out_until_s = 0.0

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"capture {self.record.id} at {self.record.address}"

    @property
    def id(self) -> str:
        """See `Worker.id`."""
        return self.record.id

    @property
    def location(self) -> str:
        """The Flight location of its tables' rows, as `plan` gives it to readers."""
        scheme = "grpc+tls" if self._access.security.enabled else "grpc"
        return f"{scheme}://{self.record.flight_address}"

    @property
    def is_left_out(self) -> bool:
        """Whether it was lost a short time ago, so that it gets no tables yet."""
        return time.monotonic() < self._left_out_until_s

    @property
    def was_lost(self) -> bool:
        """Whether it was ever lost; it is then probed before it gets tables again."""
        return self._losses > 0

    def share(self, start: ShareStart) -> WorkerShare:
        """See `Worker.share`."""
        return RemoteShare.of(self, start)

    def connect(self) -> grpc.aio.Channel:
        """A channel for calls from the event loop."""
        return self._access.connect(self.record.address)

    @cached_property
    def stub(self) -> WorkerServiceStub:
        """The client for calls from any thread; it reconnects by itself."""
        return stub_at(self.record.address, self._access.security, self._access.token_file)

    def do_get(self, ticket: fl.Ticket, timeout_s: float) -> fl.FlightStreamReader:
        """Its rows, from any thread."""
        credentials = self._access.credentials
        return client(self.location, credentials).do_get(
            ticket, call_options(credentials, timeout_s)
        )

    def do_action(self, action: fl.Action, timeout_s: float) -> Iterator[fl.Result]:
        """Its answer to an action, from any thread."""
        credentials = self._access.credentials
        results: Iterator[fl.Result] = client(self.location, credentials).do_action(
            action, call_options(credentials, timeout_s)
        )
        return results

    def lost(self) -> None:
        """Leave it out for a while."""
        self._left_out_until_s = time.monotonic() + min(
            _LEFT_OUT_S * 2**self._losses, _LEFT_OUT_MAX_S
        )
        self._losses += 1

    kill = lost


class Peers:
    """Implements `Workers` over all captures that can be reached; `run` keeps them up to date.

    `own` are this capture's: itself, or its worker processes.
    """

    def __init__(
        self,
        identity: str,
        directory: Path,
        access: PeerAccess,
        executor: Executor,
        term: Callable[[], int],
        own: Sequence[Worker],
    ) -> None:
        self.executor = executor
        self._term = term
        self._id = identity
        self._directory = directory
        self._access = access
        self._own = tuple(own)
        self._reached: Mapping[str, PeerCapture] = {}
        self._refused: dict[str, str] = {}
        """Why captures get no tables, as it was last logged."""
        self._leaving: set[str] = set()
        """Captures that are drained, as the records of the next look will say."""
        self._asked = asyncio.Event()
        self._known = asyncio.Event()
        """Set while this capture is the owner and has looked at the others."""

    @property
    def term(self) -> int:
        """See `Workers`."""
        return self._term()

    def workers(self) -> Sequence[Worker]:
        """See `Workers`; this capture is one of them, whether it reaches its own ports or not."""
        left_out = {self._id, *self._leaving}
        others = (
            peer
            for key, peer in self._reached.items()
            if key not in left_out and not peer.is_left_out
        )
        return (*self._own, *others)

    async def wait_known(self) -> None:
        """See `Workers`: an owner that was elected just now has not looked at the others yet."""
        if not self._known.is_set():
            self._asked.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(_KNOWN_S):
                await self._known.wait()

    def refused(self) -> frozenset[str]:
        """The ids of captures that get nothing: they cannot be reached, or have another version."""
        # Not this one: even if it cannot reach its own advertised address, it runs logs.
        return frozenset(self._refused) - {self._id}

    def leave_out(self, identity: str) -> None:
        """Give no share of later runs to a capture that is being drained, although the records that
        were read last may not say so yet.
        """
        self._leaving.add(identity)

    def is_own(self, location: str) -> bool:
        """Whether its location sends readers to this capture."""
        own = self._reached.get(self._id)
        return own is not None and own.location == location

    def wipe(self, changefeed: str) -> None:
        """See `Workers`: other captures delete what they have of a share when it ends."""
        for directory in self._directory.glob(f"sorter/worker-*/{changefeed}"):
            shutil.rmtree(directory, ignore_errors=True)

    async def run(self, records: Callable[[], Awaitable[Sequence[CaptureRecord]]]) -> None:
        """Follow the captures' `records` until cancelled; they are empty while another capture is
        the owner.
        """
        try:
            while True:
                leaving = {*self._leaving}
                try:
                    await self._look(await records())
                    self._leaving -= leaving
                except UnavailableError as err:
                    _log.warning("captures cannot be looked up now", error=str(err))
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_EVERY_S):
                        await self._asked.wait()
                self._asked.clear()
        finally:
            metrics.SHARING_CAPTURES.clear()

    async def _look(self, records: Sequence[CaptureRecord]) -> None:
        own = next((each.version for each in records if each.id == self._id), "")
        # Without a record of its own this capture is not a member now, and must divide nothing.
        records = sorted(records, key=lambda each: each.id) if own else []
        reasons = await gather(self._reason_against(record, own) for record in records)
        reached: dict[str, PeerCapture] = {}
        refused: dict[str, str] = {}
        for record, reason in zip(records, reasons, strict=True):
            if reason:
                refused[record.id] = reason
            else:
                reached[record.id] = self._peer(record)
        self._log_changes(reached, refused)
        self._reached, self._refused = reached, refused
        for worker in self._own:
            if isinstance(worker, LocalWorker):
                worker.location = reached[self._id].location if self._id in reached else ""
        if own:
            self._known.set()
            metrics.SHARING_CAPTURES.set(len({*reached, self._id}))
        else:
            self._known.clear()
            metrics.SHARING_CAPTURES.clear()

    def _peer(self, record: CaptureRecord) -> PeerCapture:
        peer = self._reached.get(record.id)
        return peer if peer and peer.record == record else PeerCapture(record, self._access)

    async def _reason_against(self, record: CaptureRecord, own_version: str) -> str:
        """Why a capture can get no tables; empty: it can."""
        # A capture that serves is not probed each second: the loss of a share would show that it is
        # gone.
        peer = self._reached.get(record.id)
        if peer and peer.record == record and (not peer.was_lost or peer.is_left_out):
            return ""
        # The contract between captures (WorkerService) holds within one version only.
        if record.version != own_version:
            return f"its version is {record.version}, not {own_version}"
        return await _unreachable(record)

    def _log_changes(self, reached: Mapping[str, PeerCapture], refused: Mapping[str, str]) -> None:
        """Log which captures have come and gone."""
        for name in reached.keys() - self._reached.keys():
            _log.info("capture runs shares", capture=name, address=reached[name].record.address)
        for name in self._reached.keys() - reached.keys():
            _log.info("capture runs no shares any more", capture=name)
        for name, reason in refused.items():
            if self._refused.get(name) != reason:
                _log.warning("capture gets no tables", capture=name, reason=reason)


async def _unreachable(record: CaptureRecord) -> str:
    """Which port of a capture takes no connections; empty: both do."""
    for address in (record.address, record.flight_address):
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(_REACH_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, ValueError):
            return f"{address} cannot be reached from here"
        writer.close()
    return ""
