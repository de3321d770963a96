"""`tidemark cli processor list|query`: what captures do for changefeeds, as `cdc cli` has it."""

import argparse
from typing import Any, Final

from tidemarkpb.v1 import changefeed_pb2 as pb
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub

from server.capture.errors import CaptureUnknownError
from server.changefeed.view import tables_by_capture
from server.cli.arguments import DEFAULT_NAMESPACE
from server.cli.dump import add_changefeed_id
from server.cli.output import Output
from server.cli.remote import CALL_S, Remote

_COLUMNS: Final = (("CHANGEFEED", "changefeed-id"), ("CAPTURE", "capture-id"), ("TABLES", "tables"))


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `processor`."""
    verbs = groups.add_parser("processor").add_subparsers(required=True, metavar="VERB")
    listed = verbs.add_parser(
        "list", help="list the captures of each running changefeed", parents=[shared]
    )
    listed.set_defaults(command=list_processors)
    query = verbs.add_parser(
        "query", help="show the tables that a capture replicates", parents=[shared]
    )
    add_changefeed_id(query)
    query.add_argument(
        *("-p", "--capture-id"), required=True, help="id of the capture, as in `processor list`"
    )
    query.set_defaults(command=query_processor)


async def list_processors(remote: Remote, _: argparse.Namespace) -> Output:
    """List each running changefeed once for each capture that works for it."""
    async with remote.capture() as channel:
        answer = await ChangefeedServiceStub(channel).ListChangefeeds(
            pb.ListChangefeedsRequest(), timeout=CALL_S
        )
    rows = [
        {
            "changefeed-id": each.id,
            "capture-id": capture,
            "tables": len(tables),
            "namespace": DEFAULT_NAMESPACE,
        }
        for each in answer.changefeeds
        if _runs(each)
        for capture, tables in tables_by_capture(each).items()
    ]
    return Output(rows, _COLUMNS)


async def query_processor(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Show the tables that a capture replicates for a changefeed, and how far they are.

    Raises:
        CaptureUnknownError: it does not work for the changefeed.
    """
    request = pb.QueryChangefeedRequest(id=arguments.changefeed_id)
    async with remote.capture() as channel:
        answer = await ChangefeedServiceStub(channel).QueryChangefeed(request, timeout=CALL_S)
    changefeed = answer.changefeed
    processors = tables_by_capture(changefeed) if _runs(changefeed) else {}
    if arguments.capture_id not in processors:
        raise CaptureUnknownError(
            f"capture {arguments.capture_id!r} does nothing for changefeed {changefeed.id}; see "
            "`tidemark cli processor list`"
        )
    tables = {
        str(table.table_id): {
            "name": table.name,
            "checkpoint-ts": table.checkpoint_ts,
            "resolved-ts": table.resolved_ts,
        }
        for table in processors[arguments.capture_id]
    }
    position = {"checkpoint-ts": changefeed.checkpoint_ts, "resolved-ts": changefeed.resolved_ts}
    return Output({"status": {"tables": tables}, "position": position})


def _runs(changefeed: pb.Changefeed) -> bool:
    running = (pb.CHANGEFEED_STATE_NORMAL, pb.CHANGEFEED_STATE_WARNING)
    return changefeed.state in running
