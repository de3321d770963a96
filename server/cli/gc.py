"""`tidemark cli gc …`: garbage collection as its worker does it.

`gc status` says who leads, how far GC is, what it does and who holds it back; `gc safepoint` gives
the safe points as PD's `/pd/api/v1/gc/safepoint` does; `gc config` reads and sets the variables of
mysql.tidb; `gc run` starts a round, and `gc history` lists the last ones. People read a round as a
document, as a row of the history, and as one line while it runs. `gc explain` (`gc_blockers`) and
`gc ranges` are modules of their own.
"""

import argparse
import asyncio
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tidemarkpb.v1 import gc_pb2

from gcsafepoint.explain.explanation import time_of
from gcsafepoint.worker.config import (
    DurationError,
    GCConfig,
    GCConfigError,
    format_instant,
    nearest,
    parse_instant_ms,
)
from gcsafepoint.worker.election import Leader
from gcsafepoint.worker.records import ROUNDS_KEPT, load_rounds, read_config, read_table
from gcsafepoint.worker.round import Phase
from server.cli import gc_blockers, gc_ranges
from server.cli.arguments import count
from server.cli.gc_blockers import safe_points
from server.cli.output import Output
from server.cli.remote import CALL_S, Remote, add_gc_worker_address
from server.gc_worker.view import Overview, overview, round_message
from storage.model.errors import ConflictError, TidemarkError
from storage.model.ts import physical_ms

if TYPE_CHECKING:
    from tidemarkpb.v1.gc_pb2_grpc import GCServiceAsyncStub


_CONFIG_COLUMNS: Final = tuple(
    (name, name) for name in ("VARIABLE_NAME", "VARIABLE_VALUE", "COMMENT")
)
_LIVE_S: Final = 3.0
_ROUND_COLUMNS = (
    ("STARTED", "started"),
    ("SECONDS", "seconds"),
    ("RESULT", "result"),
    ("SAFE POINT", "safe_point_time"),
    ("REGIONS", "regions"),
    ("LOCKS", "resolved_locks"),
    ("RANGES", "deleted_ranges"),
    ("FAILED", "failed_ranges"),
    ("BLOCKER OR ERROR", "reason"),
)
_ENDED = "ended"
_POLL_S = 0.3
_PLAN_S = 600.0
_GOOD = ("done", "no new safepoint", "gave way to the next round")


