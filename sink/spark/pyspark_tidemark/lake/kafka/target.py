"""A topic as a target: the changes of all tables, in the transaction of their cut.

A topic has no tables that could be altered, emptied or renamed: messages have the columns that
their row had, and a DDL is a message itself, in front of the cut that starts at it.
"""

import dataclasses
import json
from typing import Any, Final

from pyspark_tidemark.column_metadata import with_column_ids
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import BEFORE, ChangefeedMeta, Ddl, SliceEndpoint, TableMeta
from pyspark_tidemark.lake.changes import Changes
from pyspark_tidemark.lake.checksum import checksum, hexadecimal
from pyspark_tidemark.lake.format import APPEND
from pyspark_tidemark.lake.kafka.manifest import KafkaManifest
from pyspark_tidemark.lake.kafka.messages import Messages, Statement, longest
from pyspark_tidemark.lake.kafka.topic import now_ms
from pyspark_tidemark.lake.schema import SchemaChange, lake_schema
from pyspark_tidemark.lake.target import Applied, Health, Retention

_CALL_ROWS: Final = 4096
"""Rows that become messages, and pass to the JVM, at a time."""


class KafkaTarget:
    """Implements `Target` and `StatementTarget`."""

    empties_with_cut = False

    def __init__(self, manifest: KafkaManifest) -> None:
        self._manifest = manifest

    def position(self, table: TableMeta) -> int | None:
        """The end of the newest cut, which is that of every table."""
        del table
        return None if self._manifest.last is None else self._manifest.last.end_ts

    def version(self, table: TableMeta) -> int:
        """The newest cut."""
        return self.position(table) or 0

    def schema(self, table: TableMeta) -> Any:
        """What the changefeed gives: there is no table that could have another one."""
        return with_column_ids(lake_schema(table, APPEND), table.column_ids)

    def storable(self, schema: Any) -> Any:
        """Any."""
        return schema

    def create(self, changes: Changes) -> Applied:
        """As `apply`."""
        return self.apply(changes)

    def apply(self, changes: Changes) -> Applied:
        """Send the changes; they are visible with the cut.

        Raises:
            SourceError: ErrMessageTooLarge; ErrTargetBusy, ErrTargetUnavailable.
        """
        # As they are sent: fitted to a table's schema they would lose what the rows were before.
        slices = tuple(map(_with_before, changes.slices))
        whole = dataclasses.replace(changes, slices=slices, read_schema=None)
        rows, total, built_ms = 0, 0, now_ms()
        for batch in whole.batches():
            own = batch.drop_columns([BEFORE]) if BEFORE in batch.schema.names else batch
            batch_rows, batch_sum = checksum([own])
            rows, total = rows + batch_rows, total + batch_sum
            for start in range(0, batch.num_rows, _CALL_ROWS):
                part = batch.slice(start, _CALL_ROWS)
                messages = self._manifest.encoder.rows(changes.table, part, built_ms)
                self._check_size(changes.table, messages)
                self._manifest.topic.send(messages)
        return Applied(rows, changes.end_ts, hexadecimal(total))

    def write_statement(self, ddl: Ddl, before: ChangefeedMeta, now: ChangefeedMeta) -> None:
        """Send the message of a DDL, in front of the cut that starts at it."""
        if ddl.is_filter_update or not ddl.touched:
            return
        encoder = self._manifest.encoder
        message = encoder.statement(_statement(ddl, before, now), now_ms())
        self._manifest.topic.send_statement(message, to_all=encoder.ddl_to_all)

    def alter(self, table: TableMeta, change: SchemaChange) -> None:
        """Do nothing: each message has its own columns."""

    def rekey(self, table: TableMeta) -> None:
        """Do nothing: each message has its own key."""

    def is_empty(self, table: TableMeta) -> bool:
        """Never: a log does not know which rows are left."""
        del table
        return False

    def truncate(self, table: TableMeta, ts: int) -> None:
        """Do nothing: the statement is a message."""

    def replace(self, table: TableMeta, ts: int, change: SchemaChange) -> None:
        """Do nothing: the statement is a message."""

    def drop(self, table: TableMeta) -> None:
        """Do nothing: the statement is a message."""

    def rename(self, old: TableMeta, new: TableMeta) -> None:
        """Do nothing: the statement is a message."""

    def maintain(self, kept: Retention) -> Health | None:
        """Do nothing: the brokers look after themselves."""

    def close(self) -> None:
        """Do nothing: no work goes on beside the cuts."""

    def _check_size(self, table: TableMeta, messages: Messages) -> None:
        largest, limit = longest(messages), self._manifest.topic.max_message_bytes
        if largest > limit:
            raise SourceError(
                "ErrMessageTooLarge",
                f"{table.name}: the message of a row has {largest} bytes, and the topic takes "
                f"{limit}: raise max.message.bytes of the topic, and max-message-bytes of the sink "
                "URI if it is smaller, or leave the large column out (changefeed create --columns)",
            )


def _with_before(part: SliceEndpoint) -> SliceEndpoint:
    """The same rows, with what each was before."""
    ticket = json.loads(part.ticket) | {"before": True}
    return dataclasses.replace(part, ticket=json.dumps(ticket).encode())


def _statement(ddl: Ddl, before: ChangefeedMeta, now: ChangefeedMeta) -> Statement:
    """What a DDL is about: of several tables the first, as its text has all of them."""
    if ddl.renamed:
        old, new = ddl.renamed[0]
        return Statement(ddl, "RENAME", new, old, now.tables.get(new))
    if ddl.truncated:
        name = ddl.truncated[0]
        return Statement(ddl, "TRUNCATE", name, name, now.tables.get(name))
    if ddl.tables:
        name = ddl.tables[0]
        kind = "ALTER" if name in before.tables and name not in ddl.dropped else "CREATE"
        return Statement(ddl, kind, name, name, now.tables.get(name))
    return Statement(ddl, "ERASE", ddl.dropped[0], ddl.dropped[0], None)
