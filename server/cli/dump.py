"""`tidemark cli changefeed dumpstart|dumppause|dumpresume|dumprestart|dumpstatus`: seed 003's commands."""

import argparse
from typing import Any

from tidemarkpb.v1 import dump_pb2 as pb
from tidemarkpb.v1.dump_pb2_grpc import DumpServiceStub

from server.cli.output import Output, plain, table
from server.cli.remote import CALL_S, Remote
from storage.model.errors import InvalidError

_COLUMNS = (
    ("TABLE", "table"),
    ("STATE", "state"),
    ("PROGRESS", "progress"),
    ("READ", "rows_read"),
    ("ROWS", "rows_done"),
    ("BYTES", "bytes_done"),
    ("ROWS/S", "rows_per_second"),
    ("ETA", "eta"),
    ("ERROR", "error"),
)
_VERBS = (
    ("dumppause", "PauseDump", pb.PauseDumpRequest, "read no more chunks until it is resumed"),
    ("dumpresume", "ResumeDump", pb.ResumeDumpRequest, "go on; tables that have failed are tried again"),
    ("dumprestart", "RestartDump", pb.RestartDumpRequest, "begin anew, with the same options"),
    ("dumpstatus", "GetDumpStatus", pb.GetDumpStatusRequest, "how far it is, table by table"),
)


class WhereError(InvalidError):
    """An option --where has another form."""

    code = "ErrWhereInvalid"


def add_verbs(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add the verbs to the group `changefeed`."""
    start = verbs.add_parser("dumpstart", help="copy what the tables hold into the changefeed", parents=[shared])
    start.add_argument("-c", "--changefeed-id", required=True)
    start.add_argument(
        "--table", action="append", default=[], metavar="SCHEMA.TABLE", help="with * and ?; default: all, also new ones"
    )
    start.add_argument(
        "--where", action="append", default=[], metavar="SCHEMA.TABLE=CONDITION", help="only rows for which it is true"
    )
    start.add_argument("--rows-per-second", type=int, default=0, help="at most so many (default: as the log lets it)")
    start.add_argument("--bytes-per-second", type=int, default=0, help="at most so many")
    start.add_argument("--parallel", type=int, default=0, help="chunks read at a time (default: 4, at most 16)")
    start.set_defaults(command=start_dump)
    for name, method, request, text in _VERBS:
        verb = verbs.add_parser(name, help=text, parents=[shared])
        verb.add_argument("-c", "--changefeed-id", required=True)
        verb.set_defaults(command=call_dump, method=method, request=request)


async def start_dump(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Ask for a dump."""
    request = pb.StartDumpRequest(
        changefeed_id=arguments.changefeed_id,
        tables=arguments.table,
        where=dict(map(_condition, arguments.where)),
        rows_per_second_max=arguments.rows_per_second,
        bytes_per_second_max=arguments.bytes_per_second,
        parallel=arguments.parallel,
    )
    async with remote.capture() as channel:
        return _output(await DumpServiceStub(channel).StartDump(request, timeout=CALL_S))


async def call_dump(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Any other verb."""
    request = arguments.request(changefeed_id=arguments.changefeed_id)
    async with remote.capture() as channel:
        return _output(await getattr(DumpServiceStub(channel), arguments.method)(request, timeout=CALL_S))


def _condition(text: str) -> tuple[str, str]:
    name, equals, condition = text.partition("=")
    if not equals or "." not in name or not condition.strip():
        raise WhereError(f"--where {text!r} is not of the form SCHEMA.TABLE=CONDITION")
    return name, condition


def _output(answer: Any) -> Output:
    dump = answer.dump
    document = {
        "changefeed_id": dump.changefeed_id,
        "job_id": dump.job_id,
        "state": dump.state,
        "tables": list(dump.tables),
        "where": dict(dump.where),
        "rows_per_second_max": dump.rows_per_second_max,
        "bytes_per_second_max": dump.bytes_per_second_max,
        "parallel": dump.parallel,
        "status": [plain(each) for each in answer.status],
    }
    rows = [
        {
            **plain(each),
            "progress": f"{each.progress_percent:.1f} %" if each.rows_estimated or each.state == "done" else "",
            "eta": f"{each.eta_seconds} s" if each.eta_seconds >= 0 else "",
        }
        for each in answer.status
    ]
    head = f"dump {dump.job_id} of {dump.changefeed_id}: {dump.state}"
    return Output(document, shown=f"{head}\n{table(rows, _COLUMNS)}")
