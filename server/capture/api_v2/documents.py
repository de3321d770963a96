"""The JSON documents of TiCDC's API, from and to the messages of the gRPC API. Pure.

Answers have TiCDC's members with its names and forms, and others beside them.

Requests: a member that this product does not know is an error, as it may ask for something. TiCDC's
members that have no meaning here are taken as long as they hold the value that asks for nothing.
"""

import json
import tomllib
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from tidemarkpb.v1 import capture_pb2 as capturepb
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.capture.errors import ParameterError
from server.changefeed.source import FORCE_REPLICATE, takes_keyless, with_option
from server.changefeed.table_rule import parts_of
from server.changefeed.view import detail, event_filters, state_of, synced
from server.version import VERSION
from storage.client_json import read_json
from storage.model.ts import MAX_TS, physical_ms

_RUNNING_ERROR_SHOWN = ("warning", "failed")
NO_SINK: Final = "blackhole://"
ALL_TABLES: Final = "*.*"
"""TiCDC's filter if none is given."""
_EXPRESSIONS: Final = tuple(
    f"ignore_{name}_value_expr" for name in ("insert", "update_new", "update_old", "delete")
)
_UINT32_MAX: Final = (1 << 32) - 1
_SECOND_NS: Final = 1_000_000_000
_NO_UPSTREAM: Final = ("pd_addrs", "ca_path", "cert_path", "key_path", "cert_allowed_cn")
"""Members that name another cluster than the capture's own."""
NAMESPACES: Final = ("namespace", "keyspace")
"""TiCDC's word, and the one of its new architecture."""
_IDLE: Final[Mapping[str, tuple[Any, ...]]] = {
    "bdr_mode": (False,),
    "case_sensitive": (False,),
    "changefeed_error_stuck_duration": (1800 * _SECOND_NS, "30m", "30m0s"),
    "check_gc_safe_point": (True,),
    "consistent.compression": ("",),
    "consistent.encoding_worker_num": (16,),
    "consistent.flush_interval": (2000,),
    "consistent.flush_worker_num": (8,),
    "consistent.level": ("", "none"),
    "consistent.max_log_size": (64,),
    "consistent.memory_usage.memory_quota_percentage": (50,),
    "consistent.meta_flush_interval": (200,),
    "consistent.storage": ("",),
    "consistent.use_file_backend": (False,),
    "enable_active_active": (False,),
    "enable_sync_point": (False,),
    "enable_table_monitor": (False,),
    "filter.event_filters": ([],),
    "filter.ignore_txn_start_ts": ([],),
    "integrity.corruption_handle_level": ("", "warn"),
    "integrity.integrity_check_level": ("", "none"),
    "memory_quota": (0, 1 << 30),
    "mounter.worker_num": (0, 16),
    "scheduler.enable_splittable_check": (False,),
    "scheduler.write_key_threshold": (0,),
    "sink.advance_timeout_in_sec": (150,),
    "sink.content_compatible": (False,),
    "sink.csv.binary_encoding_method": ("", "base64"),
    "sink.csv.delimiter": (",",),
    "sink.csv.include_commit_ts": (False,),
    "sink.csv.null": ("\\N",),
    "sink.csv.output_field_header": (False,),
    "sink.csv.output_handle_key": (False,),
    "sink.csv.output_old_value": (False,),
    "sink.csv.quote": ('"',),
    "sink.date_separator": ("", "day"),
    "sink.debezium.output_old_value": (True,),
    "sink.debezium_disable_schema": (False,),
    "sink.delete_only_output_handle_key_columns": (False,),
    "sink.enable_kafka_sink_v2": (False,),
    "sink.enable_partition_separator": (True,),
    "sink.encoder_concurrency": (32,),
    "sink.only_output_updated_columns": (False,),
    "sink.open.output_old_value": (True,),
    "sink.protocol": ("",),
    "sink.schema_registry": ("",),
    "sink.send_all_bootstrap_at_start": (False,),
    "sink.send_bootstrap_in_msg_count": (10_000,),
    "sink.send_bootstrap_interval_in_sec": (120,),
    "sink.send_bootstrap_to_all_partition": (True,),
    "sink.terminator": ("", "\r\n"),
    "sink.transaction_atomicity": ("",),
    "sync_point_interval": (600 * _SECOND_NS, "10m", "10m0s"),
    "sync_point_retention": (86_400 * _SECOND_NS, "24h", "24h0m0s"),
    "synced_status.checkpoint_interval": (15,),
    "synced_status.synced_check_interval": (300,),
}
"""Of TiCDC's replica_config: the values that ask for nothing, which are its defaults."""
_TERMS: Final[Mapping[str, str]] = {
    "column_selectors": "columns",
    "column_masks": "masks",
    "event_filters": "event_filters",
}
"""The members of `ReplicaConfig` that have a form of their own in TiCDC's replica_config."""
_REGION_THRESHOLD = 100_000
"""TiCDC's default."""
_TICDC_CODES: Final = frozenset(
    [
        "ErrAPIInvalidParam",
        "ErrCaptureNotExist",
        "ErrChangeFeedAlreadyExists",
        "ErrChangeFeedNotExists",
        "ErrChangefeedUpdateRefused",
        "ErrExpressionParseFailed",
        "ErrFilterRuleInvalid",
        "ErrGCTTLExceeded",
        "ErrNotOwner",
        "ErrSinkURIInvalid",
        "ErrSnapshotLostByGC",
        "ErrStartTsBeforeGC",
        "ErrSyncRenameTableFailed",
        "ErrTableIneligible",
        "ErrTableRouteConflict",
        "ErrTargetTsBeforeStartTs",
        "ErrUnauthorized",
    ]
)
"""Errors that TiCDC has by the same name; scripts compare them with its prefix."""
_LIST_STATES: Final = ("normal", "pending", "stopped", "failed", "warning")
"""What TiCDC lists where no state is asked for: what is not over."""
_STATES: Final = ("all", *_LIST_STATES, "error", "finished", "removed")
Check = Callable[[Any], bool]


