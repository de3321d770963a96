"""What a format whose lakes are directories must offer: open them for writing, read a table at a
version, and put single rows of it right.

Each format's package has one in its `connector` module, which its `LakeFormat` names.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.formats import find_format
from pyspark_tidemark.lake.target import Target, table_path
from pyspark_tidemark.sink_uri import SinkUri


@dataclass(frozen=True, slots=True)
class StoredTable:
    """One table of a lake."""

    uri: SinkUri
    changefeed: str
    name: str

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
    def open_target(self, arguments: Arguments, spark: SparkSession) -> Target:
        """The tables, for the lake job.

        Raises:
            SourceError: ErrTargetUnusable.
        """

    @abstractmethod
    def read(self, spark: SparkSession, table: StoredTable, version: int) -> DataFrame:
        """The table as it was at a version that a cut names.

        Raises:
            SourceError: ErrCutExpired, the version is gone; ErrSchemaIncompatible.
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
    if record.is_database:
        raise SourceError(
            "ErrTargetInvalid", "a database shows only its newest cut; read its tables as they are"
        )
    connector: LakeConnector = record.implementation()()
    return connector


def _no_repair(table: StoredTable) -> SourceError:
    return SourceError(
        "ErrRepairUnsupported",
        f"table {table.name}: tables of the format {table.uri.format} cannot be repaired in place",
    )
