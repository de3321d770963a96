"""Rounds of GC: `tidemark cli gc run [--wait | --dry-run]` and `gc history`.

People read a round as a document, as a row of the history, and as one line while it runs.
"""

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING, Any

from tidemarkpb.v1 import gc_pb2

from gcsafepoint.worker.records import ROUNDS_KEPT, load_rounds
from gcsafepoint.worker.round import Phase
from server.cli.arguments import count
from server.cli.output import Output
from server.cli.remote import CALL_S, Remote, add_gc_worker_address
from server.cli.tso import time_of
from server.gc_worker.view import round_message
from storage.model.errors import ConflictError
from storage.model.ts import physical_ms

if TYPE_CHECKING:
    from tidemarkpb.v1.gc_pb2_grpc import GCServiceAsyncStub

_COLUMNS = (
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


def add_verbs(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add `run` and `history`."""
    run = verbs.add_parser("run", help="start a round now, due or not", parents=[shared])
    run.add_argument("--wait", action="store_true", help="show its progress, and fail if it fails")
    run.add_argument("--dry-run", action="store_true", help="only say what a round would do")
    add_gc_worker_address(run)
    run.set_defaults(command=run_round)
    past = verbs.add_parser(
        "history", help=f"the last rounds, at most {ROUNDS_KEPT}", parents=[shared]
    )
    past.add_argument("-n", "--limit", type=count, default=20, help="how many (default: 20)")
    past.set_defaults(command=show_history)


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
    return Output([document(round_message(gc_round, now_ms)) for gc_round in rounds], _COLUMNS)


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
    """Where a running round is."""
    left = f", about {gc_round.eta_ms / 1000:.0f}s left" if gc_round.HasField("eta_ms") else ""
    return (
        f"{gc_round.phase}: {_progress(gc_round) or 'begins'}, {gc_round.resolved_locks} locks "
        f"resolved{left}"
    )


def has_ended(gc_round: gc_pb2.GCRound) -> bool:
    """Whether nothing more will happen in it."""
    return bool(gc_round.phase == _ENDED)


def _progress(gc_round: gc_pb2.GCRound) -> str:
    return (
        f"{gc_round.done} of {gc_round.total}" if gc_round.total and not has_ended(gc_round) else ""
    )
