"""`tidemark cli gc explain`: who blocks GC, down to the cause, until when,
and the command that ends it.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from tidemarkpb.v1 import explain_pb2 as pb
from tidemarkpb.v1.explain_pb2_grpc import ExplainServiceStub

from gcsafepoint.explain.document import span
from server.cli.arguments import count
from server.cli.output import Output, plain
from server.cli.remote import CALL_S, Remote

_REMOVE = "remove="


def add_verb(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add `explain` to the verbs of `gc`."""
    verb = verbs.add_parser(
        "explain", help="who blocks GC, why, until when, and what ends it", parents=[shared]
    )
    verb.add_argument(
        "--what-if",
        action="append",
        type=removed_names,
        default=[],
        metavar="remove=NAME[,NAME…]",
        help="what GC would wait for without these services or changefeeds; nothing is changed",
    )
    verb.add_argument(
        "--limit", type=count, default=10, help="blockers to show, the lowest first (default: 10)"
    )
    verb.set_defaults(command=explain)


def removed_names(text: str) -> list[str]:
    """The names of `remove=NAME,…`; raises ArgumentTypeError."""
    names = [name for name in text.removeprefix(_REMOVE).split(",") if name]
    if not text.startswith(_REMOVE) or not names:
        raise argparse.ArgumentTypeError(f"{text!r} is not understood; write --what-if remove=NAME")
    return names


async def explain(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Chains of blockers, the lowest first."""
    names = [name for group in arguments.what_if for name in group]
    document = await explained(remote, names, max(1, arguments.limit))
    return Output(document, shown="\n".join(tree(document)))


async def explained(remote: Remote, what_if_remove: list[str], limit: int = 1) -> dict[str, Any]:
    """What the leading coordinator says; raises as `Remote.leader`."""
    request = pb.ExplainGCRequest(what_if_remove=what_if_remove, limit=limit)
    async with remote.leader() as (_, channel):
        return plain(await ExplainServiceStub(channel).ExplainGC(request, timeout=CALL_S))


def tree(document: dict[str, Any]) -> Iterator[str]:
    """The document as people read it."""
    yield document["summary"]
    for name in ("gc_safe_point", "min_safe_point", "wanted_safe_point"):
        yield f"  {name.replace('_', ' '):<18} {document[name]}  {document[f'{name}_time']}".rstrip()
    for number, blocker in enumerate(document["blockers"], 1):
        yield ""
        yield f"{number}. {blocker['id']}{' blocks GC' if blocker['blocks'] else ''}"
        yield from _chain(blocker["chain"])
    if document["blockers_left_out"]:
        yield f"\n{document['blockers_left_out']} more, see --limit"
    if document["what_if"]:
        yield from _what_if(document["what_if"])
    for problem in document["problems"]:
        yield f"could not be learnt: {problem}"


def _chain(links: list[dict[str, Any]]) -> Iterator[str]:
    for depth, link in enumerate(links):
        branch = "   " * depth + ("└─ " if depth else "   ")
        margin = "   " * (depth + 1) + "   "
        state = f" [{link['state']}]" if link["state"] else ""
        owner = f", {link['owner']}" if link["owner"] else ""
        yield f"{branch}{link['kind'].replace('_', ' ')} {link['name']}{state}{owner}"
        yield f"{margin}{link['reason']}"
        yield f"{margin}{', '.join(_facts(link))}"
        for command in link["commands"]:
            yield f"{margin}$ {command}"


def _facts(link: dict[str, Any]) -> Iterator[str]:
    yield f"at {link['ts']}" + (
        f" = {link['time']}, {span(link['age_seconds'] * 1000)} old" if link["time"] else ""
    )
    if link["ttl_left_seconds"] is not None:
        yield f"TTL left {span(link['ttl_left_seconds'] * 1000)}, until {link['expires_at']}"
    if link["history_lost_at"]:
        yield f"history lost at {link['history_lost_at']}"
    if link["holds_back_seconds"]:
        yield f"holds back {span(link['holds_back_seconds'] * 1000)}"


def _what_if(what_if: dict[str, Any]) -> Iterator[str]:
    yield f"\nwhat if: {what_if['summary']}"
    yield (
        f"   minimum {what_if['min_safe_point']}  {what_if['min_safe_point_time']}; next: "
        f"{what_if['next']['id']}"
    )
    yield from _chain(what_if["next"]["chain"])