def code_prefix(code: str) -> str:
    """What is before an error's code: TiCDC's prefix where TiCDC has an error of that name."""
    return "CDC" if code in _TICDC_CODES else "TM"


def listing(items: Sequence[Any]) -> dict[str, Any]:
    """TiCDC's form of all lists."""
    return {"total": len(items), "items": list(items)}


def listed_states(state: str) -> Collection[str]:
    """The states of the changefeeds that `GET changefeeds?state=` asks for.

    Raises:
        ParameterError: there is no such state.
    """
    if state not in ("", *_STATES):
        raise ParameterError(f"state {state[:40]!r}: it is one of {', '.join(_STATES)}")
    return _LIST_STATES if not state else _STATES if state == "all" else (state,)


def summary(changefeed: pb.Changefeed) -> dict[str, Any]:
    """TiCDC's ChangefeedCommonInfo."""
    state = state_of(changefeed)
    return {
        "upstream_id": 0,
        "namespace": "default",
        "keyspace": "default",
        "id": changefeed.id,
        "state": state,
        "checkpoint_tso": changefeed.checkpoint_ts,
        "checkpoint_time": _time(changefeed.checkpoint_ts),
        "error": _error(changefeed) if state in _RUNNING_ERROR_SHOWN else None,
    }


def changefeed_document(changefeed: pb.Changefeed, maintainer_addr: str = "") -> dict[str, Any]:
    """TiCDC's ChangeFeedInfo, and what `tidemark cli changefeed query` shows beside it."""
    tasks = node_tables(changefeed)
    return detail(changefeed) | {
        "upstream_id": 0,
        "keyspace": "default",
        "admin_job_type": 0,
        "config": replica_config(changefeed),
        "maintainer_addr": maintainer_addr,
        "task_status": [
            {"capture_id": each["node_id"], "table_ids": each["table_ids"]} for each in tasks
        ],
        "creator_version": VERSION,
        "checkpoint_ts": changefeed.checkpoint_ts,
        "checkpoint_time": _time(changefeed.checkpoint_ts),
        "error": summary(changefeed)["error"],
    }


