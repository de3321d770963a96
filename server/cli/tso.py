"""`tidemark cli tso query` and `tidemark cli tso TS`."""

import argparse
from typing import Any

from gcsafepoint.explain.document import time_of
from server.cli.arguments import timestamp
from server.cli.output import Output
from server.cli.remote import Remote
from storage.model.ts import logical, physical_ms

_QUERY = "query"

__all__ = ["add_commands", "time_of"]


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `tso`."""
    verb = groups.add_parser("tso", parents=[shared])
    verb.add_argument(
        "ts", type=ts_or_query, metavar="query|TS", help="take a new one, or decode this one"
    )
    verb.set_defaults(command=show_tso)


def ts_or_query(text: str) -> int | str:
    """`query`, or a timestamp in decimal or 0x hexadecimal; raises ArgumentTypeError."""
    return text if text == _QUERY else timestamp(text)


async def show_tso(remote: Remote, arguments: argparse.Namespace) -> Output:
    """A timestamp and what it says; only `query` asks the coordinator."""
    ts = arguments.ts
    if ts == _QUERY:
        async with remote.coordinator() as pd:
            ts = await pd.tso()
    return Output(
        {"tso": ts, "time": time_of(ts), "physical_ms": physical_ms(ts), "logical": logical(ts)}
    )
