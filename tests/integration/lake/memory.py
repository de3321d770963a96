"""A lake in memory behind the lake job's own code: barriers and cuts are the product's,
only the tables are dicts.

It needs no Spark, so tests can follow thousands of statements; what it promises about a table every
target must.
"""

import dataclasses
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa
from pyspark_tidemark.column_metadata import with_column_ids
from pyspark_tidemark.flight import ACK_AGAIN_S, Changefeed, TableMeta
from pyspark_tidemark.lake.changes import Changes
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.cut_record import CutRecord, Shown
from pyspark_tidemark.lake.format import SOFT_DELETE, UPSERT
from pyspark_tidemark.lake.schema import ENVELOPE, Policy, SchemaChange, lake_schema
from pyspark_tidemark.lake.shards import ShardRows
from pyspark_tidemark.lake.target import Applied, Health, Retention

Row = dict[str, Any]
Key = tuple[Any, ...]


@dataclasses.dataclass
class MemoryTable:
    """The rows by key, and the columns with their identities."""

    schema: Any
    key: tuple[str, ...]
    position: int
    rows: dict[Key, Row] = dataclasses.field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """The upstream's own."""
        return [name for name in self.schema.names if name != "_commit_ts"]

    def keyed(self, row: Row) -> Key:
        """What identifies a row."""
        return tuple(row[name] for name in self.key)


class MemoryTarget:
    """Implements `lake.target.Target`, mode upsert, or of merged tables soft-delete;
    `doubled` are inserts of keys that were there already.
    """

    empties_with_cut = False

    def __init__(self, mode: str = UPSERT) -> None:
        self.marks = mode == SOFT_DELETE
        self.tables: dict[str, MemoryTable] = {}
        self.doubled: list[str] = []

    def position(self, table: TableMeta) -> int | None:
        """See `Target`, as of all methods here."""
        known = self.tables.get(table.name)
        return None if known is None else known.position

    def version(self, table: TableMeta) -> int:
        return self.tables[table.name].position

    def schema(self, table: TableMeta) -> Any:
        return self.tables[table.name].schema

    def storable(self, schema: Any) -> Any:
        return schema

    def create(self, changes: Changes) -> Applied:
        table = changes.table
        self.tables[table.name] = MemoryTable(_schema(table), table.key, changes.start_ts)
        return self.apply(changes)

    def apply(self, changes: Changes) -> Applied:
        """Row by row, in the order of the log: an insert promises that its key is not there."""
        table = self.tables[changes.table.name]
        assert tuple(changes.table.key) == tuple(table.key), (
            f"{changes.table.name}: nobody told that the key changed"
        )
        rows = [change for batch in changes.batches() for change in batch.to_pylist()]
        for change in rows:
            row = {
                name: value
                for name, value in change.items()
                if name not in ENVELOPE or name == "_commit_ts"
            }
            key = table.keyed(row)
            if change["_op"] == "delete":
                table.rows.pop(key, None)
                continue
            there = table.rows.get(key, {"is_deleted": True})
            if change["_op"] == "insert" and not there.get("is_deleted"):
                self.doubled.append(f"{changes.table.name} {key} at {change['_commit_ts']}")
            assert row.keys() == set(table.schema.names), (
                f"{row.keys()} are not {table.schema.names}"
            )
            table.rows[key] = row
        table.position = changes.end_ts
        return Applied(len(rows), changes.end_ts)

    def alter(self, table: TableMeta, change: SchemaChange) -> None:
        known = self.tables[table.name]
        new_names = dict(change.renamed)
        kept = [name for name in known.schema.names if name not in change.dropped]
        filled = {name: value.as_py() for name, value in change.filled}
        added = {field.name: filled.get(field.name) for field in change.added}
        known.rows = {
            key: {new_names.get(name, name): row[name] for name in kept} | added
            for key, row in known.rows.items()
        }
        wide = {field.name: field.type for field in change.widened}
        fields = [(new_names.get(name, name), known.schema.field(name).type) for name in kept]
        fields += [(field.name, field.type) for field in change.added]
        schema = pa.schema([(name, wide.get(name, kind)) for name, kind in fields])
        known.schema = with_column_ids(schema, change.ids)
        known.key = tuple(new_names.get(name, name) for name in known.key)

    def rekey(self, table: TableMeta) -> None:
        known = self.tables[table.name]
        known.key = table.key
        known.rows = {known.keyed(row): row for row in known.rows.values()}

    def is_empty(self, table: TableMeta) -> bool:
        return not self.tables[table.name].rows

    def truncate(self, table: TableMeta, ts: int) -> None:
        self.tables[table.name].rows.clear()

    def replace(self, table: TableMeta, ts: int, change: SchemaChange) -> None:
        self.alter(table, change)
        known = self.tables[table.name]
        known.rows, known.key, known.position = {}, table.key, max(ts, known.position)

    def drop(self, table: TableMeta) -> None:
        self.tables.pop(table.name, None)

    def rename(self, old: TableMeta, new: TableMeta) -> None:
        if old.name in self.tables:
            self.tables[new.name] = self.tables.pop(old.name)

    def shards(self, table: TableMeta) -> set[str]:
        rows = self.tables[table.name].rows.values()
        return {row[table.key[0]] for row in rows if not row.get("is_deleted")}

    def change_rows(self, table: TableMeta, steps: Sequence[ShardRows]) -> None:
        known = self.tables[table.name]
        for step in steps:
            for key, row in list(known.rows.items()):
                if row[step.column] != step.shard:
                    continue
                if step.is_gone and self.marks:
                    ts = row["_commit_ts"] if row["is_deleted"] else step.ts
                    known.rows[key] = row | {"is_deleted": True, "_commit_ts": ts}
                    continue
                del known.rows[key]
                if step.is_gone:
                    continue
                values = {
                    field.name: None if value is None else value.as_py()
                    for field, value in step.filled
                }
                assert values.keys() <= row.keys()
                changed = row | values | {step.column: step.new_name or step.shard}
                known.rows[known.keyed(changed)] = changed

    def maintain(self, kept: Retention) -> Health | None:
        del kept
        return None

    def close(self) -> None:
        return