def tables_document(checked: pb.CheckChangefeedResponse) -> dict[str, Any]:
    """TiCDC's Tables, with the reasons."""
    eligible = [_table(each.name) | {"table_id": each.table_id} for each in checked.tables]
    ineligible = [_table(each.name) | {"reason": each.reason} for each in checked.ineligible]
    return {"eligible_tables": eligible, "ineligible_tables": ineligible}


def all_tables_document(checked: pb.CheckChangefeedResponse) -> dict[str, Any]:
    """The same, with all tables of the source, whether or not the filter takes them."""
    document = tables_document(checked)
    others = [_table(each.name) for each in checked.not_taken]
    tables = [*document["eligible_tables"], *document["ineligible_tables"], *others]
    names = ("database_name", "table_name")
    tables.sort(key=lambda table: [table[name] for name in names])
    plain = [{name: each for name, each in table.items() if name != "reason"} for table in tables]
    return document | {"all_tables": plain}


def node_tables(changefeed: pb.Changefeed) -> list[dict[str, Any]]:
    """TiCDC's NodeTableInfo: the tables of each capture; a split table is on several."""
    nodes: dict[str, list[int]] = {}
    for table in changefeed.tables:
        for capture in captures_of(changefeed, table):
            nodes.setdefault(capture, []).append(table.table_id)
    return [{"node_id": node, "table_ids": sorted(nodes[node])} for node in sorted(nodes)]


def captures_of(changefeed: pb.Changefeed, table: pb.TableStatus) -> list[str]:
    """The captures that have a table, or parts of it."""
    names: str = table.capture or changefeed.maintainer
    return names.split(", ") if names else []


def status(changefeed: pb.Changefeed) -> dict[str, Any]:
    """TiCDC's ChangefeedStatus: a warning is what the changefeed gets over by itself."""
    state, error = state_of(changefeed), _error(changefeed)
    kind = "last_warning" if state == "warning" else "last_error"
    return {
        "state": state,
        "resolved_ts": changefeed.resolved_ts,
        "checkpoint_ts": changefeed.checkpoint_ts,
    } | ({kind: error} if error else {})


def synced_document(changefeed: pb.Changefeed, now_s: float) -> dict[str, Any]:
    """TiCDC's SyncedStatus, whose times are wall clocks."""
    document = synced(changefeed, now_s)
    return {
        member: _time(value) if member.endswith("_ts") else value
        for member, value in document.items()
    }


def capture_document(capture: capturepb.Capture) -> dict[str, Any]:
    """TiCDC's Capture."""
    return {
        "id": capture.id,
        "is_owner": capture.is_owner,
        "address": capture.address,
        "cluster_id": "default",
    }


def _error(changefeed: pb.Changefeed) -> dict[str, str] | None:
    """TiCDC's RunningError."""
    if not changefeed.HasField("error"):
        return None
    error = changefeed.error
    return {
        "addr": "",
        "time": error.time,
        "code": f"{code_prefix(error.code)}:{error.code}",
        "message": error.message,
    }


def _table(name: str) -> dict[str, Any]:
    schema, _, table = name.partition(".")
    return {"database_name": schema, "table_name": table, "table_id": 0, "is_partition": False}


def _time(ts: int) -> str:
    """TiCDC's form of a timestamp's wall clock, in UTC."""
    at = datetime.fromtimestamp(physical_ms(ts) / 1e3, UTC)
    return at.strftime("%Y-%m-%d %H:%M:%S.") + f"{at.microsecond // 1000:03d}"


