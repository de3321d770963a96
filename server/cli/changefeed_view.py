"""Changefeeds as `tidemark cli changefeed` shows them; names as TiCDC's, members are added only. Pure."""

from typing import Any

from tidemarkpb.v1 import changefeed_pb2 as pb

from server.cli.tso import time_of


def detail(changefeed: pb.Changefeed) -> dict[str, Any]:
    """A changefeed as `query` shows it."""
    return {
        "id": changefeed.id,
        "namespace": "default",
        "source_uri": changefeed.source_uri,
        "sink_uri": changefeed.sink_uri,
        "create_time": changefeed.create_time,
        "start_ts": changefeed.start_ts,
        "resolved_ts": changefeed.resolved_ts,
        "target_ts": changefeed.target_ts,
        "checkpoint_tso": changefeed.checkpoint_ts,
        "checkpoint_time": time_of(changefeed.checkpoint_ts),
        "state": _state(changefeed),
        "error": _error(changefeed),
        "filter": list(changefeed.filter),
        "columns": list(changefeed.columns),
        "ignored_tables": list(changefeed.ignored_tables),
        "tables": list(map(_table, changefeed.tables)),
        "ddls": list(map(_schema_change, changefeed.schema_changes)),
        "holding": _holding(changefeed.holding),
    }


def summary(changefeed: pb.Changefeed) -> dict[str, Any]:
    """A changefeed as `list` shows it."""
    short = {
        "state": _state(changefeed),
        "tso": changefeed.checkpoint_ts,
        "checkpoint": time_of(changefeed.checkpoint_ts),
        "error": _error(changefeed),
    }
    return {"id": changefeed.id, "namespace": "default", "summary": short}


def _table(table: pb.TableStatus) -> dict[str, Any]:
    return {
        "table": table.name,
        "table_id": table.table_id,
        "state": pb.TableState.Name(table.state).removeprefix("TABLE_STATE_").lower(),
        "resolved_ts": table.resolved_ts,
        "checkpoint_ts": table.checkpoint_ts,
        "schema_ts": table.schema_ts,
    }


def _schema_change(change: pb.SchemaChange) -> dict[str, Any]:
    return {
        "commit_ts": change.commit_ts,
        "time": time_of(change.commit_ts),
        "query": change.query,
        "tables": list(change.tables),
        "dropped": list(change.dropped),
        "truncated": list(change.truncated),
    }


def _holding(holding: pb.Holding) -> dict[str, Any]:
    return {
        "regions": holding.regions,
        "staged_bytes": holding.staged_bytes,
        "sorter_memory_bytes": holding.sorter_memory_bytes,
        "sorter_disk_bytes": holding.sorter_disk_bytes,
        "disk_error": holding.disk_error,
        "waiting": holding.waiting,
        "pulled_ts": holding.pulled_ts,
        "sorted_ts": holding.sorted_ts,
    }


def _state(changefeed: pb.Changefeed) -> str:
    return pb.ChangefeedState.Name(changefeed.state).removeprefix("CHANGEFEED_STATE_").lower()


def _error(changefeed: pb.Changefeed) -> dict[str, str] | None:
    if not changefeed.HasField("error"):
        return None
    error = changefeed.error
    return {"time": error.time, "code": f"TM:{error.code}", "message": error.message}
