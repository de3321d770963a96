"""A Spark program that reads a changefeed as one reader into files, exactly once, and that may kill
itself: `python -m … OPTIONS_JSON OUTPUT CHECKPOINT BATCH`, with SIGKILL once that batch is written
(-1: never). It ends when it has taken what is there.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

from tests.spark_cluster import LIGHT


def main() -> int:
    options, output, checkpoint, batch = sys.argv[1:]
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.extraJavaOptions", LIGHT)
        .getOrCreate()
    )
    query = (
        spark.readStream.format("tidemark")
        .options(**json.loads(options))
        .load()
        .writeStream.format("parquet")
        .option("path", output)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    written = Path(output) / "_spark_metadata" / batch
    while query.isActive:
        if written.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    query.awaitTermination()
    return 0


if __name__ == "__main__":
    sys.exit(main())
