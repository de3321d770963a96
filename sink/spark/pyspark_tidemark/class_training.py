"""What jobs do, done once in a JVM that archives its classes when it ends.

`java.make_class_archive` runs it: `python -m pyspark_tidemark.class_training ARCHIVE SCRATCH`.
"""

import sys
from pathlib import Path

from pyspark.sql import SparkSession

from pyspark_tidemark.jars import default_directory, present
from pyspark_tidemark.java import QUIET
from pyspark_tidemark.lake.session import open_session


def main(archive: Path, scratch: Path) -> None:
    """Leave the classes in `archive`, and other files under `scratch`."""
    spark = open_session(
        master="local[2]",
        driver_memory="1g",
        directory=scratch / "spark",
        lake="delta",
        extra={"spark.driver.defaultJavaOptions": f"-XX:ArchiveClassesAtExit={archive} {QUIET}"},
    )
    tables = scratch / "tables"
    _use_delta(spark, tables / "delta")
    _use_streams(spark, tables / "delta", tables / "stream")
    if present(default_directory(), "iceberg"):
        _use_iceberg(spark, tables / "iceberg")
    # The JVM ends, and writes the archive, when its standard input does.
    process = spark.sparkContext._gateway.proc  # type: ignore[union-attr]  # noqa: SLF001
    spark.stop()
    process.stdin.close()
    process.wait()


def _use_delta(spark: SparkSession, table: Path) -> None:
    spark.sql(
        f"CREATE TABLE delta.`{table}` (id BIGINT, name STRING) USING delta TBLPROPERTIES "
        "('delta.columnMapping.mode' = 'name', 'delta.enableDeletionVectors' = 'true')"
    )
    rows = spark.range(1000).selectExpr("id", "CAST(id AS STRING) AS name")
    rows.write.format("delta").mode("append").save(str(table))
    rows.createOrReplaceTempView("news")
    spark.sql(
        f"MERGE INTO delta.`{table}` t USING news n ON t.id <=> n.id "
        "WHEN MATCHED AND n.id < 10 THEN DELETE WHEN MATCHED THEN UPDATE SET * "
        "WHEN NOT MATCHED THEN INSERT *"
    )
    spark.sql(f"OPTIMIZE delta.`{table}`")
    older = spark.read.format("delta").option("versionAsOf", 1).load(str(table))
    older.groupBy("name").count().toArrow()


def _use_streams(spark: SparkSession, source: Path, checkpoint: Path) -> None:
    stream = spark.readStream.format("delta").option("ignoreChanges", "true").load(str(source))
    query = (
        stream.writeStream.option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .foreachBatch(lambda batch, _: batch.toArrow())
        .start()
    )
    query.awaitTermination()


def _use_iceberg(spark: SparkSession, table: Path) -> None:
    """Its table library alone, as jobs do: its Spark classes are those of another Spark."""
    rows = spark.range(1).selectExpr("id", "CAST(id AS STRING) AS name")
    iceberg = spark._jvm.org.apache.iceberg  # type: ignore[union-attr]  # noqa: SLF001
    schema = iceberg.spark.SparkSchemaUtil.convert(rows._jdf.schema())  # noqa: SLF001
    conf = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    made = iceberg.hadoop.HadoopTables(conf).create(schema, str(table))
    made.newAppend().commit()
    made.newScan().planFiles().close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
