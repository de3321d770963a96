"""Rights on the ports of PD's, TiKV's, etcd's and Pump's protocol: the listener checks a call,
gRPC's or HTTP's, before any handler gets it.

A method has a right by its name alone, and one that nobody has thought of needs most of these
protocols. TiDB, TiKV, TiCDC, BR and the daemons of a cluster bring no tokens: their certificates'
common names are their clients, with the role `cluster`. People and dashboards bring either.

Services of ours on the same ports (`tidemarkpb.v1`) have `server.rpc.access_guard`, which can look
into requests; health checks and reflection are answered to everybody whom the port lets in.

A refused call is counted, and logged: one that would change something each time, others once a
client and method. A call that changes something has a line when it begins, whose outcome is not
known then; those of the role `cluster` have none, as there are thousands a second.

Calls that stay open are asked about again when the clients have changed (`has_changed`). The native
engine has the check in its listener; gRPC's own engine has it in the `AccessInterceptor`.
"""

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio

from server.config import ConfigError
from server.routes import Request
from server.rpc.access_list import CLUSTER, Access, Client, OpenAccess, Right
from server.rpc.audit_log import BEGUN, log_change
from server.rpc.credentials import AllowedNames, SecurityConfig
from server.rpc.errors import StatusError
from server.rpc.recheck import while_allowed
from sink.flight.tokens import tokens_of
from storage.model.errors import TidemarkError

_ELSEWHERE: Final = ("/tidemarkpb.v1.", "/grpc.health.v1.", "/grpc.reflection.")
"""Services whose rights are checked elsewhere, or need no check."""
_SEEN: Final = {
    "pdpb.PD": ("Get", "Scan", "BatchScan", "Query", "IsBootstrapped", "Watch"),
    "keyspacepb.Keyspace": ("Get", "Load", "Watch"),
    "etcdserverpb.Maintenance": ("Status",),
    "etcdserverpb.Cluster": ("MemberList",),
}
"""The prefixes of methods that only show states and positions, by service."""
_UNSEEN: Final = ("WatchGlobalConfig",)
_ROWS: Final = {
    "tikvpb.Tikv": (
        *("KvGet", "KvScan", "KvBatchGet", "KvBufferBatchGet", "KvMvcc", "MvccGet"),
        *("RawGet", "RawBatchGet", "RawScan", "RawBatchScan", "RawChecksum"),
        *("Coprocessor", "BatchCoprocessor", "RawCoprocessor"),
    ),
    "cdcpb.ChangeData": ("EventFeed",),
    "binlog.Pump": ("PullBinlogs",),
}
"""The same, of methods that hand out rows."""
_CHANGES_NOTHING: Final = frozenset(
    {
        "Tso",
        "StoreHeartbeat",
        "RegionHeartbeat",
        "ReportBuckets",
        "ReportMinResolvedTS",
        "SyncRegions",
    }
    | {"Range", "Watch", "LeaseKeepAlive", "LeaseTimeToLive", "Hash", "HashKV", "Snapshot"}
    | {"LoadGlobalConfig", "WatchGlobalConfig", "KvScanLock", "CheckLeader", "GetStoreSafeTS"}
    | {"GetLockWaitInfo", "BatchCommands", "Observe", "Leader"}
)
"""Methods for the cluster only, calls of which have no line in the log."""
_PROBES: Final = frozenset({"/pd/api/v1/health", "/pd/api/v1/ping", "/health", "/ping"})
_READS: Final = ("GET", "HEAD")
_REFUSALS_LOGGED: Final = 256
_ARITY: Final = ("unary", "stream")


def check_provable(access_file: str, security: SecurityConfig) -> None:
    """Refuse an access file that would keep the cluster's own processes out.

    Raises:
        ConfigError: nobody shows a certificate.
    """
    if access_file and not (security.ca_path and security.cert_path and security.key_path):
        raise ConfigError(
            "--access-file of this daemon needs --ca-path, --cert-path and --key-path: stores, "
            "captures, pumps and TiDB bring no tokens, but show who they are by their certificates, "
            'each with a [[client]] of role "cluster" for its common-name'
        )


def right_of_call(path: str) -> Right | None:
    """The right that a call of `/package.Service/Method` needs; None: it needs none here."""
    if path.startswith(_ELSEWHERE):
        return None
    service, _, method = path.removeprefix("/").rpartition("/")
    if method.startswith(_ROWS.get(service, ())):
        return Right.ROWS
    if method.startswith(_SEEN.get(service, ())) and method not in _UNSEEN:
        return Right.SEE
    return Right.CLUSTER


def right_of_request(method: str, path: str) -> Right | None:
    """The same of an HTTP request."""
    if method in _READS:
        return None if path in _PROBES else Right.SEE
    return Right.CLUSTER


