"""Forwards calls to the capture that has to carry them out: the owner, or the one that runs the
changefeed. So a client may call any capture. `Router` forwards gRPC calls, `FlightForwarder` those
of Flight.

A plan names for each slice the capture that has its rows. Rows are forwarded only for a reader that
cannot reach that capture.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
import pyarrow as pa
import pyarrow.flight as fl
from pyspark_tidemark import tracing
from tidemarkpb.v1 import capture_pb2 as capturepb
from tidemarkpb.v1.capture_pb2_grpc import CaptureServiceStub

from server.capture.errors import (
    CaptureAddressTakenError,
    ChangeInterruptedError,
    NotOwnerError,
)
from server.capture.maintainers import Maintainers
from server.capture.membership import Membership
from server.capture.worker.moves import MOVE_S
from server.capture.worker.peers import PeerAccess, PeerCapture
from server.capture.worker.remote import error_of_flight
from server.changefeed.captures import CaptureRecord
from server.rpc.client import connection_fault
from server.rpc.errors import StatusError, passed_on
from storage.meta.errors import MetaUnavailableError
from storage.model.errors import TidemarkError, UnavailableError

_FORWARDED: Final = "tidemark-forwarded"
_LOCAL: Final = "tidemark-local"
_FORWARD_TIMEOUT_S: Final = 30.0
_LONG_CALL_TIMEOUTS_S: Final = dict.fromkeys(("MoveTable", "SplitTable"), MOVE_S + 15.0)
"""A little longer than such a call may take: the capture that runs it ends it first, with an error
that says more.
"""
_NEVER_REPEATED: Final = frozenset({"ResignOwner"})
"""Calls for the present owner, which must not reach the next one."""
_READS: Final = frozenset({"ListChangefeeds", "QueryChangefeed", "CheckChangefeed"})
_MADE_ONCE: Final = frozenset(
    f"{change}Changefeed" for change in ("Create", "Pause", "Resume", "Update", "Remove")
) | {"AddReader", "RemoveReader"}
"""Changes that happen once, however often they are sent, by the `request_id` of the request."""
_REPEATABLE: Final = _READS | _MADE_ONCE | {"DrainCapture"}
"""Calls that may be sent again after a lost answer."""
_CONNECT_S: Final = 3.0
_UNANSWERED: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_LOCAL_TIMEOUT_S: Final = 3.0
_FIND_TIMEOUT_S: Final = 15.0
"""How long to wait until some capture runs the changefeed: a little longer than the lease of a dead
one.
"""
_POLL_S: Final = 0.05
_FLIGHT_FIND_TIMEOUT_S: Final = 2.0
"""Short, since readers try again by themselves."""
_FLIGHT_CHECK_S: Final = 1.0
_FLIGHT_ACTION_TIMEOUT_S: Final = 30.0
_FLIGHT_ROWS_TIMEOUT_S: Final = 3600.0
"""For all rows of a slice. Its reader may be slow, and would have to begin the slice again after a
timeout.
"""
A = TypeVar("A")
T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]
Stub = Callable[[grpc.aio.Channel], Any]


class Router:
    """Runs gRPC calls here, or on the capture that has to carry them out."""

    def __init__(
        self, maintainers: Maintainers, membership: Membership, access: PeerAccess
    ) -> None:
        self._maintainers = maintainers
        self._membership = membership
        self._access = access

    async def carry_out(
        self,
        stub: Stub,
        method: str,
        request: Any,
        context: Context,
        call: Callable[[], Awaitable[A]],
        changefeed: str = "",
    ) -> Any:
        """Run `call` if this capture is the one for it; else send the request to the capture that
        runs `changefeed`, or to the owner.

        Raises:
            NotOwnerError: no capture can carry it out within `_FIND_TIMEOUT_S`.
            ChangeInterruptedError: the change may have been made.
            TidemarkError: the error of `call`, or of that capture.
        """
        is_forwarded = _has(context, _FORWARDED)
        timeout_s = _LONG_CALL_TIMEOUTS_S.get(method, _FORWARD_TIMEOUT_S)
        deadline_s = asyncio.get_running_loop().time() + _FIND_TIMEOUT_S
        interrupted: ChangeInterruptedError | None = None
        while True:
            try:
                capture = await self.find(changefeed)
                if capture is None:
                    return await call()
                # A call is forwarded once. While an election is under way two captures may each
                # take the other one for the owner, and would pass the call to and fro.
                if is_forwarded:
                    raise NotOwnerError("the changefeed has moved just now; ask again")
                return await self._ask(capture, stub, method, request, _FORWARDED, timeout_s)
            except (UnavailableError, StatusError) as err:
                if method not in _READS:
                    interrupted = _interrupted(method, err) or interrupted
                again = not is_forwarded and _is_repeated(method, err)
                if not again or asyncio.get_running_loop().time() > deadline_s:
                    raise (interrupted or err) from None
            await asyncio.sleep(_POLL_S)

    async def find(
        self, changefeed: str = "", timeout_s: float = _FIND_TIMEOUT_S
    ) -> CaptureRecord | None:
        """Find the capture that runs `changefeed`, or the owner if `changefeed` is empty. None
        means this capture, which also answers that a changefeed does not exist.

        Waits up to `timeout_s` for a changefeed that moves to another capture.

        Raises:
            NotOwnerError: no capture runs it now, or none is the owner.
        """
        if self._maintainers.has(changefeed):
            return None
        try:
            async with asyncio.timeout(timeout_s):
                # While it moves, no capture runs a log's changefeed for a moment; after a crash,
                # until the dead capture's lease ends.
                while changefeed and await self._membership.has_maintainer(changefeed):
                    capture = await self._membership.maintainer(changefeed)
                    if self._maintainers.has(changefeed):
                        return None
                    if capture is not None and capture.id != self._membership.id:
                        return capture
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise NotOwnerError(
                f"changefeed {changefeed} is on its way to another capture; ask again"
            ) from None
        if self._maintainers.owner.is_active:
            return None
        owner = await self._membership.owner()
        if owner.id == self._membership.id:
            raise NotOwnerError("this capture begins to own the changefeeds, or ends; ask again")
        return owner

    async def ask_others(self, stub: Stub, method: str, request: Any) -> list[Any]:
        """Send the request to all other captures that run logs; returns the answers of those that
        answer.
        """
        captures = await self._membership.maintaining()
        calls = [
            self._ask(capture, stub, method, request, _LOCAL, _LOCAL_TIMEOUT_S)
            for capture in captures
            if capture.id != self._membership.id
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def check_address(self, address: str) -> None:
        """Check that no other living capture answers at `address`. A record of that address whose
        capture does not answer is one of a capture that has just died.

        Raises:
            CaptureAddressTakenError: another capture answers there.
        """
        own, answered_by = self._membership.id, ""
        # A failed check must not keep a capture from starting.
        with suppress(TidemarkError):
            for record in [member.record for member in await self._membership.members()]:
                if record.address == address and record.id != own:
                    answer = await self._ask(
                        record,
                        CaptureServiceStub,
                        "ListCaptures",
                        capturepb.ListCapturesRequest(),
                        _LOCAL,
                        _LOCAL_TIMEOUT_S,
                    )
                    answered_by = answer.answered_by
        if answered_by not in ("", own):
            raise CaptureAddressTakenError(
                f"capture {answered_by} answers at {address}, so that this one could not be "
                "reached: give each capture an --advertise-addr of its own"
            )

    async def _ask(
        self,
        capture: CaptureRecord,
        stub: Stub,
        method: str,
        request: Any,
        mark: str,
        timeout_s: float,
    ) -> Any:
        async with self._access.connect(capture.address) as channel:
            try:
                async with asyncio.timeout(min(_CONNECT_S, timeout_s)):
                    await channel.channel_ready()
            except TimeoutError:
                # Nothing was sent, so the caller may try again: the place of a dead capture is
                # taken within seconds.
                fault = await connection_fault(capture.address, self._access.security)
                raise NotOwnerError(
                    f"capture {capture.id} does not answer: {fault or capture.address}; ask again"
                ) from None
            forward = getattr(stub(channel), method)
            try:
                return await forward(request, timeout=timeout_s, metadata=((mark, "1"),))
            except grpc.aio.AioRpcError as err:
                raise passed_on(err) from err


def _is_repeated(method: str, err: TidemarkError) -> bool:
    """Whether a call that failed with `err` is sent again, to whichever capture is then the one."""
    # The changefeed has just moved, or an election is under way, for example because the owner was
    # too busy to renew its lease. Nothing was changed.
    if err.code == NotOwnerError.code:
        return method not in _NEVER_REPEATED
    # The capture has just died, hangs, or waits for a metadata server that hangs.
    unanswered = _is_unanswered(err) or err.code in (
        ChangeInterruptedError.code,
        MetaUnavailableError.code,
    )
    return unanswered and method in _REPEATABLE


def _is_unanswered(err: TidemarkError) -> bool:
    return isinstance(err, StatusError) and err.status in _UNANSWERED


def _interrupted(method: str, err: TidemarkError) -> ChangeInterruptedError | None:
    """The error that says that the change may have been made; None: it was not made."""
    if err.code == ChangeInterruptedError.code:
        return ChangeInterruptedError(err.message)
    if not _is_unanswered(err):
        return None
    again = "; or send it again with the same request_id" if method in _MADE_ONCE else ""
    return ChangeInterruptedError(
        "whether the change is made is not known, as the capture that runs the changefeed gave no "
        f"answer ({err.message}): see `tidemark cli changefeed query`{again}"
    )


def is_local(context: Context) -> bool:
    """Whether the caller is a capture that wants this capture's own changefeeds only."""
    return _has(context, _LOCAL)


