"""Flight calls for changefeeds that run on another capture: they are passed on to it, so that a
reader may ask any capture.

A plan's slices name the capture that has the rows, so rows pass through here only where a reader
cannot reach that one.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Final, TypeVar

import pyarrow as pa
import pyarrow.flight as fl

from server.capture.errors import NotOwnerError
from server.capture.routing import Router
from server.capture.worker.peers import PeerAccess, PeerCapture
from server.capture.worker.remote import error_of_flight

_FIND_S: Final = 2.0
"""Readers ask again: a changefeed on its way to another capture is not waited for here."""
_LOOK_EVERY_S: Final = 1.0
_ACTION_S: Final = 30.0
_ROWS_S: Final = 300.0
T = TypeVar("T")


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
        """How to ask the capture that runs a changefeed: the action's name and body in, its answer
        out; None: it is this one, which also answers for changefeeds that there are not.

        Raises:
            NotOwnerError: nobody runs it at this moment.
        """
        peer = self._peer(changefeed)
        if peer is None:
            return None

        def act(name: str, body: bytes) -> bytes:
            def ask() -> bytes:
                [result] = peer.do_action(fl.Action(name, body), _ACTION_S)
                answer: bytes = result.body.to_pybytes()
                return answer

            return self._asked(changefeed, peer, ask)

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
        ticket = fl.Ticket(json.dumps(document).encode())

        def opened() -> tuple[fl.FlightStreamReader, pa.Schema]:
            stream = peer.do_get(ticket, _ROWS_S)
            return stream, stream.schema

        stream, schema = self._asked(changefeed, peer, opened)
        return schema, self._batches(changefeed, peer, stream)

    def _batches(
        self, changefeed: str, peer: PeerCapture, stream: fl.FlightStreamReader
    ) -> Iterator[pa.RecordBatch]:
        def following() -> pa.RecordBatch | None:
            try:
                return stream.read_chunk().data
            except StopIteration:
                return None

        while (batch := self._asked(changefeed, peer, following)) is not None:
            yield batch

    def _asked(self, changefeed: str, peer: PeerCapture, call: Callable[[], T]) -> T:
        """What a capture answers, as long as it is the one to ask; its refusals come as they were
        raised there.
        """
        answering = self._executor.submit(call)
        while True:
            try:
                return answering.result(_LOOK_EVERY_S)
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
            self._router.find(changefeed, _FIND_S), self._loop
        )
        try:
            capture = finding.result(2 * _FIND_S)
        except TimeoutError:
            finding.cancel()
            raise NotOwnerError(
                "the metadata does not say who runs the changefeed; ask again"
            ) from None
        return None if capture is None else PeerCapture(capture, self._access)
