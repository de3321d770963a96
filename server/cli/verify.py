"""`tidemark cli verify`: exit status 0 the lake equals its upstream, 1 it differs,
2 they could not be compared.
"""

import argparse
import asyncio
import dataclasses
import json
import secrets
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from server.cli.arguments import count, seconds, timestamp
from server.cli.output import Output
from server.cli.remote import Remote
from server.rpc.tikv import KvClient
from server.verify.errors import VerifyTimeoutError, VerifyUnsupportedError
from server.verify.progress import Progress
from server.verify.spans import SLOTS_MAX, Sample, Span
from storage.model.errors import TidemarkError, ours_alone
from storage.tasks import background_tasks

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
        epilog=(
            "exit status: 0 the lake equals its upstream, 1 it differs, 2 they could not be "
            "compared"
        ),
        parents=[shared],
    )
    command.add_argument(
        "-c",
        "--changefeed-id",
        "--changefeed",
        dest="changefeed",
        required=True,
        help="the changefeed whose lake is compared",
    )
    command.add_argument(
        "--table", metavar="SCHEMA.TABLE", help="compare only this table (default: all)"
    )
    command.add_argument(
        "--at",
        type=timestamp,
        metavar="TSO",
        help="compare at the newest cut up to this timestamp (default: at the newest)",
    )
    command.add_argument(
        "--repair",
        action="store_true",
        help="correct the lake's rows that differ; stop its job first",
    )
    command.add_argument(
        "--dry-run", action="store_true", help="change nothing; show what --repair would do"
    )
    command.add_argument(
        "--sample",
        type=_sample,
        metavar="N|P%",
        help="compare N random ranges of each table's keys, or P%% of them; tables whose key does not begin with an "
        "integer are compared whole",
    )
    command.add_argument(
        "--seed",
        type=count,
        help=(
            "seed of the random ranges of --sample (default: a new one each time, which is printed)"
        ),
    )
    command.add_argument(
        "--limit",
        type=count,
        default=1000,
        help="differences to print per table (default: %(default)s)",
    )
    command.add_argument(
        "--timeout",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help=(
            "end with status 2 if there is no result after this long, and say what was going on "
            "(default: none)"
        ),
    )
    command.set_defaults(command=run_verify)


