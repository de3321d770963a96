"""A lake of any kind, kept by the lake job's own steps in this process,
and all its rows as a reader sees them.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark_tidemark.column_metadata import scalar
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed, ChangefeedMeta, TableMeta
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.cut_record import CutRecord
from pyspark_tidemark.lake.format import SCD2
from pyspark_tidemark.lake.opening import open_target, opened_manifest
from pyspark_tidemark.lake.parquet.target import CUT, SINCE, timestamps
from pyspark_tidemark.lake.reading import as_of_cut
from pyspark_tidemark.lake.schema import own_columns
from pyspark_tidemark.lake.target import table_path
from pyspark_tidemark.options import parse

from tests.integration.lake.test_databases import rows

PATIENCE_S = 900
Row = dict[str, Any]


class Told(Changefeed):
    """Remembers which tables DDLs have emptied, which a changelog does not."""

    truncated: Mapping[str, int] = {}

    def describe(self, *arguments: Any, **named: Any) -> ChangefeedMeta:
        found = super().describe(*arguments, **named)
        self.truncated = {**self.truncated} | {
            name: ddl.ts for ddl in found.ddls for name in ddl.truncated
        }
        return found


class KeptLake:
    """The lake of one changefeed; the same object may keep it several times."""

    def __init__(
        self, endpoint: str, changefeed: str, target: str, spark: Any, directory: Path
    ) -> None:
        flags = [
            "--endpoint",
            endpoint,
            "--changefeed",
            changefeed,
            "--target",
            target,
            "--on-drop",
            "drop",
        ]
        self._arguments = Arguments.parse([*flags, "--checkpoint-dir", str(directory)])
        self._changefeed = Told(parse(self._arguments.source_options | {"cuts": "true"}))
        self._spark = spark
        self._judged_ts = -1

    def keep(self, is_last: Callable[[CutRecord], bool]) -> None:
        """Apply and acknowledge cuts up to the last one; start again as a job does that may."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._live(is_last, deadline)
            except SourceError as err:
                if not err.retryable or time.monotonic() > deadline:
                    raise
            else:
                return

    def _live(self, is_last: Callable[[CutRecord], bool], deadline: float) -> None:
        arguments = self._arguments
        with opened_manifest(arguments, lambda: self._spark) as manifest:
            target = open_target(arguments, self._spark, manifest)
            applier = CutApplier(
                self._changefeed,
                arguments.changefeed,
                target,
                manifest,
                policy=arguments.policy,
                writers=TableWriters(
                    arguments.source_options, self._spark, parallel=2, write=arguments.write
                ),
            )
            at_ts = (
                self._changefeed.describe().checkpoint_ts
                if manifest.last is None
                else manifest.last.end_ts
            )
            newest = manifest.last  # it may be one behind which a life ended
            ended = newest is not None and newest.end_ts > self._judged_ts and is_last(newest)
            while not ended:
                assert time.monotonic() < deadline, f"{arguments.target} is at {at_ts} only"
                end_ts = self._changefeed.latest(at_ts, wait_ms=1000)
                if end_ts > at_ts:
                    record = applier.apply(Cut(0, at_ts, end_ts))
                    applier.acknowledge()
                    at_ts = self._judged_ts = record.end_ts
                    ended = is_last(record)
            target.close()

    def tables(self) -> dict[str, list[Row]]:
        """All rows of all tables, without our own columns."""
        tables = self._changefeed.describe().tables
        if self._arguments.target.is_database:
            return {
                name: [_own(row) for row in rows(str(self._arguments.target), name)]
                for name in tables
            }
        if self._arguments.target.format == "parquet":
            return {name: list(self._folded(table).values()) for name, table in tables.items()}
        frames = as_of_cut(self._spark, str(self._arguments.target))
        return {
            name: [_own(row) for row in frame.toArrow().to_pylist()]
            for name, frame in frames.items()
        }

    def _folded(self, table: TableMeta) -> dict[tuple[Any, ...], Row]:
        """What the changes of a changelog come to, as a reader puts them together:
        columns are told by identity.
        """
        directory = Path(table_path(self._arguments.target.path, table.name))
        names = [path.name for path in directory.iterdir()]
        since = max(
            [*timestamps(names, SINCE), self._changefeed.truncated.get(table.name, 0)], default=0
        )
        live: dict[tuple[Any, ...], Row] = {}
        for ts in timestamps(names, CUT):
            for part in sorted((directory / f"{CUT}{ts}").glob("*.parquet")) if ts > since else ():
                for op, row in _changes(part, table):
                    key = tuple(row[name] for name in table.key)
                    live.pop(key, None)
                    if op != "delete":
                        live[key] = row
        return live


def has_rows(record: CutRecord, table: str) -> bool:
    """Whether a cut brings rows of a table."""
    return any(each.table == table and each.rows for each in record.tables)


def _changes(part: Path, table: TableMeta) -> list[tuple[str, Row]]:
    """The operations of a file and their rows, with the columns that the table has now."""
    with pq.ParquetFile(part) as file:
        found = file.read()
    stored = {
        int(field.metadata[b"PARQUET:field_id"]): field.name
        for field in found.schema
        if field.metadata
    }
    columns = {
        field.name: field.type for field in table.schema if field.name not in own_columns(SCD2)
    }
    older = {name: scalar(value, columns[name]).as_py() for name, value in table.defaults.items()}
    return [
        (
            row["_op"],
            {
                name: row[stored[number]]
                if (number := table.column_ids[name]) in stored
                else older.get(name)
                for name in columns
            },
        )
        for row in found.to_pylist()
    ]


def _own(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in own_columns(SCD2)}


def fitted(rows: list[Row], schema: Any) -> list[Row]:
    """Rows with the Python types that the columns of a schema have;
    as they are where they have other columns.
    """
    if any(row.keys() != set(schema.names) for row in rows):
        return rows
    return pa.Table.from_pylist(rows, schema=schema).to_pylist()
