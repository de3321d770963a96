"""The JSON documents that answer actions (docs/format/flight.md). Pure."""

import base64
from dataclasses import asdict
from typing import Any, TypeAlias

from sink.flight.feeds import FeedDescription, Slice, TableDescription
from sink.flight.request import Plan, Ticket

Answer: TypeAlias = dict[str, Any]


def described(feed: FeedDescription) -> Answer:
    """The answer to `describe`; without `tables` where the reader knows them."""
    tables = {} if feed.tables is None else {"tables": [_table(table) for table in feed.tables]}
    return {
        "changefeed": feed.changefeed,
        "state": feed.state,
        "sink_uri": feed.sink_uri,
        "start_ts": feed.start_ts,
        **({"target_ts": feed.target_ts} if feed.target_ts else {}),
        "checkpoint_ts": feed.checkpoint_ts,
        "resolved_ts": feed.resolved_ts,
        **({"skipped": [list(each) for each in feed.skipped]} if feed.skipped else {}),
        **tables,
        "ddls": [asdict(ddl) for ddl in feed.ddls],
    }


def planned(asked: Plan, part: Slice, location: str) -> Answer:
    """One slice of the answer to `plan`; `location` is the server's own."""
    ticket = Ticket(asked.changefeed, part.table, part.start_ts, part.end_ts, asked.before)
    return {
        "table": part.table,
        "locations": [*part.locations, location],
        "ticket": ticket.document(),
        "rows": part.rows,
        "bytes": part.bytes,
    }


def _table(table: TableDescription) -> Answer:
    return {
        "table": table.table,
        "table_id": table.table_id,
        "key": list(table.key),
        "schema": base64.b64encode(table.schema.serialize().to_pybytes()).decode(),
        "schema_ts": table.schema_ts,
        "resolved_ts": table.resolved_ts,
        "checkpoint_ts": table.checkpoint_ts,
    }
