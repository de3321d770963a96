"""The HTTP API on the client port: its routes and their handlers.

Only the leader knows stores, regions and rules. A follower sends the client there with 307, which
Go's clients follow with method and body, and curl does with -L; PD passes such requests on itself,
to the same effect.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import Any
from urllib.parse import unquote_to_bytes

from gcsafepoint.state.compat import ServiceUpdate
from gcsafepoint.state.errors import SafePointRequestError
from server.coordinator.cluster.regions import KnownRegion, Regions
from server.coordinator.cluster.rules import RuleContentError, body_of, label_rule
from server.coordinator.errors import NotLeaderError
from server.coordinator.http_api import safe_points_document
from server.coordinator.leadership.members import Members
from server.coordinator.pd_http import documents, placement
from server.coordinator.term import CurrentTerm, LeaderTerm
from server.routes import (
    Answer,
    MethodRefusedError,
    Request,
    error_answer,
    fault,
    json_answer,
    template_arguments,
)
from storage.model.errors import TidemarkError

PREFIX = "/pd/api/v1/"
_SCAN_REGIONS = 16
_SLICE_REGIONS = 1024
"""Looked at in one turn of the loop: a cluster has up to a million."""
_MAX_REGIONS = 1024
"""The limit of regions in one answer: making it stops the timestamps for some milliseconds.
`regions/key` gives the rest.
"""

LeaderHandler = Callable[[LeaderTerm, Request, Sequence[str]], Awaitable[Answer]]
"""Answers a request from the present term; the strings are the values for `{…}` in the route's
path.
"""


class PdHttp:
    """Answers every HTTP request on the client port; see `RpcServer.serve_http1`."""

    def __init__(self, cluster_id: int, current: CurrentTerm, members: Members) -> None:
        self._cluster_id = cluster_id
        self._current = current
        self._members = members
        self._started_s = int(time.time())
        self._routes: list[tuple[list[str], Mapping[str, LeaderHandler | Callable[[], Answer]]]] = [
            (path.split("/"), methods) for path, methods in self._table().items()
        ]

    async def answer(self, request: Request) -> Answer:
        """The answer to a request; raises nothing that is the client's fault."""
        methods, arguments = self._find(request.path)
        if methods is None:
            return fault(
                404,
                "ErrPathUnknown",
                f"nothing is served at {request.path[:256]}; see docs/design/0011",
            )
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            return error_answer(MethodRefusedError(request.path, request.method, methods))
        # Answered by every coordinator: by these clients find the leader.
        if request.path.removeprefix(PREFIX) in self._member_routes:
            return self._member_routes[request.path.removeprefix(PREFIX)]()
        return await self._answer_as_leader(handler, request, arguments)

    async def _answer_as_leader(
        self, handler: Any, request: Request, arguments: Sequence[str]
    ) -> Answer:
        term = self._current.term
        if term is None:
            return self._redirect_to_leader(request)
        try:
            async with term.leadership.while_held():
                answer: Answer = await handler(term, request, arguments)
            term.leadership.check()
        except NotLeaderError:
            return self._redirect_to_leader(request)
        except (RuleContentError, SafePointRequestError) as err:
            return json_answer(err.message, 500 if isinstance(err, SafePointRequestError) else 400)
        except TidemarkError as err:
            return error_answer(err)
        return answer

    def _redirect_to_leader(self, request: Request) -> Answer:
        """Redirect the client to the leader, if another one is known."""
        leader = self._members.leader
        if (
            leader is None
            or not leader.client_urls
            or leader.member_id == self._members.me.member_id
        ):
            return fault(503, "ErrNotLeader", self._members.not_leader().message)
        query = f"?{request.raw_query}" if request.raw_query else ""
        location = f"{leader.client_urls[0]}{request.path}{query}"
        # A line break in the path would end the header and begin one of the client's choice.
        if not location.isascii() or not location.isprintable():
            return fault(400, "ErrAPIInvalidParam", "the path has characters that no URL has")
        return Answer(307, b"", headers=[("Location", location)])

    def _find(self, path: str) -> tuple[Mapping[str, Any] | None, Sequence[str]]:
        """Return the methods of a path, and the percent-decoded values of its `{…}`."""
        if not path.startswith(PREFIX):
            return None, ()
        parts = path.removeprefix(PREFIX).rstrip("/").split("/")
        for names, methods in self._routes:
            given = template_arguments(names, parts)
            if given is not None:
                return methods, [
                    unquote_to_bytes(part).decode(errors="surrogateescape") for part in given
                ]
        return None, ()

    def _table(self) -> dict[str, dict[str, Any]]:
        self._member_routes: dict[str, Callable[[], Answer]] = {
            "version": lambda: json_answer({"version": documents.VERSION}),
            "status": self._status,
            "members": self._all_members,
            "health": self._health,
            "leader": self._leader,
        }
        anyone = {path: {"GET": handler} for path, handler in self._member_routes.items()}
        return {
            **anyone,
            "cluster": {"GET": cluster},
            "cluster/status": {"GET": cluster_status},
            "stores": {"GET": stores},
            "store/{}": {"GET": store},
            "regions": {"GET": regions},
            "regions/key": {"GET": regions_from_key},
            "regions/store/{}": {"GET": regions_of_store},
            "regions/replicated": {"GET": regions_replicated},
            "region/id/{}": {"GET": region_by_id},
            "region/key/{}": {"GET": region_by_key},
            "stats/region": {"GET": region_stats},
            "gc/safepoint": {"GET": safe_points},
            "gc/safepoint/{}": {"DELETE": delete_safe_point},
            "config": {"GET": config},
            "config/replicate": {"GET": replication},
            "config/cluster-version": {"GET": cluster_version},
            "config/region-label/rules": {"GET": label_rules, "PATCH": patch_label_rules},
            "config/region-label/rules/ids": {"GET": label_rules_by_ids},
            "config/region-label/rule": {"POST": set_label_rule},
            "config/region-label/rule/{}": {"GET": get_label_rule, "DELETE": delete_label_rule},
            **placement.ROUTES,
        }

    def _status(self) -> Answer:
        return json_answer(
            {
                "build_ts": "",
                "version": documents.VERSION,
                "git_hash": "",
                "start_timestamp": self._started_s,
                "kernel_type": "Classic",
            }
        )

    def _all_members(self) -> Answer:
        return json_answer(
            documents.members(self._cluster_id, self._members.listed, self._members.leader)
        )

    def _leader(self) -> Answer:
        leader = self._members.leader
        return json_answer(documents.member(leader) if leader else None, 200 if leader else 503)

    def _health(self) -> Answer:
        leader = self._members.leader
        return json_answer(
            [
                {
                    "name": one.name,
                    "member_id": one.member_id,
                    "client_urls": list(one.client_urls),
                    "health": leader is not None,
                }
                for one in self._members.listed
            ]
        )


