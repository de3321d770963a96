"""`tidemark cli gc ranges`: what dropped tables left, waiting or destroyed; mysql.gc_delete_range and …_done."""

import argparse
from datetime import UTC, datetime
from typing import Any

from server.cli.gc_leader import gc_records
from server.cli.output import Output
from server.cli.remote import Remote
from server.gc_worker.view import ListedRange, list_ranges

_COLUMNS = (
    ("JOB", "job_id"),
    ("ELEMENT", "element_id"),
    ("START", "start_key"),
    ("END", "end_key"),
    ("TS", "ts"),
    ("STATE", "state"),
    ("ATTEMPTS", "attempts"),
    ("AGAIN", "redo_time"),
    ("LAST ERROR", "last_error"),
)


def add_verbs(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add `ranges`."""
    ranges = verbs.add_parser("ranges", help="ranges of dropped tables, waiting or destroyed", parents=[shared])
    ranges.add_argument("--state", choices=("waiting", "due", "failed", "done", "redo failed"), help="only these")
    ranges.set_defaults(command=show_ranges)


async def show_ranges(remote: Remote, arguments: argparse.Namespace) -> Output:
    """All recorded ranges, those still to be destroyed first."""
    async with gc_records(remote) as records:
        ranges = await list_ranges(records)
    return Output([_row(it) for it in ranges if arguments.state in (None, it.state)], _COLUMNS)


def _row(listed: ListedRange) -> dict[str, Any]:
    it = listed.it
    return {
        "job_id": it.job_id,
        "element_id": it.element_id,
        "start_key": it.start_key.hex(),
        "end_key": it.end_key.hex(),
        "ts": it.ts,
        "state": listed.state,
        "attempts": it.attempts,
        "done_time": _time(it.done_ms),
        "redo_time": _time(listed.redo_ms),
        "last_error": it.error,
    }


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1e3, UTC).isoformat(timespec="seconds") if unix_ms else ""
