"""What the API serves: one record an operation, and the OpenAPI document that they make."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from server.rpc.access_list import Right

PREFIX: Final = "/api/v2"
_STATES: Final = ["normal", "warning", "failed", "stopped", "finished", "removed"]
_TSO: Final = {"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1}
_TEXT: Final = {"type": "string"}
_FLAG: Final = {"type": "boolean"}
_NAMESPACE: Final = {"type": "string", "enum": ["", "default"]}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path, relative to `PREFIX`; `{name}` stands for one part of a path."""

    name: str
    """The method of `Api` that answers, and the document's operationId."""
    method: str
    path: str
    summary: str
    answer: str
    """The schema of the answer, one of `SCHEMAS`."""
    body: str = ""
    """The schema of the body; empty: none is taken."""
    query: tuple[str, ...] = ()
    """The parameters that are taken after `?`, beside `namespace`."""
    right: Right | None = Right.ADMIN
    """The right that its client needs; None: it is answered to everybody. Calls of gRPC services
    check more where the request itself decides, as a `resume` that gives changes up.
    """

    @property
    def names_changefeed(self) -> bool:
        """Whether its path names a changefeed, before it names anything else."""
        return "/{changefeed_id}" in self.path

    @property
    def body_names_changefeed(self) -> bool:
        """Whether it is about the changefeed that its body names, if it names one."""
        return "changefeed_id" in SCHEMAS[self.body].get("properties", ()) if self.body else False


