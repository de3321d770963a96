"""`tidemarkpb.v1.ExplainService`: answered by the leader only, for only it knows the safe points."""

import asyncio
from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import ParseDict
from tidemarkpb.v1 import explain_pb2 as pb

from gcsafepoint.explain.document import document
from gcsafepoint.explain.explanation import MOST_CHAINS, explain
from server.coordinator.explain.gather import gather
from server.coordinator.leadership.members import Members
from server.coordinator.term import Seat
from server.rpc.credentials import SecurityConfig
from storage.meta.meta import Meta
from storage.model.errors import InvalidError, UnavailableError

_GATHER_SECONDS = 10.0
_ASKED_AT_ONCE = 4
_NAMES_MAX, _NAME_CHARACTERS_MAX = 100, 1024


class ExplainBusyError(UnavailableError):
    """Too many explanations are asked for, or the metadata is too slow."""

    code = "ErrExplainUnavailable"


class ExplainRequestError(InvalidError):
    """The request asks for too much."""

    code = "ErrAPIInvalidParam"


class Explainer:
    """Explains from the term that leads at the time."""

    def __init__(self, meta: Meta, seat: Seat, members: Members, security: SecurityConfig) -> None:
        self._meta = meta
        self._seat = seat
        self._members = members
        self._security = security
        self._at_once = asyncio.Semaphore(_ASKED_AT_ONCE)

    async def explain(self, what_if_remove: Sequence[str] = (), limit: int = 0) -> dict[str, Any]:
        """The document of `gcsafepoint.explain.document`; a leader that lost its lease meanwhile does not answer.

        Raises:
            NotLeaderError: naming the leader.
            ExplainRequestError: too many names, or too long ones.
            BlockerUnknownError, BlockerFixedError: nothing of a name to be removed holds GC back.
            ExplainBusyError: it took too long.
        """
        if len(what_if_remove) > _NAMES_MAX or any(len(name) > _NAME_CHARACTERS_MAX for name in what_if_remove):
            raise ExplainRequestError(
                f"at most {_NAMES_MAX} names of {_NAME_CHARACTERS_MAX} characters can be thought away at a time"
            )
        term = self._seat.term
        if term is None:
            raise self._members.not_leader()
        try:
            async with asyncio.timeout(_GATHER_SECONDS), self._at_once:
                situation = await gather(await term.safe_points.view(), self._meta, self._security)
        except TimeoutError:
            raise ExplainBusyError(f"the situation was not gathered within {_GATHER_SECONDS:g} s; try again") from None
        most = min(limit or MOST_CHAINS, MOST_CHAINS)
        found = await asyncio.to_thread(lambda: document(explain(situation, what_if_remove, most)))
        term.leadership.check()
        return found


class ExplainService:
    """The servicer."""

    def __init__(self, explainer: Explainer) -> None:
        self._explainer = explainer

    async def ExplainGC(self, request: pb.ExplainGCRequest, _context: Any) -> pb.ExplainGCResponse:
        """Chains of blockers, the lowest first."""
        found = await self._explainer.explain(list(request.what_if_remove), request.limit)
        return ParseDict(found, pb.ExplainGCResponse())
