"""Shows the blockers of GC: `tidemark cli gc explain`, `service-gc-safepoint [delete ID]` and
`gc-state keyspace ID|all`.

`gc explain` follows each blocker down to the cause: until when it holds GC, and the command that
ends it. The other two are pd-ctl's commands, with its documents. Deleting a service's safe point
may lose history, so it is asked for.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

from kvproto import pdpb_pb2 as pdpb
from kvproto.pdpb_pb2_grpc import PDStub
from tidemarkpb.v1 import explain_pb2 as pb
from tidemarkpb.v1.explain_pb2_grpc import ExplainServiceStub

from gcsafepoint.explain.explanation import span, time_of
from gcsafepoint.explain.names import feed_of, shown
from server.cli.arguments import NotConfirmedError, add_yes, confirm, count
from server.cli.output import Output, plain, table
from server.cli.remote import CALL_S, NotServedError, Remote, RemoteError
from storage.meta.meta import KeyValue
from storage.model.errors import CorruptError, InvalidError, NotFoundError

_REMOVE = "remove="
_NEVER_EXPIRES_S = (1 << 63) - 1
_SERVICE_COLUMNS = (
    ("SERVICE", "service_id"),
    ("SAFE POINT", "safe_point"),
    ("TIME", "time"),
    ("TTL LEFT", "ttl"),
)
_LIVE = ("renewed", "dead", "stopped", "failed")
_TOTALS = ("min_service_gc_safe_point", "gc_safe_point")
NULL_KEYSPACE = 0xFFFF_FFFF
_LAST_KEYSPACE = 0xFF_FFFF
_NEVER_S = 9_223_372_036  # 63 bits of nanoseconds: PD counts them


class ServiceUnknownError(NotFoundError):
    """No service safepoint has this name."""

    code = "ErrServiceUnknown"


class ServiceFixedError(InvalidError):
    """GC's own safe point cannot be deleted."""

    code = "ErrServiceFixed"


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the groups `service-gc-safepoint` and `gc-state`."""
    _add_services(groups, shared)
    _add_states(groups, shared)


def add_explain(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add `explain` to the verbs of `gc`."""
    verb = verbs.add_parser(
        "explain", help="show what blocks GC, why, until when, and how to end it", parents=[shared]
    )
    verb.add_argument(
        "--what-if",
        action="append",
        type=removed_names,
        default=[],
        metavar="remove=NAME[,NAME…]",
        help="change nothing; show what GC would wait for without these services or changefeeds",
    )
    verb.add_argument(
        "--limit", type=count, default=10, help="blockers to show, the lowest first (default: 10)"
    )
    verb.set_defaults(command=explain)


