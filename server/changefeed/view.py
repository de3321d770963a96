"""Changefeeds as `tidemark cli changefeed` shows them; names as TiCDC's, members are added only.

Pure.
"""

import json
import shlex
from typing import Any, Final

from pyspark_tidemark.sink_uri import READERS, redacted
from tidemarkpb.v1 import changefeed_pb2 as pb

from gcsafepoint.explain.explanation import time_of
from server.rpc.enum_name import enum_name
from storage.model.ts import compose, physical_ms

SYNCED_CHECK_S: Final = 300
SYNCED_CHECKPOINT_S: Final = 15
"""TiCDC's synced-check-interval and checkpoint-interval."""
NOBODY_READS: Final = "nobody reads this changefeed"
"""How the warning of a changefeed without a reader begins."""
_UNREAD_MS = 60_000
"""A changefeed unread for longer than this, in milliseconds, is warned about; Spark needs a while
to start.
"""


def detail(changefeed: pb.Changefeed) -> dict[str, Any]:
    """A changefeed as `query` shows it."""
    return (
        {
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
            "state": state_of(changefeed),
            "error": error_of(changefeed),
            "filter": list(changefeed.filter),
            "columns": list(changefeed.columns),
            "zero_dates": changefeed.zero_dates,
            "ignored_tables": list(changefeed.ignored_tables),
            "tables": list(map(table_status, changefeed.tables)),
            "ddls": list(map(_schema_change, changefeed.schema_changes)),
            "holding": _holding(changefeed.holding),
            "lake_job": _lake_job(changefeed),
            "skipped": list(map(_skipped, changefeed.skipped)),
            "maintainer": changefeed.maintainer,
        }
        | ({"audit_seconds": changefeed.audit_s} if changefeed.audit_s else {})
        | ({"event_filters": event_filters(changefeed)} if changefeed.event_filters else {})
        | _masks(changefeed)
        | _splitting(changefeed)
        | ({"routes": list(changefeed.routes)} if changefeed.routes else {})
        | _retention(changefeed)
        | _readers(changefeed)
        | _reading(changefeed)
        | _filter_update(changefeed)
        | _rereads(changefeed)
        | _warnings(changefeed)
    )


def check_document(checked: pb.CheckChangefeedResponse) -> dict[str, Any]:
    """The document that `create --dry-run` shows."""
    return {
        "dry_run": True,
        "start_ts": checked.start_ts,
        "start_time": time_of(checked.start_ts),
        "eligible_tables": [
            {
                "table": each.name,
                "key": list(each.key),
                "columns": {column.name: column.type for column in each.columns},
            }
            | _masked(each)
            | ({"target": each.target} if each.target else {})
            for each in checked.tables
        ],
        "ineligible_tables": [
            {"table": each.name, "reason": each.reason} for each in checked.ineligible
        ],
    }


def explained(checked: pb.CheckChangefeedResponse) -> dict[str, Any]:
    """The same as `create --dry-run --explain` shows it: with the rules that decide."""
    document = check_document(checked)
    for shown, each in zip(document["eligible_tables"], checked.tables, strict=True):
        renamed = {column.name: column.source for column in each.columns if column.source}
        reasons = {
            "rule": each.rule,
            "renamed_from": renamed,
            "left_out": list(each.left_out),
            "ignored": list(each.ignored),
        }
        shown |= {name: value for name, value in reasons.items() if value}
    document["not_taken"] = [
        {"table": each.name, "reason": each.reason} for each in checked.not_taken
    ]
    return document


def _masked(table: pb.EligibleTable) -> dict[str, Any]:
    """The columns that readers are shown by masks, if there are any."""
    masks = {column.name: column.mask for column in table.columns if column.mask}
    return {"masks": masks} if masks else {}


