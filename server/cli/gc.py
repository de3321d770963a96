"""`tidemark cli gc …`: the group, and `gc safepoint`: the safe points as PD's `/pd/api/v1/gc/safepoint` says them."""

import argparse
import json
from typing import Any

from server.cli import gc_config, gc_explain, gc_ranges, gc_run, gc_status
from server.cli.output import Output
from server.cli.remote import Remote
from server.rpc.client import connect
from storage.meta.client import open_meta


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `gc`."""
    verbs = groups.add_parser("gc", help="garbage collection of the upstream").add_subparsers(required=True)
    gc_explain.add_verb(verbs, shared)
    safepoint = verbs.add_parser("safepoint", help="the GC safe point and the services' safe points", parents=[shared])
    safepoint.set_defaults(command=show_safepoint)
    for module in (gc_status, gc_run, gc_config, gc_ranges):
        module.add_verbs(verbs, shared)


async def show_safepoint(remote: Remote, _: argparse.Namespace) -> Output:
    """The GC safe point, and all service safe points, smallest first."""
    async with (
        remote.coordinator() as pd,
        open_meta(f"etcd://{remote.pd}", lambda address: connect(address, remote.security)) as meta,
    ):
        gc_safe_point = await pd.gc_safe_point()
        pairs = await meta.get_prefix(f"/pd/{pd.cluster_id}/gc/safe_point/service/".encode())
    services = sorted((json.loads(pair.value) for pair in pairs), key=lambda service: int(service["safe_point"]))
    least = services[0]["safe_point"] if services else 0
    return Output(
        {
            "gc_safe_point": gc_safe_point,
            "min_service_gc_safe_point": least,
            "service_gc_safe_points": services,
        }
    )
