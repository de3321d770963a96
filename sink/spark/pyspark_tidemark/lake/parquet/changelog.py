# ruff: noqa: B027 - a changelog has nothing to do where other targets change what they hold
"""A Parquet changelog: every change of a table, one directory a cut,
`<root>/<database>/<table>/cut=<end_ts>`.

Invariant: a directory `cut=…` is complete and durable. It is written beside, under a name that
Spark's readers skip, synced and renamed; a repeated cut finds its directory and does nothing. A
local file system, or one that is mounted: renames are atomic.
"""

import base64
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from pyspark_tidemark.defaults import with_column_ids
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.changes import Changes, Counted
from pyspark_tidemark.lake.files import Files, LocalFiles, sync
from pyspark_tidemark.lake.mode import APPEND
from pyspark_tidemark.lake.parquet.part import PART, read_columns, write_part
from pyspark_tidemark.lake.schema import SchemaChange
from pyspark_tidemark.lake.target import Applied, Health, Kept, check_replaceable, table_path

CUT = "cut="
SINCE = "_since-"
"""Begins the name of a file that marks a ts: cuts up to it are those of an earlier table of the
same name.

It holds the new table's schema, as base64 of one IPC schema message: no cut may have it yet.
"""


class Changelog(ABC):
    """The changelogs under one directory; each cut has the schema that the table had then."""

    empties_with_cut = False
    """A reader of cuts asks for the versions that they name."""

    @abstractmethod
    def position(self, table: TableMeta) -> int | None:
        """The end_ts of the newest cut."""

    @abstractmethod
    def create(self, changes: Changes) -> Applied:
        """As `apply`, also without a single row: the table can then be read."""

    def version(self, table: TableMeta) -> int:
        """The newest cut."""
        return self.position(table) or 0

    def schema(self, table: TableMeta) -> Any:
        """That of the newest cut, or of the table that has taken the name since."""
        replaced = marked_schema(self._files(table), self.version(table))
        return self._newest_schema(table) if replaced is None else replaced

    def storable(self, schema: Any) -> Any:
        """The format keeps all types of the captures."""
        return schema

    def apply(self, changes: Changes) -> Applied:
        """Write the cut."""
        return self.create(changes)

    def alter(self, table: TableMeta, change: SchemaChange) -> None:
        """Nothing: the next cut is written with the new schema."""

    def rekey(self, table: TableMeta) -> None:
        """Nothing: a changelog has no key."""

    def is_empty(self, table: TableMeta) -> bool:
        """Never: a changelog tells changes, and not which rows are left."""
        del table
        return False

    def truncate(self, table: TableMeta, ts: int) -> None:
        """Nothing: a changelog keeps what was."""

    def replace(self, table: TableMeta, ts: int, change: SchemaChange) -> None:  # noqa: ARG002 - each cut has its own
        """A mark from where the name is another table's:
        readers at a cut leave out what is below it.
        """
        mark(self._files(table), ts, with_column_ids(table.schema, table.column_ids))

    def maintain(self, kept: Kept) -> Health | None:
        """Nothing: a changelog is kept as it is."""

    def close(self) -> None:
        """Nothing is under way."""

    @abstractmethod
    def _files(self, table: TableMeta) -> Files:
        """What is in the table's directory."""

    @abstractmethod
    def _newest_schema(self, table: TableMeta) -> Any:
        """That of the newest cut."""


class ChangelogTarget(Changelog):
    """On a local file system."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._spark = spark
        self._root = root

    def position(self, table: TableMeta) -> int | None:
        """The end_ts of the newest cut directory."""
        return max(self._cuts(table), default=None)

    def create(self, changes: Changes) -> Applied:
        """As `apply`, also without a single row: the table can then be read."""
        directory = self._directory(changes.table)
        final = directory / f"{CUT}{changes.end_ts}"
        counted = changes.counted(self._spark) if final.exists() else self._written(changes, final)
        return Applied(counted.rows, changes.end_ts, counted.checksum)

    def drop(self, table: TableMeta) -> None:
        """Remove the table's directory."""
        shutil.rmtree(self._directory(table), ignore_errors=True)

    def rename(self, old: TableMeta, new: TableMeta) -> None:
        """Rename the table's directory."""
        source, target = self._directory(old), self._directory(new)
        if not source.exists():
            return
        if target.exists():
            check_replaceable(APPEND, new.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        sync(target.parent)

    def _files(self, table: TableMeta) -> LocalFiles:
        return LocalFiles(self._directory(table))

    def _newest_schema(self, table: TableMeta) -> Any:
        newest = self._directory(table) / f"{CUT}{self.version(table)}"
        return read_columns(next(iter(sorted(newest.glob("*.parquet")))))

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
        entries = self._directory(table).glob(f"{CUT}*")
        return [int(entry.name.removeprefix(CUT)) for entry in entries]


def mark(files: Files, ts: int, schema: Any) -> None:
    """Note that the name is another table's above `ts`, with `schema`;
    durable when it returns, harmless repeated.
    """
    files.create(f"{SINCE}{ts}", base64.b64encode(schema.serialize().to_pybytes()).decode())


def timestamps(names: Iterable[str], prefix: str) -> list[int]:
    """The ts in the names that begin with `prefix`, ascending."""
    return sorted(int(name.removeprefix(prefix)) for name in names if name.startswith(prefix))


def marked_schema(files: Files, newest_cut: int) -> Any:
    """The schema of the table that has taken the name at or above `newest_cut`;
    None if there is none.
    """
    marks = timestamps(files.names(), SINCE)
    if not marks or marks[-1] < newest_cut:
        return None
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(files.read(f"{SINCE}{marks[-1]}"))))
