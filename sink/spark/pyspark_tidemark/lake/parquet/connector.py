"""Parquet changelogs: opened for the job, and read up to a cut. They keep every change, so there is
no row to repair.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyarrow.fs import FileSelector
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import LongType, StructField, StructType

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.files import LocalFiles, file_system
from pyspark_tidemark.lake.hadoop import HadoopFiles
from pyspark_tidemark.lake.parquet.changelog import (
    CUT,
    SINCE,
    ChangelogTarget,
    RemoteChangelog,
    timestamps,
)
from pyspark_tidemark.lake.target import LakeConnector, StoredTable, Target


class ParquetConnector(LakeConnector):
    """Implements `LakeConnector`; a version is a cut's end."""

    def open_target(self, arguments: Arguments, spark: SparkSession) -> Target:
        """See `LakeConnector`."""
        root = arguments.target.path
        if arguments.target.is_remote:
            return RemoteChangelog(spark, root, arguments.checkpoint_dir)
        return ChangelogTarget(spark, root)

    def read(self, spark: SparkSession, table: StoredTable, version: int) -> DataFrame:
        """See `LakeConnector`; the changes up to the version."""
        path = table.path
        files = HadoopFiles(spark, path) if table.uri.is_remote else LocalFiles(Path(path))
        names = files.names()
        # Below the newest mark the name was another table's, whose rows are not those of this one.
        marks = timestamps(names, SINCE)
        since = max((ts for ts in marks if ts < version), default=-1)
        chosen = [ts for ts in timestamps(names, CUT) if since < ts <= version]
        parts = [f"{path}/{CUT}{ts}" for ts in chosen] if marks else [path]
        reader = spark.read.option("basePath", path)
        try:
            frame = reader.option("mergeSchema", "true").parquet(*parts)
        except (PySparkException, Py4JJavaError) as err:
            # Spark merges equal types only, and a column may have been widened between two cuts.
            if "CANNOT_MERGE" not in str(err):
                raise
            widest = _widest(path, chosen)
            frame = spark.read.schema(widest).option("basePath", path).parquet(*parts)
        return frame.where(f"cut <= {version}").drop("cut")


def _widest(path: str, chosen: Sequence[int]) -> StructType:
    """All columns of some cuts of a changelog, with types that hold the values of all of them.

    Raises:
        SourceError: ErrSchemaIncompatible.
    """
    system, root = file_system(path)
    files = [file.path for file in system.get_file_info(FileSelector(root, recursive=True))]
    cuts = {f"{CUT}{ts}" for ts in chosen}
    parts = [path for path in files if Path(path).parent.name in cuts and path.endswith(".parquet")]
    schemas = [pq.read_schema(part, filesystem=system).remove_metadata() for part in parts]
    try:
        widest = pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as err:
        raise SourceError(
            "ErrSchemaIncompatible",
            f"a column of {path} has types in different cuts that do not fit together ({err}); "
            f"read the directories {CUT}… by themselves",
        ) from None
    return StructType([*from_arrow_schema(widest), StructField("cut", LongType())])
