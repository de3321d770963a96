"""`tidemark cli source check`: whether a MySQL or MariaDB server can be a changefeed's source,
and what to change.
"""

import argparse
import asyncio
from dataclasses import asdict
from functools import partial
from typing import Any

from pyspark_tidemark.sink_uri import format_of

from server.changefeed.source import FAILURE, WARNING, Check, RunChecks
from server.cli.output import Output, table
from server.cli.remote import Remote
from server.exit_status import EXIT_ERROR, EXIT_OK

_COLUMNS = (("CHECK", "name"), ("STATE", "state"), ("FOUND", "found"))
_ANY = ("*.*",)


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `source`."""
    group = groups.add_parser("source")
    verbs = group.add_subparsers(required=True, metavar="VERB")
    check = verbs.add_parser(
        "check",
        help="check that a server logs all that a changefeed needs; exit status 1 if not",
        parents=[shared],
    )
    check.add_argument(
        "--source-uri", required=True, help="as for `changefeed create`: mysql://user@host:3306?…"
    )
    check.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="RULE",
        help="the tables to check, as for `changefeed create`",
    )
    check.add_argument(
        "--sink-uri",
        default="",
        help=(
            "as for `changefeed create`; check that the target can hold the names of tables and "
            "columns"
        ),
    )
    check.add_argument(
        "--columns",
        action="append",
        default=[],
        metavar="TABLE=COLUMN,…",
        help="as for `changefeed create`",
    )
    check.add_argument(
        "--no-write",
        action="store_true",
        help="do not write the test row that must come back through the log",
    )
    check.set_defaults(command=check_source)


async def check_source(_: Remote, arguments: argparse.Namespace) -> Output:
    """All checks; exit 1 if one failed."""
    from server.changefeed.columns import ColumnRules
    from server.changefeed.info import check_sink_uri
    from server.changefeed.source import (
        KINDS,
        SourceUri,
        SourceUriError,
        find_kind,
        load,
        takes_keyless,
    )
    from server.changefeed.table import TableRecord, check_names

    uri = SourceUri.parse(arguments.source_uri)
    kind = find_kind(uri.scheme)
    if not kind.check_at:
        checked = " and ".join(each.shown for each in KINDS.values() if each.check_at)
        raise SourceUriError(
            f"only {checked} sources are checked so; others are checked when a changefeed is created"
        )
    run_checks: RunChecks = load(kind.check_at)
    read_table = load(kind.table_at)
    if takes_keyless(uri.text):
        read_table = partial(read_table, force_replicate=True)
    rules = tuple(arguments.filter) or _ANY
    columns, target = ColumnRules(arguments.columns), format_of(arguments.sink_uri)
    if arguments.sink_uri:
        check_sink_uri(arguments.sink_uri)

    def read(record: TableRecord) -> None:
        check_names(read_table(columns.of(read_table(record))), target)

    checks: list[Check] = await asyncio.to_thread(
        lambda: list(run_checks(uri, rules, read, target=target, write=not arguments.no_write))
    )
    failures = [check for check in checks if check.state == FAILURE]
    document = {
        "source_uri": uri.text,
        "ok": not failures,
        "checks": [asdict(check) for check in checks],
    }
    status = EXIT_ERROR if failures else EXIT_OK
    return Output(document, shown=_shown(checks, (FAILURE, WARNING)), status=status)


def _shown(checks: Any, explained: tuple[str, ...]) -> str:
    lines = [table([asdict(check) for check in checks], _COLUMNS)]
    for check in checks:
        if check.state in explained and (check.why or check.fix):
            lines += ["", f"{check.name} ({check.state}): {check.why}"]
            lines += [f"  fix: {check.fix}"] if check.fix else []
    return "\n".join(lines)
