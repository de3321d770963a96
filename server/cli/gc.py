"""`tidemark cli gc …`: the group, and `gc safepoint`: the safe points as PD's `/pd/api/v1/gc/safepoint` says them."""

import argparse
from typing import Any

from server.cli import gc_config, gc_explain, gc_ranges, gc_run, gc_status
from server.cli.output import Output
from server.cli.remote import Remote
from server.cli.service_safepoint import safe_points


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `gc`."""
    group = groups.add_parser("gc", help="garbage collection of the upstream")
    verbs = group.add_subparsers(required=True, metavar="VERB")
    gc_explain.add_verb(verbs, shared)
    safepoint = verbs.add_parser("safepoint", help="the GC safe point and the services' safe points", parents=[shared])
    safepoint.set_defaults(command=show_safepoint)
    for module in (gc_status, gc_run, gc_config, gc_ranges):
        module.add_verbs(verbs, shared)


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
