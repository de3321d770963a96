"""`tidemark cli gc …`: garbage collection as its worker does it.

Here are the group, and its small verbs: `gc status` says who leads, how far GC is, what it does and
who holds it back; `gc safepoint` gives the safe points as PD's `/pd/api/v1/gc/safepoint` does; `gc
config` reads and sets the variables of mysql.tidb. `gc explain`, `gc run`, `gc history` and `gc
ranges` are modules of their own.
"""

import argparse
from dataclasses import dataclass
from typing import Any, Final

from tidemarkpb.v1 import gc_pb2

from gcsafepoint.worker.config import GCConfig, GCConfigError, nearest
from gcsafepoint.worker.election import Leader
from gcsafepoint.worker.records import read_config, read_table
from gcsafepoint.worker.times import DurationError, format_instant, parse_instant_ms
from server.cli import gc_explain, gc_ranges, gc_round
from server.cli.output import Output
from server.cli.remote import CALL_S, Remote, add_gc_worker_address
from server.cli.service_gc_safepoint import safe_points
from server.cli.tso import time_of
from server.gc_worker.view import Overview, overview, round_message
from storage.model.errors import TidemarkError
from storage.model.ts import physical_ms

_CONFIG_COLUMNS: Final = tuple(
    (name, name) for name in ("VARIABLE_NAME", "VARIABLE_VALUE", "COMMENT")
)
_LIVE_S: Final = 3.0


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `gc`."""
    group = groups.add_parser("gc")
    verbs = group.add_subparsers(required=True, metavar="VERB")
    gc_explain.add_verb(verbs, shared)
    safepoint = verbs.add_parser(
        "safepoint", help="the GC safe point and the services' safe points", parents=[shared]
    )
    safepoint.set_defaults(command=show_safepoint)
    status = verbs.add_parser(
        "status", help="who leads, how far GC is, and who holds it back", parents=[shared]
    )
    status.set_defaults(command=show_status)
    gc_round.add_verbs(verbs, shared)
    _add_config(verbs, shared)
    gc_ranges.add_verbs(verbs, shared)


def _add_config(verbs: Any, shared: argparse.ArgumentParser) -> None:
    config = verbs.add_parser(
        "config", help="the variables that steer GC, as in mysql.tidb", parents=[shared]
    )
    config.set_defaults(command=get_config, names=[])
    actions = config.add_subparsers(metavar="[get | set]")
    get = actions.add_parser("get", help="some variables, or all", parents=[shared])
    get.add_argument("names", nargs="*", metavar="NAME", help="such as tikv_gc_life_time")
    get.set_defaults(command=get_config)
    put = actions.add_parser(
        "set", help="set variables, all or none; in force at the next tick", parents=[shared]
    )
    put.add_argument(
        "settings",
        nargs="+",
        metavar="NAME=VALUE",
        type=setting,
        help="such as tikv_gc_life_time=24h",
    )
    add_gc_worker_address(put)
    put.set_defaults(command=set_config)


async def show_safepoint(remote: Remote, _: argparse.Namespace) -> Output:
    """The GC safe point, and all service safe points, smallest first."""
    safepoints = await safe_points(remote)
    return Output(
        {
            "gc_safe_point": safepoints["gc_safe_point"],
            "min_service_gc_safe_point": safepoints.get("min_service_gc_safe_point", 0),
            "service_gc_safe_points": safepoints["service_gc_safe_points"],
        }
    )


async def show_status(remote: Remote, _: argparse.Namespace) -> Output:
    """How GC stands, also when no worker runs."""
    async with remote.coordinator() as pd, remote.gc_records() as records:
        now_ms, gc_safe_point = physical_ms(await pd.tso()), await pd.gc_safe_point()
        gc_overview, config, fault = await overview(records), None, ""
        try:
            config = await read_config(records)
        except GCConfigError as err:
            fault = str(err)
    newest = round_message(gc_overview.newest, now_ms) if gc_overview.newest else None
    live = await _live_round(remote)
    if live is not None and (newest is None or live.id >= newest.id):
        newest = live
    return Output(report(GCState(now_ms, gc_safe_point, gc_overview, config, fault, newest)))


@dataclass(frozen=True, slots=True)
class GCState:
    """What the answer of `gc status` is made of."""

    now_ms: int
    gc_safe_point: int
    records: Overview
    config: GCConfig | None
    fault: str
    newest: gc_pb2.GCRound | None


def report(state: GCState) -> dict[str, Any]:
    """The answer as a document (pure)."""
    records, saved = state.records, state.records.saved_safe_point
    blocker = state.newest.blocker if state.newest else ""
    return {
        "enabled": state.config.enable if state.config else None,
        "mode": state.config.mode if state.config else None,
        "leader": _leader(records.leader, state.now_ms),
        "safe_point": saved,
        "safe_point_time": time_of(saved),
        "behind_seconds": (state.now_ms - physical_ms(saved)) // 1000 if saved else None,
        "gc_safe_point": state.gc_safe_point,
        "blocker": blocker,
        "last_run_time": records.last_run_time,
        "next_run_time": _next_run(state),
        "pending_ranges": records.pending_ranges,
        "failed_ranges": records.failed_ranges,
        "round": gc_round.document(state.newest) if state.newest else None,
        "advice": "; ".join(_advice(state, blocker)),
    }


def _advice(state: GCState, blocker: str) -> list[str]:
    leader = _leader(state.records.leader, state.now_ms)
    advice = [state.fault] if state.fault else []
    if leader is None or not leader["leads"]:
        advice.append("no gc worker leads; start one with `tidemark gc-worker`")
    if state.config and not state.config.enable:
        advice.append(
            "gc is switched off; `tidemark cli gc config set tikv_gc_enable=true` switches it on"
        )
    if blocker:
        advice.append(
            f"held back by {blocker}; `tidemark cli gc explain` says what is behind it and what "
            "may be done"
        )
    if state.records.failed_ranges:
        advice.append("some ranges could not be destroyed; `tidemark cli gc ranges` says why")
    if state.newest and state.newest.error:
        advice.append("the last round failed; the next one does what is left")
    return advice


def _leader(leader: Leader | None, now_ms: int) -> dict[str, Any] | None:
    if leader is None:
        return None
    try:
        leads = parse_instant_ms(leader.lease) >= now_ms
    except DurationError:
        leads = False
    return {
        "uuid": leader.uuid,
        "desc": leader.desc,
        "lease": leader.lease,
        "address": leader.address,
        "leads": leads,
    }


def _next_run(state: GCState) -> str:
    if state.config is None or not state.config.enable:
        return ""
    try:
        last_ms = parse_instant_ms(state.records.last_run_time)
    except DurationError:
        return format_instant(state.now_ms)
    return format_instant(max(state.now_ms, last_ms + state.config.run_interval_ms))


async def _live_round(remote: Remote) -> gc_pb2.GCRound | None:
    """The leader's newest round as it is right now; None if it cannot be asked."""
    try:
        async with remote.gc_leader() as leader:
            answer = await leader.GetGCStatus(gc_pb2.GetGCStatusRequest(), timeout=_LIVE_S)
    except TidemarkError:
        # Without a worker, or with one that does not answer, the records say enough.
        return None
    return answer.last_round if answer.HasField("last_round") else None