def _add_services(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `service-gc-safepoint`, which by itself lists."""
    group = groups.add_parser("service-gc-safepoint", parents=[shared])
    group.set_defaults(command=list_services)
    delete = group.add_subparsers(metavar="delete").add_parser(
        "delete",
        help="delete the safepoint of a service, so that GC no longer waits for it",
        parents=[shared],
    )
    delete.add_argument("service_id", help="the service's id in the list")
    delete.add_argument(
        "--dry-run", action="store_true", help="change nothing; show what would happen"
    )
    add_yes(delete, "do not ask, not even for a changefeed that exists")
    delete.set_defaults(command=delete_service)


def _add_states(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `gc-state`."""
    group = groups.add_parser("gc-state")
    verbs = group.add_subparsers(required=True, metavar="keyspace|all")
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument(
        "--include-expired", action="store_true", help="also show barriers whose TTL is over"
    )
    flags.add_argument(
        "--exclude-global-barriers",
        action="store_true",
        help="leave out barriers that hold for all keyspaces",
    )
    one = verbs.add_parser(
        "keyspace", help="show the GC state of one keyspace", parents=[shared, flags]
    )
    one.add_argument(
        "keyspace_id", type=keyspace_id, help=f"0 to {_LAST_KEYSPACE}, or null ({NULL_KEYSPACE})"
    )
    one.set_defaults(command=show_keyspace)
    every = verbs.add_parser(
        "all", help="show the GC states of all keyspaces", parents=[shared, flags]
    )
    every.set_defaults(command=show_all)


def removed_names(text: str) -> list[str]:
    """The names of `remove=NAME,…`; raises ArgumentTypeError."""
    names = [name for name in text.removeprefix(_REMOVE).split(",") if name]
    if not text.startswith(_REMOVE) or not names:
        raise argparse.ArgumentTypeError(f"{text!r} is not understood; write --what-if remove=NAME")
    return names


def keyspace_id(text: str) -> int:
    """A keyspace id, `null` for the null keyspace; raises ArgumentTypeError."""
    if text == "null":
        return NULL_KEYSPACE
    if (
        text.isascii()
        and text.isdigit()
        and (int(text) <= _LAST_KEYSPACE or int(text) == NULL_KEYSPACE)
    ):
        return int(text)
    raise argparse.ArgumentTypeError(
        f"{text!r} is no keyspace id: 0 to {_LAST_KEYSPACE}, {NULL_KEYSPACE} or null"
    )


async def explain(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Chains of blockers, the lowest first."""
    names = [name for group in arguments.what_if for name in group]
    document = await explained(remote, names, max(1, arguments.limit))
    return Output(document, shown="\n".join(tree(document)))


async def explained(remote: Remote, what_if_remove: list[str], limit: int = 1) -> dict[str, Any]:
    """The leading coordinator's explanation; raises as `Remote.leader`."""
    request = pb.ExplainGCRequest(what_if_remove=what_if_remove, limit=limit)
    async with remote.leader() as (_, channel):
        return plain(await ExplainServiceStub(channel).ExplainGC(request, timeout=CALL_S))


def tree(document: dict[str, Any]) -> Iterator[str]:
    """The document as people read it."""
    yield document["summary"]
    for name in ("gc_safe_point", "min_safe_point", "wanted_safe_point"):
        yield f"  {name.replace('_', ' '):<18} {document[name]}  {document[f'{name}_time']}".rstrip()
    for number, blocker in enumerate(document["blockers"], 1):
        yield ""
        yield f"{number}. {blocker['id']}{' blocks GC' if blocker['blocks'] else ''}"
        yield from _chain(blocker["chain"])
    if document["blockers_left_out"]:
        yield f"\n{document['blockers_left_out']} more, see --limit"
    if document["what_if"]:
        yield from _what_if(document["what_if"])
    for problem in document["problems"]:
        yield f"could not be learnt: {problem}"


def _chain(links: list[dict[str, Any]]) -> Iterator[str]:
    for depth, link in enumerate(links):
        branch = "   " * depth + ("└─ " if depth else "   ")
        margin = "   " * (depth + 1) + "   "
        state = f" [{link['state']}]" if link["state"] else ""
        owner = f", {link['owner']}" if link["owner"] else ""
        yield f"{branch}{link['kind'].replace('_', ' ')} {link['name']}{state}{owner}"
        yield f"{margin}{link['reason']}"
        yield f"{margin}{', '.join(_facts(link))}"
        for command in link["commands"]:
            yield f"{margin}$ {command}"


def _facts(link: dict[str, Any]) -> Iterator[str]:
    yield f"at {link['ts']}" + (
        f" = {link['time']}, {span(link['age_seconds'] * 1000)} old" if link["time"] else ""
    )
    if link["ttl_left_seconds"] is not None:
        yield f"TTL left {span(link['ttl_left_seconds'] * 1000)}, until {link['expires_at']}"
    if link["history_lost_at"]:
        yield f"history lost at {link['history_lost_at']}"
    if link["holds_back_seconds"]:
        yield f"holds back {span(link['holds_back_seconds'] * 1000)}"


def _what_if(what_if: dict[str, Any]) -> Iterator[str]:
    yield f"\nwhat if: {what_if['summary']}"
    yield (
        f"   minimum {what_if['min_safe_point']}  {what_if['min_safe_point_time']}; next: "
        f"{what_if['next']['id']}"
    )
    yield from _chain(what_if["next"]["chain"])


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
            if service["expired_at"] >= _NEVER_EXPIRES_S
            else _left(service["expired_at"] - now_s),
        }
        for service in document["service_gc_safe_points"]
    ]
    lines = [
        table(rows, _SERVICE_COLUMNS),
        *(f"{name}: {_with_time(document[name])}" for name in document if name in _TOTALS),
    ]
    return Output(document, shown="\n".join(lines))