async def cluster(term: LeaderTerm, _request: Request, _: Sequence[str]) -> Answer:
    """The cluster's own record."""
    return json_answer({"id": term.cluster.id, "max_peer_count": 1})


async def cluster_status(term: LeaderTerm, _request: Request, _: Sequence[str]) -> Answer:
    """Answer whether a store has bootstrapped the cluster."""
    return json_answer(
        {"is_initialized": term.cluster.bootstrapped, "replication_status": "REPLICATED"}
    )


async def stores(term: LeaderTerm, _request: Request, _: Sequence[str]) -> Answer:
    """All stores."""
    counts = await _count_regions(term, b"", b"")
    listed = [
        documents.store(term.cluster, one, counts) for _, one in sorted(term.cluster.stores.items())
    ]
    return json_answer({"count": len(listed), "stores": listed})


async def store(term: LeaderTerm, _request: Request, arguments: Sequence[str]) -> Answer:
    """One store."""
    one = term.cluster.stores.get(_number(arguments[0]))
    if one is None:
        return json_answer(f"[PD:core:ErrStoreNotFound]store {arguments[0]} not found", 404)
    return json_answer(documents.store(term.cluster, one, await _count_regions(term, b"", b"")))


async def regions(term: LeaderTerm, request: Request, _: Sequence[str]) -> Answer:
    """The first regions, by key; as many as one answer may have."""
    return json_answer(
        documents.regions(_first_regions(term, b"", b"", _limit(request, _MAX_REGIONS)))
    )