def document_of(body: bytes) -> dict[str, Any]:
    """A body's JSON object; an empty body is an empty object.

    Raises:
        ParameterError: it is none.
    """
    try:
        document = read_json(body) if body.strip() else {}
    except ValueError as err:
        raise ParameterError(f"the body is no JSON: {err}") from None
    if not isinstance(document, dict):
        raise ParameterError("the body is no JSON object")
    return document


def question(body: bytes) -> pb.CreateChangefeedRequest:
    """What `POST get_all_tables` asks about, which need not name a sink; raises as `creation`."""
    document = document_of(body)
    return _creation(document | {"sink_uri": document.get("sink_uri") or NO_SINK})


def creation(body: bytes) -> pb.CreateChangefeedRequest:
    """What `POST changefeeds` asks for.

    Raises:
        ParameterError: a member is unknown, or has a value that cannot be taken.
    """
    return _creation(document_of(body))


def _creation(document: Mapping[str, Any]) -> pb.CreateChangefeedRequest:
    members = _Members(document)
    _check_upstream(members)
    config = ReplicaConfig.parse(members.take("replica_config", _is_object, default={}))
    # TiCDC's first API has it beside the configuration, and scripts still do.
    ignores = members.take("ignore_ineligible_table", _is_flag, default=False)
    tables = members.take("tables", _is_tables, default=[])
    request = pb.CreateChangefeedRequest(
        id=members.take("changefeed_id", _is_text, default="") or str(uuid.uuid4()),
        sink_uri=members.take("sink_uri", _is_text, default=""),
        source_uri=with_option(
            members.take("source_uri", _is_text, default=""),
            FORCE_REPLICATE,
            "true" if config.force_replicate else "",
        ),
        start_ts=members.take("start_ts", _is_ts, default=0),
        target_ts=members.take("target_ts", _is_ts, default=0),
        columns=[*config.columns, *members.take("columns", _is_texts, default=[])],
        event_filters=config.event_filters,
        masks=config.masks,
        salt_file=config.salt_file,
        routes=config.routes,
        zero_dates=members.take("zero_dates", _is_text, default=""),
        on_unclear_ddl=members.take("on_unclear_ddl", _is_text, default=""),
        audit_s=members.take("audit_seconds", _is_uint32, default=0),
        retain_s=members.take("retain_seconds", _is_uint32, default=0),
        retain_bytes=members.take("retain_bytes", _is_ts, default=0),
        reader_ttl_s=members.take("reader_ttl_seconds", _is_uint32, default=0),
        filter=config.rules or ([] if tables else [ALL_TABLES]),
        tables=[
            pb.Table(
                schema_name=table["schema_name"], table_info_json=json.dumps(table["table_info"])
            )
            for table in tables
        ],
        ignore_ineligible_table=ignores or config.ignore_ineligible_table,
        region_threshold=config.region_threshold,
    )
    members.check_empty()
    return request


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """What of TiCDC's replica_config means something here; all else must ask for nothing."""

    rules: Sequence[str] = ()
    """Of the table filter."""
    columns: Sequence[str] = ()
    """TiCDC's column selectors, as rules about columns."""
    event_filters: Sequence[pb.EventFilter] = ()
    masks: Sequence[str] = ()
    """Of columns, as rules; `sink.column_masks` and `sink.salt_file` are not TiCDC's."""
    salt_file: str = ""
    routes: Sequence[str] = ()
    """Of TiCDC's dispatchers the names of tables in the target."""
    ignore_ineligible_table: bool = False
    force_replicate: bool = False
    region_threshold: int = 0
    """Of the scheduler, where its `enable_table_across_nodes` is true."""
    given: frozenset[str] = frozenset()
    """Those of `columns`, `event_filters`, `masks` and `scheduler` that it has a member for, if an
    empty one.
    """

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> "ReplicaConfig":
        """Read the object of a request's body.

        Raises:
            ParameterError: a member has a wrong type, or asks for something that there is not.
        """
        config = _Members(document, "replica_config.")
        chosen = _Members(config.take("filter", _is_object, default={}), "replica_config.filter.")
        sink = _Members(config.take("sink", _is_object, default={}), "replica_config.sink.")
        scheduler = _Members(
            config.take("scheduler", _is_object, default={}), "replica_config.scheduler."
        )
        members = {"column_selectors": sink, "column_masks": sink, "event_filters": chosen}
        given = {_TERMS[name] for name, each in members.items() if each.left.get(name) is not None}
        splits = scheduler.take("enable_table_across_nodes", _is_flag, default=None)
        if splits is not None:
            given.add("scheduler")
        regions = scheduler.take("region_threshold", _is_uint32, default=_REGION_THRESHOLD)
        parsed = cls(
            rules=chosen.take("rules", _is_texts, default=[]),
            columns=[
                f"{table}={','.join(selector['columns'])}"
                for selector in sink.take("column_selectors", _is_selectors, default=[])
                for table in selector["matcher"]
            ],
            event_filters=[
                _event_filter(each)
                for each in chosen.take("event_filters", _are_objects, default=[])
            ],
            masks=[
                _mask_rule(table, each)
                for each in sink.take("column_masks", _are_masks, default=[])
                for table in each["matcher"]
            ],
            salt_file=sink.take("salt_file", _is_text, default=""),
            routes=[
                route
                for each in sink.take("dispatchers", _are_objects, default=[])
                for route in _routes(each)
            ],
            ignore_ineligible_table=config.take("ignore_ineligible_table", _is_flag, default=False),
            force_replicate=config.take("force_replicate", _is_flag, default=False),
            region_threshold=max(regions, 1) if splits else 0,
            given=frozenset(given),
        )
        left = {"filter": chosen.left, "sink": sink.left, "scheduler": scheduler.left}
        _check_idle(config.left | left)
        return parsed

    def change(self, now: pb.Changefeed, request: pb.UpdateChangefeedRequest) -> None:
        """Ask for what is otherwise than the changefeed has it now; what the configuration has no
        member for stays.

        Raises:
            ParameterError: it asks for something else that is not so already, and that cannot be
                changed.
        """
        # A rule may have another text when it comes back in TiCDC's form.
        shown = ReplicaConfig.parse(replica_config(now))
        others = {
            "routes (dispatchers)": self.routes
            and list(self.routes) not in (list(now.routes), list(shown.routes)),
            "force-replicate": self.force_replicate and not takes_keyless(now.source_uri),
            "ignore-ineligible-table": (
                self.ignore_ineligible_table and not now.ignore_ineligible_table
            ),
        }
        if changed := [name for name, is_other in others.items() if is_other]:
            raise ParameterError(
                f"{', '.join(changed)} would be changed, and of a changefeed's configuration only "
                "filter.rules, filter.event_filters, sink.column_selectors, sink.column_masks, "
                "sink.salt_file and scheduler can be. Leave the rest as it is, or create another changefeed with "
                "a new target"
            )
        if list(self.rules) != list(now.filter):
            request.filter.extend(self.rules)
        if "columns" in self.given and list(self.columns) != list(now.columns):
            request.columns.CopyFrom(pb.Texts(texts=self.columns))
        if "masks" in self.given and list(self.masks) not in (list(now.masks), list(shown.masks)):
            request.masks.CopyFrom(pb.Texts(texts=self.masks))
        if "event_filters" in self.given and list(self.event_filters) != list(now.event_filters):
            request.event_filters.CopyFrom(pb.EventFilters(filters=self.event_filters))
        if "scheduler" in self.given and self.region_threshold != now.region_threshold:
            request.region_threshold = self.region_threshold
        if self.salt_file and self.salt_file != now.salt_file:
            request.salt_file = self.salt_file

    @classmethod
    def parse_toml(cls, text: str) -> "ReplicaConfig":
        """Read a file of `cdc cli changefeed create --config`, whose keys have hyphens.

        Raises:
            ParameterError: it is no TOML, or as `parse`.
        """
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as err:
            raise ParameterError(f"the changefeed's configuration is no TOML: {err}") from err
        return cls.parse(_with_underscores(document))


