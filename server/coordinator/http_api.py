"""The coordinator's routes on its HTTP port: PD's service safe points, and `gc explain`.

Only the leader answers.

PD's texts and shapes, so that pd-ctl's users and scripts find what they know; errors of ours have
TiCDC's form. What HTTP's threads ask for runs on the coordinator's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from gcsafepoint.state.compat import ServiceUpdate
from gcsafepoint.state.errors import SafePointRequestError
from gcsafepoint.state.states import GcView
from server.coordinator.errors import NotLeaderError
from server.coordinator.explain_service import Explainer, ExplainRequestError
from server.coordinator.leadership.members import Members
from server.coordinator.term import CurrentTerm, LeaderTerm
from server.routes import Answer, Handler, Request, Route, answered, fault, json_answer
from storage.model.errors import TidemarkError

T = TypeVar("T")
_SAFEPOINTS = "/pd/api/v1/gc/safepoint"
_EXPLAIN = "/tidemark/api/v1/gc/explain"


class HttpApi:
    """The routes; make it on the event loop that the calls run on."""

    def __init__(self, current: CurrentTerm, members: Members, explainer: Explainer) -> None:
        self._loop = asyncio.get_running_loop()
        self._current = current
        self._members = members
        self._explainer = explainer

    def handlers(self) -> Mapping[Route, Handler]:
        """The handlers, for `Routes.serving`."""
        return {
            ("GET", _SAFEPOINTS): self.list_safe_points,
            ("DELETE", f"{_SAFEPOINTS}/"): self.delete_safe_point,
            ("GET", _EXPLAIN): self.explain_gc,
        }

    def list_safe_points(self, _request: Request) -> Answer:
        """All service safe points, as PD shows them, the lowest first."""

        async def listed(term: LeaderTerm) -> dict[str, Any]:
            view = await term.safe_points.view()
            term.leadership.check()
            return safe_points_document(view)

        return self._answer(self._led(listed))

    def delete_safe_point(self, request: Request) -> Answer:
        """Remove one; as in PD without any check, so the history that it protected may be lost."""

        async def deleted(term: LeaderTerm) -> str:
            # Interrupted when the leadership ends: the HTTP thread must not wait for an etcd that
            # is away.
            async with term.leadership.while_held():
                [outcome] = await term.safe_points.update_services(
                    [ServiceUpdate(request.tail, 0, 0)]
                )
            if isinstance(outcome, TidemarkError):
                raise outcome
            return "Delete service GC safepoint successfully."

        return self._answer(self._led(deleted))

    def explain_gc(self, request: Request) -> Answer:
        """`?what_if=remove:NAME`, repeated or with commas between names; `?limit=N`."""

        async def explained() -> dict[str, Any]:
            return await self._explainer.explain(_removed(request), _limit(request))

        return self._answer(explained())

    async def _led(self, call: Callable[[LeaderTerm], Awaitable[T]]) -> T:
        term = self._current.term
        if term is None:
            raise self._members.not_leader()
        return await call(term)

    def _answer(self, call: Coroutine[Any, Any, Any]) -> Answer:
        try:
            return json_answer(answered(call, self._loop))
        except NotLeaderError as err:
            return fault(503, "ErrNotLeader", err.message)
        except SafePointRequestError as err:
            return json_answer(err.message, 500)  # PD's status and form


def safe_points_document(view: GcView) -> dict[str, Any]:
    """PD's `ListServiceGCSafepoint`; one that never expires has PD's MaxInt64."""
    services = sorted(
        (view.gc_worker, *view.services),
        key=lambda service: (service.safe_point, service.service_id),
    )
    minimum = min(service.safe_point for service in services if not service.is_expired(view.now_s))
    listed = [
        {
            "service_id": service.service_id,
            "expired_at": service.expired_at,
            "safe_point": service.safe_point,
        }
        for service in services
    ]
    lowest = {"min_service_gc_safe_point": minimum} if minimum else {}
    return {"service_gc_safe_points": listed, **lowest, "gc_safe_point": view.gc_safe_point}


def _removed(request: Request) -> list[str]:
    names: list[str] = []
    for text in request.query.get("what_if", ()):
        verb, _, rest = text.partition(":")
        if verb != "remove" or not rest:
            raise ExplainRequestError(
                f"what_if={text!r} is not understood; write what_if=remove:NAME"
            )
        names += [name for name in rest.split(",") if name]
    return names


def _limit(request: Request) -> int:
    texts = request.query.get("limit", ("0",))
    if not (texts[0].isdecimal() and len(texts[0]) < 9):
        raise ExplainRequestError(f"limit={texts[0]!r} is not a number")
    return int(texts[0])
