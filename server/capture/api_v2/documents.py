"""The JSON documents of TiCDC's API, from and to the messages of the gRPC API. Pure.

Answers have TiCDC's members with its names and forms, and others beside them.

Requests: a member that this product does not know is an error, as it may ask for something.
"""

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from tidemarkpb.v1 import capture_pb2 as capturepb
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.capture.api_v2.members import (
    Members,
    is_flag,
    is_object,
    is_text,
    is_texts,
    is_ts,
    is_uint32,
)
from server.capture.api_v2.replica_config import ReplicaConfig, replica_config
from server.capture.errors import ParameterError
from server.changefeed.source import FORCE_REPLICATE, with_option
from server.changefeed.view import detail, state_of, synced, tables_by_capture
from server.version import VERSION
from storage.client_json import read_json
from storage.model.ts import physical_ms

_RUNNING_ERROR_SHOWN = ("warning", "failed")
NO_SINK: Final = "blackhole://"
ALL_TABLES: Final = "*.*"
"""TiCDC's filter if none is given."""
_NO_UPSTREAM: Final = ("pd_addrs", "ca_path", "cert_path", "key_path", "cert_allowed_cn")
"""Members that name another cluster than the capture's own."""
NAMESPACES: Final = ("namespace", "keyspace")
"""TiCDC's word, and the one of its new architecture."""
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
    return [
        {"node_id": capture, "table_ids": sorted(table.table_id for table in tables)}
        for capture, tables in tables_by_capture(changefeed).items()
        if tables
    ]


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
    members = Members(document)
    _check_upstream(members)
    config = ReplicaConfig.parse(members.take("replica_config", is_object, default={}))
    # TiCDC's first API has it beside the configuration, and scripts still do.
    ignores = members.take("ignore_ineligible_table", is_flag, default=False)
    tables = members.take("tables", _is_tables, default=[])
    request_id = members.take("request_id", is_text, default="")
    # A request that is repeated has the same id each time.
    own_id = uuid.uuid5(uuid.NAMESPACE_OID, request_id) if request_id else uuid.uuid4()
    request = pb.CreateChangefeedRequest(
        id=members.take("changefeed_id", is_text, default="") or str(own_id),
        request_id=request_id,
        sink_uri=members.take("sink_uri", is_text, default=""),
        source_uri=with_option(
            members.take("source_uri", is_text, default=""),
            FORCE_REPLICATE,
            "true" if config.force_replicate else "",
        ),
        start_ts=members.take("start_ts", is_ts, default=0),
        target_ts=members.take("target_ts", is_ts, default=0),
        columns=[*config.columns, *members.take("columns", is_texts, default=[])],
        event_filters=config.event_filters,
        masks=config.masks,
        salt_file=config.salt_file,
        routes=config.routes,
        zero_dates=members.take("zero_dates", is_text, default=""),
        on_unclear_ddl=members.take("on_unclear_ddl", is_text, default=""),
        audit_s=members.take("audit_seconds", is_uint32, default=0),
        retain_s=members.take("retain_seconds", is_uint32, default=0),
        retain_bytes=members.take("retain_bytes", is_ts, default=0),
        reader_ttl_s=members.take("reader_ttl_seconds", is_uint32, default=0),
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


def update(now: pb.Changefeed, body: bytes) -> pb.UpdateChangefeedRequest | None:
    """What `PUT changefeeds/{id}` asks for; None: for what the changefeed has `now`. Raises as
    `creation`.

    The configuration that a changefeed has may be sent back with other rules, or as it is.
    """
    members = Members(document_of(body))
    is_given = any(members.left.get(name) is not None for name in ("replica_config", "target_ts"))
    _check_upstream(members)
    config = ReplicaConfig.parse(members.take("replica_config", is_object, default={}))
    request = pb.UpdateChangefeedRequest(
        id=now.id,
        sink_uri=members.take("sink_uri", is_text, default=""),
        on_unclear_ddl=members.take("on_unclear_ddl", is_text, default=""),
    )
    config.change(now, request)
    columns = members.take("columns", is_texts, default=None)
    if columns is not None:
        request.columns.CopyFrom(pb.Texts(texts=[*config.columns, *columns]))
    request.no_dump = members.take("no_dump", is_flag, default=False)
    audit_s = members.take("audit_seconds", is_uint32, default=None)
    if audit_s is not None:
        request.audit_s = audit_s
    target_ts = members.take("target_ts", is_ts, default=None)
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
    members: "Members", now: pb.Changefeed, request: pb.UpdateChangefeedRequest
) -> None:
    """How much history is kept, and for how long silent readers are held for."""
    retain_s = members.take("retain_seconds", is_uint32, default=None)
    retain_bytes = members.take("retain_bytes", is_ts, default=None)
    if retain_s is not None or retain_bytes is not None:
        # What is left out stays.
        request.retention.retain_s = now.retain_s if retain_s is None else retain_s
        request.retention.retain_bytes = now.retain_bytes if retain_bytes is None else retain_bytes
    reader_ttl_s = members.take("reader_ttl_seconds", is_uint32, default=None)
    if reader_ttl_s is not None:
        request.reader_ttl_s = reader_ttl_s


