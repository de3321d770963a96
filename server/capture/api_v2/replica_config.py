"""TiCDC's replica_config, from requests and files, and as a changefeed is shown. Pure.

Members that have no meaning here are taken as long as they hold the value that asks for nothing.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tidemarkpb.v1 import changefeed_pb2 as pb

from server.capture.api_v2.members import (
    Members,
    are_objects,
    is_flag,
    is_object,
    is_text,
    is_texts,
    is_uint32,
)
from server.capture.errors import ParameterError
from server.changefeed.filter import table_and_rest
from server.changefeed.source import takes_keyless
from server.changefeed.view import event_filters

_SECOND_NS: Final = 1_000_000_000
_EXPRESSIONS: Final = tuple(
    f"ignore_{name}_value_expr" for name in ("insert", "update_new", "update_old", "delete")
)
_TIDB_SQL_MODE: Final = (
    "ONLY_FULL_GROUP_BY,STRICT_TRANS_TABLES,NO_ZERO_IN_DATE,NO_ZERO_DATE,"
    "ERROR_FOR_DIVISION_BY_ZERO,NO_AUTO_CREATE_USER,NO_ENGINE_SUBSTITUTION"
)
_IDLE: Final[Mapping[str, tuple[Any, ...]]] = {
    "bdr_mode": (False,),
    "case_sensitive": (False,),
    "changefeed_error_stuck_duration": (1800 * _SECOND_NS, "30m", "30m0s"),
    "check_gc_safe_point": (True,),
    "consistent.compression": ("",),
    "consistent.encoding_worker_num": (16, 0),
    "consistent.flush_concurrency": (1, 0),
    "consistent.flush_interval": (2000, 0),
    "consistent.flush_worker_num": (8, 0),
    "consistent.level": ("", "none"),
    "consistent.max_log_size": (64, 0),
    "consistent.memory_usage.memory_quota_percentage": (50,),
    "consistent.meta_flush_interval": (200,),
    "consistent.storage": ("",),
    "consistent.use_file_backend": (False,),
    "enable_active_active": (False,),
    "enable_old_value": (True,),
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
    "sink.date_separator": ("", "day", "none"),
    "sink.debezium.output_old_value": (True,),
    "sink.debezium_disable_schema": (False,),
    "sink.delete_only_output_handle_key_columns": (False,),
    "sink.enable_kafka_sink_v2": (False,),
    "sink.enable_partition_separator": (True,),
    "sink.encoder_concurrency": (32, 16, 0),
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
    "sql_mode": ("", _TIDB_SQL_MODE),
    "sync_point_interval": (600 * _SECOND_NS, "10m", "10m0s"),
    "sync_point_retention": (86_400 * _SECOND_NS, "24h", "24h0m0s"),
    "synced_status.checkpoint_interval": (15,),
    "synced_status.synced_check_interval": (300,),
}
"""Of TiCDC's replica_config: the values that ask for nothing, which are its defaults now or were
those of earlier versions.
"""
_BY_KEY: Final = ("", "index-value")
_TERMS: Final[Mapping[str, str]] = {
    "column_selectors": "columns",
    "column_masks": "masks",
    "event_filters": "event_filters",
}
"""The members of `ReplicaConfig` that have a form of their own in TiCDC's replica_config."""
_REGION_THRESHOLD = 100_000
"""TiCDC's default."""


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
        config = Members(document, "replica_config.")
        chosen = Members(config.take("filter", is_object, default={}), "replica_config.filter.")
        sink = Members(config.take("sink", is_object, default={}), "replica_config.sink.")
        scheduler = Members(
            config.take("scheduler", is_object, default={}), "replica_config.scheduler."
        )
        members = {"column_selectors": sink, "column_masks": sink, "event_filters": chosen}
        given = {_TERMS[name] for name, each in members.items() if each.left.get(name) is not None}
        splits = scheduler.take("enable_table_across_nodes", is_flag, default=None)
        if splits is not None:
            given.add("scheduler")
        regions = scheduler.take("region_threshold", is_uint32, default=_REGION_THRESHOLD)
        parsed = cls(
            rules=chosen.take("rules", is_texts, default=[]),
            columns=[
                f"{table}={','.join(selector['columns'])}"
                for selector in sink.take("column_selectors", _is_selectors, default=[])
                for table in selector["matcher"]
            ],
            event_filters=[
                _event_filter(each)
                for each in chosen.take("event_filters", are_objects, default=[])
            ],
            masks=[
                _mask_rule(table, each)
                for each in sink.take("column_masks", _are_masks, default=[])
                for table in each["matcher"]
            ],
            salt_file=sink.take("salt_file", is_text, default=""),
            routes=[
                route
                for each in sink.take("dispatchers", are_objects, default=[])
                for route in _routes(each)
            ],
            ignore_ineligible_table=config.take("ignore_ineligible_table", is_flag, default=False),
            force_replicate=config.take("force_replicate", is_flag, default=False),
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
        except (ValueError, RecursionError) as err:
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
    tables, text = table_and_rest(rule) or (rule, "")
    return tables, text


def _dispatcher(tables: str, name: str) -> dict[str, Any]:
    """The route of `_routes`."""
    schema, _, table = name.partition(".")
    table, _, shards = table.partition("{shard=")
    document = {"matcher": [tables], "target_schema": schema, "target_table": table}
    return document | ({"shard_column": shards.rstrip("} ")} if shards else {})


def _event_filter(document: Mapping[str, Any]) -> pb.EventFilter:
    """One of TiCDC's; raises ParameterError."""
    members = Members(document, "replica_config.filter.event_filters.")
    each = pb.EventFilter(
        matcher=members.take("matcher", is_texts, default=[]),
        ignore_event=members.take("ignore_event", is_texts, default=[]),
        ignore_update_only_columns=members.take("ignore_update_only_columns", is_texts, default=[]),
        ignore_sql=members.take("ignore_sql", is_texts, default=[]),
        **{name: members.take(name, is_text, default="") for name in _EXPRESSIONS},
    )
    members.check_empty()
    return each


def _routes(document: Mapping[str, Any]) -> list[str]:
    """One of TiCDC's dispatchers, as `--route` has it; raises ParameterError."""
    members = Members(document, "replica_config.sink.dispatchers.")
    matcher = members.take("matcher", is_texts, default=[])
    schema = members.take("target_schema", is_text, default="") or "{schema}"
    table = members.take("target_table", is_text, default="") or "{table}"
    column = members.take("shard_column", is_text, default="")
    partition = members.take("partition", is_text, default="")
    if partition not in _BY_KEY:
        raise ParameterError(
            f"replica_config.sink.dispatchers.partition {partition[:40]!r}: the changes of a key are "
            "in one partition of a topic, chosen by the key (`index-value`); leave it out"
        )
    if members.take("topic", is_text, default=""):
        raise ParameterError(
            "replica_config.sink.dispatchers.topic: all tables of a changefeed are in the topic of "
            "its sink URI; leave it out, or create a changefeed for each topic"
        )
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


def _check_idle(config: Mapping[str, Any], path: str = "") -> None:
    """See that what is left of a replica_config asks for nothing."""
    for name, value in config.items():
        full = f"{path}{name}"
        if value is None:
            continue
        if isinstance(value, dict):
            _check_idle(value, f"{full}.")
        elif not any(type(value) is type(idle) and value == idle for idle in _IDLE.get(full, ())):
            raise ParameterError(f"replica_config.{full[:100]}: {_refusal(full)}; leave it out")


def _refusal(member: str) -> str:
    """Why a member of a replica_config is not taken."""
    idle = _IDLE.get(member)
    if idle is None:
        return "this is not supported"
    return f"only {' or '.join(json.dumps(each) for each in idle)} is supported"


def _is_selectors(value: Any) -> bool:
    return isinstance(value, list) and all(
        is_object(each)
        and each.keys() == {"matcher", "columns"}
        and is_texts(each["matcher"])
        and is_texts(each["columns"])
        for each in value
    )


def _are_masks(value: Any) -> bool:
    return isinstance(value, list) and all(
        is_object(each)
        and each.keys() == {"matcher", "columns", "mask"}
        and is_texts(each["matcher"])
        and is_texts(each["columns"])
        and is_text(each["mask"])
        for each in value
    )
