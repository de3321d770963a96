"""The lake job: `python -m pyspark_tidemark.job …`, one Structured Streaming query over the cuts of a changefeed.

Exit codes: 0 ended by SIGTERM or at --until-ts, 1 an error that starting again cannot mend, 2 bad usage,
75 (EX_TEMPFAIL) an error after which the same command may succeed: whoever supervises the job starts it again.
Standard output carries one JSON object a line: `{"ready": true, …}`, then one for each cut.
"""

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.java import check_java
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.cut import Cut, CutApplier
from pyspark_tidemark.lake.cuts import CutRecord
from pyspark_tidemark.lake.kept import Keeper
from pyspark_tidemark.lake.manifest import Manifest, check_mode
from pyspark_tidemark.lake.offset_log import logged_range
from pyspark_tidemark.lake.progress import BatchListener
from pyspark_tidemark.lake.session import open_session
from pyspark_tidemark.lake.targets import open_target, opened_manifest
from pyspark_tidemark.options import parse

EXIT_OK, EXIT_ERROR, EXIT_AGAIN = 0, 1, 75


class _StoppedError(Exception):
    """Raised in a batch that begins after the job was told to stop: Spark must not count it as done."""


class Job:
    """The query, from the first cut to the stop."""

    def __init__(self, arguments: Arguments, applier: CutApplier, keeper: Keeper, out: IO[str]) -> None:
        self._arguments = arguments
        self._applier = applier
        self._keeper = keeper
        self._out = out
        self._stop = threading.Event()
        self._in_batch = threading.Lock()
        self._saying = threading.Lock()
        self._failure: SourceError | None = None

    def stop(self, *_: Any) -> None:
        """End after the batch that is running; also a signal handler."""
        self._stop.set()

    def run(self, spark: SparkSession, start_ts: int) -> None:
        """Apply cuts until stopped or until `--until-ts`.

        Raises:
            SourceError: what a batch failed with.
        """
        spark.streams.addListener(BatchListener(self._say))
        query = self._started(spark, start_ts)
        self._say({"ready": True, "query": query.id, "start_ts": start_ts})
        try:
            while query.isActive and not self._stop.wait(0.1):
                pass
            asked = self._stop.is_set()
            with self._in_batch:  # a cut that is being applied gets finished, and is not interrupted
                self._stop.set()
        finally:
            failed = query.exception() if not query.isActive else None
            query.stop()
        if self._failure is not None:
            raise self._failure
        if not asked:
            raise SourceError("ErrQueryFailed", f"the query ended by itself: {failed}", retryable=True)

    def _started(self, spark: SparkSession, start_ts: int) -> StreamingQuery:
        arguments = self._arguments
        options = arguments.source_options | {"cuts": "true", "startTs": str(start_ts)}
        options["maxRowsPerTrigger"] = str(arguments.max_rows)
        checkpoint = arguments.checkpoint_dir / "query"
        if arguments.until_ts is not None:
            options["endTs"] = str(arguments.until_ts)
        return (
            spark.readStream.format("tidemark")
            .options(**options)
            .load()
            .writeStream.queryName("tidemark")
            .option("checkpointLocation", checkpoint.absolute().as_uri())
            .trigger(processingTime=arguments.trigger)
            .foreachBatch(lambda cuts, batch: self._apply(cuts, batch, logged_range(checkpoint, batch, start_ts)))
            .start()
        )

    def _apply(self, cuts: DataFrame, batch: int, logged: tuple[int, int] | None) -> None:
        with self._in_batch:
            if self._stop.is_set():
                raise _StoppedError
            try:
                for start_ts, end_ts in cuts.collect() if logged is None else [logged]:
                    self._apply_one(Cut(batch, start_ts, end_ts))
            except SourceError as err:
                self._failure = err
                raise
            except (PySparkException, Py4JError, OSError) as err:
                self._failure = _disk_full(err)
                raise

    def _apply_one(self, cut: Cut) -> None:
        started = time.monotonic()
        replayed = cut.end_ts <= self._applier.applied_ts
        record = self._applier.apply(cut)
        rows = {} if replayed else {item.table: item.rows for item in record.tables}
        checkpoint_ts = self._applier.acknowledge()
        self._report(record, cut.batch, rows, seconds=time.monotonic() - started, checkpoint_ts=checkpoint_ts)
        if (found := self._keeper.maintain()) is not None:
            self._say({"maintenance": found})

    def _report(
        self, record: CutRecord, batch: int, rows: dict[str, int], *, seconds: float, checkpoint_ts: int
    ) -> None:
        self._say(
            {
                "batch": batch,
                "start_ts": record.start_ts,
                "end_ts": record.end_ts,
                "rows": rows,
                "seconds": round(seconds, 3),
                "checkpoint": checkpoint_ts,
                "applied_at": record.applied_at,
            }
        )
        if self._arguments.until_ts is not None and record.end_ts >= self._arguments.until_ts:
            self._stop.set()

    def _say(self, document: dict[str, Any]) -> None:
        with self._saying:
            self._out.write(json.dumps(document) + "\n")
            self._out.flush()


