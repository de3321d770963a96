"""A driver of a standalone cluster: `python -m … MASTER < options.json`;
prints the rows that each executor read.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from tests.spark_cluster import LIGHT

EXECUTORS = 2


def counted(batches: Iterable[Any]) -> Iterator[Any]:
    """Who read how much: an executor's Python workers are children of its own daemon."""
    rows = sum(batch.num_rows for batch in batches)
    yield pa.RecordBatch.from_pydict({"executor": [os.getppid()], "rows": [rows]})


def main() -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.locality.wait": "0s",
        "spark.driver.extraJavaOptions": LIGHT,
        "spark.executor.extraJavaOptions": LIGHT,
        "spark.ui.enabled": "false",
    }
    builder = SparkSession.builder.master(sys.argv[1])
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    while (
        spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() <= EXECUTORS
    ):  # the driver is one of them
        time.sleep(0.1)
    frame = spark.read.format("tidemark").options(**json.load(sys.stdin)).load()
    rows: Counter[int] = Counter()
    for row in frame.mapInArrow(counted, "executor long, rows long").collect():
        rows[row.executor] += row.rows
    print(json.dumps(rows))
    spark.stop()


if __name__ == "__main__":
    main()
