"""The noop target of the lake's benchmark: a streaming query that reads a table and throws it away,
told like cuts.

`python -m tests.bench.lake_noop --endpoint URI --table T --batch-rows N --until-ts TS --directory
D`
"""

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark_tidemark.lake.session import open_session


class Told(StreamingQueryListener):
    """Prints a line for each batch; tells when the end is reached."""

    def __init__(self, until_ts: int) -> None:
        self.ended = threading.Event()
        self._until_ts = until_ts

    def onQueryStarted(self, event: Any) -> None:
        """Nothing."""

    def onQueryProgress(self, event: Any) -> None:
        """One batch is committed."""
        progress = event.progress
        source = progress.sources[0]
        start_ts, end_ts = (
            json.loads(text)["ts"] if text else 0 for text in (source.startOffset, source.endOffset)
        )
        seconds = progress.durationMs["triggerExecution"] / 1000
        told = {
            "start_ts": start_ts,
            "end_ts": end_ts,
            "rows": {"": progress.numInputRows},
            "seconds": seconds,
        }
        sys.stdout.write(json.dumps(told | {"ms": dict(progress.durationMs)}) + "\n")
        sys.stdout.flush()
        if end_ts >= self._until_ts:
            self.ended.set()

    def onQueryIdle(self, event: Any) -> None:
        """Nothing."""

    def onQueryTerminated(self, event: Any) -> None:
        """No more lines come."""
        self.ended.set()


def main() -> None:
    """Run the query to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--endpoint", "--table"):
        parser.add_argument(name, required=True)
    for name in ("--batch-rows", "--until-ts"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    arguments = parser.parse_args()
    directory = arguments.directory
    spark = open_session(
        master="local[2]", driver_memory="1g", directory=directory, lake="parquet", extra={}
    )
    told = Told(arguments.until_ts)
    spark.streams.addListener(told)
    options = {"endpoint": arguments.endpoint, "changefeed": "bench", "table": arguments.table}
    options |= {"maxRowsPerTrigger": str(arguments.batch_rows), "endTs": str(arguments.until_ts)}
    rows = spark.readStream.format("tidemark").options(**options).load()
    writer = rows.writeStream.format("noop").option("checkpointLocation", str(directory / "query"))
    query = writer.trigger(processingTime="0 seconds").start()
    told.ended.wait()
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main()