class CallAccess:
    """Asks `access`; nothing is checked where every client may do everything."""

    def __init__(self, access: Access | None = None) -> None:
        self._access = access or OpenAccess()
        self._is_open = isinstance(self._access, OpenAccess)
        self._logged: set[tuple[str, str]] = set()
        self._state = self._access.state()

    def __bool__(self) -> bool:
        """Whether calls are checked."""
        return not self._is_open

    def check_call(
        self,
        path: str,
        metadata: Iterable[tuple[str, str | bytes]],
        names: Iterable[bytes],
        peer: str,
    ) -> None:
        """Check that a gRPC call may be made, by who its metadata, and the common names of its
        connection's certificate, say makes it.

        Raises:
            UnauthenticatedError, ForbiddenError: it may not.
        """
        right = None if self._is_open else right_of_call(path)
        if right is not None:
            client = self._client(path, right, metadata, names, peer)
            _log_begun(right, _method(path), client, peer)

    def check_again(
        self,
        path: str,
        metadata: Iterable[tuple[str, str | bytes]],
        names: Iterable[bytes],
        peer: str,
    ) -> None:
        """Check a call that was allowed before and is still open; raises as `check_call`."""
        right = None if self._is_open else right_of_call(path)
        if right is not None:
            self._client(path, right, metadata, names, peer)

    def has_changed(self) -> bool:
        """Whether calls that were allowed before the last check may be refused now."""
        state = self._access.state()
        has_changed, self._state = state != self._state, state
        return has_changed

    def check_request(self, request: Request) -> None:
        """Check that an HTTP request may be made; raises as `check_call`."""
        right = None if self._is_open else right_of_request(request.method, request.path)
        if right is not None:
            values = [request.authorization] if request.authorization else []
            what = f"{request.method} {request.path[:256]}"
            client = self._checked(right, what, values, request.common_names, request.peer)
            _log_begun(right, what, client, request.peer)

    def _client(
        self,
        path: str,
        right: Right,
        metadata: Iterable[tuple[str, str | bytes]],
        names: Iterable[bytes],
        peer: str,
    ) -> Client:
        values = [value for key, value in metadata if key == "authorization"]
        return self._checked(right, _method(path), values, names, peer)

    def _checked(
        self,
        right: Right,
        what: str,
        authorization: Sequence[str | bytes],
        names: Iterable[bytes],
        peer: str,
    ) -> Client:
        name = ""
        try:
            client = self._access.client(tokens_of(authorization, basic=True), names)
            name = client.name
            client.check(right, what)
        except TidemarkError as err:
            self._log_refusal(right, what, err, name, peer)
            raise
        return client

    def _log_refusal(
        self, right: Right, what: str, err: TidemarkError, name: str, peer: str
    ) -> None:
        seen = (what, name or peer.rpartition(":")[0])
        if not _is_change(right, what):
            if seen in self._logged or len(self._logged) >= _REFUSALS_LOGGED:
                return
            self._logged.add(seen)
        log_change(what, None, err.code, peer, name)


def _method(path: str) -> str:
    return path.rpartition("/")[2]


def _log_begun(right: Right, what: str, client: Client, peer: str) -> None:
    if _is_change(right, what) and client.role != CLUSTER:
        log_change(what, None, BEGUN, peer, client.name)


def _is_change(right: Right, what: str) -> bool:
    return right is Right.CLUSTER and what not in _CHANGES_NOTHING


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Checks for gRPC's own engine, at each call of whatever service, the names in the client's
    certificate, and whether the client may make it.
    """

    def __init__(self, allowed: AllowedNames, access: CallAccess) -> None:
        self._allowed = allowed
        self._access = access

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The method's handler, behind the check."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        path = handler_call_details.method
        kind = f"{_ARITY[handler.request_streaming]}_{_ARITY[handler.response_streaming]}"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        function = getattr(handler, kind)
        stays_open = handler.request_streaming or handler.response_streaming
        if stays_open and self._access:
            function = self._while_allowed(path, function)
        return make(
            self._checked(path, function, streams=handler.response_streaming),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _while_allowed(self, path: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A streaming method that ends once its client may not make the call any more."""

        async def call(request: Any, context: Any) -> Any:
            metadata = tuple(context.invocation_metadata() or ())
            names = tuple(context.auth_context().get("x509_common_name", ()))
            check = partial(self._access.check_again, path, metadata, names, context.peer())
            answers = function(request, context)
            work = answers if inspect.isawaitable(answers) else _written(answers, context)
            try:
                return await while_allowed(work, check)
            except StatusError as err:
                await context.abort(err.status, str(err))

        return call

    def _checked(
        self, path: str, function: Callable[..., Any], *, streams: bool
    ) -> Callable[..., Any]:
        async def check(context: Any) -> None:
            names = context.auth_context().get("x509_common_name", ())
            try:
                self._allowed.check(names)
                metadata = context.invocation_metadata() or ()
                self._access.check_call(path, metadata, names, context.peer())
            except StatusError as err:
                await context.abort(err.status, str(err))

        async def answer(request: Any, context: Any) -> Any:
            await check(context)
            return await function(request, context)

        async def stream(request: Any, context: Any) -> None:
            await check(context)
            answers = function(request, context)
            # gRPC takes both: a generator of the answers, and a coroutine that writes them.
            await (answers if inspect.isawaitable(answers) else _written(answers, context))

        return stream if streams else answer


async def _written(answers: AsyncIterator[Any], context: Any) -> None:
    async for message in answers:
        await context.write(message)