async def regions_from_key(term: LeaderTerm, request: Request, _: Sequence[str]) -> Answer:
    """`?key=&end_key=&limit=`: regions from a key on; the keys are percent-encoded bytes."""
    start, end = request.query_bytes("key"), request.query_bytes("end_key")
    return json_answer(
        documents.regions(_first_regions(term, start, end, _limit(request, _SCAN_REGIONS)))
    )


async def regions_of_store(term: LeaderTerm, _request: Request, arguments: Sequence[str]) -> Answer:
    """Regions with a peer on a store."""
    number = _number(arguments[0])
    regions_there: list[KnownRegion] = []
    async for entry in scan_in_turns(term.cluster.regions, b"", b""):
        if any(peer.store_id == number for peer in entry.region.peers):
            regions_there.append(entry)
        if len(regions_there) == _MAX_REGIONS:
            break
    return json_answer(documents.regions(regions_there))


async def regions_replicated(_term: LeaderTerm, _request: Request, _: Sequence[str]) -> Answer:
    """Answer whether placement rules are satisfied: each region has the one copy that
    it can have.
    """
    return json_answer("REPLICATED")


async def region_by_id(term: LeaderTerm, _request: Request, arguments: Sequence[str]) -> Answer:
    """One region; null if there is none, as from PD."""
    entry = term.cluster.regions.by_id(_number(arguments[0]))
    return json_answer(documents.region(entry) if entry else None)


async def region_by_key(term: LeaderTerm, _request: Request, arguments: Sequence[str]) -> Answer:
    """The region of a key."""
    entry = term.cluster.regions.find(arguments[0].encode(errors="surrogateescape"))
    return json_answer(documents.region(entry) if entry else None)


async def region_stats(term: LeaderTerm, request: Request, _: Sequence[str]) -> Answer:
    """`?start_key=&end_key=`: how many regions there are, and where."""
    start, end = request.query_bytes("start_key"), request.query_bytes("end_key")
    return json_answer(documents.region_stats(await _count_regions(term, start, end)))


async def safe_points(term: LeaderTerm, _request: Request, _: Sequence[str]) -> Answer:
    """All service safe points."""
    return json_answer(safe_points_document(await term.safe_points.view()))


async def delete_safe_point(
    term: LeaderTerm, _request: Request, arguments: Sequence[str]
) -> Answer:
    """Remove a service's safe point."""
    [outcome] = await term.safe_points.update_services([ServiceUpdate(arguments[0], 0, 0)])
    if isinstance(outcome, TidemarkError):
        raise outcome
    return json_answer("Delete service GC safepoint successfully.")


async def config(_term: LeaderTerm, _request: Request, _: Sequence[str]) -> Answer:
    """The settings of PD's that pd-ctl and dashboards read; none of them can be changed here."""
    return json_answer(
        {
            "cluster-version": documents.VERSION.removeprefix("v"),
            "replication": _REPLICATION,
            "schedule": {},
            "pd-server": {"use-region-storage": "true"},
        }
    )


async def replication(_term: LeaderTerm, _request: Request, _: Sequence[str]) -> Answer:
    """One copy of each region."""
    return json_answer(_REPLICATION)


async def cluster_version(_term: LeaderTerm, _request: Request, _: Sequence[str]) -> Answer:
    """The version clients choose features by."""
    return json_answer(documents.VERSION.removeprefix("v"))


async def label_rules(term: LeaderTerm, _request: Request, _: Sequence[str]) -> Answer:
    """All region label rules."""
    return json_answer(_by_index(term.rules.labels.values()))