OPERATIONS: Final = (
    Operation("health", "GET", "/health", "Whether an owner is elected", "Empty", right=None),
    Operation("status", "GET", "/status", "This capture", "ServerStatus", right=Right.SEE),
    Operation("captures", "GET", "/captures", "All living captures", "Captures", right=Right.SEE),
    Operation(
        "drain_capture",
        "PUT",
        "/captures/{capture_id}/drain",
        "Let a capture's tables go to the others; ask again until none is left",
        "Drained",
        right=Right.OPERATE,
    ),
    Operation(
        "drain_capture_by_post",
        "POST",
        "/captures/{capture_id}/drain",
        "The same, by the method of TiCDC's v2",
        "Drained",
        right=Right.OPERATE,
    ),
    Operation(
        "resign_owner",
        "POST",
        "/owner/resign",
        "Let another capture be elected",
        "Empty",
        right=Right.OPERATE,
    ),
    Operation(
        "set_log_level",
        "POST",
        "/log",
        "What this capture logs from now on, until it ends; each capture is asked by itself",
        "Empty",
        body="LogLevel",
        right=Right.OPERATE,
    ),
    Operation(
        "redact_log",
        "POST",
        "/log/redact",
        "Keep users' data out of this capture's log from now on; as in TiCDC it cannot be taken back here",
        "Redaction",
        body="Redact",
        right=Right.OPERATE,
    ),
    Operation("tso", "POST", "/tso", "A new timestamp", "Tso", body="Upstream", right=Right.SEE),
    Operation(
        "list_changefeeds",
        "GET",
        "/changefeeds",
        "The changefeeds of a state; `all`, or without one those that are not finished",
        "Changefeeds",
        query=("state",),
        right=Right.SEE,
    ),
    Operation(
        "create_changefeed",
        "POST",
        "/changefeeds",
        "Create a changefeed",
        "Changefeed",
        body="NewChangefeed",
    ),
    Operation(
        "verify_table",
        "POST",
        "/verify_table",
        "Which tables a changefeed would replicate, and which it cannot; the body need not name a sink",
        "Tables",
        body="TablesQuestion",
    ),
    Operation(
        "get_all_tables",
        "POST",
        "/get_all_tables",
        "The same, and all tables of the source; the body need not name a sink",
        "AllTables",
        body="TablesQuestion",
    ),
    Operation(
        "get_changefeed",
        "GET",
        "/changefeeds/{changefeed_id}",
        "One changefeed",
        "Changefeed",
        right=Right.SEE,
    ),
    Operation(
        "changefeed_meta_info",
        "GET",
        "/changefeeds/{changefeed_id}/meta_info",
        "The same, for clients of TiCDC's first v2",
        "Changefeed",
        right=Right.SEE,
    ),
    Operation(
        "update_changefeed",
        "PUT",
        "/changefeeds/{changefeed_id}",
        "Change filters, columns, masks, target_ts, how to log in at the sink, the audit, or what unclear DDL leads to",
        "Changefeed",
        body="ChangefeedUpdate",
    ),
    Operation(
        "remove_changefeed",
        "DELETE",
        "/changefeeds/{changefeed_id}",
        "Remove a changefeed; as in TiCDC no error if there is none",
        "Empty",
    ),
    Operation(
        "pause_changefeed",
        "POST",
        "/changefeeds/{changefeed_id}/pause",
        "Pause a changefeed",
        "Empty",
        right=Right.OPERATE,
    ),
    Operation(
        "resume_changefeed",
        "POST",
        "/changefeeds/{changefeed_id}/resume",
        "Resume a changefeed",
        "Empty",
        body="Resume",
        right=Right.OPERATE,
    ),
    Operation(
        "move_table",
        "POST",
        "/changefeeds/{changefeed_id}/move_table",
        "Let another capture pull and serve a table of the cluster; the changefeed goes on",
        "Empty",
        query=("tableID", "targetNodeID", "giveUpHistory"),
        right=Right.OPERATE,
    ),
    Operation(
        "move_split_table",
        "POST",
        "/changefeeds/{changefeed_id}/move_split_table",
        "The same of all parts of a split table; they stay there until captures come or go",
        "Empty",
        query=("tableID", "targetNodeID", "giveUpHistory"),
        right=Right.OPERATE,
    ),
    Operation(
        "split_table_by_region_count",
        "POST",
        "/changefeeds/{changefeed_id}/split_table_by_region_count",
        "Split a table over all captures, as many regions to each; of a changefeed with enable_table_across_nodes",
        "Empty",
        query=("tableID", "giveUpHistory"),
        right=Right.OPERATE,
    ),
    Operation(
        "merge_table",
        "POST",
        "/changefeeds/{changefeed_id}/merge_table",
        "Put a split table together; TiCDC puts two of its parts together at a time",
        "Empty",
        query=("tableID", "giveUpHistory"),
        right=Right.OPERATE,
    ),
    Operation(
        "changefeed_status",
        "GET",
        "/changefeeds/{changefeed_id}/status",
        "State and progress of a changefeed",
        "ChangefeedStatus",
        right=Right.SEE,
    ),
    Operation(
        "list_tables",
        "GET",
        "/changefeeds/{changefeed_id}/tables",
        "The tables of a changefeed on each capture; none while it does not run",
        "NodeTables",
        right=Right.SEE,
    ),
    Operation(
        "get_dispatcher_count",
        "GET",
        "/changefeeds/{changefeed_id}/get_dispatcher_count",
        "How many tables, and parts of split ones, captures replicate for a changefeed",
        "DispatcherCount",
        right=Right.SEE,
    ),
    Operation(
        "synced",
        "GET",
        "/changefeeds/{changefeed_id}/synced",
        "Whether the target has all that the source has",
        "Synced",
        right=Right.SEE,
    ),
    Operation(
        "list_processors",
        "GET",
        "/processors",
        "Which capture runs which changefeed",
        "Processors",
        right=Right.SEE,
    ),
    Operation(
        "get_processor",
        "GET",
        "/processors/{changefeed_id}/{capture_id}",
        "The tables of a changefeed on a capture",
        "Processor",
        right=Right.SEE,
    ),
    Operation(
        "unsafe_metadata",
        "GET",
        "/unsafe/metadata",
        "The records of captures and changefeeds, without secrets",
        "Metadata",
    ),
    Operation(
        "unsafe_resolve_lock",
        "POST",
        "/unsafe/resolve_lock",
        "End what transactions of clients that are gone have locked in a region",
        "Empty",
        body="ResolveLock",
    ),
    Operation(
        "unsafe_delete_service_gc_safepoint",
        "DELETE",
        "/unsafe/service_gc_safepoint",
        "Remove the GC safepoints of changefeeds that are gone; those of others stay",
        "Empty",
        body="Upstream",
    ),
    Operation("openapi", "GET", "/openapi.json", "This document", "Any", right=None),
)


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    document: dict[str, Any] = {"type": "object", "properties": properties}
    return document | ({"required": list(required)} if required else {})


def _listed(item: Mapping[str, Any]) -> dict[str, Any]:
    return _object(
        "total", "items", total={"type": "integer"}, items={"type": "array", "items": item}
    )


def _named(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}


