"""A round of GC as people read it: as a document, as a row of the history, as one line while it runs."""

from typing import Any

from tidemarkpb.v1 import gc_pb2

from gcsafepoint.worker.round import Phase
from server.cli.tso import time_of

COLUMNS = (
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


def document(gc_round: gc_pb2.GCRound) -> dict[str, Any]:
    """Everything about it; times in seconds."""
    return {
        "id": gc_round.id,
        "worker": gc_round.worker,
        "started": gc_round.started,
        "seconds": round((gc_round.ended_ms - gc_round.started_ms) / 1000, 3) if gc_round.ended_ms else None,
        "phase": gc_round.phase,
        "phase_seconds": {
            phase.label: gc_round.phase_ms[phase.label] / 1000 for phase in Phase if phase.label in gc_round.phase_ms
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
    return f"{gc_round.phase}: {_progress(gc_round) or 'begins'}, {gc_round.resolved_locks} locks resolved{left}"


def has_ended(gc_round: gc_pb2.GCRound) -> bool:
    """Whether nothing more will happen in it."""
    return bool(gc_round.phase == _ENDED)


def _progress(gc_round: gc_pb2.GCRound) -> str:
    return f"{gc_round.done} of {gc_round.total}" if gc_round.total and not has_ended(gc_round) else ""
