"""A Parquet changelog: every change of a table, one directory a cut, `<root>/<database>/<table>/cut=<end_ts>`.

Invariant: a directory `cut=…` is complete and durable. It is written beside, under a name that Spark's readers skip,
synced and renamed; a repeated cut finds its directory and does nothing. A local file system, or one that is mounted:
renames are atomic.
"""

import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.changes import Changes, Counted
from pyspark_tidemark.lake.files import sync
from pyspark_tidemark.lake.part import PART, write_part
from pyspark_tidemark.lake.schema import SchemaChange
from pyspark_tidemark.lake.target import Applied, Health, Kept, table_path

CUT = "cut="


class ChangelogTarget:
    """The changelogs under one directory; each cut has the schema that the table had then."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._spark = spark
        self._root = root

    def position(self, table: TableMeta) -> int | None:
        """The end_ts of the newest cut directory."""
        return max(self._cuts(table), default=None)

    def version(self, table: TableMeta) -> int:
        """The newest cut."""
        return self.position(table) or 0

    def schema(self, table: TableMeta) -> Any:
        """That of the newest cut."""
        newest = self._directory(table) / f"{CUT}{self.version(table)}"
        return pq.read_schema(next(iter(sorted(newest.glob("*.parquet"))))).remove_metadata()

    def storable(self, schema: Any) -> Any:
        """The format keeps all types of the captures."""
        return schema

    def create(self, changes: Changes) -> Applied:
        """As `apply`, also without a single row: the table can then be read."""
        directory = self._directory(changes.table)
        final = directory / f"{CUT}{changes.end_ts}"
        counted = changes.counted(self._spark) if final.exists() else self._written(changes, final)
        return Applied(counted.rows, changes.end_ts, counted.checksum)

    def apply(self, changes: Changes) -> Applied:
        """Write the cut's directory."""
        return self.create(changes)

    def alter(self, table: TableMeta, change: SchemaChange) -> None:
        """Nothing: the next cut is written with the new schema."""

    def truncate(self, table: TableMeta, ts: int) -> None:
        """Nothing: a changelog keeps what was."""

    def drop(self, table: TableMeta) -> None:
        """Remove the table's directory."""
        shutil.rmtree(self._directory(table), ignore_errors=True)

    def rename(self, old: TableMeta, new: TableMeta) -> None:
        """Rename the table's directory."""
        source, target = self._directory(old), self._directory(new)
        if source.exists() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)

    def maintain(self, kept: Kept) -> Health | None:
        """Nothing: a changelog is kept as it is."""

    def close(self) -> None:
        """Nothing is under way."""

    def _written(self, changes: Changes, final: Path) -> Counted:
        staged = final.with_name(f"_staged-{changes.end_ts}")
        shutil.rmtree(staged, ignore_errors=True)
        if changes.in_arrow:
            staged.mkdir(parents=True)
            counted = write_part(changes, staged / PART)
        else:
            changes.frame(self._spark).write.parquet(str(staged))
            counted = changes.counted(self._spark)
        for path in (*staged.iterdir(), staged):
            sync(path)
        staged.rename(final)
        sync(final.parent)
        return counted

    def _directory(self, table: TableMeta) -> Path:
        return Path(table_path(self._root, table.name))

    def _cuts(self, table: TableMeta) -> list[int]:
        found = self._directory(table).glob(f"{CUT}*")
        return [int(entry.name.removeprefix(CUT)) for entry in found]
