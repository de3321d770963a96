"""The handlers of TiCDC's HTTP API: each makes one call of the gRPC services, in this process.

So both APIs accept, refuse, and forward to the owner the same requests. Statuses are TiCDC's: 400
for what the client can correct, 503 for what passes by itself, else 500.
"""

import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import unquote

import grpc
from tidemarkpb.v1 import capture_pb2 as capturepb
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.capture.api_v2 import documents
from server.capture.api_v2.cluster import Cluster
from server.capture.api_v2.operations import OPERATIONS, PREFIX, Operation, openapi
from server.capture.errors import (
    CaptureUnknownError,
    ChangefeedNotExistsError,
    NotOwnerError,
    ParameterError,
)
from server.changefeed.info import State
from server.changefeed.view import state_of, tables_by_capture
from server.config import ConfigError
from server.log import log_config, set_level, set_redaction
from server.routes import (
    Answer,
    MethodRefusedError,
    PathUnknownError,
    Request,
    error_answer,
    fault,
    json_answer,
    template_arguments,
)
from server.rpc.access_guard import LOCAL, HttpContext, client_of
from server.rpc.access_list import Access, OpenAccess, Right
from server.rpc.audit_log import audited, is_audited, log_change, set_client
from server.rpc.errors import status_of
from server.version import VERSION
from storage.defect import request_error
from storage.model.errors import TidemarkError
from storage.model.ts import logical, physical_ms

_CAPTURE_SERVICE: Final = capturepb.DESCRIPTOR.services_by_name["CaptureService"]
_CHANGEFEED_SERVICE: Final = pb.DESCRIPTOR.services_by_name["ChangefeedService"]
_LEGACY_STATUS: Final = "/status"
"""Where TiCDC's status was before there was an API v2."""
_FIRST_API: Final = "/api/v1/"
_HTTP_STATUS: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 400,
    grpc.StatusCode.ABORTED: 400,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 503,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
}


class Api:
    """`changefeeds` and `captures` are the servicers of the gRPC API, behind the check of who calls
    (`server.rpc.access_guard`); `identity` is this capture's id.
    """

    def __init__(
        self,
        identity: str,
        changefeeds: Any,
        captures: Any,
        cluster: Cluster,
        access: Access | None = None,
    ) -> None:
        self._access = access or OpenAccess()
        self._operations = partial(_Operations, identity, changefeeds, captures, cluster)
        self._routes = [
            ((PREFIX + operation.path).split("/"), operation) for operation in OPERATIONS
        ]

    async def answer(self, request: Request) -> Answer:
        """The answer to a request; see `RpcServer.serve_http1`. Raises nothing."""
        try:
            operation, arguments = self._find(request)
        except TidemarkError as err:
            return error_answer(err)
        context = HttpContext(request.authorization, request.common_names, request.peer)
        try:
            # Before the body is looked at: who may not call learns nothing about it.
            self._check_right(operation, arguments, context)
            for name in documents.NAMESPACES:
                documents.check_namespace(name, request.query.get(name, ("",))[0])
            operations = self._operations(context=context)
            document = await getattr(operations, operation.name)(request, *arguments)
        except TidemarkError as err:
            return _error_answer(err)
        except Exception as err:  # noqa: BLE001 - the client gets an answer, the log the trace
            return _error_answer(request_error(err, f"{request.method} {request.path[:256]}"))
        return json_answer(document)

    def _check_right(
        self, operation: Operation, arguments: Sequence[str], context: HttpContext
    ) -> None:
        """See that the client has the right that the operation needs; a refused change has a line
        in the audit log.

        Raises:
            UnauthenticatedError, ForbiddenError: it is refused.
        """
        right, name = operation.right, ""
        if right is None:
            return
        changefeed = arguments[0] if operation.names_changefeed else None
        try:
            client = client_of(self._access, context)
            name = client.name
            set_client(name)
            if operation.body_names_changefeed:
                # Which changefeed it is about, the service checks.
                client.check_role(right, operation.name)
            else:
                client.check(right, operation.name, changefeed)
        except TidemarkError as err:
            if right is not Right.SEE:
                subject = SimpleNamespace(id=arguments[0] if arguments else "")
                log_change(operation.name, subject, err.code, context.peer(), name)
            raise

    def _find(self, request: Request) -> tuple[Operation, list[str]]:
        """The operation that answers, and what stands for `{…}` in its path.

        Raises:
            PathUnknownError, MethodRefusedError: there is none.
        """
        path = f"{PREFIX}{_LEGACY_STATUS}" if request.path == _LEGACY_STATUS else request.path
        # Split first, unquote then: an id with %2F in it is one part.
        parts = path.rstrip("/").split("/")
        fitting = {
            operation.method: (operation, [unquote(part) for part in given])
            for names, operation in self._routes
            if (given := template_arguments(names, parts)) is not None
        }
        if not fitting:
            raise PathUnknownError(f"nothing is served at {request.path[:256]}{_advice(path)}")
        method = "GET" if request.method == "HEAD" else request.method
        if method not in fitting:
            raise MethodRefusedError(request.path, request.method, fitting)
        return fitting[method]