def _disk_full(err: Exception) -> SourceError | None:
    if "No space left on device" not in str(err):
        return None
    return SourceError(
        "ErrTargetFull", "the target's disk is full; make room: the job goes on by itself", retryable=True
    )


def main(argv: Sequence[str]) -> int:
    """Run the job; returns the exit code."""
    try:
        arguments = Arguments.parse(argv)
        check_java()
        if arguments.follow_parent:
            threading.Thread(target=_follow_parent, name="parent-watch", daemon=True).start()
        return _run(arguments, _own_output())
    except SourceError as err:
        sys.stderr.write(f"{err}\n")
        return EXIT_AGAIN if err.retryable else EXIT_ERROR


def _run(arguments: Arguments, out: IO[str]) -> int:
    changefeed = Changefeed(parse(arguments.source_options | {"cuts": "true"}))
    session = functools.cache(
        lambda: open_session(
            master=arguments.master,
            driver_memory=arguments.driver_memory,
            directory=arguments.checkpoint_dir,
            lake=arguments.target.format,
            extra=arguments.conf,
        )
    )
    if arguments.target.is_remote:
        changefeed.describe()  # who cannot read it must not stop a job that can
    with opened_manifest(arguments, session) as manifest:
        check_mode(manifest.last, arguments.mode)
        start_ts = _start_ts(changefeed, manifest)
        if arguments.until_ts is not None and start_ts >= arguments.until_ts:
            return EXIT_OK
        spark = session()
        target = open_target(arguments, spark)
        applier = CutApplier(
            changefeed,
            arguments.changefeed,
            target,
            manifest,
            policy=arguments.policy,
            source_options=arguments.source_options,
            parallel=arguments.parallel,
        )
        keeper = Keeper(target, manifest, arguments.keep_hours)
        job = Job(arguments, applier, keeper, out)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, job.stop)
        job.run(spark, start_ts)
        keeper.close()
        spark.stop()
    return EXIT_OK


def _start_ts(changefeed: Changefeed, manifest: Manifest) -> int:
    """Where the first cut starts: after the last one in the lake, else at the changefeed's checkpoint."""
    checkpoint_ts = changefeed.describe().checkpoint_ts
    if manifest.last is None:
        return checkpoint_ts
    if checkpoint_ts > manifest.last.end_ts:
        raise SourceError(
            "ErrCutGap",
            f"the lake ends at {manifest.last.end_ts}, but the changefeed's checkpoint is already {checkpoint_ts}: "
            "the changes between were given to somebody else; start with a new changefeed and target",
        )
    return manifest.last.end_ts


def _own_output() -> IO[str]:
    """Keep standard output for our lines: whatever else writes there, the JVM too, goes to standard error."""
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


def _follow_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(EXIT_ERROR)


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent]
    sys.exit(main(sys.argv[1:]))
