"""The interface of a lake format, and the paths of its tables (`table_path`).

`Target` is what the lake job needs of a format: the position of each table, a cut applied to it in
one commit, its schema and changes of it. The protocols after it are optional abilities, which the
job looks for with `isinstance`. `LakeConnector` is for formats whose lakes are directories or
catalogs: it opens the target, reads a table at a version, and repairs single rows. Each format's
package has both in its `target` module, and its `LakeFormat` names the connector.

Invariant (the fence): a table's changes and its position are committed in one step, so a step that
is repeated, or that another job has made, is recognised by the position.
"""

import dataclasses
import hashlib
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import ChangefeedMeta, Ddl, TableMeta
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.changes import Changes
from pyspark_tidemark.lake.columns import quoted
from pyspark_tidemark.lake.cut_record import Shown
from pyspark_tidemark.lake.cut_tasks import TaskWriter
from pyspark_tidemark.lake.format import ROW_MODES
from pyspark_tidemark.lake.manifest import Manifest
from pyspark_tidemark.lake.registry import find_format
from pyspark_tidemark.lake.schema import SchemaChange
from pyspark_tidemark.lake.shards import ShardRows
from pyspark_tidemark.lake.soft_delete import IS_DELETED
from pyspark_tidemark.sink_uri import SinkUri

_ESCAPE = "~"
_NOT_IN_PATHS = frozenset('/\\%:*?"<>|[]{}=' + _ESCAPE)
_OWN_NAMES = ("_tidemark", "_delta_log", "_spark_metadata")
_PART_BYTES, _READABLE_BYTES, _DIGEST_CHARACTERS = 200, 120, 40
"""File systems take 255 bytes; files beside a table have longer names than the table."""


@dataclasses.dataclass(frozen=True)
class Applied:
    """The outcome of one cut for one table: the number of its changes, their checksum, and the
    table's version that has them.
    """

    rows: int
    version: int
    checksum: str | None = None
    replaced: int = 0
    """Keys that the cut inserts and that were there already."""


@dataclasses.dataclass(frozen=True)
class Health:
    """The state of a table's files; deleted rows are those that readers must leave out."""

    files: int = 0
    small_files: int = 0
    rows: int = 0
    deleted_rows: int = 0

    def __add__(self, other: "Health") -> "Health":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Health(*[one + two for one, two in pairs])


class Retention(Protocol):
    """Which cuts readers may still ask for, as `maintain` needs it (`maintenance.KeptCuts`)."""

    @property
    def horizon(self) -> datetime:
        """The time from which on all cuts are kept, and the one that was the newest then."""

    def versions(self, table: str) -> frozenset[int]:
        """The versions of a table that kept cuts show."""


class Target(Protocol):
    """Tables of one format in one mode; calls for different tables may come from different
    threads.
    """

    @property
    def empties_with_cut(self) -> bool:
        """Whether `apply` can empty a table in the same commit as a cut (`Changes.emptied`); else
        the barrier calls `truncate`.
        """

    def position(self, table: TableMeta) -> int | None:
        """The end_ts up to which `table` is applied; None if it does not exist yet."""

    def version(self, table: TableMeta) -> int:
        """The version by which a reader gets `table` as it is now."""

    def schema(self, table: TableMeta) -> Any:
        """The pyarrow.Schema of the table as it is in the target."""

    def storable(self, schema: Any) -> Any:
        """The schema (pyarrow.Schema) that the format returns for a table that was made with
        `schema`: types that it does not have are replaced.
        """

    def create(self, changes: Changes) -> Applied:
        """Apply the first changes of a table; durable when it returns, harmless when repeated."""

    def apply(self, changes: Changes) -> Applied:
        """Apply later changes; durable when it returns, harmless when repeated."""

    def alter(self, table: TableMeta, change: SchemaChange) -> None:
        """Change the table's columns; harmless when repeated."""

    def rekey(self, table: TableMeta) -> None:
        """Identify rows by the columns `table.key` from now on; harmless when repeated."""

    def is_empty(self, table: TableMeta) -> bool:
        """Whether the table has no row."""

    def truncate(self, table: TableMeta, ts: int) -> None:
        """Remove the table's rows as of `ts`; modes that keep history end, mark or leave them."""

    def replace(self, table: TableMeta, ts: int, change: SchemaChange) -> None:
        """Make the target's table of this name `table`, which is a new one upstream: without rows
        above `ts`, and with the columns that `change` leads to.

        The history that the mode keeps of the earlier table stays. Harmless when repeated.
        """

    def drop(self, table: TableMeta) -> None:
        """Remove the table, if it is there."""

    def rename(self, old: TableMeta, new: TableMeta) -> None:
        """Give the table another name, if it still has the old one.

        A table that still has the new name was dropped upstream and kept: see `check_replaceable`.
        """

    def maintain(self, kept: Retention) -> Health | None:
        """Do due maintenance (compaction, expiry), for a bounded time or in the background; None:
        there was nothing to do.
        """

    def close(self) -> None:
        """Wait for the work in the background."""


