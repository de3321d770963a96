"""Delta lakes: opened for the job, read at a version, repaired by one MERGE."""

from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import from_arrow_schema

from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.columns import quoted
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.target import LakeConnector, Repair, StoredTable, Target

_NO_CHANGE: Final = ("OPTIMIZE", "VACUUM START", "VACUUM END")
"""Operations that leave a table's rows as they are."""


class DeltaConnector(LakeConnector):
    """Implements `LakeConnector`; a version is Delta's."""

    def open_target(self, arguments: Arguments, spark: SparkSession) -> Target:
        """See `LakeConnector`."""
        return DeltaTarget(
            spark,
            arguments.target.path,
            arguments.changefeed,
            mode=arguments.mode,
            compact_every=arguments.compact_every,
        )

    def read(self, spark: SparkSession, table: StoredTable, version: int) -> DataFrame:
        """See `LakeConnector`."""
        return spark.read.format("delta").option("versionAsOf", version).load(table.path)

    def changes_after(self, spark: SparkSession, table: StoredTable, version: int) -> str:
        """See `LakeConnector`."""
        history = spark.sql(f"DESCRIBE HISTORY delta.`{table.path}`")
        commits = history.where(f"version > {version}").collect()
        return ", ".join(row.operation for row in commits if row.operation not in _NO_CHANGE)

    def repair(self, spark: SparkSession, table: StoredTable, repair: Repair) -> int:
        """Remove and add by one MERGE.

        A key to remove matches by its `_old` columns; a row to add has none, so it matches nothing
        and is inserted.
        """
        old = {name: f"_old_{name}" for name in repair.key}
        removed = _frame(spark, repair.gone).select(
            *[F.col(quoted(name)).alias(old[name]) for name in repair.key],
            F.expr("false AS _new"),
        )
        rows = repair.rows
        added = _frame(spark, rows).selectExpr("*", "true AS _new")
        changes = added.unionByName(removed, allowMissingColumns=True)
        changes.createOrReplaceTempView("tidemark_repair")

        same = " AND ".join(f"t.{quoted(name)} = s.{quoted(old[name])}" for name in repair.key)
        columns = [quoted(name) for name in rows.schema.names]
        spark.sql(
            f"MERGE INTO delta.`{table.path}` t USING tidemark_repair s ON {same} WHEN MATCHED THEN DELETE "  # noqa: S608 - quoted names
            f"WHEN NOT MATCHED AND s._new THEN INSERT ({', '.join(columns)}) "
            f"VALUES ({', '.join(f's.{column}' for column in columns)})"
        )
        return int(spark.sql(f"DESCRIBE HISTORY delta.`{table.path}` LIMIT 1").collect()[0].version)


def _frame(spark: SparkSession, rows: Any) -> DataFrame:
    # With the schema given: Spark would take times without a zone for times of its own zone.
    return spark.createDataFrame(rows, from_arrow_schema(rows.schema))