def _advice(path: str) -> str:
    """What helps a script that was written for TiCDC's first API; empty: it was not."""
    if not path.startswith(_FIRST_API):
        return ""
    return (
        f": TiCDC has deprecated this API for {PREFIX}, whose paths and bodies are in "
        f"{PREFIX}/openapi.json. Most paths are the same there, as {PREFIX}/changefeeds; a change "
        "is answered when it is made, with 200 in place of 202"
    )


class _Operations:
    """Answers one request: a method for each operation."""

    def __init__(
        self,
        identity: str,
        changefeeds: Any,
        captures: Any,
        cluster: Cluster,
        *,
        context: HttpContext,
    ) -> None:
        self._id = identity
        self._changefeeds = changefeeds
        self._captures = captures
        self._cluster = cluster
        self._context = context

    async def health(self, _request: Request) -> dict[str, Any]:
        """Answer with an empty document once an owner is elected."""
        if not any(capture.is_owner for capture in await self._members(LOCAL)):
            raise NotOwnerError("no capture owns the changefeeds at this moment; ask again")
        return {}

    async def status(self, _request: Request) -> dict[str, Any]:
        """Describe this capture."""
        own = [capture for capture in await self._members() if capture.id == self._id]
        return {
            "version": VERSION,
            "git_hash": "",
            "id": self._id,
            "cluster_id": "default",
            "pid": os.getpid(),
            "is_owner": any(capture.is_owner for capture in own),
            "liveness": int(any(capture.draining for capture in own)),
        }

    async def captures(self, _request: Request) -> dict[str, Any]:
        """All living captures."""
        return documents.listing(list(map(documents.capture_document, await self._members())))

    async def drain_capture(self, _request: Request, capture: str) -> dict[str, int]:
        """Let its tables go to the others; how many it still has."""
        drained = await self._call("DrainCapture", capturepb.DrainCaptureRequest(id=capture))
        return {"current_table_count": drained.tables}

    drain_capture_by_post = drain_capture

    async def resign_owner(self, _request: Request) -> dict[str, Any]:
        """Let another capture be elected."""
        await self._call("ResignOwner", capturepb.ResignOwnerRequest())
        return {}

    async def set_log_level(self, request: Request) -> dict[str, Any]:
        """Log from another level on, in this process."""
        level = documents.log_level(request.body)
        await self._change("SetLogLevel", level, partial(_steered, set_level, level))
        return {}

    async def redact_log(self, request: Request) -> dict[str, str]:
        """Keep users' data out of the log of this process."""
        before, mode = log_config().redact_info_log, documents.redaction(request.body)
        if before and mode == "off":
            raise ParameterError(
                "redact_info_log is on, and this API only ever hides more; `PUT /log-redact` of "
                "the port for metrics turns it off"
            )
        await self._change("RedactLog", mode, partial(_steered, set_redaction, mode))
        return {"previous_mode": "on" if before else "off", "current_mode": mode}

    async def _change(
        self, method: str, subject: str, change: Callable[[], Awaitable[None]]
    ) -> None:
        """Change what no service of gRPC does, with a line in the audit log."""

        async def changed(_request: object, _context: HttpContext) -> None:
            await change()

        await audited(changed, method)(SimpleNamespace(id=subject), self._context)

    async def tso(self, _request: Request) -> dict[str, int]:
        """A new timestamp."""
        ts = await self._cluster.tso()
        return {"timestamp": physical_ms(ts), "logic_time": logical(ts)}

    async def list_changefeeds(self, request: Request) -> dict[str, Any]:
        """All changefeeds, or those in the state that is asked for."""
        states = documents.listed_states(request.query.get("state", ("",))[0])
        summaries = map(documents.summary, await self._all())
        return documents.listing([each for each in summaries if each["state"] in states])

    async def create_changefeed(self, request: Request) -> dict[str, Any]:
        """Make a changefeed; it is durable."""
        created = await self._call("CreateChangefeed", documents.creation(request.body))
        return await self._document(created.changefeed)

    async def verify_table(self, request: Request) -> dict[str, Any]:
        """What a changefeed would replicate."""
        checked = await self._call("CheckChangefeed", documents.question(request.body))
        return documents.tables_document(checked)

    async def get_all_tables(self, request: Request) -> dict[str, Any]:
        """What a changefeed would replicate, and all tables that there are."""
        checked = await self._call("CheckChangefeed", documents.question(request.body))
        return documents.all_tables_document(checked)

    async def get_changefeed(self, _request: Request, changefeed: str) -> dict[str, Any]:
        """One changefeed."""
        return await self._document(await self._one(changefeed))

    async def changefeed_meta_info(self, request: Request, changefeed: str) -> dict[str, Any]:
        """The same; TiCDC leaves secrets in it, which are masked here."""
        return await self.get_changefeed(request, changefeed)

    async def update_changefeed(self, request: Request, changefeed: str) -> dict[str, Any]:
        """Change a changefeed."""
        now = await self._one(changefeed)
        changes = documents.update(now, request.body)
        if changes is None:
            return await self._document(now)
        updated = await self._call("UpdateChangefeed", changes)
        return await self._document(updated.changefeed)

    async def remove_changefeed(self, _request: Request, changefeed: str) -> dict[str, Any]:
        """Remove a changefeed, if there is one."""
        try:
            # TiCDC answers 200 when there is nothing to remove, so that a client may repeat the
            # call.
            await self._call("RemoveChangefeed", pb.RemoveChangefeedRequest(id=changefeed))
        except TidemarkError as err:
            if err.code != ChangefeedNotExistsError.code:
                raise
        return {}

    async def pause_changefeed(self, _request: Request, changefeed: str) -> dict[str, Any]:
        """Stop pulling."""
        await self._call("PauseChangefeed", pb.PauseChangefeedRequest(id=changefeed))
        return {}

    async def resume_changefeed(self, request: Request, changefeed: str) -> dict[str, Any]:
        """Pull again."""
        await self._call("ResumeChangefeed", documents.resumption(changefeed, request.body))
        return {}

    async def changefeed_status(self, _request: Request, changefeed: str) -> dict[str, Any]:
        """The state and the positions of a changefeed."""
        return documents.status(await self._one(changefeed))

    async def synced(self, _request: Request, changefeed: str) -> dict[str, Any]:
        """Whether the target has all that the source has."""
        return documents.synced_document(await self._one(changefeed), time.time())

    async def move_table(self, request: Request, changefeed: str) -> dict[str, Any]:
        """Let another capture pull and serve a table."""
        table, gives_up = await self._table(request, changefeed)
        target = request.query.get("targetNodeID", ("",))[0]
        move = pb.MoveTableRequest(
            id=changefeed, table=table, capture=target, give_up_history=gives_up
        )
        await self._call("MoveTable", move)
        return {}

    move_split_table = move_table

    async def split_table_by_region_count(
        self, request: Request, changefeed: str
    ) -> dict[str, Any]:
        """Split a table over all captures."""
        return await self._split(request, changefeed, put_together=False)

    async def merge_table(self, request: Request, changefeed: str) -> dict[str, Any]:
        """Put a split table together."""
        return await self._split(request, changefeed, put_together=True)

    async def _split(
        self, request: Request, changefeed: str, *, put_together: bool
    ) -> dict[str, Any]:
        table, gives_up = await self._table(request, changefeed)
        split = pb.SplitTableRequest(
            id=changefeed, table=table, put_together=put_together, give_up_history=gives_up
        )
        await self._call("SplitTable", split)
        return {}

    async def _table(self, request: Request, changefeed: str) -> tuple[str, bool]:
        """The name of the table that a request is about, and whether its history may go."""
        table_id, gives_up, mode = (
            request.query.get(name, ("",))[0] for name in ("tableID", "giveUpHistory", "mode")
        )
        if gives_up not in ("", "true", "false"):
            raise ParameterError(f"giveUpHistory is true or false, not {gives_up[:40]!r}")
        if mode not in ("", "0"):
            raise ParameterError(f"mode {mode[:40]!r}: there is no redo log, only mode 0")
        names = [
            table.name
            for table in (await self._one(changefeed)).tables
            if str(table.table_id) == table_id
        ]
        if not names:
            raise ParameterError(
                f"changefeed {changefeed} has no table with the tableID {table_id[:100]!r}; see "
                f"`tidemark cli changefeed query -c {changefeed}`"
            )
        return names[0], gives_up == "true"

    async def list_processors(self, _request: Request) -> dict[str, Any]:
        """The running changefeeds, once for each capture that works for them."""
        return documents.listing(
            [
                {"namespace": "default", "changefeed_id": each.id, "capture_id": capture}
                for each in await self._all()
                if _is_running(each)
                for capture in tables_by_capture(each)
            ]
        )

    async def get_processor(
        self, _request: Request, changefeed: str, capture: str
    ) -> dict[str, Any]:
        """The ids of the tables that a capture replicates for a changefeed."""
        shown = await self._one(changefeed)
        if capture not in [each.id for each in await self._members()]:
            raise CaptureUnknownError(f"there is no capture {capture[:256]!r}; see GET captures")
        if not _is_running(shown):
            raise ParameterError(f"changefeed {changefeed} does not run; resume it first")
        tables = tables_by_capture(shown).get(capture, [])
        return {"table_ids": [table.table_id for table in tables]}

    async def list_tables(self, _request: Request, changefeed: str) -> dict[str, Any]:
        """The ids of a changefeed's tables, by capture."""
        shown = await self._one(changefeed)
        return documents.listing(documents.node_tables(shown) if _is_running(shown) else [])

    async def get_dispatcher_count(self, _request: Request, changefeed: str) -> dict[str, int]:
        """How many tables and parts of split tables captures replicate for a changefeed."""
        shown = await self._one(changefeed)
        nodes = documents.node_tables(shown) if _is_running(shown) else []
        return {"count": sum(len(node["table_ids"]) for node in nodes)}

    async def unsafe_metadata(self, _request: Request) -> list[dict[str, str]]:
        """The records of captures and changefeeds."""
        return await self._cluster.metadata()

    async def unsafe_resolve_lock(self, request: Request) -> dict[str, Any]:
        """End transactions of clients that are gone, in one region."""
        region_id, ts = documents.region_locks(request.body)
        change = partial(self._cluster.resolve_locks, region_id, ts)
        await self._change("ResolveLock", str(region_id), change)
        return {}

    async def unsafe_delete_service_gc_safepoint(self, request: Request) -> dict[str, Any]:
        """Remove the safepoints of changefeeds that are gone."""
        documents.check_own_cluster(request.body)
        change = self._cluster.remove_safe_points
        await self._change("DeleteServiceGCSafePoint", "", change)
        return {}

    async def openapi(self, _request: Request) -> dict[str, Any]:
        """The OpenAPI document."""
        return openapi(VERSION)

    async def _document(self, changefeed: pb.Changefeed) -> dict[str, Any]:
        addresses = {each.id: each.address for each in await self._members(LOCAL)}
        address = addresses.get(changefeed.maintainer, "")
        return documents.changefeed_document(changefeed, address)

    async def _one(self, changefeed: str) -> pb.Changefeed:
        queried = await self._call("QueryChangefeed", pb.QueryChangefeedRequest(id=changefeed))
        shown: pb.Changefeed = queried.changefeed
        return shown

    async def _all(self) -> list[pb.Changefeed]:
        listed = await self._call("ListChangefeeds", pb.ListChangefeedsRequest())
        return sorted(listed.changefeeds, key=lambda each: str(each.id))

    async def _members(self, context: HttpContext | None = None) -> list[capturepb.Capture]:
        request = capturepb.ListCapturesRequest()
        listed = await self._captures.ListCaptures(request, context or self._context)
        return list(listed.captures)

    async def _call(self, method: str, request: Any) -> Any:
        """Call a method of either service; a change has its line in the audit log."""
        of_captures = _CAPTURE_SERVICE.methods_by_name.get(method)
        servicer = self._changefeeds if of_captures is None else self._captures
        full_name = (of_captures or _CHANGEFEED_SERVICE.methods_by_name[method]).full_name
        function = getattr(servicer, method)
        if is_audited(full_name):
            function = audited(function, full_name)
        return await function(request, self._context)


async def _steered(change: Callable[[str], None], value: str) -> None:
    """How this process logs is changed."""
    try:
        change(value)
    except ConfigError as err:
        raise ParameterError(err.message) from None


def _is_running(changefeed: pb.Changefeed) -> bool:
    return State(state_of(changefeed)).is_running


def _error_answer(err: TidemarkError) -> Answer:
    status = _HTTP_STATUS.get(status_of(err)[0], 500)
    return fault(status, err.code, err.message, documents.code_prefix(err.code))