async def label_rules_by_ids(term: LeaderTerm, request: Request, _: Sequence[str]) -> Answer:
    """The label rules whose ids the body lists."""
    ids = body_of(request)
    if not (isinstance(ids, list) and all(isinstance(rule_id, str) for rule_id in ids)):
        raise RuleContentError("the body is a JSON list of rule ids")
    return json_answer(
        [term.rules.labels[rule_id] for rule_id in ids if rule_id in term.rules.labels]
    )


async def patch_label_rules(term: LeaderTerm, request: Request, _: Sequence[str]) -> Answer:
    """Delete and set rules, as TiDB does with its DDL."""
    patch = body_of(request)
    sets, deletes = _list(patch, "sets"), _list(patch, "deletes")
    if not all(isinstance(rule_id, str) for rule_id in deletes):
        raise RuleContentError("deletes is a list of rule ids")
    await term.rules.change_labels([label_rule(rule) for rule in sets], deletes)
    return json_answer("Update region label rules successfully.")


async def set_label_rule(term: LeaderTerm, request: Request, _: Sequence[str]) -> Answer:
    """Set one rule."""
    await term.rules.change_labels([label_rule(body_of(request))], ())
    return json_answer("Update region label rule successfully.")


async def get_label_rule(term: LeaderTerm, _request: Request, arguments: Sequence[str]) -> Answer:
    """One rule."""
    rule = term.rules.labels.get(arguments[0])
    return json_answer(rule, 200 if rule else 404)


async def delete_label_rule(
    term: LeaderTerm, _request: Request, arguments: Sequence[str]
) -> Answer:
    """Remove one rule."""
    if arguments[0] not in term.rules.labels:
        return json_answer(
            f"[PD:region:ErrRegionRuleNotFound]region label rule not found for id {arguments[0]}",
            404,
        )
    await term.rules.change_labels((), [arguments[0]])
    return Answer(200, b"Delete rule successfully.")


_REPLICATION = {
    "max-replicas": 1,
    "location-labels": "",
    "strictly-match-label": "false",
    "enable-placement-rules": "true",
    "enable-placement-rules-cache": "false",
    "isolation-level": "",
}


def _by_index(rules: Any) -> list[dict[str, Any]]:
    return sorted(rules, key=lambda rule: (rule.get("index", 0), rule["id"]))


def _list(document: Any, name: str) -> list[Any]:
    value = (document.get(name) if isinstance(document, dict) else 0) or []
    if not isinstance(document, dict) or not isinstance(value, list):
        raise RuleContentError(f"the body is a JSON object with a list {name}")
    return value


def _number(text: str) -> int:
    """A number from a path; 0, which nothing has, for anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else 0


def _limit(request: Request, default: int) -> int:
    text = (request.query.get("limit") or [""])[0]
    limit = _number(text)
    return min(limit or default, _MAX_REGIONS)


def _first_regions(term: LeaderTerm, start: bytes, end: bytes, limit: int) -> list[KnownRegion]:
    return list(islice(term.cluster.regions.scan(start, end), limit))


async def _count_regions(term: LeaderTerm, start: bytes, end: bytes) -> documents.RegionCounts:
    counts = documents.RegionCounts()
    async for entry in scan_in_turns(term.cluster.regions, start, end):
        counts.add(entry)
    return counts


async def scan_in_turns(regions: Regions, start: bytes, end: bytes) -> AsyncIterator[KnownRegion]:
    """Regions that touch `[start, end)`, by slices: others are answered in between,
    and regions may split and merge.

    What was passed already is not given again, whatever it has become.
    """
    at = start
    while True:
        # Taken whole before the loop is given away: the map may change while others are answered.
        part = list(islice(regions.scan(at, end), _SLICE_REGIONS))
        for entry in part:
            # A region that was merged since begins before `at`; its first part was given already.
            if at == start or entry.region.start_key >= at:
                yield entry
        if len(part) < _SLICE_REGIONS or not part[-1].region.end_key:
            return
        at = part[-1].region.end_key
        await asyncio.sleep(0)