def replica_config(changefeed: pb.Changefeed) -> dict[str, Any]:
    """TiCDC's replica_config of a changefeed, as a body may send it back."""
    chosen: dict[str, Any] = {"rules": list(changefeed.filter)}
    if changefeed.event_filters:
        chosen["event_filters"] = event_filters(changefeed)
    threshold = changefeed.region_threshold
    return {
        "filter": chosen,
        "sink": _sink_config(changefeed),
        "scheduler": {
            "enable_table_across_nodes": threshold > 0,
            "region_threshold": threshold or _REGION_THRESHOLD,
        },
        "ignore_ineligible_table": changefeed.ignore_ineligible_table,
        "force_replicate": takes_keyless(changefeed.source_uri),
        "check_gc_safe_point": True,
    }


def _sink_config(changefeed: pb.Changefeed) -> dict[str, Any]:
    """The rules about columns and names, a member for each kind that there is."""
    masks = (_parted(rule) for rule in changefeed.masks)
    sink: dict[str, Any] = {
        "column_selectors": [
            {"matcher": [tables], "columns": columns.split(",")}
            for tables, columns in map(_parted, changefeed.columns)
        ],
        "column_masks": [
            {"matcher": [tables], "columns": [column], "mask": mask}
            for tables, columns in masks
            for column, _, mask in (each.rpartition(":") for each in columns.split(","))
        ],
        "dispatchers": [_dispatcher(*_parted(route)) for route in changefeed.routes],
        "salt_file": changefeed.salt_file,
    }
    return {name: value for name, value in sink.items() if value}


