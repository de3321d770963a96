"""`tidemark cli gc ranges`: the key ranges of dropped tables, waiting or destroyed;
mysql.gc_delete_range and …_done.

`gc ranges add` registers more of them: by flags, or from rows as `mysql -N` prints those of
mysql.gc_delete_range. `gc ranges remove` takes one back before it is due.
"""

import argparse
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from gcsafepoint.worker.delete_ranges import (
    DeleteRange,
    DeleteRangeError,
    check,
    register,
    withdraw,
)
from gcsafepoint.worker.records import SAFE_POINT_TS, read_ts
from server.cli.output import Output
from server.cli.remote import Remote
from server.gc_worker.view import ListedRange, list_ranges

_STATES: Final = ("waiting", "due", "failed", "done", "redo failed")
_TABLE: Final = b"t"
_TABLE_BYTES: Final = 9

_COLUMNS = (
    ("JOB", "job_id"),
    ("ELEMENT", "element_id"),
    ("START", "start_key"),
    ("END", "end_key"),
    ("TS", "ts"),
    ("STATE", "state"),
    ("ATTEMPTS", "attempts"),
    ("AGAIN", "redo_time"),
    ("LAST ERROR", "last_error"),
)


def add_verbs(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add `ranges`."""
    ranges = verbs.add_parser(
        "ranges",
        help="list the key ranges of dropped tables, and whether they are deleted",
        parents=[shared],
    )
    ranges.add_argument("--state", choices=_STATES, help="show only ranges in this state")
    ranges.set_defaults(command=show_ranges)
    more = ranges.add_subparsers(title="verbs", metavar="VERB")
    listed = more.add_parser("list", help="the same as `gc ranges`", parents=[shared])
    listed.add_argument("--state", choices=_STATES, help="show only ranges in this state")
    listed.set_defaults(command=show_ranges)
    _add_add(more, shared)
    _add_remove(more, shared)


def _add_add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    add = verbs.add_parser(
        "add",
        help="register key ranges: all their keys are deleted once --ts is before the safepoint",
        parents=[shared],
    )
    add.add_argument("--job", type=int, help="id of the DDL job that dropped it")
    add.add_argument("--element", type=int, help="id of the table or index that was dropped")
    add.add_argument("--start-key", metavar="HEX", help="first key of the range")
    add.add_argument(
        "--end-key", metavar="HEX", help="end of the range: the first key that is not in it"
    )
    add.add_argument(
        "--ts", type=int, help="timestamp of the drop: no snapshot at or after it reads the range"
    )
    add.add_argument(
        "--rows",
        metavar="FILE",
        help=(
            "instead of one range, a file of rows of mysql.gc_delete_range, separated by tabs "
            "(mysql -N); -: stdin"
        ),
    )
    add.add_argument(
        "--dry-run", action="store_true", help="change nothing; check and show the ranges"
    )
    add.set_defaults(command=add_ranges)


def _add_remove(verbs: Any, shared: argparse.ArgumentParser) -> None:
    remove = verbs.add_parser(
        "remove",
        help=(
            "remove a range that waits to be deleted; if its --ts is before the safepoint, it "
            "may be too late"
        ),
        parents=[shared],
    )
    remove.add_argument("--job", type=int, required=True, help="id of the DDL job that dropped it")
    remove.add_argument(
        "--element", type=int, required=True, help="id of the table or index that was dropped"
    )
    remove.add_argument(
        "--dry-run", action="store_true", help="change nothing; check and show the range"
    )
    remove.set_defaults(command=remove_range)


async def add_ranges(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Register ranges, all of them checked before the first is;
    one that is registered already is left as it is.

    Raises:
        DeleteRangeError: a range is not that of a table or index, or another one has its job and
            element.
    """
    ranges = _given(arguments)
    for new in ranges:
        # All are checked before the first is registered: half a file would be hard to take back.
        check(new)
        _check_table(new)
    async with remote.gc_records() as records:
        if not arguments.dry_run:
            for new in ranges:
                await register(records, new)
        safe_point = await read_ts(records, SAFE_POINT_TS)
    listed = [ListedRange(new, "due" if new.ts < safe_point else "waiting", 0) for new in ranges]
    return Output([_row(each) | {"dry_run": arguments.dry_run} for each in listed], _COLUMNS)


async def remove_range(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Forget a range that waits; its keys stay where they are.

    Raises:
        DeleteRangeError: there is no such range, or it may be destroyed already.
    """
    async with remote.gc_records() as records:
        removed = await withdraw(
            records, arguments.job, arguments.element, dry_run=arguments.dry_run
        )
    state = "waiting" if arguments.dry_run else "removed"
    return Output([_row(ListedRange(removed, state, 0)) | {"dry_run": arguments.dry_run}], _COLUMNS)


def parse_rows(lines: Iterable[str]) -> list[DeleteRange]:
    """Rows of mysql.gc_delete_range: job_id, element_id, start_key and end_key in hex, ts;
    empty lines are left out.

    Raises:
        DeleteRangeError: a line is something else.
    """
    return [_parse_row(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _parse_row(number: int, line: str) -> DeleteRange:
    fields = line.split()
    try:
        job_id, element_id, start_key, end_key, ts = fields
        return DeleteRange(
            int(job_id), int(element_id), bytes.fromhex(start_key), bytes.fromhex(end_key), int(ts)
        )
    except ValueError as err:
        raise DeleteRangeError(
            f"line {number} is no row of mysql.gc_delete_range (job_id, element_id, start_key and "
            f"end_key in hex, ts): {line.strip()[:200]!r}"
        ) from err


def _given(arguments: argparse.Namespace) -> list[DeleteRange]:
    one = (arguments.job, arguments.element, arguments.start_key, arguments.end_key, arguments.ts)
    if arguments.rows is not None:
        if any(value is not None for value in one):
            raise DeleteRangeError(
                "give --rows alone, or --job, --element, --start-key, --end-key and --ts"
            )
        if arguments.rows == "-":
            return parse_rows(sys.stdin)
        try:
            return parse_rows(Path(arguments.rows).read_text().splitlines())
        except (OSError, UnicodeDecodeError) as err:
            raise DeleteRangeError(f"cannot read {arguments.rows}: {err}") from err
    if any(value is None for value in one):
        raise DeleteRangeError(
            "a range needs --job, --element, --start-key, --end-key and --ts; or give --rows"
        )
    return [_parse_row(1, " ".join(map(str, one)))]


def _check_table(new: DeleteRange) -> None:
    """Refuse a range that is not of a table or index: a wrong key could destroy the cluster's
    schemas.
    """
    if not (
        new.start_key.startswith(_TABLE)
        and new.end_key.startswith(_TABLE)
        and len(new.start_key) >= _TABLE_BYTES
    ):
        raise DeleteRangeError(
            f"[{new.start_key.hex()}, {new.end_key.hex()}) is no range of a table or index: both "
            "keys begin with 74 ('t'), and the first names a table by 8 more bytes"
        )


async def show_ranges(remote: Remote, arguments: argparse.Namespace) -> Output:
    """All recorded ranges, those still to be destroyed first."""
    async with remote.gc_records() as records:
        ranges = await list_ranges(records)
    return Output(
        [_row(listed) for listed in ranges if arguments.state in (None, listed.state)], _COLUMNS
    )


def _row(listed: ListedRange) -> dict[str, Any]:
    delete_range = listed.delete_range
    return {
        "job_id": delete_range.job_id,
        "element_id": delete_range.element_id,
        "start_key": delete_range.start_key.hex(),
        "end_key": delete_range.end_key.hex(),
        "ts": delete_range.ts,
        "state": listed.state,
        "attempts": delete_range.attempts,
        "done_time": _time(delete_range.done_ms),
        "redo_time": _time(listed.redo_ms),
        "last_error": delete_range.error,
    }


def _time(unix_ms: int) -> str:
    return (
        datetime.fromtimestamp(unix_ms / 1e3, UTC).isoformat(timespec="seconds") if unix_ms else ""
    )