class GCRoundFailedError(ConflictError):
    """The round that was waited for did not do its work."""

    code = "ErrGCRoundFailed"


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `gc`."""
    group = groups.add_parser("gc")
    verbs = group.add_subparsers(required=True, metavar="VERB")
    gc_blockers.add_explain(verbs, shared)
    safepoint = verbs.add_parser(
        "safepoint", help="show the GC safepoint and the services' safepoints", parents=[shared]
    )
    safepoint.set_defaults(command=show_safepoint)
    status = verbs.add_parser(
        "status",
        help="show which GC worker leads, how far GC is, and what holds it back",
        parents=[shared],
    )
    status.set_defaults(command=show_status)
    _add_rounds(verbs, shared)
    _add_config(verbs, shared)
    gc_ranges.add_verbs(verbs, shared)


def _add_config(verbs: Any, shared: argparse.ArgumentParser) -> None:
    config = verbs.add_parser(
        "config",
        help="show and set the variables that control GC, as in mysql.tidb",
        parents=[shared],
    )
    config.set_defaults(command=get_config, names=[])
    actions = config.add_subparsers(metavar="[get | set]")
    get = actions.add_parser("get", help="show some variables, or all", parents=[shared])
    get.add_argument("names", nargs="*", metavar="NAME", help="such as tikv_gc_life_time")
    get.set_defaults(command=get_config)
    put = actions.add_parser(
        "set",
        help="set variables, all or none; they take effect at the next tick",
        parents=[shared],
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


def _add_rounds(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add `run` and `history`."""
    run = verbs.add_parser("run", help="start a round of GC now, due or not", parents=[shared])
    run.add_argument(
        "--wait",
        action="store_true",
        help="wait for its end and show its progress; exit status 1 if it fails",
    )
    run.add_argument(
        "--dry-run", action="store_true", help="change nothing; show what a round would do"
    )
    add_gc_worker_address(run)
    run.set_defaults(command=run_round)
    past = verbs.add_parser(
        "history", help=f"list the last rounds, at most {ROUNDS_KEPT}", parents=[shared]
    )
    past.add_argument("-n", "--limit", type=count, default=20, help="how many (default: 20)")
    past.set_defaults(command=show_history)


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
    """Show the state of GC; works when no worker runs, too."""
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
    """The facts of which `gc status` makes its answer."""

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
        "round": document(state.newest) if state.newest else None,
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
    """Return the present state of the leader's newest round; None if the leader does not answer."""
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
    """Show the named variables, or all of them.

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


async def run_round(remote: Remote, arguments: argparse.Namespace) -> Output:
    """A round, begun or ended or only thought of.

    Raises:
        GCRoundFailedError: with --wait: it failed, or its worker lost the lease.
    """
    async with remote.gc_leader(arguments.gc_worker) as leader:
        if arguments.dry_run:
            answer = await leader.RunGC(gc_pb2.RunGCRequest(dry_run=True), timeout=_PLAN_S)
            return Output(_plan(answer.plan))
        gc_round = (await leader.RunGC(gc_pb2.RunGCRequest(no_wait=True), timeout=CALL_S)).round
        if arguments.wait:
            gc_round = await _ended(leader, gc_round)
    if gc_round.result and gc_round.result not in _GOOD:
        raise GCRoundFailedError(
            f"the round {gc_round.id} ended as {gc_round.result!r}: {gc_round.error}"
        )
    return Output(document(gc_round))


async def show_history(remote: Remote, arguments: argparse.Namespace) -> Output:
    """The last rounds, newest first."""
    async with remote.gc_records() as records, remote.coordinator() as pd:
        now_ms = physical_ms(await pd.tso())
        rounds = await load_rounds(records, max(1, arguments.limit))
    return Output(
        [document(round_message(gc_round, now_ms)) for gc_round in rounds], _ROUND_COLUMNS
    )


async def _ended(leader: "GCServiceAsyncStub", gc_round: gc_pb2.GCRound) -> gc_pb2.GCRound:
    """The round once it has ended; until then its progress goes to stderr."""
    printed = ""
    while not has_ended(gc_round):
        if line(gc_round) != printed:
            printed = line(gc_round)
            print(printed, file=sys.stderr, flush=True)
        await asyncio.sleep(_POLL_S)
        newest = (await leader.GetGCStatus(gc_pb2.GetGCStatusRequest(), timeout=CALL_S)).last_round
        # Another round may have begun meanwhile: then the history tells how this one ended.
        gc_round = newest if newest.id == gc_round.id else await _from_history(leader, gc_round)
    return gc_round


async def _from_history(leader: "GCServiceAsyncStub", gc_round: gc_pb2.GCRound) -> gc_pb2.GCRound:
    rounds = (await leader.ListRounds(gc_pb2.ListRoundsRequest(), timeout=CALL_S)).rounds
    return next((each for each in rounds if each.id == gc_round.id), gc_round)


def _plan(plan: gc_pb2.GCPlan) -> dict[str, Any]:
    return {
        "would": _would(plan),
        "safe_point": plan.safe_point,
        "safe_point_time": time_of(plan.safe_point),
        "last_safe_point": plan.saved_safe_point,
        "last_safe_point_time": time_of(plan.saved_safe_point),
        "blocker": plan.blocker,
        "mode": plan.mode,
        "regions": plan.regions,
        "locks": plan.locks,
        "transactions": plan.transactions,
        "ranges": [
            {
                "job_id": delete_range.job_id,
                "element_id": delete_range.element_id,
                "start_key": delete_range.start_key.hex(),
                "end_key": delete_range.end_key.hex(),
                "ts": delete_range.ts,
                "state": delete_range.state,
            }
            for delete_range in plan.ranges
        ],
    }


def _would(plan: gc_pb2.GCPlan) -> str:
    if not plan.enabled:
        return "refuse: gc is switched off (tikv_gc_enable)"
    ranges = f"destroy {len(plan.ranges)} ranges"
    if not plan.fresh:
        blocked_by = f", held back by {plan.blocker}" if plan.blocker else ""
        return f"{ranges} and nothing else: the safepoint does not move{blocked_by}"
    collect = "collect region by region" if plan.mode == "central" else "let the stores collect"
    return (
        f"resolve {plan.locks} locks of {plan.transactions} transactions in {plan.regions} "
        f"regions, {ranges}, {collect}"
    )


def document(gc_round: gc_pb2.GCRound) -> dict[str, Any]:
    """Everything about it; times in seconds."""
    return {
        "id": gc_round.id,
        "worker": gc_round.worker,
        "started": gc_round.started,
        "seconds": round((gc_round.ended_ms - gc_round.started_ms) / 1000, 3)
        if gc_round.ended_ms
        else None,
        "phase": gc_round.phase,
        "phase_seconds": {
            phase.label: gc_round.phase_ms[phase.label] / 1000
            for phase in Phase
            if phase.label in gc_round.phase_ms
        },
        "progress": _progress(gc_round),
        "eta_seconds": gc_round.eta_ms / 1000 if gc_round.HasField("eta_ms") else None,
        "safe_point": gc_round.safe_point,
        "safe_point_time": time_of(gc_round.safe_point),
        "blocker": gc_round.blocker,
        "regions": gc_round.regions,
        "resolved_locks": gc_round.resolved_locks,
        "deleted_ranges": gc_round.deleted_ranges,
        "failed_ranges": gc_round.failed_ranges,
        "collected_regions": gc_round.collected_regions,
        "result": gc_round.result or "running",
        "error": gc_round.error,
        "reason": gc_round.error or gc_round.blocker,
    }


def line(gc_round: gc_pb2.GCRound) -> str:
    """Describe how far a running round is."""
    left = f", about {gc_round.eta_ms / 1000:.0f}s left" if gc_round.HasField("eta_ms") else ""
    return (
        f"{gc_round.phase}: {_progress(gc_round) or 'begins'}, {gc_round.resolved_locks} locks "
        f"resolved{left}"
    )


def has_ended(gc_round: gc_pb2.GCRound) -> bool:
    """Whether the round is over."""
    return bool(gc_round.phase == _ENDED)


def _progress(gc_round: gc_pb2.GCRound) -> str:
    return (
        f"{gc_round.done} of {gc_round.total}" if gc_round.total and not has_ended(gc_round) else ""
    )
