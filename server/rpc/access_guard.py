"""A servicer behind a check of its clients' rights: each method checks the right it needs, before
anything else.

gRPC's listener and the HTTP API call the same guarded servicer, so there is one place that decides.
A call that came by HTTP, or that the process makes for itself, has an `HttpContext` in the place of
gRPC's context.
"""

import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from functools import partial
from typing import Any, Final

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from server.rpc.access_list import EVERYBODY, Access, Client, OpenAccess, Right
from server.rpc.audit_log import is_audited, log_change, set_client
from server.rpc.recheck import Recheck
from sink.flight.tokens import tokens_of
from storage.model.errors import TidemarkError

_SEEN: Final = ("Get", "List", "Query", "Explain")
_OPERATED: Final = frozenset(
    {
        "PauseChangefeed",
        "ResumeChangefeed",
        "MoveTable",
        "SplitTable",
        "AddReader",
        "RemoveReader",
        "StartDump",
        "PauseDump",
        "ResumeDump",
        "UpdateDump",
        "RestartDump",
        "DrainCapture",
        "ResignOwner",
        "RunGC",
        "ChangeState",
    }
)
_INTERNAL: Final = ("WorkerService",)
"""Between captures; its reads are not for people."""
_OF_CLUSTER: Final = frozenset({"WriteBinlogs", "AdoptRegion"})
"""Between the daemons of a cluster."""
_OBJECTS: Final = {"ChangefeedService": "id", "DumpService": "changefeed_id"}
"""The member of a request that says which changefeed it is about."""
_LISTED: Final = {
    "ListChangefeeds": ("changefeeds", "id"),
    "GetBlockers": ("changefeeds", "changefeed"),
}
"""Answers about many changefeeds: a client of some gets these only."""
_REFUSALS_LOGGED: Final = 256


def right_of(method: MethodDescriptor, request: Any = None) -> Right:
    """The right that a call needs; a method without a rule of its own needs the highest one."""
    if method.containing_service.name in _INTERNAL:
        return Right.ADMIN
    if method.name in _OF_CLUSTER:
        return Right.CLUSTER
    if method.name.startswith(_SEEN):
        return Right.SEE
    if method.name == "ResumeChangefeed" and _discards(request):
        return Right.ADMIN
    return Right.OPERATE if method.name in _OPERATED else Right.ADMIN


def _discards(resume: Any) -> bool:
    """Whether the changes between the old and the new checkpoint are discarded."""
    return bool(
        getattr(resume, "overwrite_checkpoint_ts", 0) or getattr(resume, "overwrite_with_now", 0)
    )


def client_of(access: Access, context: Any) -> Client:
    """The client that makes the call of a gRPC context.

    Raises:
        UnauthenticatedError: nobody who is known.
    """
    metadata: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    values = [value for key, value in metadata if key == "authorization"]
    return access.client(
        tokens_of(values, basic=True), context.auth_context().get("x509_common_name", ())
    )


def guarded(service: ServiceDescriptor, servicer: object, access: Access) -> Any:
    """`servicer`, whose methods of `service` refuse calls that the client may not make."""
    if isinstance(access, OpenAccess):
        return servicer
    return _Guarded(service, servicer, access)


class _Guarded:
    """Has each method of the servicer that the service has."""

    def __init__(self, service: ServiceDescriptor, servicer: object, access: Access) -> None:
        self._access = access
        self._logged: set[tuple[str, str]] = set()
        for method in service.methods:
            if hasattr(servicer, method.name):
                function = getattr(servicer, method.name)
                make = self._stream if method.server_streaming else self._call
                setattr(self, method.name, make(method, function))

    def _call(
        self, method: MethodDescriptor, function: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            client = self._checked(method, request, context)
            return _only_seen(method.name, await function(request, context), client)

        return call

    def _stream(
        self, method: MethodDescriptor, function: Callable[..., AsyncGenerator[Any]]
    ) -> Callable[..., AsyncIterator[Any]]:
        assert inspect.isasyncgenfunction(function), f"{method.full_name} yields its answers"

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            self._checked(method, request, context)
            check = partial(self._checked, method, request, context)
            with Recheck(check) as recheck:
                async with aclosing(function(request, context)) as answers:
                    while True:
                        try:
                            answer = await recheck.wait(anext(answers))
                        except StopAsyncIteration:
                            return
                        yield answer

        return stream

    def _checked(self, method: MethodDescriptor, request: Any, context: Any) -> Client:
        """The client that makes the call; a refusal is logged.

        Raises:
            UnauthenticatedError, ForbiddenError: it is refused.
        """
        if context is LOCAL:
            return EVERYBODY
        name = ""
        try:
            client = client_of(self._access, context)
            name = client.name
            set_client(name)
            member = _OBJECTS.get(method.containing_service.name)
            changefeed = getattr(request, member, None) if member else None
            client.check(right_of(method, request), method.name, changefeed)
        except TidemarkError as err:
            self._log(method, request, err, name, context)
            raise
        return client

    def _log(
        self, method: MethodDescriptor, request: Any, err: TidemarkError, name: str, context: Any
    ) -> None:
        # Changes have a line for each call anyway; of the others the first of a client is told,
        # as one that polls would fill the log.
        seen = (method.name, name or context.peer().rpartition(":")[0])
        if is_audited(method.full_name) or seen in self._logged:
            return
        if len(self._logged) < _REFUSALS_LOGGED:
            self._logged.add(seen)
            log_change(method.name, request, err.code, context.peer(), name)


def _only_seen(method: str, answer: Any, client: Client) -> Any:
    """The answer without changefeeds that are not the client's."""
    if method in _LISTED and client.changefeeds:
        field, member = _LISTED[method]
        listed = getattr(answer, field)
        own = [each for each in listed if client.may_see(getattr(each, member))]
        del listed[:]
        listed.extend(own)
    return answer


class HttpContext:
    """The gRPC context of a call that came by HTTP: the client's header and the names in its
    certificate.
    """

    def __init__(
        self, authorization: str = "", common_names: Sequence[bytes] = (), peer: str = ""
    ) -> None:
        self._metadata = (("authorization", authorization),) if authorization else ()
        self._common_names = tuple(common_names)
        self._peer = peer

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The header `authorization`, if there is one."""
        return self._metadata

    def peer(self) -> str:
        """The address that the HTTP request came from, as gRPC writes it."""
        return self._peer

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """The certificate's names, in the form of gRPC's `auth_context`."""
        return {"x509_common_name": self._common_names} if self._common_names else {}


LOCAL: Final = HttpContext()
"""The context of calls that the process makes for itself; no right is checked."""