def _parted(rule: str) -> tuple[str, str]:
    """The tables that a rule is about, and what it says of them."""
    tables, text = parts_of(rule) or (rule, "")
    return tables, text


def _dispatcher(tables: str, name: str) -> dict[str, Any]:
    """The route of `_routes`."""
    schema, _, table = name.partition(".")
    table, _, shards = table.partition("{shard=")
    document = {"matcher": [tables], "target_schema": schema, "target_table": table}
    return document | ({"shard_column": shards.rstrip("} ")} if shards else {})


def _event_filter(document: Mapping[str, Any]) -> pb.EventFilter:
    """One of TiCDC's; raises ParameterError."""
    members = _Members(document, "replica_config.filter.event_filters.")
    each = pb.EventFilter(
        matcher=members.take("matcher", _is_texts, default=[]),
        ignore_event=members.take("ignore_event", _is_texts, default=[]),
        ignore_update_only_columns=members.take(
            "ignore_update_only_columns", _is_texts, default=[]
        ),
        ignore_sql=members.take("ignore_sql", _is_texts, default=[]),
        **{name: members.take(name, _is_text, default="") for name in _EXPRESSIONS},
    )
    members.check_empty()
    return each


def _routes(document: Mapping[str, Any]) -> list[str]:
    """One of TiCDC's dispatchers, as `--route` has it; raises ParameterError."""
    members = _Members(document, "replica_config.sink.dispatchers.")
    matcher = members.take("matcher", _is_texts, default=[])
    schema = members.take("target_schema", _is_text, default="") or "{schema}"
    table = members.take("target_table", _is_text, default="") or "{table}"
    column = members.take("shard_column", _is_text, default="")
    members.check_empty()
    shards = f"{{shard={column}}}" if column else ""
    return [f"{each}={schema}.{table}{shards}" for each in matcher]


def _mask_rule(table: str, masks: Mapping[str, Any]) -> str:
    """As `--mask` has it."""
    mask = masks["mask"]
    return f"{table}={','.join(f'{column}:{mask}' for column in masks['columns'])}"


