"""Calls that one capture carries out: the owner, or the one that runs a changefeed. Any capture
takes them, and passes them on to it: `Router` those of gRPC, `FlightForwarder` those of Flight, so
that a reader may ask any capture.

A plan's slices name the capture that has the rows, so rows pass through here only where a reader
cannot reach that one.
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
_FORWARD_S: Final = 30.0
_LONG_CALLS_S: Final = dict.fromkeys(("MoveTable", "SplitTable"), MOVE_S + 15.0)
"""A little longer than such a call may take, since the capture that runs it decides about its
timeout.
"""
_OF_THIS_OWNER: Final = frozenset({"ResignOwner"})
"""Calls that are meant for the present owner and are not repeated at the next one."""
_READS: Final = frozenset({"ListChangefeeds", "QueryChangefeed", "CheckChangefeed"})
_REPEATABLE: Final = _READS | {"CreateChangefeed", "PauseChangefeed", "DrainCapture"}
"""Calls that may be made several times; by its `request_id` a creation is carried out once."""
_CONNECT_S: Final = 3.0
_SILENT: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_LOCAL_S: Final = 3.0
_MOVES_S: Final = 15.0
"""How long to look for the new runner of a changefeed: a little longer than the lease of a dead
capture.
"""
_LOOK_EVERY_S: Final = 0.05
_FLIGHT_FIND_S: Final = 2.0
"""Readers ask again: a changefeed on its way to another capture is not waited for here."""
_FLIGHT_LOOK_EVERY_S: Final = 1.0
_FLIGHT_ACTION_S: Final = 30.0
_FLIGHT_ROWS_S: Final = 3600.0
"""For all rows of a slice: its reader may be slow, and one that is cut off begins it anew."""
A = TypeVar("A")
T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]
Stub = Callable[[grpc.aio.Channel], Any]


class Router:
    """Finds the capture for a call."""

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
            NotOwnerError: there is none for `_MOVES_S`.
            ChangeInterruptedError: an earlier attempt may have made the change.
            TidemarkError: what that capture raises.
        """
        is_forwarded, limit_s = _has(context, _FORWARDED), _LONG_CALLS_S.get(method, _FORWARD_S)
        gives_up_s = asyncio.get_running_loop().time() + _MOVES_S
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
                return await self._ask(capture, stub, method, request, _FORWARDED, limit_s)
            except (UnavailableError, StatusError) as err:
                if method not in _READS:
                    interrupted = _interrupted(method, err) or interrupted
                again = not is_forwarded and _is_repeated(method, err)
                if not again or asyncio.get_running_loop().time() > gives_up_s:
                    raise (interrupted or err) from None
            await asyncio.sleep(_LOOK_EVERY_S)

    async def find(self, changefeed: str = "", moves_s: float = _MOVES_S) -> CaptureRecord | None:
        """The capture that runs a changefeed, without one the owner; None: this one, which also
        answers for changefeeds that there are not. One on its way to another capture is waited for.

        Raises:
            NotOwnerError: there is none at this moment.
        """
        if self._maintainers.has(changefeed):
            return None
        try:
            async with asyncio.timeout(moves_s):
                # A changefeed of a log may be with nobody for a moment, or, after a capture has
                # died, for as long as its lease lasts.
                while changefeed and await self._membership.has_maintainer(changefeed):
                    capture = await self._membership.maintainer(changefeed)
                    if self._maintainers.has(changefeed):
                        return None
                    if capture is not None and capture.id != self._membership.id:
                        return capture
                    await asyncio.sleep(_LOOK_EVERY_S)
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
        """Ask the other captures about their own changefeeds; captures that do not answer are left
        out.
        """
        captures = await self._membership.maintaining()
        calls = [
            self._ask(capture, stub, method, request, _LOCAL, _LOCAL_S)
            for capture in captures
            if capture.id != self._membership.id
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def check_address(self, address: str) -> None:
        """See that calls for this capture would not reach another one at `address`. Where nobody
        answers, a capture has died there a moment ago.

        Raises:
            CaptureAddressTakenError: they would.
        """
        own, answered_by = self._membership.id, ""
        # What cannot be asked must not keep a capture from starting.
        with suppress(TidemarkError):
            for record in [member.record for member in await self._membership.members()]:
                if record.address == address and record.id != own:
                    answer = await self._ask(
                        record,
                        CaptureServiceStub,
                        "ListCaptures",
                        capturepb.ListCapturesRequest(),
                        _LOCAL,
                        _LOCAL_S,
                    )
                    answered_by = answer.answered_by
        if answered_by not in ("", own):
            raise CaptureAddressTakenError(
                f"capture {answered_by} answers at {address}, so that this one could not be "
                "reached: give each capture an --advertise-addr of its own"
            )

    async def _ask(
        self, capture: CaptureRecord, stub: Stub, method: str, request: Any, mark: str, for_s: float
    ) -> Any:
        async with self._access.connect(capture.address) as channel:
            try:
                async with asyncio.timeout(min(_CONNECT_S, for_s)):
                    await channel.channel_ready()
            except TimeoutError:
                # Nothing was sent: if it has died, another one takes its place within seconds.
                fault = await connection_fault(capture.address, self._access.security)
                raise NotOwnerError(
                    f"capture {capture.id} does not answer: {fault or capture.address}; ask again"
                ) from None
            forward = getattr(stub(channel), method)
            try:
                return await forward(request, timeout=for_s, metadata=((mark, "1"),))
            except grpc.aio.AioRpcError as err:
                raise passed_on(err) from err


def _is_repeated(method: str, err: TidemarkError) -> bool:
    """Whether a call that failed so is made again, at whoever is the one for it by then."""
    # It began to move after it was found; or an election is under way, as when the owner was too
    # busy to renew its lease. Nothing was changed.
    if err.code == NotOwnerError.code:
        return method not in _OF_THIS_OWNER
    # The owner has died a moment ago, hangs, or waits for a metadata server that does.
    silent = _is_silent(err) or err.code in (ChangeInterruptedError.code, MetaUnavailableError.code)
    return silent and method in _REPEATABLE


def _is_silent(err: TidemarkError) -> bool:
    return isinstance(err, StatusError) and err.status in _SILENT


def _interrupted(method: str, err: TidemarkError) -> ChangeInterruptedError | None:
    """The error of a change that may have been carried out; None: it has not been."""
    if err.code == ChangeInterruptedError.code:
        return ChangeInterruptedError(err.message)
    if not _is_silent(err):
        return None
    again = "; or send it again with the same request_id" if method == "CreateChangefeed" else ""
    return ChangeInterruptedError(
        "whether the change is made is not known, as the capture that runs the changefeed gave no "
        f"answer ({err.message}): see `tidemark cli changefeed query`{again}"
    )


def is_local(context: Context) -> bool:
    """Whether another capture asks for this capture's own changefeeds only."""
    return _has(context, _LOCAL)


def _has(context: Context, mark: str) -> bool:
    return any(key == mark for key, _ in context.invocation_metadata() or ())


class FlightForwarder:
    """Passes calls on; called from Flight's threads, while `loop` runs.

    The calls are made in threads of `executor`: one to a capture that hangs is left alone when
    another capture takes its place.
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

    def elsewhere(self, changefeed: str) -> Callable[[str, bytes], bytes] | None:
        """Return a function that sends an action's name and body to the capture that runs a
        changefeed; None: it is this capture, which also answers for unknown changefeeds.

        Raises:
            NotOwnerError: nobody runs it at this moment.
        """
        peer = self._peer(changefeed)
        if peer is None:
            return None

        def act(name: str, body: bytes) -> bytes:
            def ask() -> bytes:
                [result] = peer.do_action(fl.Action(name, body), _FLIGHT_ACTION_S)
                answer: bytes = result.body.to_pybytes()
                return answer

            return self._call_runner(changefeed, peer, ask)

        return act

    def read(
        self, changefeed: str, table: str, start_ts: int, end_ts: int, *, before: bool
    ) -> tuple[pa.Schema, Iterator[pa.RecordBatch]] | None:
        """See `Feeds.read`: the rows from the capture that runs the changefeed; None: it is this
        one.

        Raises:
            NotOwnerError: nobody runs it at this moment.
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

        def opened() -> tuple[fl.FlightStreamReader, pa.Schema]:
            stream = peer.do_get(ticket, _FLIGHT_ROWS_S)
            return stream, stream.schema

        stream, schema = self._call_runner(changefeed, peer, opened)
        return schema, self._batches(changefeed, peer, stream)

    def _batches(
        self, changefeed: str, peer: PeerCapture, stream: fl.FlightStreamReader
    ) -> Iterator[pa.RecordBatch]:
        def following() -> pa.RecordBatch | None:
            try:
                return stream.read_chunk().data
            except StopIteration:
                return None

        while (batch := self._call_runner(changefeed, peer, following)) is not None:
            yield batch

    def _call_runner(self, changefeed: str, peer: PeerCapture, call: Callable[[], T]) -> T:
        """Call another capture for as long as it runs the changefeed; its errors are raised here
        again.
        """
        answering = self._executor.submit(call)
        while True:
            try:
                return answering.result(_FLIGHT_LOOK_EVERY_S)
            except (fl.FlightError, pa.ArrowException) as err:
                raise error_of_flight(peer.name, err) from err
            except TimeoutError:
                now = self._peer(changefeed)
                if now is None or now.record != peer.record:
                    raise NotOwnerError(
                        f"changefeed {changefeed} has gone to another capture; ask again"
                    ) from None

    def _peer(self, changefeed: str) -> PeerCapture | None:
        """The capture to ask; None: this one."""
        finding = asyncio.run_coroutine_threadsafe(
            self._router.find(changefeed, _FLIGHT_FIND_S), self._loop
        )
        try:
            capture = finding.result(2 * _FLIGHT_FIND_S)
        except TimeoutError:
            finding.cancel()
            raise NotOwnerError(
                "the metadata does not say who runs the changefeed; ask again"
            ) from None
        return None if capture is None else PeerCapture(capture, self._access)
