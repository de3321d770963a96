"""`tidemark cli changefeed create`."""

import argparse
import importlib
import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from tidemarkpb.v1 import changefeed_pb2 as pb
from tidemarkpb.v1 import dump_pb2
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub
from tidemarkpb.v1.dump_pb2_grpc import DumpServiceStub

from gcsafepoint.explain.explanation import time_of
from server.changefeed.source import FORCE_REPLICATE, with_option
from server.changefeed.view import check_document, detail, explained
from server.cli.arguments import (
    Refused,
    add_namespace,
    add_yes,
    confirm,
    period,
    retention,
    timestamp,
)
from server.cli.output import Output, add_verbose, confirmed, table
from server.cli.remote import CALL_S, Remote, make_change
from server.exit_status import EXIT_ERROR, EXIT_OK
from sink.retention import Retention
from storage.model.errors import InvalidError, UnavailableError
from storage.model.ts import physical_ms
from storage.tidb.field_type import NULL_DATES, SHOWN_DATES

if TYPE_CHECKING:
    from server.capture.api_v2.replica_config import ReplicaConfig

UNCLEAR = ("reread", "stop")
UNCLEAR_HELP = (
    "what to do when a DDL changes rows of a mysql:// source without logging them: read "
    "the table again, while cuts wait (reread, the default), or stop the changefeed"
)
AUDIT_HELP = (
    "compare the lake with its source in the background, each table completely once per "
    "DURATION (1m to 2160h, such as 1h); a difference puts the changefeed into the state "
    "`warning`"
)
RETAIN_HELP = (
    "keep changes that all readers have acknowledged, for readers that are added later: "
    "for a time (24h), up to a size on the captures' disks (50GiB), or both (24h,50GiB: "
    "the limit that is reached first counts). The source's GC does not wait for them, "
    "and they are lost when the changefeed is started again"
)
READER_TTL_HELP = (
    "a named reader that acknowledges nothing for this long is given up: changes are no "
    "longer kept for it"
)
_CHECK_COLUMNS = (("TABLE", "table"), ("REPLICATED", "replicated"), ("COLUMNS, OR WHY NOT", "what"))
_LARGE_GAP_S = 86_400
_NAMED = 5
"""A confirmation names at most so many tables."""
_UPSTREAM = "the upstream is the capture's own cluster, or what --source-uri names"
_REFUSED = {
    "--sort-engine": "there is one sorter",
    "--sort-dir": "a capture sorts in its --data-dir",
    "--schema-registry": "Avro is not written to Kafka, only canal-json and Debezium's JSON",
    "--tz": "timestamps are stored in UTC",
    "--disable-gc-check": "a start that GC has passed would lose changes",
} | dict.fromkeys(
    ("--upstream-pd", "--upstream-ca", "--upstream-cert", "--upstream-key"), _UPSTREAM
)
"""Flags of `cdc cli` that mean something that there is not here."""


class ConfigFileError(InvalidError):
    """The file of --config cannot be read."""

    code = "ErrConfigFileInvalid"


class TablesFileError(InvalidError):
    """The file of --tables cannot be used."""

    code = "ErrTablesFileInvalid"


class DumpNotStartedError(UnavailableError):
    """The changefeed was created, its dump was not started."""

    code = "ErrDumpNotStarted"


