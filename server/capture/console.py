"""The console's document: the state of the captures, in one answer.

Served on the capture's API port beside the console's pages (`server.console`) and TiCDC's API, by
which the page pauses and resumes. Any capture answers: it asks the owner for the changefeeds.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final, Generic, TypeVar

import grpc
from prometheus_client import REGISTRY
from tidemarkpb.v1 import capture_pb2, changefeed_pb2, dump_pb2, explain_pb2
from tidemarkpb.v1.explain_pb2_grpc import ExplainServiceStub

from server.capture.api_v2.api import Api
from server.capture.cluster_map import ClusterMap
from server.changefeed.diagnosis import (
    diagnose_captures,
    diagnose_changefeed,
    diagnose_gc,
    stages,
    worst_first,
)
from server.changefeed.view import detail, error_of, summary
from server.console import console_pages
from server.routes import Answer, Request, error_answer, json_answer
from server.rpc.access_guard import LOCAL, HttpContext, client_of
from server.rpc.access_list import Access, Client, OpenAccess, Right
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient
from server.version import VERSION
from storage.defect import request_error
from storage.model.errors import TidemarkError
from storage.model.ts import physical_ms

_DOCUMENT: Final = "/console.json"
_TABLES_SHOWN: Final = 200
"""The number of tables shown of the selected changefeed; the slowest ones come first."""
_CHANGEFEEDS_SHOWN: Final = 500
_FINDINGS_SHOWN: Final = 100
_GC_EVERY_S: Final = 10.0
"""An explanation of GC asks all stores for locks, so pages share one for ten seconds."""
_DUMP_EVERY_S: Final = 5.0
"""The greatest age of a shown dump progress in seconds; after it the metadata is read again."""
_GC_CALL_S: Final = 5.0
_BLOCKERS: Final = 5
_ROWS_IN: Final = "tidemark_sorter_rows_in_total"

T = TypeVar("T")
ExplainGC = Callable[[], Awaitable[explain_pb2.ExplainGCResponse]]


class Console:
    """Answers HTTP/1.1 requests on the API port: pages and document; all others are the API's."""

    def __init__(
        self,
        api: Api,
        services: "Services",
        explain_gc: ExplainGC,
        access: Access | None = None,
        cluster: ClusterMap | None = None,
    ) -> None:
        """`cluster` tells of the daemons beside the captures."""
        self._access = access or OpenAccess()
        self._cluster = _CachedAnswer[list[dict[str, Any]]](cluster or _nobody, [], keeps=True)
        self._api = api
        self._services = services
        self._explain_gc = explain_gc
        self._pages = console_pages()
        self._began_s = time.monotonic()
        self._rate = _Rate()
        self._gc = _CachedAnswer(self._ask_gc, None, keeps=False)
        """The blockers of GC; None if no coordinator answers `gc explain`."""

    async def answer(self, request: Request) -> Answer:
        """See `RpcServer.serve_http1`. Raises nothing."""
        page = self._pages.get(request.path)
        if page is not None and request.method in ("GET", "HEAD"):
            return page
        if request.path != _DOCUMENT:
            return await self._api.answer(request)
        try:
            context = HttpContext(request.authorization, request.common_names, request.peer)
            client = client_of(self._access, context)
            client.check(Right.SEE, "the console")
            opened = request.query.get("changefeed", ("",))[0]
            return json_answer(await self._document(opened, client))
        except TidemarkError as err:
            return error_answer(err)
        except Exception as err:  # noqa: BLE001 - the client gets an answer, the log the trace
            return error_answer(request_error(err, f"GET {_DOCUMENT}"))

    async def _document(self, opened: str, client: Client) -> dict[str, Any]:
        now_ms = int(time.time() * 1000)
        captures = await self._services.captures()
        changefeeds = [
            each for each in await self._services.changefeeds() if client.may_see(each.id)
        ][:_CHANGEFEEDS_SHOWN]
        # What holds GC back names other changefeeds.
        gc = None if client.changefeeds else await self._gc.now()

        findings = list(
            diagnose_captures([{"is-owner": each["is_owner"], **each} for each in captures])
        )
        shown, opened_detail = [], None
        for changefeed in changefeeds:
            document = detail(changefeed)
            dump = await self._services.dump(changefeed.id)
            findings += diagnose_changefeed(document, dump, now_ms)
            lags = {stage.name: round(stage.lag_s, 1) for stage in stages(document, now_ms)}
            shown.append(_row(changefeed, lags, dump, now_ms))
            if changefeed.id == opened:
                opened_detail = _opened(document, lags, now_ms)
        findings += diagnose_gc(gc) if gc else ()
        return {
            "version": VERSION,
            "uptime_seconds": round(time.monotonic() - self._began_s),
            "rows_per_second": self._rate.next(REGISTRY.get_sample_value(_ROWS_IN) or 0.0),
            "findings": [each.document() for each in worst_first(findings)[:_FINDINGS_SHOWN]],
            "changefeeds": shown,
            "detail": opened_detail,
            "captures": captures,
            "daemons": await self._cluster.now(),
            "gc": gc
            and {"summary": gc["summary"], "blockers": list(map(_blocker, gc["blockers"]))},
        }

    async def _ask_gc(self) -> dict[str, Any] | None:
        return _explained(await self._explain_gc())