@runtime_checkable
class VersionedTarget(Protocol):
    """A target that can tell whether somebody else has rolled back or removed a table."""

    @property
    def names_are_paths(self) -> bool:
        """Whether a table's path is made of its name (`table_path`)."""

    def check_continues(self, table: TableMeta, shown: Shown) -> None:
        """Check that a table which is there has all that the newest cut shows of it.

        Raises:
            SourceError: ErrTableRolledBack, somebody else has put an older state of it there;
                ErrTableRemoved.
        """


@runtime_checkable
class TaskTarget(Protocol):
    """A target whose files Spark's tasks can write, of many tables in one job
    (`lake.cut_tasks`).
    """

    def task_writer(self, changes: Changes, *, is_new: bool) -> TaskWriter | None:
        """The writer of the changes' files in tasks; `create` of a new table or `apply` then
        commits the files. None: these read the changes and write the files themselves.
        """


@runtime_checkable
class ShardTarget(Protocol):
    """A target that can keep tables which are merged of shards (`lake.shards`)."""

    def shards(self, table: TableMeta) -> set[str]:
        """The shards that have rows in the table, marked ones aside; empty for a changelog."""

    def change_rows(self, table: TableMeta, steps: Sequence[ShardRows]) -> None:
        """Change the rows of shards, in the modes `upsert` and `soft-delete`: each step for itself,
        or all at once. Harmless when repeated.

        In `soft-delete` a name that a shard gets may have marked rows of an earlier one; those
        whose key the shard has, too, go.
        """


@runtime_checkable
class StatementTarget(Protocol):
    """A target that also gets the DDL statements themselves, as a topic does."""

    def write_statement(self, ddl: Ddl, before: ChangefeedMeta, now: ChangefeedMeta) -> None:
        """Write a statement that is crossed; `before` and `now` are the changefeed below and above
        its ts. Called after the next cut was announced, and before its rows are written.
        """


@dataclass(frozen=True, slots=True)
class StoredTable:
    """One table of a lake."""

    uri: SinkUri
    changefeed: str
    name: str
    ts: int | None = None
    """At which it is read, by a cut that ends there or before; None: that is not known."""

    @property
    def path(self) -> str:
        """Its directory."""
        return table_path(self.uri.path, self.name)


@dataclass(frozen=True, slots=True)
class Repair:
    """The keys that go, and the rows that come (pyarrow.Tables), as of the cut at `ts`."""

    ts: int
    key: tuple[str, ...]
    gone: Any
    live: Any

    @property
    def rows(self) -> Any:
        """The rows that come, as the lake has them: with `_commit_ts`, which is the cut."""
        cuts = pa.array([self.ts] * len(self.live), pa.int64())
        return self.live.append_column("_commit_ts", cuts)


class LakeConnector(ABC):
    """Access to lakes of one format."""

    @abstractmethod
    def open_target(self, arguments: Arguments, spark: SparkSession, manifest: Manifest) -> Target:
        """The tables, for the lake job, which has the manifest open.

        Raises:
            SourceError: ErrTargetUnusable.
        """

    @abstractmethod
    def read(self, spark: SparkSession, table: StoredTable, version: int) -> DataFrame:
        """The table as it was at a version that a cut names.

        Raises:
            SourceError: ErrCutExpired, the version is gone, or the table is another one now;
                ErrSchemaIncompatible.
        """

    def changes_after(self, spark: SparkSession, table: StoredTable, version: int) -> str:
        """The operations after a version that changed rows; empty: none."""
        del spark, version
        raise _no_repair(table)

    def repair(self, spark: SparkSession, table: StoredTable, repair: Repair) -> int:
        """Remove keys and add rows in one commit, fences as they are; returns the new version."""
        del spark, repair
        raise _no_repair(table)


