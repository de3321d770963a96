"""`tidemark cli changefeed dumpstart|dumppause|dumpresume|dumprestart|dumpstatus`:
the commands of dumps.

And `dumpupdate`, which changes the pace and the order of one that is under way.
"""

import argparse
import re
from typing import Any

import grpc.aio
from tidemarkpb.v1 import dump_pb2 as pb
from tidemarkpb.v1.changefeed_pb2 import QueryChangefeedRequest
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub
from tidemarkpb.v1.dump_pb2_grpc import DumpServiceStub

from server.changefeed.view import unread_warning
from server.cli.arguments import add_namespace, byte_count, count
from server.cli.output import Output, add_watch, plain, table
from server.cli.remote import CALL_S, Remote
from storage.model.errors import InvalidError

_COLUMNS = (
    ("TABLE", "table"),
    ("STATE", "state"),
    ("PRIORITY", "priority"),
    ("PROGRESS", "progress"),
    ("READ", "rows_read"),
    ("ROWS", "rows_done"),
    ("BYTES", "bytes_done"),
    ("ROWS/S", "rows_per_second"),
    ("ETA", "eta"),
    ("VERIFIED", "verified"),
    ("ERROR", "error"),
    ("READ AGAIN", "reason"),
)
_NOT_OF_ALL = ("priority", "verified", "error", "reason")
_NUMBER = re.compile(r"-?\d{1,6}")
_VERBS = (
    (
        "dumppause",
        "PauseDump",
        pb.PauseDumpRequest,
        "pause a dump: no more chunks are read until `dumpresume`",
    ),
    (
        "dumpresume",
        "ResumeDump",
        pb.ResumeDumpRequest,
        "resume a dump; tables that failed are tried again",
    ),
    (
        "dumprestart",
        "RestartDump",
        pb.RestartDumpRequest,
        "start a dump again from its beginning, with the same options",
    ),
    (
        "dumpstatus",
        "GetDumpStatus",
        pb.GetDumpStatusRequest,
        "show the progress of a dump, table by table",
    ),
)


class WhereError(InvalidError):
    """An option --where has another form."""

    code = "ErrWhereInvalid"


class PriorityError(InvalidError):
    """An option --priority has another form."""

    code = "ErrPriorityInvalid"