def setting(text: str) -> tuple[str, str]:
    """NAME=VALUE; raises ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=VALUE, such as tikv_gc_life_time=24h"
        )
    return name.strip(), value.strip()


async def get_config(remote: Remote, arguments: argparse.Namespace) -> Output:
    """The variables asked for, or all of them.

    Raises:
        GCConfigError: there is none of that name.
    """
    async with remote.gc_records() as records:
        table = await read_table(records)
    rows = {name: (name, value, comment) for name, value, comment in table}
    for name in arguments.names:
        if name not in rows:
            raise GCConfigError(f"{name}: no such variable, did you mean {nearest(name, rows)}?")
    chosen = [rows[name] for name in arguments.names or rows]
    titles = [title for title, _ in _CONFIG_COLUMNS]
    return Output([dict(zip(titles, row, strict=True)) for row in chosen], _CONFIG_COLUMNS)


async def set_config(remote: Remote, arguments: argparse.Namespace) -> Output:
    """The variables that were set, as they are now."""
    variables = dict(arguments.settings)
    async with remote.gc_leader(arguments.gc_worker) as leader:
        await leader.SetGCConfig(gc_pb2.SetGCConfigRequest(variables=variables), timeout=CALL_S)
    return await get_config(remote, argparse.Namespace(names=list(variables)))
