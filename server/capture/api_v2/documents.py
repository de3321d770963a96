"""Changefeeds as TiCDC's API shows them, from the messages of the gRPC API. Pure.

TiCDC's members have its names and forms; others are added.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tidemarkpb.v1 import capture_pb2 as capturepb
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.changefeed.info import CREATOR_VERSION
from server.changefeed.view import detail, error_of, state_of
from storage.model.ts import physical_ms

_RUNNING_ERROR_SHOWN = ("warning", "failed")


def listing(items: Sequence[Any]) -> dict[str, Any]:
    """TiCDC's form of all lists."""
    return {"total": len(items), "items": list(items)}


def summary(changefeed: pb.Changefeed) -> dict[str, Any]:
    """TiCDC's ChangefeedCommonInfo."""
    state = state_of(changefeed)
    return {
        "upstream_id": 0,
        "namespace": "default",
        "id": changefeed.id,
        "state": state,
        "checkpoint_tso": changefeed.checkpoint_ts,
        "checkpoint_time": _time(changefeed.checkpoint_ts),
        "error": _error(changefeed) if state in _RUNNING_ERROR_SHOWN else None,
    }


def changefeed_document(changefeed: pb.Changefeed) -> dict[str, Any]:
    """TiCDC's ChangeFeedInfo, and what `tidemark cli changefeed query` shows beside it."""
    config = {
        "filter": {"rules": list(changefeed.filter)},
        "check_gc_safe_point": True,
    }
    return detail(changefeed) | {
        "upstream_id": 0,
        "config": config,
        "creator_version": CREATOR_VERSION,
        "checkpoint_ts": changefeed.checkpoint_ts,
        "checkpoint_time": _time(changefeed.checkpoint_ts),
        "error": summary(changefeed)["error"],
    }


def tables_document(checked: pb.CheckChangefeedResponse) -> dict[str, Any]:
    """TiCDC's Tables, with the reasons."""
    eligible = [_table(each.name) | {"table_id": each.table_id} for each in checked.tables]
    ineligible = [_table(each.name) | {"reason": each.reason} for each in checked.ineligible]
    return {"eligible_tables": eligible, "ineligible_tables": ineligible}


def status(changefeed: pb.Changefeed) -> dict[str, Any]:
    """TiCDC's ChangefeedStatus: a warning is what the changefeed gets over by itself."""
    state, error = state_of(changefeed), _error(changefeed)
    kind = "last_warning" if state == "warning" else "last_error"
    return {
        "state": state,
        "resolved_ts": changefeed.resolved_ts,
        "checkpoint_ts": changefeed.checkpoint_ts,
    } | ({kind: error} if error else {})


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
    error = error_of(changefeed)
    return None if error is None else {"addr": ""} | error


def _table(name: str) -> dict[str, Any]:
    schema, _, table = name.partition(".")
    return {"database_name": schema, "table_name": table, "table_id": 0, "is_partition": False}


def _time(ts: int) -> str:
    """TiCDC's form of a timestamp's wall clock, in UTC."""
    at = datetime.fromtimestamp(physical_ms(ts) / 1e3, UTC)
    return at.strftime("%Y-%m-%d %H:%M:%S.") + f"{at.microsecond // 1000:03d}"
