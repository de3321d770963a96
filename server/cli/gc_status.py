"""`tidemark cli gc status`: who leads, how far GC is, what it does, and who holds it back."""

import argparse
from dataclasses import dataclass
from typing import Any

from tidemarkpb.v1 import gc_pb2

from gcsafepoint.worker.config import GCConfig, GCConfigError
from gcsafepoint.worker.election import Leader
from gcsafepoint.worker.records import read_config
from gcsafepoint.worker.times import DurationError, format_instant, parse_instant_ms
from server.cli.gc_leader import gc_leader, gc_records
from server.cli.gc_round import document
from server.cli.output import Output
from server.cli.remote import Remote
from server.cli.tso import time_of
from server.gc_worker.view import Overview, overview, round_message
from storage.model.errors import TidemarkError
from storage.model.ts import physical_ms

_LIVE_S = 3.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What the answer is made of."""

    now_ms: int
    gc_safe_point: int
    records: Overview
    config: GCConfig | None
    fault: str
    newest: gc_pb2.GCRound | None


def add_verbs(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add `status`."""
    status = verbs.add_parser("status", help="who leads, how far GC is, and who holds it back", parents=[shared])
    status.set_defaults(command=show_status)


async def show_status(remote: Remote, _: argparse.Namespace) -> Output:
    """How GC stands, also when no worker runs."""
    async with remote.coordinator() as pd, gc_records(remote) as records:
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
    return Output(report(Seen(now_ms, gc_safe_point, gc_overview, config, fault, newest)))


def report(seen: Seen) -> dict[str, Any]:
    """The answer as a document (pure)."""
    records, saved = seen.records, seen.records.saved_safe_point
    blocker = seen.newest.blocker if seen.newest else ""
    return {
        "enabled": seen.config.enable if seen.config else None,
        "mode": seen.config.mode if seen.config else None,
        "leader": _leader(records.leader, seen.now_ms),
        "safe_point": saved,
        "safe_point_time": time_of(saved),
        "behind_seconds": (seen.now_ms - physical_ms(saved)) // 1000 if saved else None,
        "gc_safe_point": seen.gc_safe_point,
        "blocker": blocker,
        "last_run_time": records.last_run_time,
        "next_run_time": _next_run(seen),
        "pending_ranges": records.pending_ranges,
        "failed_ranges": records.failed_ranges,
        "round": document(seen.newest) if seen.newest else None,
        "advice": "; ".join(_advice(seen, blocker)),
    }


def _advice(seen: Seen, blocker: str) -> list[str]:
    leader = _leader(seen.records.leader, seen.now_ms)
    advice = [seen.fault] if seen.fault else []
    if leader is None or not leader["leads"]:
        advice.append("no gc worker leads; start one with `tidemark gc-worker`")
    if seen.config and not seen.config.enable:
        advice.append("gc is switched off; `tidemark cli gc config set tikv_gc_enable=true` switches it on")
    if blocker:
        advice.append(f"held back by {blocker}; `tidemark cli gc explain` says what is behind it and what may be done")
    if seen.records.failed_ranges:
        advice.append("some ranges could not be destroyed; `tidemark cli gc ranges` says why")
    if seen.newest and seen.newest.error:
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


def _next_run(seen: Seen) -> str:
    if seen.config is None or not seen.config.enable:
        return ""
    try:
        last_ms = parse_instant_ms(seen.records.last_run_time)
    except DurationError:
        return format_instant(seen.now_ms)
    return format_instant(max(seen.now_ms, last_ms + seen.config.run_interval_ms))


async def _live_round(remote: Remote) -> gc_pb2.GCRound | None:
    """The leader's newest round as it is right now; None if it cannot be asked: the records say enough."""
    try:
        async with gc_leader(remote) as leader:
            answer = await leader.GetGCStatus(gc_pb2.GetGCStatusRequest(), timeout=_LIVE_S)
    except TidemarkError:
        return None
    return answer.last_round if answer.HasField("last_round") else None
