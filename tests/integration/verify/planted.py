"""A row changed behind everybody's back: `python -m … FORMAT ROOT ID VALUE` sets column `v` of a
row in the Delta or Iceberg table `ROOT/shop/orders`, as another engine would.
"""

import sys
import tempfile
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark_tidemark.lake.iceberg.files import write
from pyspark_tidemark.lake.iceberg.target import IcebergTarget
from pyspark_tidemark.lake.session import open_session

TABLE, KEY = "shop.orders", ("id",)


def main() -> None:
    lake, root, key, value = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        spark = open_session(
            master="local[1]", driver_memory="1g", directory=Path(directory), lake=lake, extra={}
        )
        PLANTS[lake](spark, root, int(key), int(value))
        spark.stop()


def plant_in_delta(spark: SparkSession, root: str, key: int, value: int) -> None:
    spark.sql(f"UPDATE delta.`{root}/shop/orders` SET v = {value} WHERE id = {key}")


def plant_in_iceberg(spark: SparkSession, root: str, key: int, value: int) -> None:
    # Iceberg's SQL needs an older Spark than this one; its Java API, which the target uses, does
    # not.
    target = IcebergTarget(spark, root, "shop", mode="upsert", compact_every=0)
    catalog = target._catalog
    table = catalog.load(TABLE)
    rows = pa.table({"id": pa.array([key], pa.int32()), "v": pa.array([value], pa.int32())})
    rows = rows.append_column("_commit_ts", pa.array([1], pa.int64()))
    written = write(catalog.layout(table, KEY), rows, rows.select(KEY))
    catalog.commit(table.newTransaction(), written, KEY, 1)
    target.close()


PLANTS = {"delta": plant_in_delta, "iceberg": plant_in_iceberg}

if __name__ == "__main__":
    main()