def summary(changefeed: pb.Changefeed, now_s: float) -> dict[str, Any]:
    """A changefeed as `list` shows it at `now_s`, in seconds since 1970."""
    lag_s = max(0.0, now_s - physical_ms(changefeed.checkpoint_ts) / 1000)
    short = {
        "state": state_of(changefeed),
        "sink_uri": changefeed.sink_uri,
        "lag_seconds": round(lag_s, 1) if changefeed.checkpoint_ts else None,
        "lake_job": changefeed.lake_job.state if changefeed.HasField("lake_job") else "none",
        "tso": changefeed.checkpoint_ts,
        "checkpoint": time_of(changefeed.checkpoint_ts),
        "error": error_of(changefeed),
    } | _reading(changefeed)
    if changefeed.HasField("reading"):
        short["last_read"] = _last_read(changefeed.reading)
    if warnings := stuck_warnings(changefeed):
        short["warnings"] = warnings
    if changefeed.HasField("rereads"):
        short["rereads"] = ", ".join(each.table for each in changefeed.rereads.tables)
    return {"id": changefeed.id, "namespace": "default", "summary": short}


def state_of(changefeed: pb.Changefeed) -> str:
    """The name of its state, as TiCDC has it."""
    return _word(pb.ChangefeedState, changefeed.state, "CHANGEFEED_STATE_")


def _word(enum: Any, number: int, prefix: str) -> str:
    return enum_name(enum, number).removeprefix(prefix).lower()


def error_of(changefeed: pb.Changefeed) -> dict[str, str] | None:
    """Why it is in that state, where there is an error."""
    if not changefeed.HasField("error"):
        return None
    return _running_error(changefeed.error)


def synced(
    changefeed: pb.Changefeed,
    now_s: float,
    check_s: int = SYNCED_CHECK_S,
    checkpoint_s: int = SYNCED_CHECKPOINT_S,
) -> dict[str, Any]:
    """Whether the target has everything that the source has, as in TiCDC: the checkpoint is less
    than `checkpoint_s` old, and no row or DDL has been taken for `check_s`.

    Times are TSOs; `info` says what is still to come.
    """
    delivery = changefeed.delivery
    lag_s = now_s - physical_ms(changefeed.checkpoint_ts) / 1000
    quiet_s = now_s - physical_ms(delivery.last_ts) / 1000
    state = state_of(changefeed)
    done = state == "finished"
    if done:
        info = "everything up to the target_ts is at the target"
    elif state not in ("normal", "warning"):
        info = f"the changefeed is {state}: what was committed since is not at the target"
    elif lag_s >= checkpoint_s:
        info = f"the target is {duration(int(lag_s))} behind: rows may be on their way"
    elif quiet_s <= check_s:
        info = (
            f"the last change was taken less than {duration(max(1, int(quiet_s)))} ago; it counts "
            f"as synced after {duration(check_s)} without one"
        )
    else:
        done = True
        info = f"everything is at the target, and nothing has changed for {duration(int(quiet_s))}"
    return {
        "synced": done,
        "sink_checkpoint_ts": changefeed.checkpoint_ts,
        "puller_resolved_ts": changefeed.resolved_ts,
        "last_synced_ts": delivery.last_ts,
        "now_ts": compose(int(now_s * 1000)),
        "info": info,
    }


def statistics(
    before: pb.Changefeed, after: pb.Changefeed, now_s: float, over_s: float
) -> dict[str, Any]:
    """The rows that readers took in the `over_s` seconds between two looks at a changefeed, and its
    lag; the members are those of TiCDC's, and more.
    """
    # A new owner counts from 0.
    rows = max(0, after.delivery.rows - before.delivery.rows)
    return {
        "state": state_of(after),
        "ops": round(rows / over_s) if over_s else 0,
        "count": after.delivery.rows,
        "sink_gap": _gap(after.resolved_ts, after.checkpoint_ts),
        "replication_gap": _gap(compose(int(now_s * 1000)), after.checkpoint_ts),
        "checkpoint_tso": after.checkpoint_ts,
        "staged_bytes": after.holding.staged_bytes,
        "sorter_disk_bytes": after.holding.sorter_disk_bytes,
    }


