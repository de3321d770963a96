"""The row changes of one table in one cut, read on the driver when few, by the executors when many."""

import dataclasses
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from pyspark_tidemark.flight import Changefeed, Slice, TableMeta

ENVELOPE = ("_op", "_commit_ts", "_start_ts", "_seq")
DELETE, INSERT = "delete", "insert"
FEW_ROWS = 20_000
"""Up to here a cut's rows of one table go through the driver: starting Python workers costs more than reading them."""


@dataclasses.dataclass(frozen=True)
class Changes:
    """Rows with `start_ts < _commit_ts <= end_ts`; the same range always gives the same rows."""

    table: TableMeta
    start_ts: int
    end_ts: int
    slices: tuple[Slice, ...]
    changefeed: Changefeed
    source_options: dict[str, str]

    @property
    def rows(self) -> int:
        """How many, as planned by the captures."""
        return sum(part.rows for part in self.slices)

    @property
    def few(self) -> bool:
        """Whether the driver reads them."""
        return self.rows <= FEW_ROWS

    @property
    def spark_schema(self) -> StructType:
        """The Spark schema of the changes, envelope included."""
        return from_arrow_schema(self.table.schema)

    def arrow(self) -> Any:
        """All of them as a pyarrow.Table in this process."""
        found = [batch for part in self.slices for batch in self.changefeed.read(part)]
        return pa.Table.from_batches(found, schema=self.table.schema)

    def frame(self, session: SparkSession) -> DataFrame:
        """All of them as a DataFrame, read when it runs: by tasks, or from this process if they are few."""
        if self.few:
            return session.createDataFrame(self.arrow(), schema=self.spark_schema).coalesce(1)
        reader = session.read.format("tidemark").options(**self.source_options)
        bounds = {"table": self.table.name, "startTs": str(self.start_ts), "endTs": str(self.end_ts)}
        return reader.options(**bounds).load()


def lake_columns(table: TableMeta) -> list[str]:
    """What an upserted table holds: the upstream's columns, then the commit_ts of each row's last change."""
    return [name for name in table.schema.names if name not in ENVELOPE] + ["_commit_ts"]


def lake_schema(table: TableMeta) -> Any:
    """The pyarrow.Schema of `lake_columns`."""
    return pa.schema([table.schema.field(name) for name in lake_columns(table)])
