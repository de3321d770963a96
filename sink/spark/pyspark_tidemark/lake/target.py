"""What a target must offer: a position for each table, the changes of one cut applied in one step, and its schema."""

import dataclasses
from datetime import datetime
from typing import Any, Protocol
from urllib.parse import SplitResult, parse_qsl, urlsplit

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.changes import Changes
from pyspark_tidemark.lake.mode import APPEND, MODES, SCD2, UPSERT
from pyspark_tidemark.lake.schema import SchemaChange

MODES_OF = {
    "delta": (UPSERT, APPEND, SCD2),
    "iceberg": (UPSERT, APPEND),
    "parquet": (APPEND,),
    "postgresql": (UPSERT, APPEND, SCD2),
    "mysql": (UPSERT, APPEND, SCD2),
}
"""What each format can do, its default first."""
DATABASES = ("postgresql", "mysql")
SYSTEMS = ("hdfs", "viewfs", "s3a")
"""Hadoop's file systems that can hold a lake, by scheme: see `lake.hadoop`."""
RENAMING = ("hdfs", "viewfs")
"""Those whose rename is one step that fails if there is a file of the new name."""
TARGETS = (
    "FORMAT:///path or FORMAT+SCHEME://authority/path, with a FORMAT of delta, iceberg, parquet and a SCHEME of "
    f"{', '.join(SYSTEMS)}; postgresql://user@host:port/db or mysql://user@host:port/db"
)
_DATABASE_OPTIONS = ("password-file", "ca-path")


@dataclasses.dataclass(frozen=True)
class Applied:
    """What one cut did to one table: changes read, their checksum, and the version that holds them."""

    rows: int
    version: int
    checksum: str | None = None


@dataclasses.dataclass(frozen=True)
class Health:
    """What maintenance found in a table's files; deleted rows are those that readers must leave out."""

    files: int = 0
    small_files: int = 0
    rows: int = 0
    deleted_rows: int = 0

    def __add__(self, other: "Health") -> "Health":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Health(*[one + two for one, two in pairs])


class Kept(Protocol):
    """The cuts that readers may still ask for."""

    @property
    def horizon(self) -> datetime:
        """When the oldest of them was applied."""

    def versions(self, table: str) -> frozenset[int]:
        """The versions of a table that they show."""


class Target(Protocol):
    """Tables of one format in one mode; calls for different tables may come from different threads."""

    def position(self, table: TableMeta) -> int | None:
        """The end_ts up to which `table` is applied; None if it does not exist yet."""

    def version(self, table: TableMeta) -> int:
        """What a reader asks for to see `table` as it is now."""

    def schema(self, table: TableMeta) -> Any:
        """The pyarrow.Schema of the table as it is in the target."""

    def storable(self, schema: Any) -> Any:
        """A pyarrow.Schema with the types that the format keeps."""

    def create(self, changes: Changes) -> Applied:
        """Apply the first changes of a table; durable when it returns, harmless when repeated."""

    def apply(self, changes: Changes) -> Applied:
        """Apply later changes; durable when it returns, harmless when repeated."""

    def alter(self, table: TableMeta, change: SchemaChange) -> None:
        """Change the table's columns; harmless when repeated."""

    def truncate(self, table: TableMeta, ts: int) -> None:
        """The upstream's table is empty at `ts`: so is the target's, but for the history that its mode keeps."""

    def drop(self, table: TableMeta) -> None:
        """Remove the table, if it is there."""

    def rename(self, old: TableMeta, new: TableMeta) -> None:
        """Give the table another name, if it still has the old one."""

    def maintain(self, kept: Kept) -> Health | None:
        """Do what may wait between cuts, for a bounded time or beside them; None: there was nothing to do."""

    def close(self) -> None:
        """Wait for what is under way."""