async def delete_service(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Delete a service safepoint, or with --dry-run show what GC would wait for then."""
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
    """The coordinator's forecast of a removal; a real PD gives none, then the name must do."""
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


async def show_keyspace(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Show the GC state of one keyspace, and the keyspace whose state applies to it."""
    keyspace: int = arguments.keyspace_id
    async with remote.leader() as (pd, channel):
        request = pdpb.GetGCStateRequest(
            header=pdpb.RequestHeader(cluster_id=pd.cluster_id),
            keyspace_scope=pdpb.KeyspaceScope(keyspace_id=keyspace),
            include_global_gc_barriers=not arguments.exclude_global_barriers,
        )
        answer = _checked(await PDStub(channel).GetGCState(request, timeout=CALL_S))
    state = _state(answer.gc_state, arguments)
    document = {
        "requested_keyspace_id": keyspace,
        "effective_keyspace_id": state.pop("keyspace_id"),
    } | state
    if not arguments.exclude_global_barriers:
        document["global_gc_barriers"] = _barriers(answer.global_gc_barriers.barriers, arguments)
    return Output(document, shown="\n".join(_lines(document)))


async def show_all(remote: Remote, arguments: argparse.Namespace) -> Output:
    """All keyspaces, the lowest id first."""
    async with remote.leader() as (pd, channel):
        request = pdpb.GetAllKeyspacesGCStatesRequest(
            header=pdpb.RequestHeader(cluster_id=pd.cluster_id),
            exclude_global_gc_barriers=arguments.exclude_global_barriers,
        )
        answer = _checked(await PDStub(channel).GetAllKeyspacesGCStates(request, timeout=CALL_S))
    states = sorted(
        (_state(state, arguments) for state in answer.gc_states),
        key=lambda item: int(item["keyspace_id"]),
    )
    document: dict[str, Any] = {"gc_states": states}
    if not arguments.exclude_global_barriers:
        document["global_gc_barriers"] = _barriers(answer.global_gc_barriers, arguments)
    lines = [line for state in states for line in (*_lines(state), "")]
    return Output(
        document,
        shown="\n".join([*lines, *_barrier_lines(document, "global_gc_barriers")]).rstrip(),
    )


def _checked(answer: Any) -> Any:
    if answer.header.error.type != pdpb.OK:
        raise RemoteError(answer.header.error.message)
    return answer


def _state(state: pdpb.GCState, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "keyspace_id": state.keyspace_scope.keyspace_id
        if state.HasField("keyspace_scope")
        else NULL_KEYSPACE,
        "is_keyspace_level_gc": state.is_keyspace_level_gc,
        "txn_safe_point": state.txn_safe_point,
        "gc_safe_point": state.gc_safe_point,
        "gc_barriers": _barriers(state.gc_barriers, arguments),
    }


def _barriers(barriers: Iterable[Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    documents = [
        {
            "barrier_id": barrier.barrier_id,
            "barrier_ts": barrier.barrier_ts,
            "ttl_seconds": barrier.ttl_seconds,
        }
        for barrier in barriers
        if barrier.ttl_seconds > 0 or arguments.include_expired
    ]
    return sorted(documents, key=lambda barrier: (barrier["barrier_ts"], barrier["barrier_id"]))


def _lines(document: dict[str, Any]) -> list[str]:
    names = [name for name in document if not name.endswith("barriers")]
    lines = [f"{name}: {document[name]}{_time(name, document[name])}" for name in names]
    return (
        lines
        + _barrier_lines(document, "gc_barriers")
        + _barrier_lines(document, "global_gc_barriers")
    )


def _barrier_lines(document: dict[str, Any], name: str) -> list[str]:
    barriers = document.get(name)
    return [f"{name}:", *map(_barrier_line, barriers)] if barriers else []


def _barrier_line(barrier: dict[str, Any]) -> str:
    ttl_s = barrier["ttl_seconds"]
    left = (
        "never ends"
        if ttl_s >= _NEVER_S
        else f"ends in {span(ttl_s * 1000)}"
        if ttl_s
        else "expired"
    )
    return (
        f"  - {shown(barrier['barrier_id'])}: "
        f"{barrier['barrier_ts']}{_time('ts', barrier['barrier_ts'])}, {left}"
    )


def _time(name: str, value: Any) -> str:
    return f"  {time_of(value)}" if name.endswith(("ts", "safe_point")) and value else ""
