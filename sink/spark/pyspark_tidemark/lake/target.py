"""What a lake format must offer: a position for each table, and the changes of one cut applied in one step."""

import dataclasses
from typing import Protocol
from urllib.parse import urlsplit

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.changes import Changes

FORMATS = ("delta", "parquet")


@dataclasses.dataclass(frozen=True)
class Applied:
    """What one cut did to one table: changes read, and the version that holds them."""

    rows: int
    version: int


class Target(Protocol):
    """Tables of one format under one directory; calls for different tables may come from different threads."""

    def position(self, table: TableMeta) -> int | None:
        """The end_ts up to which `table` is applied; None if it does not exist yet."""

    def version(self, table: TableMeta) -> int:
        """What a reader asks for to see `table` as it is now."""

    def create(self, changes: Changes) -> Applied:
        """Apply the first changes of a table; durable when it returns, harmless when repeated."""

    def apply(self, changes: Changes) -> Applied:
        """Apply later changes; durable when it returns, harmless when repeated."""

    def maintain(self) -> None:
        """Do what may wait between cuts."""


@dataclasses.dataclass(frozen=True)
class TargetUri:
    """`delta:///directory` or `parquet:///directory`."""

    format: str
    path: str

    @classmethod
    def parse(cls, text: str) -> "TargetUri":
        """Read the URI.

        Raises:
            SourceError: ErrTargetInvalid.
        """
        parts = urlsplit(text)
        if parts.scheme not in FORMATS or parts.netloc or not parts.path.startswith("/") or parts.query:
            raise SourceError(
                "ErrTargetInvalid", f"--target is delta:///absolute/path or parquet:///absolute/path, not {text!r}"
            )
        return cls(parts.scheme, parts.path.rstrip("/") or "/")


def table_path(root: str, name: str) -> str:
    """Where table `database.table` lies under `root`."""
    database, _, table = name.partition(".")
    return f"{root}/{database}/{table}"