def _gap(later_ts: int, earlier_ts: int) -> str:
    return f"{max(0, physical_ms(later_ts) - physical_ms(earlier_ts))}ms"


def history(document: dict[str, Any]) -> list[dict[str, str]]:
    """The events of a changefeed's life that `detail` knows: the oldest first.

    Of schema changes and errors only the last ones are kept.
    """
    happened = [
        (
            document["create_time"],
            "created",
            f"{document['source_uri'] or 'the cluster'} → {document['sink_uri']}",
        )
    ]
    happened += [(each["time"], "schema change", each["query"]) for each in document["ddls"]]
    happened += [
        (each["asked"], "left out", f"{each['start_time']} to {each['end_time']}")
        for each in document["skipped"]
    ]
    job = document["lake_job"]
    for event, error in (("error", document["error"]), ("lake job", job and job["error"])):
        if error:
            happened.append((error["time"], event, f"[{error['code']}] {error['message']}"))
    happened.sort(key=lambda each: each[0])
    return [{"time": time, "event": event, "what": what} for time, event, what in happened]


def stuck_warnings(changefeed: pb.Changefeed) -> list[str]:
    """What keeps a changefeed from going on although its state is `normal`: a full disk of its
    capture, or that nobody reads it.
    """
    disk_error = changefeed.holding.disk_error
    advice = "free space at the capture's --data-dir; it goes on by itself"
    disk = f"the capture cannot write to its disk: {disk_error}; {advice}" if disk_error else ""
    return list(filter(None, [disk, unread_warning(changefeed)]))


def unread_warning(changefeed: pb.Changefeed) -> str:
    """Advice if no reader takes a changefeed's rows; empty if one does, or need not."""
    if not _is_unread(changefeed):
        return ""
    uri = changefeed.sink_uri
    if _has_lake(uri):
        run = f"tidemark spark run --changefeed {changefeed.id} --target {shlex.quote(uri)}"
        reason = "no lake job has reported"
        advice = f"start `tidemark spark keep` or `{run}`; one that has just started needs a minute"
    else:
        reason, advice = f"{uri} has no lake job", "start your own reader of it"
    since = _since(changefeed.reading) if changefeed.HasField("reading") else ""
    return f"{NOBODY_READS}: {since}{reason}; {advice}"


def _since(reading: pb.Reading) -> str:
    ago = duration(reading.idle_s)
    return (
        f"nobody has asked for its rows since it started, {ago} ago; "
        if reading.never
        else f"nobody has asked for its rows in the last {ago}; "
    )


def _last_read(reading: pb.Reading) -> str:
    if reading.never:
        return "never"
    return f"{duration(reading.idle_s)} ago" if reading.idle_s * 1000 > _UNREAD_MS else "now"


def _reading(changefeed: pb.Changefeed) -> dict[str, Any]:
    """Describe for how long no rows have been requested from a running changefeed."""
    if not changefeed.HasField("reading"):
        return {}
    reading = changefeed.reading
    return {"reading": {"idle_seconds": reading.idle_s, "never": reading.never}}