_OPTIONS: Final[dict[str, Any]] = {
    "on_unclear_ddl": {"type": "string", "enum": ["", "reread", "stop"]},
    "audit_seconds": {"type": "integer", "minimum": 0},
    "retain_seconds": {"type": "integer", "minimum": 0},
    "retain_bytes": {"type": "integer", "minimum": 0},
    "reader_ttl_seconds": {"type": "integer", "minimum": 0},
}
_TABLES: Final = {
    "type": "array",
    "items": _object(
        database_name=_TEXT,
        table_name=_TEXT,
        table_id={"type": "integer", "description": "0 of a table that cannot be replicated"},
        is_partition=_FLAG,
        reason={"type": "string", "description": "why it cannot be replicated"},
    ),
}
_NEW_CHANGEFEED: Final[dict[str, Any]] = {
    "namespace": _NAMESPACE,
    "keyspace": _NAMESPACE,
    "ignore_ineligible_table": _FLAG,
    "changefeed_id": {"type": "string", "description": "made up if it is left out"},
    "request_id": {
        "type": "string",
        "maxLength": 128,
        "description": "the same in each repetition of a request whose outcome is not known: the "
        "changefeed that it has made already is its answer",
    },
    "start_ts": _TSO,
    "target_ts": _TSO,
    "sink_uri": _TEXT,
    "source_uri": {"type": "string", "description": "empty: the cluster"},
    "tables": {
        "type": "array",
        "description": "tables whose schemas the source does not have, as of --tables",
        "items": _object(
            "schema_name", "table_info", schema_name=_TEXT, table_info={"type": "object"}
        ),
    },
    "columns": {"type": "array", "items": _TEXT},
    "zero_dates": _TEXT,
    "replica_config": _named("ReplicaConfig"),
    **_OPTIONS,
}
SCHEMAS: Final[Mapping[str, dict[str, Any]]] = {
    "Any": {"type": "object"},
    "Empty": _object(),
    "Error": _object("error_msg", "error_code", error_msg=_TEXT, error_code=_TEXT),
    "RunningError": _object(time=_TEXT, addr=_TEXT, code=_TEXT, message=_TEXT),
    "ServerStatus": _object(
        version=_TEXT,
        git_hash=_TEXT,
        id=_TEXT,
        cluster_id=_TEXT,
        pid={"type": "integer"},
        is_owner=_FLAG,
        liveness={"type": "integer", "description": "0: it serves; 1: it is drained"},
    ),
    "Captures": _listed(_object(id=_TEXT, is_owner=_FLAG, address=_TEXT, cluster_id=_TEXT)),
    "Drained": _object(current_table_count={"type": "integer"}),
    "LogLevel": _object(
        log_level={
            "type": "string",
            "description": "debug, info, warn (or warning) or error; info if it is left out",
        }
    ),
    "Redact": _object(
        "redact_info_log",
        redact_info_log={"type": "string", "description": "on; off only where it is off"},
    ),
    "Redaction": _object(previous_mode=_TEXT, current_mode=_TEXT),
    "Upstream": _object(id={"type": "integer"}),
    "Tso": _object(timestamp={"type": "integer"}, logic_time={"type": "integer"}),
    "ReplicaConfig": _object(
        filter=_object(
            rules={"type": "array", "items": _TEXT},
            event_filters={"type": "array", "items": _named("EventFilter")},
        ),
        sink=_object(
            column_selectors={"type": "array", "items": _named("ColumnSelector")},
            column_masks={"type": "array", "items": _named("ColumnMask")},
            dispatchers={"type": "array", "items": _named("Dispatcher")},
            salt_file={
                "type": "string",
                "description": "of mask.hash.SHA-256: the file of the salt, on every capture",
            },
        ),
        scheduler=_object(
            enable_table_across_nodes={
                "type": "boolean",
                "description": "split tables with region_threshold regions or more over captures",
            },
            region_threshold={"type": "integer", "description": "100000 if it is left out"},
        ),
        ignore_ineligible_table=_FLAG,
        force_replicate=_FLAG,
    ),
    "ColumnSelector": _object(
        "matcher",
        "columns",
        matcher={"type": "array", "items": _TEXT},
        columns={"type": "array", "items": _TEXT},
    ),
    "Dispatcher": _object(
        "matcher",
        matcher={"type": "array", "items": _TEXT},
        target_schema={"type": "string", "description": "with {schema} and {table}"},
        target_table={"type": "string", "description": "with {schema} and {table}"},
        shard_column={
            "type": "string",
            "description": "tables are merged into one, and told apart there by this column",
        },
    ),
    "ColumnMask": _object(
        "matcher",
        "columns",
        "mask",
        matcher={"type": "array", "items": _TEXT},
        columns={"type": "array", "items": _TEXT},
        mask={
            "type": "string",
            "description": "mask.hash.SHA-256, mask.with.N.chars or truncate.to.N.chars",
        },
    ),
    "EventFilter": _object(
        "matcher",
        matcher={"type": "array", "items": _TEXT},
        ignore_event={
            "type": "array",
            "items": {
                "type": "string",
                "description": "insert, update, delete, all dml, truncate table, drop table, and "
                "DDL that changes no rows and columns",
            },
        },
        ignore_sql={"type": "array", "items": _TEXT},
        ignore_insert_value_expr=_TEXT,
        ignore_update_new_value_expr=_TEXT,
        ignore_update_old_value_expr=_TEXT,
        ignore_delete_value_expr=_TEXT,
        ignore_update_only_columns={"type": "array", "items": _TEXT},
    ),
    "NewChangefeed": _object("sink_uri", **_NEW_CHANGEFEED),
    "TablesQuestion": _object(**_NEW_CHANGEFEED),
    "ChangefeedUpdate": _object(
        sink_uri=_TEXT,
        target_ts=_TSO | {"description": "of a stopped or failed changefeed; 0: without end"},
        columns={"type": "array", "items": _TEXT},
        no_dump={
            "type": "boolean",
            "description": "tables that come, or are shown otherwise, are not copied",
        },
        replica_config=_named("ReplicaConfig"),
        **_OPTIONS,
    ),
    "Tables": _object(eligible_tables=_TABLES, ineligible_tables=_TABLES),
    "AllTables": _object(eligible_tables=_TABLES, ineligible_tables=_TABLES, all_tables=_TABLES),
    "NodeTables": _listed(
        _object(node_id=_TEXT, table_ids={"type": "array", "items": {"type": "integer"}})
    ),
    "DispatcherCount": _object("count", count={"type": "integer"}),
    "Metadata": {"type": "array", "items": _object("key", "value", key=_TEXT, value=_TEXT)},
    "ResolveLock": _object(
        "region_id",
        region_id={"type": "integer", "minimum": 1, "maximum": (1 << 64) - 1},
        ts=_TSO | {"description": "of transactions that began up to here; 0: up to now"},
    ),
    "Resume": _object(
        overwrite_checkpoint_ts=_TSO,
        overwrite_with_now={"type": "boolean", "description": "go on from the source's present"},
    ),
    "ChangefeedSummary": _object(
        upstream_id={"type": "integer"},
        namespace=_TEXT,
        keyspace=_TEXT,
        id=_TEXT,
        state={"type": "string", "enum": _STATES},
        checkpoint_tso=_TSO,
        checkpoint_time=_TEXT,
        error=_named("RunningError") | {"nullable": True},
    ),
    "Changefeeds": _listed(_named("ChangefeedSummary")),
    "Changefeed": _object(
        upstream_id={"type": "integer"},
        namespace=_TEXT,
        keyspace=_TEXT,
        id=_TEXT,
        admin_job_type={"type": "integer", "description": "always 0"},
        maintainer_addr={"type": "string", "description": "of the capture that runs it"},
        task_status={
            "type": "array",
            "items": _object(
                capture_id=_TEXT, table_ids={"type": "array", "items": {"type": "integer"}}
            ),
        },
        sink_uri={"type": "string", "description": "without secrets"},
        create_time=_TEXT,
        start_ts=_TSO,
        target_ts=_TSO,
        config=_named("ReplicaConfig"),
        state={"type": "string", "enum": _STATES},
        error=_named("RunningError") | {"nullable": True},
        creator_version=_TEXT,
        resolved_ts=_TSO,
        checkpoint_ts=_TSO,
        checkpoint_time=_TEXT,
    ),
    "ChangefeedStatus": _object(
        state={"type": "string", "enum": _STATES},
        resolved_ts=_TSO,
        checkpoint_ts=_TSO,
        last_error=_named("RunningError"),
        last_warning=_named("RunningError"),
    ),
    "Synced": _object(
        synced=_FLAG,
        sink_checkpoint_ts=_TEXT,
        puller_resolved_ts=_TEXT,
        last_synced_ts={"type": "string", "description": "no change after it has been taken"},
        now_ts=_TEXT,
        info={"type": "string", "description": "what is still to come"},
    ),
    "Processors": _listed(_object(namespace=_TEXT, changefeed_id=_TEXT, capture_id=_TEXT)),
    "Processor": _object(table_ids={"type": "array", "items": {"type": "integer"}}),
}


def openapi(version: str) -> dict[str, Any]:
    """The OpenAPI 3.0 document of all operations."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "Tidemark capture: TiCDC's API v2",
            "version": version,
            "license": {"name": "Apache-2.0"},
        },
        "servers": [{"url": PREFIX}],
        "paths": paths,
        "components": {"schemas": dict(SCHEMAS)},
    }


def _described(operation: Operation) -> dict[str, Any]:
    in_path = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True} for name in in_path]
    parameters += [{"name": name, "in": "query"} for name in operation.query]
    document: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": [
            *(each | {"schema": _TEXT} for each in parameters),
            *(
                {"name": name, "in": "query", "schema": _NAMESPACE}
                for name in ("namespace", "keyspace")
            ),
        ],
        "responses": {
            "200": _content("done", operation.answer),
            "400": _content("the request cannot be carried out", "Error"),
            "503": _content("ask again", "Error"),
        },
    }
    if operation.body:
        document["requestBody"] = _content("", operation.body)
        del document["requestBody"]["description"]
    return document


def _content(description: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": _named(schema)}}
    return {"description": description, "content": content}
