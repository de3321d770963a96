"""A lake's table as rows at a cut, whatever the target keeps: rows, every change, or every version of each row."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cuts import CutRecord, versions_at
from pyspark_tidemark.lake.fold import fold_frame
from pyspark_tidemark.lake.mode import APPEND, SCD2, UPSERT, VALID_FROM, VALID_TO
from pyspark_tidemark.lake.predicate import quoted
from pyspark_tidemark.lake.target import TargetUri, table_path


@dataclass(frozen=True, slots=True)
class LakeTable:
    """One table of the lake, at a cut."""

    uri: TargetUri
    name: str
    cut: int
    mode: str
    version: int | None
    """None: the lake has no such table at the cut."""
    key: tuple[str, ...]
    schema: Any
    """The upstream's columns, as a pyarrow.Schema."""

    @classmethod
    def parse(cls, uri: TargetUri, cuts: Sequence[CutRecord], request: dict[str, Any]) -> "LakeTable":
        """Of a request's members `table`, `cut`, `key`, `schema`."""
        name, cut = request["table"], request["cut"]
        mode = next((record.mode for record in cuts if record.end_ts == cut), None)
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(request["schema"])))
        usual = APPEND if uri.format == "parquet" else UPSERT
        return cls(uri, name, cut, mode or usual, versions_at(cuts, cut).get(name), tuple(request["key"]), schema)

    @property
    def path(self) -> str:
        """Its directory."""
        return table_path(self.uri.path, self.name)

    def frame(self, spark: SparkSession) -> DataFrame | None:
        """The rows, in the columns of the upstream; None if there is no such table.

        Raises:
            SourceError: ErrVerifyColumns, the lake lacks columns; ErrVerifyUnsupported.
        """
        if self.version is None:
            return None
        found = self._as_of_cut(self._stored(spark))
        missing = [name for name in self.schema.names if name not in found.columns]
        if missing:
            raise SourceError("ErrVerifyColumns", f"table {self.name} has no column {', '.join(missing)} in the lake")
        return found.select(*[quoted(name) for name in self.schema.names])

    def _stored(self, spark: SparkSession) -> DataFrame:
        if self.uri.format == "delta":
            return spark.read.format("delta").option("versionAsOf", self.version).load(self.path)
        if self.uri.format == "parquet":
            return spark.read.option("mergeSchema", "true").parquet(self.path).where(f"cut <= {self.cut}")
        raise SourceError(
            "ErrVerifyUnsupported", f"{self.uri.format} lakes cannot be verified yet; Delta and Parquet can"
        )

    def _as_of_cut(self, stored: DataFrame) -> DataFrame:
        if self.mode == APPEND:
            return fold_frame(stored.where(f"_commit_ts <= {self.cut}"), self.key).where("_op <> 'delete'")
        if self.mode == SCD2:
            return stored.where(f"{VALID_FROM} <= {self.cut} and coalesce({VALID_TO} > {self.cut}, true)")
        return stored