def resumption(changefeed: str, body: bytes) -> pb.ResumeChangefeedRequest:
    """What `POST changefeeds/{id}/resume` asks for; raises as `creation`."""
    members = Members(document_of(body))
    _check_upstream(members)
    request = pb.ResumeChangefeedRequest(
        id=changefeed,
        overwrite_checkpoint_ts=members.take("overwrite_checkpoint_ts", is_ts, default=0),
        overwrite_with_now=members.take("overwrite_with_now", is_flag, default=False),
    )
    members.check_empty()
    return request


def region_locks(body: bytes) -> tuple[int, int]:
    """The region, and up to which start_ts, that `POST unsafe/resolve_lock` asks for; raises as
    `creation`.
    """
    members = Members(document_of(body))
    _check_upstream(members)
    region_id = members.take("region_id", is_ts, default=0)
    ts = members.take("ts", is_ts, default=0)
    members.check_empty()
    if not region_id:
        raise ParameterError("region_id is missing: the region whose locks are to go")
    return region_id, ts


def check_own_cluster(body: bytes) -> None:
    """See that `DELETE unsafe/service_gc_safepoint` is about the capture's own cluster; raises as
    `creation`.
    """
    members = Members(document_of(body))
    if members.take("id", is_ts, default=0):
        raise ParameterError("id: a capture knows no other upstream than its own cluster, 0")
    _check_upstream(members)
    members.check_empty()


def log_level(body: bytes) -> str:
    """The level that `POST log` asks for, in this product's words; raises as `creation`."""
    members = Members(document_of(body))
    level = str(members.take("log_level", is_text, default="info")).lower()
    members.check_empty()
    return "warning" if level == "warn" else level


def redaction(body: bytes) -> str:
    """What `POST log/redact` asks for, `on` or `off`; raises as `creation`."""
    members = Members(document_of(body))
    mode = str(members.take("redact_info_log", is_text, default="")).lower()
    members.check_empty()
    if mode not in ("on", "off"):
        raise ParameterError(
            f"redact_info_log is on or off; got {mode[:40]!r} (TiCDC's `marker` is not known here: "
            "`on` hides users' data)"
        )
    return mode


def _check_upstream(members: Members) -> None:
    """See that the request is about the capture's own cluster and namespace."""
    for name in _NO_UPSTREAM:
        if members.left.pop(name, None):
            raise ParameterError(
                f"{name}: a capture replicates the cluster that it was started for; leave it out"
            )
    for name in NAMESPACES:
        check_namespace(name, members.take(name, is_text, default=""))


def check_namespace(name: str, namespace: str) -> None:
    """Raises: ParameterError: it is not the only one that there is."""
    if namespace not in ("", "default"):
        raise ParameterError(
            f"there is no {name} {namespace[:100]!r}; all changefeeds are in `default`"
        )


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and all(
        is_object(table)
        and table.keys() == {"schema_name", "table_info"}
        and is_text(table["schema_name"])
        and is_object(table["table_info"])
        for table in value
    )
