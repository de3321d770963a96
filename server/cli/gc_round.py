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


def document(it: gc_pb2.GCRound) -> dict[str, Any]:
    """Everything about it; times in seconds."""
    return {
        "id": it.id,
        "worker": it.worker,
        "started": it.started,
        "seconds": round((it.ended_ms - it.started_ms) / 1000, 3) if it.ended_ms else None,
        "phase": it.phase,
        "phase_seconds": {
            phase.label: it.phase_ms[phase.label] / 1000 for phase in Phase if phase.label in it.phase_ms
        },
        "progress": _progress(it),
        "eta_seconds": it.eta_ms / 1000 if it.HasField("eta_ms") else None,
        "safe_point": it.safe_point,
        "safe_point_time": time_of(it.safe_point),
        "blocker": it.blocker,
        "regions": it.regions,
        "resolved_locks": it.resolved_locks,
        "deleted_ranges": it.deleted_ranges,
        "failed_ranges": it.failed_ranges,
        "collected_regions": it.collected_regions,
        "result": it.result or "running",
        "error": it.error,
        "reason": it.error or it.blocker,
    }


def line(it: gc_pb2.GCRound) -> str:
    """Where a running round is."""
    left = f", about {it.eta_ms / 1000:.0f}s left" if it.HasField("eta_ms") else ""
    return f"{it.phase}: {_progress(it) or 'begins'}, {it.resolved_locks} locks resolved{left}"


def has_ended(it: gc_pb2.GCRound) -> bool:
    """Whether nothing more will happen in it."""
    return bool(it.phase == _ENDED)


def _progress(it: gc_pb2.GCRound) -> str:
    return f"{it.done} of {it.total}" if it.total and not has_ended(it) else ""