def add_verb(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add `create`."""
    create = verbs.add_parser("create", help="create a changefeed", parents=[shared])
    create.add_argument(
        "-c",
        "--changefeed-id",
        default="",
        help="its new id: letters, digits and single hyphens (default: a UUID)",
    )
    add_namespace(create)
    create.add_argument("--sink-uri", required=True, help="the target, such as delta:///path")
    create.add_argument(
        "--source-uri",
        default="",
        help=(
            "the source, such as mysql://user@host:3306?password-file=/path or pump:// (default: "
            "TiKV's change feed)"
        ),
    )
    _add_tables(create)
    _add_rows(create)
    create.add_argument(
        "--start-ts",
        type=timestamp,
        default=0,
        metavar="TSO",
        help="replicate changes committed after this timestamp (default: now)",
    )
    create.add_argument(
        "--target-ts",
        type=timestamp,
        default=0,
        metavar="TSO",
        help="replicate changes committed up to this timestamp (default: no end)",
    )
    create.add_argument(
        "--dump",
        action="store_true",
        help="also copy the rows that the tables hold now, as `dumpstart` does",
    )
    create.add_argument(
        "--dry-run",
        action="store_true",
        help=(
            "create nothing; show which tables and columns would be replicated, and why other "
            "tables cannot be"
        ),
    )
    create.add_argument(
        "--explain",
        action="store_true",
        help=(
            "like --dry-run, and show for each table the rule that includes or excludes it, its "
            "name in the target, the type and mask of each column, excluded columns, and what "
            "event filters ignore"
        ),
    )
    for flag, reason in _REFUSED.items():
        create.add_argument(flag, action=Refused, nargs="?", const=reason, help=argparse.SUPPRESS)
    add_yes(create, "do not ask when --start-ts is more than a day ago")
    add_verbose(create)
    create.set_defaults(command=create_changefeed)


def _add_tables(create: argparse.ArgumentParser) -> None:
    """Which tables, and columns, are replicated."""
    create.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="RULE",
        help=(
            "a table filter rule in TiDB's syntax, such as 'shop.*' or '!shop.tmp_*'; the last "
            "rule that matches a table decides; may be repeated"
        ),
    )
    create.add_argument(
        "--columns",
        action="append",
        default=[],
        metavar="TABLE=COLUMN,…",
        help=(
            "the columns of a table to replicate, such as 'shop.orders=id,name' or "
            "'crm.*=*,!phone,_op->op' (_op is called op in the target); key columns always are "
            "replicated"
        ),
    )
    create.add_argument(
        "--route",
        action="append",
        default=[],
        metavar="TABLE=SCHEMA.NAME",
        help=(
            "the name of tables in the target, such as 'shop.*=lake.{schema}_{table}'; the first "
            "route that matches a table decides. 'shop_*.orders=shop.orders{shard=_shard}' "
            "merges tables into one, whose column _shard has the name of the source table"
        ),
    )
    create.add_argument(
        "--mask",
        action="append",
        default=[],
        metavar="TABLE=COLUMN:MASK,…",
        help=(
            "hash, mask or shorten columns' values, such as "
            "'crm.*=email:mask.hash.SHA-256,phone_?:mask.with.4.chars,note:truncate.to.20.chars'"
        ),
    )
    create.add_argument(
        "--salt-file",
        default="",
        metavar="FILE",
        help=(
            "file with the secret salt of mask.hash.SHA-256, at least 16 bytes; every capture "
            "must have it at this path"
        ),
    )
    create.add_argument(
        "--config",
        default="",
        metavar="FILE",
        help=(
            "TOML file with TiCDC's keys: ignore-ineligible-table, force-replicate; [filter] "
            "rules and event-filters; [scheduler] enable-table-across-nodes and "
            "region-threshold; [sink] column-selectors, dispatchers (target-schema, "
            "target-table, shard-column), column-masks and salt-file. Rules of --filter, "
            "--columns, --mask and --route come after those of the file"
        ),
    )
    create.add_argument(
        "--tables",
        help='JSON file with the schemas of tables: [{"schema_name": …, "table_info": {…}}, …]',
    )
    create.add_argument(
        "--ignore-ineligible-table",
        action="store_true",
        help=(
            "leave out tables that match but cannot be replicated, such as those without a key, "
            "instead of refusing"
        ),
    )
    create.add_argument(
        "--force-replicate",
        action="store_true",
        help=(
            "also replicate MySQL tables without a key, as changelogs: an update becomes a "
            "delete and an insert, there is no dump, and the target must keep changes "
            "(?mode=append)"
        ),
    )


def _add_rows(create: argparse.ArgumentParser) -> None:
    """Add the flags about rows."""
    create.add_argument("--on-unclear-ddl", choices=UNCLEAR, default="", help=UNCLEAR_HELP)
    create.add_argument(
        "--zero-dates",
        choices=SHOWN_DATES,
        default=NULL_DATES,
        help=(
            "how invalid dates such as 0000-00-00 are replicated. null (the default): as null, "
            "and one in a key stops the changefeed; key-text: DATE, DATETIME and TIMESTAMP "
            "columns of keys become text; text: all of these columns become text"
        ),
    )
    create.add_argument(
        "--audit", type=period, default=0, metavar="DURATION", help=f"{AUDIT_HELP} (default: off)"
    )
    create.add_argument(
        "--retain",
        type=retention,
        default=Retention(),
        metavar="TIME|SIZE",
        help=f"{RETAIN_HELP} (default: off)",
    )
    create.add_argument(
        "--reader-ttl",
        type=period,
        default=0,
        metavar="DURATION",
        help=f"{READER_TTL_HELP} (default: 168h)",
    )


async def create_changefeed(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Make a changefeed of the tables that the filter takes, or whose schemas are in a file."""
    gap_s = time.time() - physical_ms(arguments.start_ts) / 1e3
    is_dry = arguments.dry_run or arguments.explain
    asks = not (arguments.yes or is_dry)
    if arguments.start_ts and gap_s > _LARGE_GAP_S and asks:
        confirm(
            f"start_ts {arguments.start_ts} is of {time_of(arguments.start_ts)}. Replicate all "
            "since?"
        )
    config = read_config(arguments.config) if arguments.config else None
    ignore_ineligible = arguments.ignore_ineligible_table
    force_replicate = arguments.force_replicate
    if config is not None:
        ignore_ineligible |= config.ignore_ineligible_table
        force_replicate |= config.force_replicate
    request = pb.CreateChangefeedRequest(
        id=arguments.changefeed_id or str(uuid.uuid4()),
        sink_uri=arguments.sink_uri,
        start_ts=arguments.start_ts,
        target_ts=arguments.target_ts,
        tables=read_tables(arguments.tables) if arguments.tables else [],
        source_uri=with_option(
            arguments.source_uri, FORCE_REPLICATE, "true" if force_replicate else ""
        ),
        filter=[*(config.rules if config else ()), *arguments.filter],
        columns=[*(config.columns if config else ()), *arguments.columns],
        event_filters=config.event_filters if config else (),
        routes=[*(config.routes if config else ()), *arguments.route],
        masks=[*(config.masks if config else ()), *arguments.mask],
        salt_file=arguments.salt_file or (config.salt_file if config else ""),
        zero_dates=arguments.zero_dates,
        ignore_ineligible_table=ignore_ineligible,
        on_unclear_ddl=arguments.on_unclear_ddl,
        audit_s=arguments.audit,
        retain_s=arguments.retain.age_s,
        retain_bytes=arguments.retain.size_bytes,
        reader_ttl_s=arguments.reader_ttl,
        region_threshold=config.region_threshold if config else 0,
    )
    async with remote.capture() as channel:
        if is_dry:
            checked = await ChangefeedServiceStub(channel).CheckChangefeed(request, timeout=CALL_S)
            explains = arguments.explain
            return _checked(checked, ignore_ineligible=ignore_ineligible, explains=explains)
        answer = await make_change(ChangefeedServiceStub(channel).CreateChangefeed, request)
        if arguments.dump:
            await _start_dump(channel, answer.changefeed.id)
    shown = detail(answer.changefeed)
    return confirmed(arguments, shown, *_created(shown, dumps=arguments.dump))


def _created(shown: dict[str, Any], *, dumps: bool) -> Iterator[str]:
    """The new changefeed, and how to see its progress, in lines."""
    name, tables = shown["id"], [each["table"] for each in shown["tables"]]
    more = f" and {len(tables) - _NAMED} more" if len(tables) > _NAMED else ""
    word = "table" if len(tables) == 1 else "tables"
    named = f" ({', '.join(tables[:_NAMED])}{more})" if tables else ""
    yield f"changefeed {name} is created: {len(tables)} {word}{named} → {shown['sink_uri']}"
    if left_out := shown["ignored_tables"]:
        yield f"left out: {', '.join(left_out)}"
    since = time_of(shown["start_ts"])
    if dumps:
        yield f"a dump copies older rows: tidemark cli changefeed dumpstatus -c {name}"
    else:
        yield (
            f"it copies what is committed after {since}; older rows come by tidemark cli "
            f"changefeed dumpstart -c {name}"
        )
    yield f"its state: tidemark cli changefeed query -c {name}"


async def _start_dump(channel: grpc.aio.Channel, changefeed: str) -> None:
    """Start the dump of a changefeed that was just created.

    Raises:
        DumpNotStartedError: with the reason, and what to do.
    """
    request = dump_pb2.StartDumpRequest(changefeed_id=changefeed)
    try:
        await DumpServiceStub(channel).StartDump(request, timeout=CALL_S)
    except grpc.aio.AioRpcError as err:
        raise DumpNotStartedError(
            f"changefeed {changefeed} was created and runs, but its dump was not started: "
            f"{err.details() or err.code().name}. Start it by `tidemark cli changefeed dumpstart "
            f"-c {changefeed}`"
        ) from err


def _checked(
    answer: pb.CheckChangefeedResponse, *, ignore_ineligible: bool, explains: bool
) -> Output:
    """The changefeed that would be created; the exit status is the one that `create` would have."""
    document = explained(answer) if explains else check_document(answer)
    rows = [
        {"table": _names(each), "replicated": "yes", "what": ", ".join(_columns(each))}
        for each in document["eligible_tables"]
    ]
    rows += [
        {"table": each["table"], "replicated": "no", "what": each["reason"]}
        for each in document["ineligible_tables"]
    ]
    refused = bool(document["ineligible_tables"]) and not ignore_ineligible
    conclusion = (
        "The changefeed would not be created: leave these tables out by --filter, or by "
        "--ignore-ineligible-table."
        if refused
        else f"The changefeed would start at {answer.start_ts} ({document['start_time']})."
    )
    reasons = "\n".join(_reasons(document)) if explains else ""
    return Output(
        document,
        shown=f"{table(rows, _CHECK_COLUMNS)}\n{reasons}{conclusion}",
        status=EXIT_ERROR if refused else EXIT_OK,
    )


def _reasons(document: dict[str, Any]) -> Iterator[str]:
    """Explain each table's treatment, in lines."""
    for each in document["eligible_tables"]:
        masks, renamed = each.get("masks", {}), each.get("renamed_from", {})
        yield f"\n{_names(each)}"
        yield f"  taken by  {each.get('rule') or '--tables'}"
        yield f"  key       {', '.join(each['key']) or 'none'}"
        for name, kind in each["columns"].items():
            was = f", {renamed[name]} in the source" if name in renamed else ""
            mask = f", shown by {masks[name]}" if name in masks else ""
            yield f"  column    {name}: {kind}{was}{mask}"
        if left_out := each.get("left_out"):
            yield f"  left out  {', '.join(left_out)}"
        for ignored in each.get("ignored", ()):
            yield f"  ignored   {ignored}"
    for each in document["not_taken"]:
        yield f"\n{each['table']}\n  not taken: {each['reason']}"
    yield "\n"


def _names(eligible: dict[str, Any]) -> str:
    """Return a table's name, and its name in the target."""
    name, target = eligible["table"], eligible.get("target")
    return f"{name} → {target}" if target else name


def _columns(eligible: dict[str, Any]) -> list[str]:
    """The columns of a table, with their masks."""
    masks = eligible.get("masks", {})
    return [f"{name} ({masks[name]})" if name in masks else name for name in eligible["columns"]]


def read_config(path: str) -> "ReplicaConfig":
    """The configuration of a --config file.

    Raises:
        ConfigFileError: it cannot be read.
        ParameterError: it asks for something that there is not.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigFileError(f"cannot read {path}: {err}") from err
    # Imported here: it brings pyarrow, and other commands need not wait for that.
    module = importlib.import_module("server.capture.api_v2.replica_config")
    config: ReplicaConfig = module.ReplicaConfig.parse_toml(text)
    return config


def read_tables(path: str) -> list[pb.Table]:
    """The tables of a --tables file.

    Raises:
        TablesFileError: it cannot be read, or is something else.
    """
    try:
        documents = json.loads(Path(path).read_text(encoding="utf-8"))
        rows = [(row["schema_name"], json.dumps(row["table_info"])) for row in documents]
        return [pb.Table(schema_name=name, table_info_json=text) for name, text in rows]
    except OSError as err:
        raise TablesFileError(f"cannot read {path}: {err.strerror}") from err
    except (ValueError, KeyError, TypeError) as err:
        raise TablesFileError(
            f'{path} must hold a JSON list of {{"schema_name": …, "table_info": {{…}}}}: {err!r}'
        ) from err
