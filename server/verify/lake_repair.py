"""Puts differing rows of a Delta table right: one commit, which the newest cut then shows.

Invariants:
1. The lake's lock is held, so no cut is applied meanwhile, and the newest cut is what was compared.
2. The keys that differ go and the upstream's rows come in one MERGE: no version lacks them.
3. The rows' `_commit_ts` is the cut: changes of later cuts are larger, so they win.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cuts import CutRecord, TableCut
from pyspark_tidemark.lake.manifest import DIRECTORY
from pyspark_tidemark.lake.mode import UPSERT
from pyspark_tidemark.lake.predicate import quoted
from pyspark_tidemark.lake.target import TargetUri

from server.verify.lake_table import LakeTable


def repair(spark: SparkSession, uri: TargetUri, newest: CutRecord, table: LakeTable, request: dict[str, Any]) -> int:
    """Remove the keys in the file `gone`, add the rows in the file `live`; returns the new version.

    Raises:
        SourceError: ErrRepairUnsupported, this lake has no rows to put right, only history.
    """
    if uri.format != "delta" or table.mode != UPSERT or table.version is None:
        raise SourceError(
            "ErrRepairUnsupported",
            f"table {table.name}: only tables of Delta lakes in mode upsert are repaired in place; write "
            "others anew with a new changefeed",
        )
    gone, live = (_frame(spark, request[name]) for name in ("gone", "live"))
    _merged(spark, table, gone, live)
    version = int(spark.sql(f"DESCRIBE HISTORY delta.`{table.path}` LIMIT 1").collect()[0].version)
    _publish(Path(uri.path) / DIRECTORY, newest, table.name, version)
    return version


def _merged(spark: SparkSession, table: LakeTable, gone: DataFrame, live: DataFrame) -> None:
    """A key to remove matches by its `_old` columns; a row to add matches nothing, and is inserted."""
    old = {name: f"_old_{name}" for name in table.key}
    removed = gone.select(*[F.col(quoted(name)).alias(old[name]) for name in table.key], F.expr("false AS _new"))
    added = live.selectExpr("*", f"bigint({table.cut}) AS _commit_ts", "true AS _new")
    source = added.unionByName(removed, allowMissingColumns=True)
    source.createOrReplaceTempView("tidemark_repair")
    same = " AND ".join(f"t.{quoted(name)} = s.{quoted(old[name])}" for name in table.key)
    columns = [quoted(name) for name in (*table.schema.names, "_commit_ts")]
    spark.sql(
        f"MERGE INTO delta.`{table.path}` t USING tidemark_repair s ON {same} WHEN MATCHED THEN DELETE "  # noqa: S608 - quoted names
        f"WHEN NOT MATCHED AND s._new THEN INSERT ({', '.join(columns)}) "
        f"VALUES ({', '.join(f's.{column}' for column in columns)})"
    )


def _publish(directory: Path, newest: CutRecord, table: str, version: int) -> None:
    """The newest cut once more, with the table's new version; a record replaces one of the same end_ts."""
    others = [item for item in newest.tables if item.table != table]
    rows = sum(item.rows for item in newest.tables if item.table == table)
    record = dataclasses.replace(newest, tables=(*others, TableCut(table, rows, version)))
    staged = directory / ".repaired"
    with staged.open("w", encoding="utf-8") as file:
        file.write(record.to_json() + "\n")
        file.flush()
        os.fsync(file.fileno())
    staged.rename(directory / f"{newest.end_ts:020d}.json")


def _frame(spark: SparkSession, path: str) -> DataFrame:
    with pa.OSFile(path) as file:
        return spark.createDataFrame(pa.ipc.open_file(file).read_all())
