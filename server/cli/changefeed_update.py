"""`tidemark cli changefeed update`."""

import argparse
from collections.abc import Iterator
from typing import Any, Final

from tidemarkpb.v1 import changefeed_pb2 as pb
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub

from server.changefeed.view import detail, filter_change
from server.cli.arguments import period, retention, timestamp
from server.cli.changefeed_create import (
    AUDIT_HELP,
    READER_TTL_HELP,
    RETAIN_HELP,
    UNCLEAR,
    UNCLEAR_HELP,
    read_config,
)
from server.cli.output import Output, confirmed
from server.cli.remote import CALL_S, Remote, make_change
from sink.retention import Retention

_OTHER_FEED = (
    "rows that are at the target would not fit; create another changefeed with a new target"
)
_KEPT: Final = dict.fromkeys(("--route", "--source-uri", "--zero-dates"), _OTHER_FEED) | {
    "--start-ts": "pause it, and `resume --overwrite-checkpoint-ts` from there",
    "--force-replicate": "create another changefeed",
    "--ignore-ineligible-table": "create another changefeed",
}
"""Options of `create` that `update` does not have, and what to do instead."""


def add_arguments(update: argparse.ArgumentParser) -> None:
    """Add those of `update`, beside the changefeed's id."""
    update.add_argument(
        "--sink-uri", default="", help="the same target, with another login or other options"
    )
    update.add_argument(
        "--on-unclear-ddl",
        choices=UNCLEAR,
        default="",
        help=UNCLEAR_HELP,
    )
    update.add_argument("--audit", type=period, metavar="DURATION|off", help=AUDIT_HELP)
    update.add_argument("--retain", type=retention, metavar="TIME|SIZE|off", help=RETAIN_HELP)
    update.add_argument("--reader-ttl", type=period, metavar="DURATION", help=READER_TTL_HELP)
    update.add_argument(
        "--target-ts",
        type=_end,
        metavar="TSO|none",
        help="of a paused or failed changefeed: replicate up to it, in the future, or without end",
    )
    update.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="RULE",
        help=(
            "a rule of the new table filter, as in `create`; give all its rules. Tables that it "
            "adds are replicated once everything up to now is at the target, and their present "
            "rows are copied. Tables that it removes stay in the target as they are"
        ),
    )
    update.add_argument(
        "--columns",
        action="append",
        metavar="RULE|none",
        help=(
            "a rule about columns, as in `create`; give all of them. In force once everything up to "
            "now is at the target: there a table of which other columns are taken is emptied and "
            "copied anew"
        ),
    )
    update.add_argument(
        "--mask",
        action="append",
        metavar="RULE|none",
        help="a rule about masks, as in `create`; give all of them. In force as --columns",
    )
    update.add_argument(
        "--salt-file",
        default="",
        metavar="FILE",
        help="another salt of masks that hash, on every capture",
    )
    update.add_argument(
        "--config",
        metavar="FILE",
        help=(
            "TOML file with TiCDC's keys: rules and event-filters of [filter], column-selectors, "
            "column-masks and salt-file of [sink], enable-table-across-nodes and region-threshold "
            "of [scheduler]; what it has none of stays. Event filters are about changes from now on"
        ),
    )
    update.add_argument(
        "--no-dump",
        action="store_true",
        help=(
            "do not copy the present rows of tables that the filter adds; tables with other columns "
            "or masks go on, and what the target has of them stays as it is"
        ),
    )
    update.add_argument(
        "--dry-run",
        action="store_true",
        help="change nothing; show the tables that would be added, removed, or shown otherwise",
    )
    for flag in _KEPT:
        update.add_argument(flag, action=_Kept, nargs="?", help=argparse.SUPPRESS)


class _Kept(argparse.Action):
    """An option of `create` that `update` does not have."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Refused."""
        del namespace, values
        advice = _KEPT[option_string or ""]
        parser.error(f"{option_string} of a changefeed cannot be changed: {advice}")


async def update_changefeed(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Change the filter, what is taken of tables, the sink URI, options, or the audit."""
    request = pb.UpdateChangefeedRequest(
        id=arguments.changefeed_id,
        salt_file=arguments.salt_file,
        columns=_texts(arguments.columns),
        masks=_texts(arguments.mask),
        sink_uri=arguments.sink_uri,
        on_unclear_ddl=arguments.on_unclear_ddl,
        audit_s=arguments.audit,
        retention=_retention_message(arguments.retain),
        reader_ttl_s=arguments.reader_ttl,
        target_ts=arguments.target_ts,
        no_dump=arguments.no_dump,
        dry_run=arguments.dry_run,
    )
    config = None if arguments.config is None else read_config(arguments.config)
    async with remote.capture() as channel:
        service = ChangefeedServiceStub(channel)
        if config is not None:
            query = pb.QueryChangefeedRequest(id=arguments.changefeed_id)
            queried = await service.QueryChangefeed(query, timeout=CALL_S)
            config.change(queried.changefeed, request)
        request.filter.extend(arguments.filter)
        answer = await make_change(service.UpdateChangefeed, request)
    changed = filter_change(answer)
    if arguments.dry_run:
        return Output({"dry_run": True} | changed)
    shown = changed | detail(answer.changefeed)
    said = f"changefeed {shown['id']} is updated"
    return confirmed(arguments, shown, said, *_changed_tables(changed), _waits(shown))


def _changed_tables(change: dict[str, Any]) -> Iterator[str]:
    """The tables that another filter brings, takes away, or cannot bring, in lines."""
    tables = change.get("filter_change", {})
    if coming := tables.get("coming"):
        yield f"tables that come: {', '.join(coming)}"
    if going := tables.get("going"):
        yield f"tables that go: {', '.join(going)}"
    if changing := tables.get("changing"):
        yield f"tables that are shown otherwise: {', '.join(changing)}"
    for name, reason in tables.get("ineligible", {}).items():
        yield f"left out: {name}: {reason}"


def _texts(rules: list[str] | None) -> pb.Texts | None:
    """All rules, of which `none` is none; None: as before."""
    return None if rules is None else pb.Texts(texts=[] if rules == ["none"] else rules)


def _waits(shown: dict[str, Any]) -> str:
    """The tables that a filter waits for before it is in force; empty: it waits for none."""
    return str(shown["filter_update"]["waits_for"]) if "filter_update" in shown else ""


def _retention_message(retained: Retention | None) -> pb.Retention | None:
    if retained is None:
        return None
    return pb.Retention(retain_s=retained.age_s, retain_bytes=retained.size_bytes)


def _end(text: str) -> int:
    return 0 if text in ("none", "0") else timestamp(text)
