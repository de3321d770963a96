"""`tidemark cli gc-state keyspace ID|all`: pd-ctl's command, and its document."""

import argparse
from collections.abc import Iterable
from typing import Any

from kvproto import pdpb_pb2 as pdpb
from kvproto.pdpb_pb2_grpc import PDStub

from gcsafepoint.explain.document import span, time_of
from gcsafepoint.explain.names import shown
from server.cli.output import Output
from server.cli.remote import CALL_S, Remote, RemoteError

NULL_KEYSPACE = 0xFFFF_FFFF
_LAST_KEYSPACE = 0xFF_FFFF
_NEVER_S = 9_223_372_036  # 63 bits of nanoseconds: PD counts them


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `gc-state`."""
    group = groups.add_parser("gc-state")
    verbs = group.add_subparsers(required=True, metavar="keyspace|all")
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument(
        "--include-expired", action="store_true", help="show barriers whose TTL is over, too"
    )
    flags.add_argument(
        "--exclude-global-barriers", action="store_true", help="leave out those of all keyspaces"
    )
    one = verbs.add_parser(
        "keyspace", help="the state that holds for one keyspace", parents=[shared, flags]
    )
    one.add_argument(
        "keyspace_id", type=keyspace_id, help=f"0 to {_LAST_KEYSPACE}, or null ({NULL_KEYSPACE})"
    )
    one.set_defaults(command=show_keyspace)
    every = verbs.add_parser("all", help="the states of all keyspaces", parents=[shared, flags])
    every.set_defaults(command=show_all)


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


async def show_keyspace(remote: Remote, arguments: argparse.Namespace) -> Output:
    """One keyspace: what was asked for, and whose state holds for it."""
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