def duration(seconds: int) -> str:
    """Whole seconds in the largest unit that they fill: 59 s, 2 min, 3 h, 4 d."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def filter_change(answer: pb.UpdateChangefeedResponse) -> dict[str, Any]:
    """The effect of a new filter, if an update gave one."""
    if not answer.HasField("filter_change"):
        return {}
    change = answer.filter_change
    return {
        "filter_change": {
            "coming": list(change.coming),
            "going": list(change.going),
            "ineligible": {each.name: each.reason for each in change.ineligible},
        }
        | ({"changing": list(change.changing)} if change.changing else {})
    }


def _readers(changefeed: pb.Changefeed) -> dict[str, Any]:
    """The readers that have a name; nothing where none has."""
    readers = [_reader(each) for each in changefeed.readers]
    if not readers:
        return {}
    return {"readers": readers, "reader_ttl_seconds": changefeed.reader_ttl_s}


def _reader(reader: pb.Reader) -> dict[str, Any]:
    return {
        "name": reader.name,
        "checkpoint_tso": reader.checkpoint_ts,
        "checkpoint_time": time_of(reader.checkpoint_ts),
        # A capture of an earlier version says neither.
        "state": reader.state or "holding",
        "silent_seconds": reader.silent_s,
    }


def reader_rows(changefeed: pb.Changefeed, now_s: float) -> list[dict[str, Any]]:
    """The readers that have a name as `list-readers` shows them at `now_s`, in seconds since
    1970.
    """
    return [
        _reader(each)
        | {"lag_seconds": round(max(0.0, now_s - physical_ms(each.checkpoint_ts) / 1000), 1)}
        for each in changefeed.readers
    ]


def _retention(changefeed: pb.Changefeed) -> dict[str, Any]:
    """Describe the limits and the size of the kept history; empty where none is kept."""
    if not (changefeed.retain_s or changefeed.retain_bytes):
        return {}
    document: dict[str, Any] = {
        "seconds": changefeed.retain_s,
        "bytes": changefeed.retain_bytes,
    }
    if changefeed.HasField("kept_history"):
        kept = changefeed.kept_history
        document |= {
            "kept_tso": kept.kept_ts,
            "kept_time": time_of(kept.kept_ts),
            "kept_bytes": kept.bytes,
        }
    return {"retain": document}


def _filter_update(changefeed: pb.Changefeed) -> dict[str, Any]:
    """A new filter that is not in force yet, if there is one."""
    if not changefeed.HasField("filter_update"):
        return {}
    update = changefeed.filter_update
    waits = (
        f"what was updated is in force when everything up to {time_of(update.ts)} is at the target; "
        "until then no table comes, and those that both filters take are replicated as before"
    )
    return {
        "filter_update": {
            "ts": update.ts,
            "before": list(update.before),
            "waits_for": update.error or waits,
        }
    }


def _rereads(changefeed: pb.Changefeed) -> dict[str, Any]:
    """Tables for which cuts wait, if there are any."""
    if not changefeed.HasField("rereads"):
        return {}
    rereads = changefeed.rereads
    tables = [
        {"table": each.table, "since_ts": each.since_ts, "reason": each.reason}
        for each in rereads.tables
    ]
    return {
        "rereads": {
            "since_ts": rereads.since_ts,
            "since": time_of(rereads.since_ts),
            "tables": tables,
        }
    }


def _warnings(changefeed: pb.Changefeed) -> dict[str, Any]:
    warnings = list(changefeed.warnings)
    if "***" in changefeed.sink_uri:
        advice = (
            "the sink URI holds a password, which is in the metadata: write it into a file, name "
            "that by"
        )
        update = (
            f"tidemark cli changefeed update -c {changefeed.id} --sink-uri …?password-file=/path"
        )
        warnings.append(f"{advice} `{update}`, and change it")
    warnings += filter(None, [unread_warning(changefeed)])
    return {"warnings": warnings} if warnings else {}


def _is_unread(changefeed: pb.Changefeed) -> bool:
    """Whether no rows have been requested for a minute, or changes wait and no lake job reports.

    A lake job that reports may have other work than to read.
    """
    # A job that reports is at work, also while it does not read; `lake_job` shows it.
    is_running = changefeed.state in (pb.CHANGEFEED_STATE_NORMAL, pb.CHANGEFEED_STATE_WARNING)
    has_job = changefeed.HasField("lake_job") and changefeed.lake_job.state != "silent"
    waits_ms = physical_ms(changefeed.resolved_ts) - physical_ms(changefeed.checkpoint_ts)
    if not is_running or has_job:
        return False
    if changefeed.HasField("reading"):
        return changefeed.reading.idle_s * 1000 > _UNREAD_MS
    return waits_ms > _UNREAD_MS and _has_lake(changefeed.sink_uri)


def _has_lake(sink_uri: str) -> bool:
    return sink_uri.partition(":")[0] not in READERS


def tables_by_capture(changefeed: pb.Changefeed) -> dict[str, list[pb.TableStatus]]:
    """The tables that each capture replicates for a changefeed; a split table is on several. The
    capture that runs the changefeed is among them, even if it has none.
    """
    tables: dict[str, list[pb.TableStatus]] = {}
    if changefeed.maintainer:
        tables[changefeed.maintainer] = []
    for table in changefeed.tables:
        names = table.capture or changefeed.maintainer
        for capture in names.split(", ") if names else ():
            tables.setdefault(capture, []).append(table)
    return dict(sorted(tables.items()))


def table_status(table: pb.TableStatus) -> dict[str, Any]:
    """Describe one table of a changefeed; empty and unknown values are left out."""
    shown = {
        "table": table.name,
        "table_id": table.table_id,
        "state": _word(pb.TableState, table.state, "TABLE_STATE_"),
        "resolved_ts": table.resolved_ts,
        "checkpoint_ts": table.checkpoint_ts,
        "schema_ts": table.schema_ts,
    }
    optional = {
        "target": table.target,
        "capture": table.capture,
        "moving_to": table.moving_to,
        "rows_per_s": round(table.rows_per_s, 1),
        "bytes_per_s": round(table.bytes_per_s),
        "weight": round(table.weight, 2),
        "resolved_lag_s": table.resolved_lag_ms / 1000,
        "checkpoint_lag_s": table.checkpoint_lag_ms / 1000,
    }
    return shown | {name: value for name, value in optional.items() if value}


def event_filters(changefeed: pb.Changefeed) -> list[dict[str, Any]]:
    """Its event filters, each with the members that are given."""
    return [
        {
            member.name: value if isinstance(value, str) else list(value)
            for member, value in each.ListFields()
        }
        for each in changefeed.event_filters
    ]


def _splitting(changefeed: pb.Changefeed) -> dict[str, Any]:
    threshold = changefeed.region_threshold
    return {"region_threshold": threshold} if threshold else {}


def _masks(changefeed: pb.Changefeed) -> dict[str, Any]:
    """Its rules about masks, if there are any; of the salt only the file's name is known."""
    if not changefeed.masks:
        return {}
    salt = {"salt_file": changefeed.salt_file} if changefeed.salt_file else {}
    return {"masks": list(changefeed.masks)} | salt


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