def _with_underscores(value: Any) -> Any:
    """The keys of the file as the API has them."""
    if isinstance(value, dict):
        return {key.replace("-", "_"): _with_underscores(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_underscores(each) for each in value]
    return value


def update(now: pb.Changefeed, body: bytes) -> pb.UpdateChangefeedRequest | None:
    """What `PUT changefeeds/{id}` asks for; None: for what the changefeed has `now`. Raises as
    `creation`.

    The configuration that a changefeed has may be sent back with other rules, or as it is.
    """
    members = _Members(document_of(body))
    is_given = any(members.left.get(name) is not None for name in ("replica_config", "target_ts"))
    _check_upstream(members)
    config = ReplicaConfig.parse(members.take("replica_config", _is_object, default={}))
    request = pb.UpdateChangefeedRequest(
        id=now.id,
        sink_uri=members.take("sink_uri", _is_text, default=""),
        on_unclear_ddl=members.take("on_unclear_ddl", _is_text, default=""),
    )
    config.change(now, request)
    columns = members.take("columns", _is_texts, default=None)
    if columns is not None:
        request.columns.CopyFrom(pb.Texts(texts=[*config.columns, *columns]))
    request.no_dump = members.take("no_dump", _is_flag, default=False)
    audit_s = members.take("audit_seconds", _is_uint32, default=None)
    if audit_s is not None:
        request.audit_s = audit_s
    target_ts = members.take("target_ts", _is_ts, default=None)
    if target_ts is not None and target_ts != now.target_ts:
        request.target_ts = target_ts
    _update_reading(members, now, request)
    if members.left:
        raise ParameterError(
            f"{', '.join(sorted(members.left))}: only sink_uri, target_ts, columns, on_unclear_ddl, "
            "audit_seconds, retain_seconds, retain_bytes, reader_ttl_seconds and, of replica_config, "
            "filter, sink.column_selectors, sink.column_masks, sink.salt_file and scheduler of a "
            "changefeed can be changed; for the rest, create another one"
        )
    is_same = request == pb.UpdateChangefeedRequest(id=now.id)
    return None if is_same and is_given else request


def _update_reading(
    members: "_Members", now: pb.Changefeed, request: pb.UpdateChangefeedRequest
) -> None:
    """How much history is kept, and for how long silent readers are held for."""
    retain_s = members.take("retain_seconds", _is_uint32, default=None)
    retain_bytes = members.take("retain_bytes", _is_ts, default=None)
    if retain_s is not None or retain_bytes is not None:
        # What is left out stays.
        request.retention.retain_s = now.retain_s if retain_s is None else retain_s
        request.retention.retain_bytes = now.retain_bytes if retain_bytes is None else retain_bytes
    reader_ttl_s = members.take("reader_ttl_seconds", _is_uint32, default=None)
    if reader_ttl_s is not None:
        request.reader_ttl_s = reader_ttl_s


def resumption(changefeed: str, body: bytes) -> pb.ResumeChangefeedRequest:
    """What `POST changefeeds/{id}/resume` asks for; raises as `creation`."""
    members = _Members(document_of(body))
    _check_upstream(members)
    request = pb.ResumeChangefeedRequest(
        id=changefeed,
        overwrite_checkpoint_ts=members.take("overwrite_checkpoint_ts", _is_ts, default=0),
        overwrite_with_now=members.take("overwrite_with_now", _is_flag, default=False),
    )
    members.check_empty()
    return request


def region_locks(body: bytes) -> tuple[int, int]:
    """The region, and up to which start_ts, that `POST unsafe/resolve_lock` asks for; raises as
    `creation`.
    """
    members = _Members(document_of(body))
    _check_upstream(members)
    region_id = members.take("region_id", _is_ts, default=0)
    ts = members.take("ts", _is_ts, default=0)
    members.check_empty()
    if not region_id:
        raise ParameterError("region_id is missing: the region whose locks are to go")
    return region_id, ts


def check_own_cluster(body: bytes) -> None:
    """See that `DELETE unsafe/service_gc_safepoint` is about the capture's own cluster; raises as
    `creation`.
    """
    members = _Members(document_of(body))
    if members.take("id", _is_ts, default=0):
        raise ParameterError("id: a capture knows no other upstream than its own cluster, 0")
    _check_upstream(members)
    members.check_empty()


def log_level(body: bytes) -> str:
    """The level that `POST log` asks for, in this product's words; raises as `creation`."""
    members = _Members(document_of(body))
    level = str(members.take("log_level", _is_text, default="info")).lower()
    members.check_empty()
    return "warning" if level == "warn" else level


def redaction(body: bytes) -> str:
    """What `POST log/redact` asks for, `on` or `off`; raises as `creation`."""
    members = _Members(document_of(body))
    mode = str(members.take("redact_info_log", _is_text, default="")).lower()
    members.check_empty()
    if mode not in ("on", "off"):
        raise ParameterError(
            f"redact_info_log is on or off; got {mode[:40]!r} (TiCDC's `marker` is not known here: "
            "`on` hides users' data)"
        )
    return mode


class _Members:
    """The members of an object that were not taken yet."""

    def __init__(self, document: Mapping[str, Any], path: str = "") -> None:
        self.left = dict(document)
        self._path = path

    def take(self, name: str, check: Check, *, default: Any) -> Any:
        """A member's value; `default` if it is left out, or null."""
        value = self.left.pop(name, None)
        if value is None:
            return default
        if not check(value):
            shown = json.dumps(value)[:100]
            raise ParameterError(f"{self._path}{name} cannot be {shown}: see GET openapi.json")
        return value

    def check_empty(self) -> None:
        """See that nothing is left; raises ParameterError."""
        if self.left:
            names = ", ".join(sorted(f"{self._path}{name}"[:100] for name in self.left))
            raise ParameterError(f"{names}: no such member; see GET openapi.json")


def _check_upstream(members: _Members) -> None:
    """See that the request is about the capture's own cluster and namespace."""
    for name in _NO_UPSTREAM:
        if members.left.pop(name, None):
            raise ParameterError(
                f"{name}: a capture replicates the cluster that it was started for; leave it out"
            )
    for name in NAMESPACES:
        check_namespace(name, members.take(name, _is_text, default=""))


def check_namespace(name: str, namespace: str) -> None:
    """Raises: ParameterError: it is not the only one that there is."""
    if namespace not in ("", "default"):
        raise ParameterError(
            f"there is no {name} {namespace[:100]!r}; all changefeeds are in `default`"
        )


def _check_idle(config: Mapping[str, Any], path: str = "") -> None:
    """See that what is left of a replica_config asks for nothing."""
    for name, value in config.items():
        full = f"{path}{name}"
        if value is None:
            continue
        if isinstance(value, dict):
            _check_idle(value, f"{full}.")
        elif not any(type(value) is type(idle) and value == idle for idle in _IDLE.get(full, ())):
            raise ParameterError(
                f"replica_config.{full[:100]} is not supported, or not with this value; leave it out"
            )


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and all(
        _is_object(table)
        and table.keys() == {"schema_name", "table_info"}
        and _is_text(table["schema_name"])
        and _is_object(table["table_info"])
        for table in value
    )


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_object, value))


def _is_selectors(value: Any) -> bool:
    return isinstance(value, list) and all(
        _is_object(each)
        and each.keys() == {"matcher", "columns"}
        and _is_texts(each["matcher"])
        and _is_texts(each["columns"])
        for each in value
    )


def _are_masks(value: Any) -> bool:
    return isinstance(value, list) and all(
        _is_object(each)
        and each.keys() == {"matcher", "columns", "mask"}
        and _is_texts(each["matcher"])
        and _is_texts(each["columns"])
        and _is_text(each["mask"])
        for each in value
    )


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_ts(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TS


def _is_uint32(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _UINT32_MAX