class Services:
    """The captures' own gRPC services, called in this process."""

    def __init__(self, changefeeds: Any, captures: Any, dumps: Any) -> None:
        self._changefeeds = changefeeds
        self._captures = captures
        self._dumps = dumps
        self._dumps_seen: dict[str, tuple[float, dict[str, Any] | None]] = {}

    async def changefeeds(self) -> list[changefeed_pb2.Changefeed]:
        """All changefeeds, by their ids; raises as ListChangefeeds."""
        request = changefeed_pb2.ListChangefeedsRequest()
        listed = await self._changefeeds.ListChangefeeds(request, LOCAL)
        ids = {each.id for each in listed.changefeeds}
        self._dumps_seen = {name: seen for name, seen in self._dumps_seen.items() if name in ids}
        return sorted(listed.changefeeds, key=lambda each: str(each.id))

    async def captures(self) -> list[dict[str, Any]]:
        """All living captures."""
        listed = await self._captures.ListCaptures(capture_pb2.ListCapturesRequest(), LOCAL)
        return [
            {
                "id": each.id,
                "is_owner": each.is_owner,
                "address": each.address,
                "flight_address": each.flight_address,
                "version": each.version,
                "is_draining": each.draining,
                "started": each.started,
            }
            for each in listed.captures
        ]

    async def dump(self, changefeed: str) -> dict[str, Any] | None:
        """Return the progress of a changefeed's dump, a few seconds old at most; None: there is no
        dump.
        """
        asked_s, seen = self._dumps_seen.get(changefeed, (-_DUMP_EVERY_S, None))
        if time.monotonic() - asked_s < _DUMP_EVERY_S:
            return seen
        dump = await self._asked_dump(changefeed)
        self._dumps_seen[changefeed] = time.monotonic(), dump
        return dump

    async def _asked_dump(self, changefeed: str) -> dict[str, Any] | None:
        request = dump_pb2.GetDumpStatusRequest(changefeed_id=changefeed)
        try:
            answer = await self._dumps.GetDumpStatus(request, LOCAL)
        except TidemarkError:
            return None
        dump = answer.dump
        tables = [
            {"table": each.table, "state": each.state, "error": each.error}
            for each in answer.status
        ]
        return {
            "state": dump.state,
            "progress_percent": dump.progress_percent,
            "eta_seconds": dump.eta_seconds,
            "waits_for": dump.waits_for,
            "tables_done": dump.tables_done,
            "tables_known": dump.tables_known,
            "status": tables,
        }


