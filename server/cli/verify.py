"""`tidemark cli verify`: exit status 0 the lake equals its upstream, 1 it differs, 2 they could not be compared."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from server.cli.number import count, timestamp
from server.cli.output import Output
from server.cli.remote import Remote
from server.rpc.tikv import KvClient
from server.verify.errors import VerifyUnsupportedError
from storage.model.errors import TidemarkError, ours_alone

if TYPE_CHECKING:
    from server.verify.comparison import TableReport
    from server.verify.verify import Report

EQUAL, DIFFERS, FAILED = 0, 1, 2
_EVERY_S = 5.0
_SHOWN = 20


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command `verify`."""
    command = groups.add_parser(
        "verify",
        help="compare a lake with its upstream, row by row",
        epilog="exit status: 0 the lake equals its upstream, 1 it differs, 2 they could not be compared",
        parents=[shared],
    )
    command.add_argument("-c", "--changefeed-id", "--changefeed", dest="changefeed", required=True, help="whose lake")
    command.add_argument("--table", metavar="SCHEMA.TABLE", help="only this one (default: all)")
    command.add_argument("--at", type=timestamp, metavar="TSO", help="the newest cut up to it (default: the newest)")
    command.add_argument(
        "--repair", action="store_true", help="write rows that differ anew; the lake's job must be stopped"
    )
    command.add_argument("--dry-run", action="store_true", help="only say what --repair would do")
    command.add_argument("--limit", type=count, default=1000, help="differences told per table (default: %(default)s)")
    command.set_defaults(command=run_verify)


async def run_verify(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Compare, and tell the first differences."""
    try:
        _check_flags(arguments)
        report = await _compared(remote, arguments)
    except TidemarkError as err:
        return _failed(str(err))
    except BaseExceptionGroup as group:
        return _failed(str(ours_alone(group)[0]))
    return Output(_document(report), shown=_shown(report), status=EQUAL if report.equal else DIFFERS)


def _check_flags(arguments: argparse.Namespace) -> None:
    if arguments.repair and arguments.at is not None:
        raise VerifyUnsupportedError("only the newest cut can be repaired: leave out --at")
    if arguments.dry_run and not arguments.repair:
        raise VerifyUnsupportedError("--dry-run says what --repair would do: give both")


async def _compared(remote: Remote, arguments: argparse.Namespace) -> "Report":
    from server.verify.comparison import Wish  # Spark's modules: no other command waits for them
    from server.verify.upstream.upstream import Cluster
    from server.verify.verify import Request, verify

    wish = Wish(arguments.limit, arguments.repair, arguments.dry_run)
    request = Request(arguments.changefeed, arguments.table, arguments.at, wish)
    async with (
        remote.coordinator() as pd,
        remote.metadata() as meta,
        KvClient.open(pd, remote.security) as kv,
    ):
        return await verify(Cluster(pd, kv, meta), request, _Told())


class _Told:
    """Progress on standard error, now and then."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _EVERY_S

    def __call__(self, line: str) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY_S
            print(line, file=sys.stderr, flush=True)


def _failed(error: str) -> Output:
    print(error, file=sys.stderr)
    return Output({"equal": None, "error": error}, shown="", status=FAILED)


def _document(report: "Report") -> dict[str, Any]:
    return {
        "changefeed": report.changefeed,
        "cut": report.cut,
        "mode": report.mode,
        "equal": report.equal,
        "tables": [_table(table) for table in report.tables],
    }


def _table(table: "TableReport") -> dict[str, Any]:
    repaired = None if table.repaired is None else dataclasses.asdict(table.repaired)
    return {
        "table": table.table,
        "ts": table.ts,
        "equal": table.equal,
        "upstream_rows": table.upstream_rows,
        "lake_rows": table.lake_rows,
        "differing_ranges": table.differing_ranges,
        "differing_rows": table.differing_rows,
        "complete": table.complete,
        "note": table.note,
        "repaired": repaired,
        "differences": [difference.to_document() for difference in table.differences],
    }


def _shown(report: "Report") -> str:
    compared = "" if report.mode == "upsert" else f" (mode {report.mode}: the current rows were compared)"
    lines = [f"{report.changefeed} at cut {report.cut}{compared}: {'equal' if report.equal else 'DIFFERS'}"]
    for table in report.tables:
        lines.append(f"  {table.table}: {table.upstream_rows} rows upstream, {table.lake_rows} in the lake")
        for difference in table.differences[:_SHOWN]:
            columns = f" in {', '.join(difference.columns)}" if difference.columns else ""
            lines.append(f"    {difference.key}: {difference.kind}{columns}")
        lines += [f"    {line}" for line in _ending(table)]
    return "\n".join(lines)


def _ending(table: "TableReport") -> Iterator[str]:
    if table.differing_rows > _SHOWN or not table.complete:
        known = f"{table.differing_rows}{'' if table.complete else ' or more'}"
        yield f"{known} rows differ in {table.differing_ranges} ranges; --json --limit tells more"
    if table.note:
        yield f"note: {table.note}"
    if table.repaired is None:
        return
    done = f"{table.repaired.removed} keys removed, {table.repaired.written} rows written"
    if table.repaired.version is None:
        yield f"would be repaired: {done}"
    else:
        yield f"repaired as version {table.repaired.version}: {done}; verify once more to see"
