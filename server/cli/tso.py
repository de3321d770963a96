"""`tidemark cli tso query`."""

import argparse
from datetime import UTC, datetime
from typing import Any

from server.cli.output import Output
from server.cli.remote import Remote
from storage.model.ts import logical, physical_ms


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `tso`."""
    verbs = groups.add_parser("tso", help="timestamps").add_subparsers(required=True)
    query = verbs.add_parser("query", help="take a new timestamp from the coordinator", parents=[shared])
    query.set_defaults(command=query_tso)


async def query_tso(remote: Remote, _: argparse.Namespace) -> Output:
    """A new timestamp, and what it says."""
    async with remote.coordinator() as pd:
        ts = await pd.tso()
    return Output({"tso": ts, "time": time_of(ts), "physical_ms": physical_ms(ts), "logical": logical(ts)})


def time_of(ts: int) -> str:
    """The wall clock of `ts`, RFC 3339 in UTC; empty for 0."""
    return datetime.fromtimestamp(physical_ms(ts) / 1e3, UTC).isoformat(timespec="milliseconds") if ts else ""