class MemoryManifest:
    """Implements `lake.manifest.Manifest`."""

    def __init__(self) -> None:
        self.last: CutRecord | None = None
        self._moved: set[int] = set()

    def announce(self, start_ts: int, end_ts: int, *, moved: bool = False) -> int:
        del start_ts, moved
        return end_ts

    def commit(self, record: CutRecord) -> None:
        self.last = record

    def note_moved(self, ts: int) -> None:
        self._moved.add(ts)

    def moved_at(self, ts: int) -> bool:
        return ts in self._moved

    def shown(self) -> dict[str, Shown]:
        return {}

    def cuts(self) -> list[CutRecord]:
        return [] if self.last is None else [self.last]

    def tidy(self, horizon: datetime) -> None:
        del horizon


class MemoryLake:
    """Follows a changefeed: `tables` are those it has now, by name."""

    def __init__(self, changefeed: Changefeed, start_ts: int) -> None:
        self.target = MemoryTarget()
        self.at_ts = start_ts
        self.dropped: set[str] = set()
        self._ack_again_at = time.monotonic() + ACK_AGAIN_S
        self._changefeed = changefeed
        self._manifest = MemoryManifest()
        self.begin_again()

    def begin_again(self) -> None:
        """As a job that died within a cut."""
        self._applier = CutApplier(
            self._changefeed,
            "memory",
            self.target,
            self._manifest,
            policy=Policy(UPSERT, on_drop="drop"),
            writers=TableWriters(source_options={}, spark=None, parallel=1),
        )  # type: ignore[arg-type]

    def follow(self, *, wait_ms: int = 200, acknowledges: bool = True) -> bool:
        """Apply the next cut, if there is one."""
        end_ts = self._changefeed.latest(self.at_ts, wait_ms=wait_ms)
        if end_ts <= self.at_ts:
            if acknowledges and time.monotonic() >= self._ack_again_at:
                self._changefeed.ack_again(self.at_ts)
                self._ack_again_at = time.monotonic() + ACK_AGAIN_S
            return False
        self._applier.apply(Cut(0, self.at_ts, end_ts))
        # The cut is in the lake, whether or not the capture lives to say that it knows.
        self.at_ts = end_ts
        if acknowledges:
            self.acknowledge()
        return True

    def acknowledge(self) -> None:
        """Say that the last cut is durable."""
        self._applier.acknowledge()


def _schema(table: TableMeta) -> Any:
    return with_column_ids(lake_schema(table), table.column_ids)
