"""`tidemark cli verify`: exit status 0 the lake equals its upstream, 1 it differs, 2 they could not be compared."""

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from server.cli.output import Output
from server.cli.remote import Remote
from server.daemon import leaves
from server.rpc.client import connect
from server.rpc.tikv import KvClient
from storage.meta.client import open_meta
from storage.model.errors import TidemarkError

if TYPE_CHECKING:
    from server.verify.verify import Report, TableReport

EQUAL, DIFFERS, FAILED = 0, 1, 2
_EVERY_S = 5.0
_SHOWN = 20


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command `verify`."""
    command = groups.add_parser("verify", help="compare a lake with its upstream, row by row", parents=[shared])
    command.add_argument("-c", "--changefeed", required=True, help="whose lake")
    command.add_argument("--table", help="only this one, database.table (default: all)")
    command.add_argument("--at", type=int, help="at the newest cut up to this TSO (default: the newest)")
    command.add_argument(
        "--repair", action="store_true", help="write rows that differ anew; the lake's job must be stopped"
    )
    command.add_argument("--limit", type=int, default=1000, help="differences told per table (default: %(default)s)")
    command.set_defaults(command=run_verify)


async def run_verify(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Compare, and tell the first differences."""
    if arguments.repair and arguments.at is not None:
        return _failed("[TM:ErrVerifyUnsupported] only the newest cut can be repaired: leave out --at")
    try:
        report = await _compared(remote, arguments)
    except TidemarkError as err:
        return _failed(str(err))
    except BaseExceptionGroup as group:
        ours, others = group.split(TidemarkError)
        if ours is None or others is not None:
            raise
        return _failed(str(leaves(ours)[0]))
    document = _document(report, arguments.limit)
    return Output(document, shown=_shown(report), status=EQUAL if report.equal else DIFFERS)


async def _compared(remote: Remote, arguments: argparse.Namespace) -> "Report":
    from server.verify.verify import Request, verify  # Spark's modules: no other command waits for them

    request = Request(arguments.changefeed, arguments.table, arguments.at, arguments.repair)
    async with (
        remote.coordinator() as pd,
        open_meta(f"etcd://{remote.pd}", lambda address: connect(address, remote.security)) as meta,
        KvClient.open(pd, remote.security) as kv,
    ):
        return await verify(pd, kv, meta, request, _Told())


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


def _document(report: "Report", limit: int) -> dict[str, Any]:
    return {
        "changefeed": report.changefeed,
        "cut": report.cut,
        "equal": report.equal,
        "tables": [_table(table, limit) for table in report.tables],
    }


def _table(table: "TableReport", limit: int) -> dict[str, Any]:
    return {
        "table": table.table,
        "equal": table.equal,
        "upstream_rows": table.upstream_rows,
        "lake_rows": table.lake_rows,
        "differing_ranges": table.differing_leaves,
        "differing_rows": len(table.differences),
        "complete": table.complete,
        "repaired_version": table.repaired_version,
        "differences": [difference.to_document() for difference in table.differences[:limit]],
    }


def _shown(report: "Report") -> str:
    lines = [f"{report.changefeed} at cut {report.cut}: {'equal' if report.equal else 'DIFFERS'}"]
    for table in report.tables:
        lines.append(f"  {table.table}: {table.upstream_rows} rows upstream, {table.lake_rows} in the lake")
        for difference in table.differences[:_SHOWN]:
            columns = f" in {', '.join(difference.columns)}" if difference.columns else ""
            lines.append(f"    {difference.key}: {difference.kind}{columns}")
        if len(table.differences) > _SHOWN or not table.complete:
            known = f"{len(table.differences)}{'' if table.complete else ' or more'}"
            lines.append(f"    {known} rows differ in {table.differing_leaves} ranges; --json --limit tells more")
        if table.repaired_version is not None:
            lines.append(f"    repaired, as version {table.repaired_version}; verify once more to see")
    return "\n".join(lines)