@dataclasses.dataclass(frozen=True)
class TargetUri:
    """`FORMAT:///directory`, `FORMAT+SCHEME://authority/path`, or a database with the file that holds its password."""

    format: str
    path: str
    """A directory of this machine; with a scheme, one that Hadoop reaches; a database's name."""
    host: str = ""
    port: int = 0
    user: str = ""
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "TargetUri":
        """Read the URI.

        Raises:
            SourceError: ErrTargetInvalid.
        """
        parts = urlsplit(text)
        if parts.scheme in DATABASES:
            return cls._database(parts)
        if "+" in parts.scheme:
            return cls._remote(parts)
        if parts.scheme not in MODES_OF or parts.netloc or not parts.path.startswith("/") or parts.query:
            raise SourceError("ErrTargetInvalid", f"--target is {TARGETS}, not {text!r}")
        return cls(parts.scheme, parts.path.rstrip("/") or "/")

    @classmethod
    def _remote(cls, parts: SplitResult) -> "TargetUri":
        found, _, system = parts.scheme.partition("+")
        if parts.username is not None or parts.query:
            raise SourceError(
                "ErrTargetInvalid",
                "credentials and settings of a file system are Hadoop's: --conf spark.hadoop.fs.…, or its own files",
            )
        if found not in MODES_OF or found in DATABASES or system not in SYSTEMS or not parts.path.startswith("/"):
            hints = {
                "file": f"; a directory of this machine is {found}:///path",
                "s3": "; S3 is s3a",
                "s3n": "; S3 is s3a",
            }
            raise SourceError("ErrTargetInvalid", f"--target is {TARGETS}{hints.get(system, '')}")
        if system == "s3a" and not parts.netloc:
            raise SourceError("ErrTargetInvalid", f"{parts.scheme}:// needs a bucket: {parts.scheme}://bucket/path")
        if found == "iceberg" and system not in RENAMING:
            raise SourceError(
                "ErrTargetInvalid",
                f"Iceberg commits to directories by renaming, which {system} cannot do in one step, so two jobs could "
                f"destroy a table: take delta+{system}:// or parquet+{system}://",
            )
        return cls(found, f"{system}://{parts.netloc}{parts.path.rstrip('/') or '/'}")

    @classmethod
    def _database(cls, parts: SplitResult) -> "TargetUri":
        if parts.password is not None:
            raise SourceError("ErrTargetInvalid", "the target's password belongs into a file: ?password-file=/path")
        options = tuple(parse_qsl(parts.query, keep_blank_values=True))
        unknown = [name for name, _ in options if name not in _DATABASE_OPTIONS]
        name = parts.path.strip("/")
        if unknown or not parts.hostname or not parts.username or not name or "/" in name:
            said = f"unknown {', '.join(unknown)}; " if unknown else ""
            raise SourceError(
                "ErrTargetInvalid",
                f"{said}a database target is {parts.scheme}://user@host:port/database?"
                f"{'&'.join(f'{option}=/path' for option in _DATABASE_OPTIONS)} (both optional)",
            )
        port = parts.port or (5432 if parts.scheme == "postgresql" else 3306)
        return cls(parts.scheme, name, parts.hostname, port, parts.username, options)

    @property
    def is_database(self) -> bool:
        """Whether it is not a directory."""
        return self.format in DATABASES

    @property
    def is_remote(self) -> bool:
        """Whether it is a directory that Hadoop reaches."""
        return "://" in self.path

    def option(self, name: str) -> str:
        """The option's value; empty if it is not given."""
        return dict(self.options).get(name, "")

    def mode(self, wanted: str) -> str:
        """`wanted`, or the format's default for an empty one.

        Raises:
            SourceError: ErrModeUnsupported.
        """
        modes = MODES_OF[self.format]
        if wanted and wanted not in modes:
            raise SourceError(
                "ErrModeUnsupported",
                f"a {self.format} target cannot do --mode {wanted}; it can do {', '.join(modes)}"
                if wanted in MODES
                else f"--mode is {', '.join(MODES)}, not {wanted!r}",
            )
        return wanted or modes[0]


def table_path(root: str, name: str) -> str:
    """Where table `database.table` lies under `root`."""
    database, _, table = name.partition(".")
    return f"{root}/{database}/{table}"
