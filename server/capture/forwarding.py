"""Flight calls for changefeeds that run on another capture: they are passed on to it, so that a
reader may ask any capture.

A plan's slices name the capture that has the rows, so rows pass through here only where a reader
cannot reach that one.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import pyarrow as pa
import pyarrow.flight as fl

from server.capture.errors import NotOwnerError
from server.capture.routing import Router
from server.capture.worker.peers import PeerAccess, PeerCapture
from server.capture.worker.remote import error_of_text

_FIND_S: Final = 2.0
"""Readers ask again: a changefeed on its way to another capture is not waited for here."""
_ACTION_S: Final = 30.0
_ROWS_S: Final = 300.0
T = TypeVar("T")


class FlightForwarder:
    """Passes calls on; called from Flight's threads, while `loop` runs."""

    def __init__(self, router: Router, access: PeerAccess, loop: asyncio.AbstractEventLoop) -> None:
        self._router = router
        self._access = access
        self._loop = loop

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
            action = fl.Action(name, body)
            [result] = _asked(peer, lambda: list(peer.do_action(action, _ACTION_S)))
            answer: bytes = result.body.to_pybytes()
            return answer

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
        ticket = {
            "changefeed": changefeed,
            "table": table,
            "start": start_ts,
            "end": end_ts,
            "before": before,
        }
        asked = fl.Ticket(json.dumps(ticket).encode())
        stream = _asked(peer, lambda: peer.do_get(asked, _ROWS_S))
        return _asked(peer, lambda: stream.schema), _batches(peer, stream)

    def _peer(self, changefeed: str) -> PeerCapture | None:
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


def _asked(peer: PeerCapture, call: Callable[[], T]) -> T:
    """What a capture answers; its refusals come as they were raised there."""
    try:
        return call()
    except (fl.FlightError, pa.ArrowException) as err:
        retryable = isinstance(err, fl.FlightUnavailableError)
        raise error_of_text(peer.name, str(err), retryable=retryable) from err


def _batches(peer: PeerCapture, stream: fl.FlightStreamReader) -> Iterator[pa.RecordBatch]:
    def following() -> pa.RecordBatch | None:
        try:
            return stream.read_chunk().data
        except StopIteration:
            return None

    while (batch := _asked(peer, following)) is not None:
        yield batch
