"""Answers the requests: each is one call of the gRPC services, in this process.

So both APIs take, refuse, and pass to the owner the same. Statuses are TiCDC's: 400 for what the
client can mend, 503 for what goes away by itself, else 500.
"""

import os
import re
from typing import Any, Final, Protocol
from urllib.parse import unquote

import grpc
from tidemarkpb.v1 import capture_pb2 as capturepb
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.capture.api_v2 import bodies, documents
from server.capture.api_v2.operations import OPERATIONS, PREFIX, openapi
from server.capture.errors import ChangefeedNotExistsError, NotOwnerError, ParameterError
from server.changefeed.info import CREATOR_VERSION
from server.routes import Answer, Request, fault, json_answer
from server.rpc.errors import StatusError, status_of
from storage.defect import request_error
from storage.model.errors import NotFoundError, TidemarkError
from storage.model.ts import logical, physical_ms

_LEGACY_STATUS: Final = "/status"
"""Where TiCDC's status was before there was an API v2."""
_CODED: Final = re.compile(r"\[TM:(?P<code>\w+)\]\s*(?P<message>.*)", re.DOTALL)
_HTTP_STATUS: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 400,
    grpc.StatusCode.ABORTED: 400,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 503,
}


class CaptureUnknownError(NotFoundError):
    """No capture has that id."""

    code = "ErrCaptureNotExist"


class Oracle(Protocol):
    """Gives timestamps; `server.rpc.pd.PdClient` does."""

    async def tso(self, count: int = 1) -> int:
        """The last of `count` new timestamps."""
        ...


