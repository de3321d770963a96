"""The daemons beside the captures, for the console: their names, addresses and start times.

Coordinators and stores are asked of PD, when each coordinator was started of itself, by PD's HTTP
API; pumps and the leading GC worker stand in the metadata. What is not known is empty.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any, Final

from kvproto import metapb_pb2, pdpb_pb2

from gcsafepoint.worker.election import Leader, read_leader
from server.gc_worker.view import MetaRecords
from server.pump.registry import OFFLINE, PUMPS, STARTS, VERSIONS, read_entry
from server.rpc.client import http_opener
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient
from storage.meta.meta import Meta
from storage.model.ts import physical_ms

Row = dict[str, str]
"""One daemon: kind, name, address, role, version, started."""
ClusterMap = Callable[[], Awaitable[list[Row]]]

_VERSION: Final = re.compile(r"\bversion:(\S+)")
"""In a GC worker's description of itself."""
_STATUS: Final = "/pd/api/v1/status"
_STATUS_S: Final = 2.0
_STATUS_BYTES: Final = 64 << 10


def mapped_by(pd: PdClient, meta: Meta, security: SecurityConfig) -> ClusterMap:
    """Return a function that reads the daemons of a cluster anew at each call."""

    async def daemons() -> list[Row]:
        members, stores = await pd.members(), await pd.stores()
        statuses = await asyncio.gather(
            *(asyncio.to_thread(_status_of, each.client_urls, security) for each in members.members)
        )
        leader = await read_leader(MetaRecords(meta))
        return [
            *_coordinators(members, statuses),
            *map(_store, stores),
            *[row async for row in _pumps(meta)],
            *([_gc_worker(leader)] if leader else []),
        ]

    return daemons


def _coordinators(
    members: pdpb_pb2.GetMembersResponse, statuses: Sequence[Mapping[str, Any]]
) -> Iterator[Row]:
    for member, status in zip(members.members, statuses, strict=True):
        yield {
            "kind": "coordinator",
            "name": member.name,
            "address": ", ".join(member.client_urls),
            "role": "leader" if member.member_id == members.leader.member_id else "",
            "version": member.binary_version or str(status.get("version", "")),
            "started": _time(status.get("start_timestamp", 0)),
        }


def _status_of(urls: Sequence[str], security: SecurityConfig) -> Mapping[str, Any]:
    """Return the status of the first coordinator that answers, by its own HTTP API; empty if none
    does.
    """
    for url in urls:
        with suppress(OSError, ValueError, HTTPException):
            tls = security if url.startswith("https:") else None
            with http_opener(tls).open(url + _STATUS, timeout=_STATUS_S) as answer:
                status = json.loads(answer.read(_STATUS_BYTES))
                return status if isinstance(status, dict) else {}
    return {}


def _store(store: metapb_pb2.Store) -> Row:
    return {
        "kind": "store",
        "name": str(store.id),
        "address": store.address,
        "role": metapb_pb2.StoreState.Name(store.state).lower(),
        "version": store.version,
        "started": _time(store.start_timestamp),
    }


async def _pumps(meta: Meta) -> Any:
    starts, versions = [
        {pair.key.removeprefix(prefix): pair.value for pair in await meta.get_prefix(prefix)}
        for prefix in (STARTS, VERSIONS)
    ]
    for pair in await meta.get_prefix(PUMPS):
        name = pair.key.removeprefix(PUMPS)
        entry = read_entry(pair.value) or {}
        if entry.get("state") == OFFLINE:
            continue
        started_ms = starts.get(name, b"")
        yield {
            "kind": "pump",
            "name": name.decode(errors="replace"),
            "address": str(entry.get("host", "")),
            "role": str(entry.get("state", "unreadable entry")),
            "version": versions.get(name, b"").decode(errors="replace"),
            "started": _time(int(started_ms) / 1000) if started_ms.isdigit() else "",
        }


def _gc_worker(leader: Leader) -> Row:
    """The worker that leads; it is named by the timestamp at which it was started, as TiDB's is."""
    try:
        started = _time(physical_ms(int(leader.uuid, 16)) / 1000)
    except (ValueError, OverflowError):
        started = ""
    version = _VERSION.search(leader.desc)
    return {
        "kind": "gc-worker",
        "name": leader.uuid,
        "address": leader.address,
        "role": "leader",
        "version": version[1] if version else "",
        "started": started,
    }


def _time(seconds: float) -> str:
    """Format a time for the page; empty for 0, an unknown time."""
    with suppress(OSError, ValueError, OverflowError, TypeError):
        return datetime.fromtimestamp(seconds, UTC).isoformat() if seconds else ""
    return ""