def open_connector(lake_format: str) -> LakeConnector:
    """The connector of a format whose lakes are directories.

    Raises:
        SourceError: ErrTargetInvalid, there is no such format.
    """
    record = find_format(lake_format)
    if record.is_topic:
        raise no_reading(lake_format)
    if record.is_database:
        raise SourceError(
            "ErrTargetInvalid", "a database shows only its newest cut; read its tables as they are"
        )
    connector: LakeConnector = record.implementation()()
    return connector


def shards_in(rows: DataFrame, table: TableMeta) -> set[str]:
    """The shards of which there are rows of a merged table."""
    if IS_DELETED in rows.columns:
        rows = rows.where(f"NOT {IS_DELETED}")
    shards = rows.select(quoted(table.key[0])).distinct().collect()
    return {row[0] for row in shards}


def removed(table: str) -> SourceError:
    """The error for a table that the newest cut shows, and that is not there any more."""
    # Made anew, it would have the changes from here on and no row of before.
    return SourceError(
        "ErrTableRemoved",
        f"the lake's newest cut has the table {table}, and somebody else has removed it: bring it "
        "back as it was, then start the job again; or create a new changefeed with a new target",
    )


def rolled_back(table: str, way_back: str) -> SourceError:
    """The error for a table that shows less than the newest cut; `way_back` says how what is
    missing can be had again.
    """
    return SourceError(
        "ErrTableRolledBack",
        f"{table} lacks changes that the lake's newest cut has: somebody else has rolled it back, "
        f"restored a copy, or made it anew. {way_back}, then start the job again; if what is "
        "missing is gone, create a new changefeed with a new target",
    )


def no_reading(lake_format: str) -> SourceError:
    """The error for a read of tables at a cut from a topic."""
    return SourceError(
        "ErrTargetInvalid",
        f"a {lake_format} target is a log: it holds changes, and no tables that could be read at a "
        "cut, compared with the upstream or repaired; consume its messages",
    )


def _no_repair(table: StoredTable) -> SourceError:
    return SourceError(
        "ErrRepairUnsupported",
        f"table {table.name}: tables of the format {table.uri.format} cannot be repaired in place",
    )


def check_replaceable(mode: str, name: str) -> None:
    """Check that a table which was dropped upstream and kept may be replaced by one that is renamed
    to its name.

    Raises:
        SourceError: ErrRenameUnsupported, it holds a history that would be lost.
    """
    if mode not in ROW_MODES:
        raise SourceError(
            "ErrRenameUnsupported",
            f"another table becomes {name}, of which the target still keeps the history: it was "
            f"dropped upstream. Move {name} of the target to another name, then start again",
        )


def table_path(root: str, name: str) -> str:
    """Where table `database.table` lies under `root`; two tables never lie at one place,
    and none outside of it.
    """
    database, _, table = name.partition(".")
    return f"{root}/{path_part(database)}/{path_part(table)}"


def path_part(name: str) -> str:
    """A database's or table's name as one part of a path: plain names as they are,
    any other with `~XX` for a byte.

    Escaped are characters that mean something to file systems, to Hadoop's paths or to Spark's
    readers, dots at an end, and names that lakes use themselves. What gets too long for a file
    system ends with `~~` and a hash of the name.
    """
    parts = [each if _is_plain(each) else _escaped(each) for each in name]
    # File systems may take two spellings of one character for one name.
    if not unicodedata.is_normalized("NFC", "".join(parts)):
        parts = [each if each.isascii() else _escaped(each) for each in parts]
    if name.startswith(".") or name.casefold().startswith(_OWN_NAMES):
        parts[0] = _escaped(name[0])
    if name.endswith((".", " ")):
        parts[-1] = _escaped(name[-1])
    text = "".join(parts).encode()
    if len(text) <= _PART_BYTES:
        return text.decode() or _ESCAPE
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{text[:_READABLE_BYTES].decode(errors='ignore')}{_ESCAPE * 2}{digest}"


def _is_plain(character: str) -> bool:
    return character.isprintable() and character not in _NOT_IN_PATHS


def _escaped(character: str) -> str:
    return "".join(f"{_ESCAPE}{byte:02X}" for byte in character.encode(errors="surrogatepass"))
