"""`tidemark cli service-gc-safepoint [delete ID]`: pd-ctl's command; deleting may lose history,
so it is asked for.
"""

import argparse
import json
import time
from typing import Any

from gcsafepoint.explain.document import span, time_of
from gcsafepoint.explain.names import feed_of, shown
from server.cli.arguments import NotConfirmedError, add_yes, confirm
from server.cli.gc_explain import explained
from server.cli.output import Output, table
from server.cli.remote import NotServedError, Remote
from storage.meta.meta import KeyValue
from storage.model.errors import CorruptError, InvalidError, NotFoundError

_NEVER_S = (1 << 63) - 1
_COLUMNS = (
    ("SERVICE", "service_id"),
    ("SAFE POINT", "safe_point"),
    ("TIME", "time"),
    ("TTL LEFT", "ttl"),
)
_LIVE = ("renewed", "dead", "stopped", "failed")


class ServiceUnknownError(NotFoundError):
    """There is no such service safe point."""

    code = "ErrServiceUnknown"


class ServiceFixedError(InvalidError):
    """GC's own safe point cannot be deleted."""

    code = "ErrServiceFixed"


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `service-gc-safepoint`, which by itself lists."""
    group = groups.add_parser("service-gc-safepoint", parents=[shared])
    group.set_defaults(command=list_services)
    delete = group.add_subparsers(metavar="delete").add_parser(
        "delete", help="let GC pass one", parents=[shared]
    )
    delete.add_argument("service_id", help="as listed")
    delete.add_argument("--dry-run", action="store_true", help="only say what would become of it")
    add_yes(delete, "do not ask, not even for a changefeed that exists")
    delete.set_defaults(command=delete_service)


async def list_services(remote: Remote, _: argparse.Namespace) -> Output:
    """All service safe points; the document has the shape of PD's HTTP API."""
    document = await safe_points(remote)
    now_s = int(time.time())
    rows = [
        {
            "service_id": shown(service["service_id"]),
            "safe_point": service["safe_point"],
            "time": time_of(service["safe_point"]),
            "ttl": "never ends"
            if service["expired_at"] >= _NEVER_S
            else _left(service["expired_at"] - now_s),
        }
        for service in document["service_gc_safe_points"]
    ]
    lines = [
        table(rows, _COLUMNS),
        *(f"{name}: {_with_time(document[name])}" for name in document if name in _TOTALS),
    ]
    return Output(document, shown="\n".join(lines))


async def delete_service(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Delete one, or with --dry-run say what GC would wait for then."""
    service_id: str = arguments.service_id
    if service_id == "gc_worker":
        raise ServiceFixedError(
            "gc_worker is GC itself and cannot be deleted; see `tidemark cli gc status`"
        )
    services = {
        service["service_id"]: service
        for service in (await safe_points(remote))["service_gc_safe_points"]
    }
    if service_id not in services:
        raise ServiceUnknownError(
            f"there is no service {service_id!r}; see `tidemark cli service-gc-safepoint`"
        )
    if services[service_id]["expired_at"] < int(time.time()):
        effect = {
            "state": "expired",
            "summary": f"{shown(service_id)} has expired and holds nothing back",
        }
    else:
        effect = await _effect(remote, service_id)
    if arguments.dry_run:
        return Output({"dry_run": True, "service_id": service_id, **effect})
    if not arguments.yes and effect["state"] != "expired":
        _confirm(service_id, effect)
    async with remote.coordinator() as pd:
        minimum = await pd.update_service_gc_safe_point(service_id, 0, 0)
    return Output(
        {
            "deleted": service_id,
            "safe_point": services[service_id]["safe_point"],
            "min_service_id": minimum.service_id,
            "min_service_gc_safe_point": minimum.safe_point,
        }
    )


_TOTALS = ("min_service_gc_safe_point", "gc_safe_point")


async def safe_points(remote: Remote) -> dict[str, Any]:
    """All safe points in the shape of PD's HTTP API: the lapsed ones, too,
    but the minimum is of those that hold.
    """
    async with remote.coordinator() as pd, remote.metadata() as meta:
        gc_safe_point = await pd.gc_safe_point()
        pairs = await meta.get_prefix(f"/pd/{pd.cluster_id}/gc/safe_point/service/".encode())
    services = sorted(
        map(_service, pairs), key=lambda service: (service["safe_point"], service["service_id"])
    )
    now_s = int(time.time())
    live = [service["safe_point"] for service in services if service["expired_at"] >= now_s]
    minimum = {"min_service_gc_safe_point": min(live)} if live and min(live) else {}
    return {"service_gc_safe_points": services, **minimum, "gc_safe_point": gc_safe_point}


def _service(pair: KeyValue) -> dict[str, Any]:
    try:
        fields = json.loads(pair.value)
        return {
            "service_id": str(fields["service_id"]),
            "expired_at": int(fields["expired_at"]),
            "safe_point": int(fields["safe_point"]),
        }
    except (ValueError, KeyError, TypeError) as err:
        raise CorruptError(
            f"{pair.key!r} holds {pair.value!r}: {err}; correct it with etcdctl"
        ) from err


async def _effect(remote: Remote, service_id: str) -> dict[str, Any]:
    """What the coordinator says would become of it; a real PD says nothing,
    then the name must do.
    """
    try:
        document = await explained(remote, [service_id], 100)
    except NotServedError:
        return {
            "state": "dead" if feed_of(service_id) else "foreign",
            "summary": f"without {shown(service_id)}",
        }
    states = {blocker["id"]: blocker["chain"][0]["state"] for blocker in document["blockers"]}
    what_if = document["what_if"]
    return {
        "state": states.get(shown(service_id), "live"),
        "summary": what_if["summary"],
        "history_given_up": what_if["history_given_up"],
        "min_service_id": what_if["min_safe_point_id"],
        "min_service_gc_safe_point": what_if["min_safe_point"],
    }


def _confirm(service_id: str, effect: dict[str, Any]) -> None:
    if effect["state"] in _LIVE:
        raise NotConfirmedError(
            f"changefeed {shown(feed_of(service_id))} exists and is {effect['state']}: "
            f"{effect['summary']}. Resume or "
            "remove the changefeed instead, or pass --yes to give its history up"
        )
    confirm(f"{effect['summary']}. Delete it?")


def _left(seconds: int) -> str:
    return span(seconds * 1000) if seconds >= 0 else "expired"


def _with_time(ts: int) -> str:
    return f"{ts}  {time_of(ts)}".rstrip()
