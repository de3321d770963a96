"""`tidemark cli capture list`."""

import argparse
from typing import Any

from tidemarkpb.v1 import capture_pb2 as pb
from tidemarkpb.v1.capture_pb2_grpc import CaptureServiceStub

from server.cli.output import Output
from server.cli.remote import CALL_S, Remote

_COLUMNS = (
    ("ID", "id"),
    ("OWNER", "is-owner"),
    ("ADDRESS", "address"),
    ("FLIGHT", "flight-address"),
)


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `capture`."""
    group = groups.add_parser("capture")
    verbs = group.add_subparsers(required=True, metavar="VERB")
    listed = verbs.add_parser("list", help="all living captures", parents=[shared])
    listed.set_defaults(command=list_captures)


async def list_captures(remote: Remote, _: argparse.Namespace) -> Output:
    """All living captures."""
    async with remote.capture() as channel:
        answer = await CaptureServiceStub(channel).ListCaptures(
            pb.ListCapturesRequest(), timeout=CALL_S
        )
    rows = [
        {
            "id": capture.id,
            "is-owner": capture.is_owner,
            "address": capture.address,
            "flight-address": capture.flight_address,
            "cluster-id": "default",
            "version": capture.version,
        }
        for capture in answer.captures
    ]
    return Output(rows, _COLUMNS)