def _lake_job(changefeed: pb.Changefeed) -> dict[str, Any] | None:
    if not changefeed.HasField("lake_job"):
        return None
    job = changefeed.lake_job
    return {
        "state": job.state,
        "cut_tso": job.cut_ts,
        "cut_time": time_of(job.cut_ts) if job.cut_ts else None,
        "commits": job.commits or None,
        "spark_ui": job.spark_ui or None,
        "reported": job.time,
        "error": _running_error(job.error) if job.HasField("error") else None,
    }


def _skipped(stretch: pb.SkippedRange) -> dict[str, Any]:
    return {
        "start_tso": stretch.start_ts,
        "start_time": time_of(stretch.start_ts),
        "end_tso": stretch.end_ts,
        "end_time": time_of(stretch.end_ts),
        "asked": stretch.time,
    }


def _running_error(error: pb.RunningError) -> dict[str, str]:
    return {"time": error.time, "code": f"TM:{error.code}", "message": error.message}


def record_document(value: bytes) -> Any:
    """A record of the metadata, as JSON if it is that; where a URI may hold a secret, it is
    masked.
    """
    try:
        return _without_secrets(json.loads(value))
    except ValueError:
        return _without_secrets(record_text(value))


def record_text(value: bytes) -> str:
    """A key or a value of the metadata; in hexadecimal digits if it is no text."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.hex()


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_secrets(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_without_secrets(member) for member in value]
    return redacted(value) if isinstance(value, str) and "://" in value else value