def add_verbs(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add the verbs to the group `changefeed`."""
    start = verbs.add_parser(
        "dumpstart",
        help="start a dump: copy the rows that the tables hold now to the target",
        parents=[shared],
    )
    add_changefeed_id(start)
    start.add_argument(
        "--table",
        action="append",
        default=[],
        metavar="SCHEMA.TABLE",
        help="tables to copy, with * and ? (default: all, and new ones)",
    )
    start.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="SCHEMA.TABLE=CONDITION",
        help="copy only the rows of this table for which the condition is true",
    )
    start.add_argument(
        "--verify",
        action="store_true",
        help=(
            "compare each chunk with a checksum that the server computes; read it again if they "
            "differ"
        ),
    )
    _add_pace(start, 0)
    start.set_defaults(command=start_dump)
    update = verbs.add_parser(
        "dumpupdate",
        help="change the speed of a running dump, or the order of its tables",
        parents=[shared],
    )
    add_changefeed_id(update)
    _add_pace(update, None)
    update.set_defaults(command=update_dump)
    for name, method, request, text in _VERBS:
        verb = verbs.add_parser(name, help=text, parents=[shared])
        add_changefeed_id(verb)
        if name == "dumpstatus":
            add_watch(verb)
        verb.set_defaults(command=call_dump, method=method, request=request)


def add_changefeed_id(verb: argparse.ArgumentParser) -> None:
    """Add the flag that says which changefeed."""
    verb.add_argument(
        "-c", "--changefeed-id", required=True, help="id of the changefeed, as in `changefeed list`"
    )
    add_namespace(verb)


def _add_pace(verb: argparse.ArgumentParser, default: int | None) -> None:
    verb.add_argument(
        "--priority",
        action="append",
        default=[],
        metavar="SCHEMA.TABLE=N",
        help="tables with greater numbers are read first (default: 0); names may have * and ?",
    )
    verb.add_argument(
        "--rows-per-second",
        type=count,
        default=default,
        help="limit of rows read per second; 0: no limit but the log, which goes first",
    )
    verb.add_argument(
        "--bytes-per-second",
        type=byte_count,
        default=default,
        help="limit of bytes read per second; 0: no limit but the log, which goes first",
    )
    unsaid = "as before" if default is None else 4
    verb.add_argument(
        "--parallel",
        type=count,
        default=default,
        help=f"chunks read at a time, at most 16 (default: {unsaid})",
    )


async def start_dump(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Ask for a dump."""
    request = pb.StartDumpRequest(
        changefeed_id=arguments.changefeed_id,
        tables=arguments.table,
        where=dict(map(_condition, arguments.where)),
        rows_per_second_max=arguments.rows_per_second,
        bytes_per_second_max=arguments.bytes_per_second,
        parallel=arguments.parallel,
        priority=dict(map(_priority, arguments.priority)),
        verify=arguments.verify,
    )
    async with remote.capture() as channel:
        return _output(await DumpServiceStub(channel).StartDump(request, timeout=CALL_S))


async def update_dump(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Change what is given, and nothing else."""
    request = pb.UpdateDumpRequest(
        changefeed_id=arguments.changefeed_id,
        priority=dict(map(_priority, arguments.priority)),
        rows_per_second_max=arguments.rows_per_second,
        bytes_per_second_max=arguments.bytes_per_second,
        parallel=arguments.parallel,
    )
    async with remote.capture() as channel:
        return _output(await DumpServiceStub(channel).UpdateDump(request, timeout=CALL_S))


async def call_dump(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Any other verb."""
    request = arguments.request(changefeed_id=arguments.changefeed_id)
    async with remote.capture() as channel:
        call = getattr(DumpServiceStub(channel), arguments.method)
        answer = await call(request, timeout=CALL_S)
        return _output(answer, await _unread_warning(channel, arguments.changefeed_id))


async def _unread_warning(channel: grpc.aio.Channel, changefeed: str) -> str:
    """A dump goes on only as far as its rows are read; empty if that cannot be told now."""
    query = ChangefeedServiceStub(channel).QueryChangefeed
    try:
        answer = await query(QueryChangefeedRequest(id=changefeed), timeout=CALL_S)
    except grpc.aio.AioRpcError:
        return ""  # the owner may be changing; the dump's status is in the metadata
    return unread_warning(answer.changefeed)


def _condition(text: str) -> tuple[str, str]:
    name, equals, condition = text.partition("=")
    if not equals or "." not in name or not condition.strip():
        raise WhereError(f"--where {text!r} is not of the form SCHEMA.TABLE=CONDITION")
    return name, condition


def _priority(text: str) -> tuple[str, int]:
    name, equals, number = text.rpartition("=")
    if not equals or "." not in name or not _NUMBER.fullmatch(number.strip()):
        raise PriorityError(
            f"--priority {text!r} is not of the form SCHEMA.TABLE=N, N a number of at most six "
            "digits"
        )
    return name, int(number)


def _output(answer: Any, warning: str = "") -> Output:
    dump = answer.dump
    rows = [
        _shown(each) | {"verified": _verified(each) if dump.verify else ""}
        for each in answer.status
    ]
    done = f"{dump.tables_done} of {dump.tables_known} tables done"
    failed = f", {dump.tables_failed} failed" if dump.tables_failed else ""
    head = f"dump {dump.job_id} of {dump.changefeed_id}: {dump.state}, {done}{failed}"
    if len(rows) > 1:
        is_done = dump.tables_done == dump.tables_known
        rows.append(
            {
                **_shown(dump, is_done=is_done),
                "table": "(all)",
                "state": dump.state,
                **dict.fromkeys(_NOT_OF_ALL, ""),
            }
        )
    head += "".join(f"\n{line}" for line in (dump.waits_for, warning) if line)
    warnings = {"warnings": [warning]} if warning else {}
    return Output(
        plain(dump) | {"status": [plain(each) for each in answer.status]} | warnings,
        shown=f"{head}\n{table(rows, _COLUMNS)}",
    )


def _verified(each: Any) -> str:
    repaired = f", {each.chunks_repaired} repaired" if each.chunks_repaired else ""
    return f"{each.chunks_verified} of {each.chunks_done} chunks{repaired}"


def _shown(each: Any, *, is_done: bool = False) -> dict[str, Any]:
    has_share = each.rows_estimated or is_done or each.state == "done"
    return {
        **plain(each),
        "progress": f"{each.progress_percent:.1f} %" if has_share else "",
        "eta": f"{each.eta_seconds} s" if each.eta_seconds >= 0 else "",
    }