class Api:
    """`changefeeds` and `captures` are the servicers of the gRPC API; `identity` is this capture's
    id.
    """

    def __init__(self, identity: str, changefeeds: Any, captures: Any, oracle: Oracle) -> None:
        self._id = identity
        self._changefeeds = changefeeds
        self._captures = captures
        self._oracle = oracle
        self._routes = [
            ((PREFIX + operation.path).split("/"), operation) for operation in OPERATIONS
        ]

    async def answer(self, request: Request) -> Answer:
        """The answer to a request; see `RpcServer.serve_http1`. Raises nothing."""
        try:
            operation, arguments = self._find(request)
            bodies.check_namespace(request.query.get("namespace", ("",))[0])
            document = await getattr(self, operation)(request, *arguments)
        except _PathError as err:
            return fault(err.status, err.code, err.message)
        except TidemarkError as err:
            return _error_answer(err)
        except Exception as err:  # noqa: BLE001 - the client gets an answer, the log the trace
            return _error_answer(request_error(err, f"{request.method} {request.path[:256]}"))
        return json_answer(document)

    async def health(self, _request: Request) -> dict[str, Any]:
        """Nothing, once an owner is elected."""
        if not any(capture.is_owner for capture in await self._members()):
            raise NotOwnerError("no capture owns the changefeeds at this moment; ask again")
        return {}

    async def status(self, _request: Request) -> dict[str, Any]:
        """This capture."""
        own = [capture for capture in await self._members() if capture.id == self._id]
        return {
            "version": CREATOR_VERSION,
            "git_hash": "",
            "id": self._id,
            "cluster_id": "default",
            "pid": os.getpid(),
            "is_owner": any(capture.is_owner for capture in own),
            "liveness": 0,
        }

    async def captures(self, _request: Request) -> dict[str, Any]:
        """All living captures."""
        return documents.listing(list(map(documents.capture_document, await self._members())))

    async def tso(self, _request: Request) -> dict[str, int]:
        """A new timestamp."""
        ts = await self._oracle.tso()
        return {"timestamp": physical_ms(ts), "logic_time": logical(ts)}

    async def list_changefeeds(self, request: Request) -> dict[str, Any]:
        """All changefeeds, or those in the state that is asked for."""
        state = request.query.get("state", ("all",))[0]
        summaries = map(documents.summary, await self._all())
        return documents.listing(
            [each for each in summaries if state in ("", "all", each["state"])]
        )

    async def create_changefeed(self, request: Request) -> dict[str, Any]:
        """Make a changefeed; it is durable."""
        created = await self._call("CreateChangefeed", bodies.creation(request.body))
        return documents.changefeed_document(created.changefeed)

    async def verify_table(self, request: Request) -> dict[str, Any]:
        """What a changefeed would replicate."""
        checked = await self._call("CheckChangefeed", bodies.creation(request.body))
        return documents.tables_document(checked)

    async def get_changefeed(self, _request: Request, changefeed: str) -> dict[str, Any]:
        """One changefeed."""
        return documents.changefeed_document(await self._one(changefeed))

    async def update_changefeed(self, request: Request, changefeed: str) -> dict[str, Any]:
        """Change a changefeed."""
        updated = await self._call("UpdateChangefeed", bodies.update(changefeed, request.body))
        return documents.changefeed_document(updated.changefeed)

    async def remove_changefeed(self, _request: Request, changefeed: str) -> dict[str, Any]:
        """Remove a changefeed, if there is one."""
        try:
            await self._call("RemoveChangefeed", pb.RemoveChangefeedRequest(id=changefeed))
        except TidemarkError as err:
            if _code_of(err) != ChangefeedNotExistsError.code:
                raise
        return {}

    async def pause_changefeed(self, _request: Request, changefeed: str) -> dict[str, Any]:
        """Stop pulling."""
        await self._call("PauseChangefeed", pb.PauseChangefeedRequest(id=changefeed))
        return {}

    async def resume_changefeed(self, request: Request, changefeed: str) -> dict[str, Any]:
        """Pull again."""
        await self._call("ResumeChangefeed", bodies.resumption(changefeed, request.body))
        return {}

    async def changefeed_status(self, _request: Request, changefeed: str) -> dict[str, Any]:
        """How a changefeed is."""
        return documents.status(await self._one(changefeed))

    async def list_processors(self, _request: Request) -> dict[str, Any]:
        """The running changefeeds, with the capture of each."""
        owner = await self._owner_id()
        return documents.listing(
            [
                {"namespace": "default", "changefeed_id": each.id, "capture_id": owner}
                for each in await self._all()
                if documents.state_of(each) in ("normal", "warning")
            ]
        )

    async def get_processor(
        self, _request: Request, changefeed: str, capture: str
    ) -> dict[str, Any]:
        """The ids of the tables that a capture replicates for a changefeed."""
        shown = await self._one(changefeed)
        if capture not in [each.id for each in await self._members()]:
            raise CaptureUnknownError(f"there is no capture {capture[:256]!r}; see GET captures")
        if documents.state_of(shown) not in ("normal", "warning"):
            raise ParameterError(f"changefeed {changefeed} does not run; resume it first")
        tables = shown.tables if capture == await self._owner_id() else ()
        return {"table_ids": [table.table_id for table in tables]}

    async def openapi(self, _request: Request) -> dict[str, Any]:
        """The OpenAPI document."""
        return openapi(CREATOR_VERSION)

    def _find(self, request: Request) -> tuple[str, list[str]]:
        """The method of this class that answers, and what stands for `{…}` in its path."""
        path = f"{PREFIX}{_LEGACY_STATUS}" if request.path == _LEGACY_STATUS else request.path
        parts = path.rstrip("/").split("/")
        fitting = {
            operation.method: (operation.name, arguments)
            for names, operation in self._routes
            if (arguments := _arguments(names, parts)) is not None
        }
        if not fitting:
            raise _PathError(404, "ErrPathUnknown", f"nothing is served at {request.path[:256]}")
        method = "GET" if request.method == "HEAD" else request.method
        if method not in fitting:
            taken = ", ".join(sorted(fitting))
            raise _PathError(
                405,
                "ErrMethodNotAllowed",
                f"{request.path[:256]} takes {taken}, not {request.method}",
            )
        return fitting[method]

    async def _one(self, changefeed: str) -> pb.Changefeed:
        queried = await self._call("QueryChangefeed", pb.QueryChangefeedRequest(id=changefeed))
        shown: pb.Changefeed = queried.changefeed
        return shown

    async def _all(self) -> list[pb.Changefeed]:
        listed = await self._call("ListChangefeeds", pb.ListChangefeedsRequest())
        return sorted(listed.changefeeds, key=lambda each: str(each.id))

    async def _members(self) -> list[capturepb.Capture]:
        listed = await self._captures.ListCaptures(capturepb.ListCapturesRequest(), _LOCAL)
        return list(listed.captures)

    async def _owner_id(self) -> str:
        return next((each.id for each in await self._members() if each.is_owner), "")

    async def _call(self, method: str, request: Any) -> Any:
        return await getattr(self._changefeeds, method)(request, _LOCAL)


class _LocalContext:
    """Stands for the gRPC context of a call that no peer has sent."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """None."""
        return ()


_LOCAL: Final = _LocalContext()


class _PathError(Exception):
    """The request names nothing that is served."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def _arguments(names: list[str], parts: list[str]) -> list[str] | None:
    """What `parts` have in the places of `{…}`, percent-decoded; None if they do not fit."""
    if len(names) != len(parts):
        return None
    pairs = list(zip(names, parts, strict=True))
    if any(not name.startswith("{") and name != part for name, part in pairs):
        return None
    return [unquote(part) for name, part in pairs if name.startswith("{")]


def _code_of(err: TidemarkError) -> str:
    """The code of an error, also of one that another capture has told."""
    coded = _CODED.match(err.message) if isinstance(err, StatusError) else None
    return coded["code"] if coded else err.code


def _error_answer(err: TidemarkError) -> Answer:
    coded = _CODED.match(err.message) if isinstance(err, StatusError) else None
    message = coded["message"] if coded else err.message
    return fault(_HTTP_STATUS.get(status_of(err)[0], 500), _code_of(err), message)