async def run_verify(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Compare, and tell the first differences."""
    progress = Progress()
    try:
        _check_flags(arguments)
        async with background_tasks(_print_progress(progress, as_json=arguments.json)):
            report = await _in_time(remote, arguments, progress)
    except TidemarkError as err:
        return _failed(str(err), progress)
    except BaseExceptionGroup as group:
        return _failed(str(ours_alone(group)[0]), progress)
    document = _document(report) | {"progress": progress.document()}
    return Output(document, shown=_shown(report), status=EQUAL if report.equal else DIFFERS)


def _sample(text: str) -> tuple[int, float]:
    """Parse a sample: a number of ranges, or a fraction of them as a percentage."""
    try:
        if not text.endswith("%"):
            ranges = int(text)
            return (ranges, 0.0) if 0 < ranges <= SLOTS_MAX else _no_sample(text)
        part = float(text.removesuffix("%")) / 100
        return (0, part) if 0 < part <= 1 else _no_sample(text)
    except ValueError:
        return _no_sample(text)


def _no_sample(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(
        f"{text!r} must be 1 to {SLOTS_MAX} ranges, or above 0% to 100%"
    )


async def _in_time(remote: Remote, arguments: argparse.Namespace, progress: Progress) -> "Report":
    """Compare before the deadline; raises VerifyTimeoutError with the stage that it was in."""
    try:
        async with asyncio.timeout(arguments.timeout or None) as deadline:
            try:
                return await _compared(remote, arguments, progress)
            except asyncio.CancelledError:
                # Taken while the cancellation passes: afterwards the stages are unwound.
                stage = progress.line()
                raise
    except TimeoutError:
        if not deadline.expired():
            raise
        raise VerifyTimeoutError(
            f"no result within {arguments.timeout:g} s: {stage}; give --timeout more, or --table "
            "one of the tables"
        ) from None


async def _print_progress(progress: Progress, *, as_json: bool) -> None:
    """Progress on standard error, every few seconds, also while nothing comes;
    cancelled at the end.
    """
    while True:
        await asyncio.sleep(_EVERY_S)
        line = json.dumps({"progress": progress.document()}) if as_json else progress.line()
        print(line, file=sys.stderr, flush=True)


def _check_flags(arguments: argparse.Namespace) -> None:
    if arguments.repair and arguments.at is not None:
        raise VerifyUnsupportedError("only the newest cut can be repaired: leave out --at")
    if arguments.dry_run and not arguments.repair:
        raise VerifyUnsupportedError("--dry-run says what --repair would do: give both")
    if arguments.seed is not None and arguments.sample is None:
        raise VerifyUnsupportedError("--seed says which ranges --sample takes: give both")


async def _compared(remote: Remote, arguments: argparse.Namespace, progress: Progress) -> "Report":
    # Spark's modules: no other command waits for them
    from server.verify.comparison import (
        VerifyOptions,
    )
    from server.verify.upstream import Cluster
    from server.verify.verify import Request, verify

    sample = None
    if arguments.sample is not None:
        ranges, part = arguments.sample
        sample = Sample(
            secrets.randbelow(1 << 31) if arguments.seed is None else arguments.seed, ranges, part
        )
    options = VerifyOptions(arguments.limit, arguments.repair, arguments.dry_run, sample)
    request = Request(arguments.changefeed, arguments.table, arguments.at, options)
    async with (
        remote.coordinator() as pd,
        remote.metadata() as meta,
        KvClient.open(pd, remote.security) as kv,
    ):
        return await verify(Cluster(pd, kv, meta), request, progress)


def _failed(error: str, progress: Progress) -> Output:
    print(error, file=sys.stderr)
    return Output(
        {"equal": None, "error": error, "progress": progress.document()}, shown="", status=FAILED
    )


def _document(report: "Report") -> dict[str, Any]:
    return {
        "changefeed": report.changefeed,
        "cut": report.cut,
        "mode": report.mode,
        "equal": report.equal,
        "seed": report.seed,
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
        "sample": None if table.sampled is None else table.sampled.document(),
        "differing_spans": [list(span) for span in table.differing_spans],
        "note": table.note,
        "repaired": repaired,
        "differences": [difference.to_document() for difference in table.differences],
    }


def _shown(report: "Report") -> str:
    compared = (
        "" if report.mode == "upsert" else f" (mode {report.mode}: the current rows were compared)"
    )
    sampled = "" if report.seed is None else f", a sample (--seed {report.seed})"
    verdict = "equal" if report.equal else "DIFFERS"
    lines = [f"{report.changefeed} at cut {report.cut}{compared}{sampled}: {verdict}"]
    for table in report.tables:
        ranges = (
            ""
            if table.sampled is None
            else f" in {len(table.sampled.spans)} ranges of {table.sampled.column}"
        )
        lines.append(
            f"  {table.table}: {table.upstream_rows} rows upstream, {table.lake_rows} in the "
            f"lake{ranges}"
        )
        lines += [
            f"    differs from {low} to below {high}"
            for low, high in map(_ends, table.differing_spans)
        ]
        for difference in table.differences[:_SHOWN]:
            columns = f" in {', '.join(difference.columns)}" if difference.columns else ""
            lines.append(f"    {difference.key}: {difference.kind}{columns}")
        lines += [f"    {line}" for line in _ending(table)]
    return "\n".join(lines)


def _ends(span: "Span") -> tuple[str, str]:
    low, high = span
    return "the least key" if low is None else str(low), "the end" if high is None else str(high)


def _ending(table: "TableReport") -> Iterator[str]:
    if table.differing_rows > _SHOWN or not table.complete:
        count = f"{table.differing_rows}{'' if table.complete else ' or more'}"
        yield f"{count} rows differ in {table.differing_ranges} ranges; --json --limit tells more"
    if table.note:
        yield f"note: {table.note}"
    if table.repaired is None:
        return
    done = f"{table.repaired.removed} keys removed, {table.repaired.written} rows written"
    if table.repaired.version is None:
        yield f"would be repaired: {done}"
    else:
        yield f"repaired as version {table.repaired.version}: {done}; verify once more to see"