class _Rate:
    """Measures how fast a counter grows between two reads that are at least a second apart."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None
        self._per_s: float | None = None

    def next(self, value: float) -> float | None:
        """Per second; None: this is the first look."""
        now_s = time.monotonic()
        if self._before is None:
            self._before = now_s, value
        elif now_s - self._before[0] >= 1.0:
            began_s, began = self._before
            self._per_s = max(0.0, (value - began) / (now_s - began_s))
            self._before = now_s, value
        return self._per_s


class _CachedAnswer(Generic[T]):
    """Caches a coordinator's answer for ten seconds."""

    def __init__(self, ask: Callable[[], Awaitable[T]], nothing: T, *, keeps: bool) -> None:
        """Without an answer the value is `nothing`, or with `keeps` the last answer."""
        self._ask = ask
        self._nothing = self._said = nothing
        self._keeps = keeps
        self._every_s = _GC_EVERY_S
        self._asked_s = -self._every_s

    async def now(self) -> T:
        """The newest answer; asked for within five seconds."""
        now_s = time.monotonic()
        if now_s - self._asked_s >= self._every_s:
            # Noted before the call: pages that come meanwhile do not ask, too.
            self._asked_s = now_s
            try:
                async with asyncio.timeout(_GC_CALL_S):
                    self._said = await self._ask()
            except (grpc.RpcError, TidemarkError, TimeoutError):
                self._said = self._said if self._keeps else self._nothing
        return self._said


async def _nobody() -> list[dict[str, Any]]:
    return []


def explained_by(pd: PdClient, security: SecurityConfig) -> ExplainGC:
    """Ask the coordinator that leads; raises grpc.RpcError where it is a real PD."""

    async def explain() -> explain_pb2.ExplainGCResponse:
        async with connect(await pd.leader_address(), security) as channel:
            request = explain_pb2.ExplainGCRequest(limit=_BLOCKERS)
            answer: explain_pb2.ExplainGCResponse = await ExplainServiceStub(channel).ExplainGC(
                request
            )
            return answer

    return explain


def _row(
    changefeed: changefeed_pb2.Changefeed,
    lags: Mapping[str, float],
    dump: dict[str, Any] | None,
    now_ms: int,
) -> dict[str, Any]:
    """A changefeed in the list."""
    short = summary(changefeed, now_ms / 1000)["summary"]
    return {
        "id": changefeed.id,
        "state": short["state"],
        "sink_uri": changefeed.sink_uri,
        "lag_seconds": short["lag_seconds"],
        "lake_job": short["lake_job"],
        "spark_ui": changefeed.lake_job.spark_ui,
        "error": error_of(changefeed),
        "stages": lags,
        "dump": dump and {key: dump[key] for key in ("state", "progress_percent", "eta_seconds")},
    }


def _opened(document: dict[str, Any], lags: Mapping[str, float], now_ms: int) -> dict[str, Any]:
    """The changefeed whose details are open, with its slowest tables."""
    tables = sorted(document["tables"], key=lambda each: each["checkpoint_ts"])[:_TABLES_SHOWN]
    for table in tables:
        table["lag_seconds"] = max(0.0, (now_ms - physical_ms(table["checkpoint_ts"])) / 1000)
    return {
        **document,
        "table_count": len(document["tables"]),
        "rows_per_s": sum(each.get("rows_per_s") or 0 for each in document["tables"]),
        "tables": tables,
        "ddls": document["ddls"][::-1],
        "stages": lags,
    }


def _explained(answer: explain_pb2.ExplainGCResponse) -> dict[str, Any]:
    """The members of `gc explain --json` that are looked at here."""
    return {
        "summary": answer.summary,
        "problems": list(answer.problems),
        "blockers": [
            {"id": each.id, "blocks": each.blocks, "chain": list(map(_link, each.chain))}
            for each in answer.blockers
        ],
    }


def _link(link: explain_pb2.GCBlockerLink) -> dict[str, Any]:
    return {
        "reason": link.reason,
        "holds_back_seconds": link.holds_back_seconds,
        "commands": list(link.commands),
    }


def _blocker(blocker: Mapping[str, Any]) -> dict[str, Any]:
    """A blocker with the reason at the end of its chain, and the commands that end it."""
    return {
        "id": blocker["id"],
        "blocks": blocker["blocks"],
        "reason": blocker["chain"][-1]["reason"],
        "commands": list(dict.fromkeys(_commands(blocker))),
    }


def _commands(blocker: Mapping[str, Any]) -> Iterator[str]:
    for link in reversed(blocker["chain"]):
        yield from link["commands"]