def _has(context: Context, mark: str) -> bool:
    return any(key == mark for key, _ in context.invocation_metadata() or ())


class FlightForwarder:
    """Forwards Flight calls. Used by Flight's threads, while `loop` runs.

    Threads of `executor` make the calls, so that a call to a capture that hangs can be abandoned
    when another capture takes over the changefeed.
    """

    def __init__(
        self,
        router: Router,
        access: PeerAccess,
        loop: asyncio.AbstractEventLoop,
        executor: Executor,
    ) -> None:
        self._router = router
        self._access = access
        self._loop = loop
        self._executor = executor

    def remote_action(self, changefeed: str) -> Callable[[str, bytes], bytes] | None:
        """Return a function that sends an action's name and body to the capture that runs the
        changefeed, and returns its answer. None means that this capture runs it; this one also
        answers that a changefeed does not exist.

        Raises:
            NotOwnerError: no capture runs it now.
        """
        peer = self._peer(changefeed)
        if peer is None:
            return None

        def forward(name: str, body: bytes) -> bytes:
            def do_action() -> bytes:
                [result] = peer.do_action(fl.Action(name, body), _FLIGHT_ACTION_TIMEOUT_S)
                answer: bytes = result.body.to_pybytes()
                return answer

            return self._call_runner(changefeed, peer, do_action)

        return forward

    def read(
        self, changefeed: str, table: str, start_ts: int, end_ts: int, *, before: bool
    ) -> tuple[pa.Schema, Iterator[pa.RecordBatch]] | None:
        """Read the rows from the capture that runs the changefeed (see `Feeds.read`); None: this
        capture runs it.

        Raises:
            NotOwnerError: no capture runs it now.
        """
        peer = self._peer(changefeed)
        if peer is None:
            return None
        document = {
            "changefeed": changefeed,
            "table": table,
            "start": start_ts,
            "end": end_ts,
            "before": before,
        }
        if traceparent := tracing.current().traceparent:
            document["traceparent"] = traceparent
        ticket = fl.Ticket(json.dumps(document).encode())

        def open_stream() -> tuple[fl.FlightStreamReader, pa.Schema]:
            stream = peer.do_get(ticket, _FLIGHT_ROWS_TIMEOUT_S)
            return stream, stream.schema

        stream, schema = self._call_runner(changefeed, peer, open_stream)
        return schema, self._batches(changefeed, peer, stream)

    def _batches(
        self, changefeed: str, peer: PeerCapture, stream: fl.FlightStreamReader
    ) -> Iterator[pa.RecordBatch]:
        def next_batch() -> pa.RecordBatch | None:
            try:
                return stream.read_chunk().data
            except StopIteration:
                return None

        while (batch := self._call_runner(changefeed, peer, next_batch)) is not None:
            yield batch

    def _call_runner(self, changefeed: str, peer: PeerCapture, call: Callable[[], T]) -> T:
        """Run `call`, which asks `peer`, and abandon it when `peer` no longer runs the changefeed.

        Raises:
            NotOwnerError: another capture runs the changefeed now.
            TidemarkError: the peer's error.
        """
        answer = self._executor.submit(call)
        while True:
            try:
                return answer.result(_FLIGHT_CHECK_S)
            except (fl.FlightError, pa.ArrowException) as err:
                raise error_of_flight(peer.name, err) from err
            except TimeoutError:
                # A capture that hangs would never answer, while the changefeed runs elsewhere.
                runner = self._peer(changefeed)
                if runner is None or runner.record != peer.record:
                    raise NotOwnerError(
                        f"changefeed {changefeed} has gone to another capture; ask again"
                    ) from None

    def _peer(self, changefeed: str) -> PeerCapture | None:
        """Find the capture that runs the changefeed; None: this one."""
        search = asyncio.run_coroutine_threadsafe(
            self._router.find(changefeed, _FLIGHT_FIND_TIMEOUT_S), self._loop
        )
        try:
            capture = search.result(2 * _FLIGHT_FIND_TIMEOUT_S)
        except TimeoutError:
            search.cancel()
            raise NotOwnerError(
                "the metadata does not say who runs the changefeed; ask again"
            ) from None
        return None if capture is None else PeerCapture(capture, self._access)
