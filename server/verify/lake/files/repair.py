"""Puts differing rows of a Delta or Iceberg table right: one commit, which the newest cut then shows.

Invariants:
1. The lake's lock is held, so no cut is applied meanwhile; the table holds nothing that the newest cut does not show.
2. The keys that differ go and the upstream's rows come in one commit: no version lacks them.
3. The rows' `_commit_ts` is the cut: changes of later cuts are larger, so they win. The table's fence stays as it is.
"""

import dataclasses
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cuts import CutRecord, TableCut
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.files import write
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.mode import UPSERT
from pyspark_tidemark.lake.predicate import quoted

from server.verify.lake.files.table import LakeTable

_NO_CHANGE_DELTA = ("OPTIMIZE", "VACUUM START", "VACUUM END")
_NO_CHANGE_ICEBERG = "replace"


def check(spark: SparkSession, table: LakeTable, newest: CutRecord) -> None:
    """See that a table can be put right.

    Raises:
        SourceError: ErrRepairUnsupported, it has no rows to put right, only history, or has changes of no cut.
    """
    name, version = table.asked.name, table.version
    if table.uri.format == "parquet" or table.mode != UPSERT or version is None:
        raise SourceError(
            "ErrRepairUnsupported",
            f"table {name}: only tables of mode upsert are repaired in place, not histories; write others anew with a "
            "new changefeed",
        )
    assert table.asked.ts == newest.end_ts, "the newest cut is what is repaired"
    changed = (
        _changed_delta(spark, table, version)
        if table.uri.format == "delta"
        else _changed_iceberg(spark, table, version)
    )
    if changed:
        raise SourceError(
            "ErrRepairUnsupported",
            f"table {name} has changes ({changed}) that no cut shows, of somebody else or of a cut that was not ended: "
            "start the lake's job, stop it when it has applied a cut, and verify again",
        )


def repair(spark: SparkSession, table: LakeTable, gone: Any, live: Any) -> int:
    """Remove keys, add rows (pyarrow.Tables); returns the new version, or snapshot id."""
    cuts = pa.array([table.asked.ts] * len(live), pa.int64())
    rows = live.append_column("_commit_ts", cuts)
    return (_repair_delta if table.uri.format == "delta" else _repair_iceberg)(spark, table, gone, rows)


def publish(manifest: FileManifest, table: str, version: int) -> None:
    """The newest cut once more, with the table's new version."""
    newest = manifest.last
    assert newest is not None, "a cut was compared"
    others = [item for item in newest.tables if item.table != table]
    rows = sum(item.rows for item in newest.tables if item.table == table)
    manifest.replace(dataclasses.replace(newest, tables=(*others, TableCut(table, rows, version))))


def _changed_delta(spark: SparkSession, table: LakeTable, version: int) -> str:
    commits = spark.sql(f"DESCRIBE HISTORY delta.`{table.path}`").where(f"version > {version}").collect()
    return ", ".join(row.operation for row in commits if row.operation not in _NO_CHANGE_DELTA)


def _repair_delta(spark: SparkSession, table: LakeTable, gone: Any, rows: Any) -> int:
    """A key to remove matches by its `_old` columns; a row to add matches nothing, and is inserted."""
    old = {name: f"_old_{name}" for name in table.asked.key}
    removed = _frame(spark, gone).select(
        *[F.col(quoted(name)).alias(old[name]) for name in table.asked.key], F.expr("false AS _new")
    )
    added = _frame(spark, rows).selectExpr("*", "true AS _new")
    added.unionByName(removed, allowMissingColumns=True).createOrReplaceTempView("tidemark_repair")
    same = " AND ".join(f"t.{quoted(name)} = s.{quoted(old[name])}" for name in table.asked.key)
    columns = [quoted(name) for name in rows.schema.names]
    spark.sql(
        f"MERGE INTO delta.`{table.path}` t USING tidemark_repair s ON {same} WHEN MATCHED THEN DELETE "  # noqa: S608 - quoted names
        f"WHEN NOT MATCHED AND s._new THEN INSERT ({', '.join(columns)}) "
        f"VALUES ({', '.join(f's.{column}' for column in columns)})"
    )
    return int(spark.sql(f"DESCRIBE HISTORY delta.`{table.path}` LIMIT 1").collect()[0].version)


def _frame(spark: SparkSession, rows: Any) -> DataFrame:
    """With the schema told: times without a zone would get one."""
    return spark.createDataFrame(rows, from_arrow_schema(rows.schema))


def _changed_iceberg(spark: SparkSession, table: LakeTable, version: int) -> str:
    found = Catalog(spark, table.uri.path, table.changefeed).load(table.asked.name)
    snapshot, changed = found.currentSnapshot(), []
    while snapshot is not None and int(snapshot.snapshotId()) != version:
        changed += [snapshot.operation()] if snapshot.operation() != _NO_CHANGE_ICEBERG else []
        parent = snapshot.parentId()
        snapshot = None if parent is None else found.snapshot(parent)
    return ", ".join(changed)


def _repair_iceberg(spark: SparkSession, table: LakeTable, gone: Any, rows: Any) -> int:
    """Deletes of keys apply to older files only, so the rows that come with them stay."""
    catalog, name = Catalog(spark, table.uri.path, table.changefeed), table.asked.name
    found = catalog.load(name)
    written = write(catalog.layout(found, table.asked.key), rows, gone)
    catalog.commit(found, written, table.asked.key, catalog.position(found, name) or table.asked.ts)
    return int(catalog.load(name).currentSnapshot().snapshotId())
