"""The lake job: `python -m pyspark_tidemark.job …`,
one Structured Streaming query over the cuts of a changefeed.

Exit codes: 0 ended by SIGTERM, at --until-ts or at the changefeed's target_ts, 1 an error that
starting again cannot mend, 2 bad usage, 75 (EX_TEMPFAIL) an error after which the same command may
succeed: whoever supervises the job starts it again.

Standard output carries one JSON object a line: `{"ready": true, …}`, then one for each cut.
Whatever ends the job by an error has a code: the last line on standard error is `[TM:ErrName] …`,
and the captures get a report of it (`lake.reporter`).
"""

import dataclasses
import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from pyspark_tidemark import tracing
from pyspark_tidemark.application import (
    attached_session,
    close_session,
    is_attached,
    is_lost,
)
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed, ChangefeedMeta
from pyspark_tidemark.java import check_java
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters, skip
from pyspark_tidemark.lake.cut_record import CutRecord
from pyspark_tidemark.lake.failure import named
from pyspark_tidemark.lake.maintenance import Maintenance
from pyspark_tidemark.lake.manifest import check_mode
from pyspark_tidemark.lake.opening import open_target, opened_manifest
from pyspark_tidemark.lake.reporter import Reporter
from pyspark_tidemark.lake.session import open_session, silence_arrow, trigger_s
from pyspark_tidemark.options import Options, parse
from pyspark_tidemark.output import own_output, write_line
from pyspark_tidemark.progress import document

EXIT_OK, EXIT_ERROR, EXIT_AGAIN = 0, 1, 75
_FINISH_S, _FINISH_STEP_S = 30.0, 0.1
_LOST = "ErrSparkLost"
_NO_WORKER = "Python worker failed to connect back"
_STARTS_MORE = 5
"""How often a query is started again whose Python did not begin in the ten seconds that Spark
gives it.
"""
_INITIALIZING = "Initializing sources"
"""What Spark says of a query whose source has not begun."""
_ROUND_S = 10.0
"""How long the job goes on to apply cuts within one batch of Spark's: to plan, log and begin one
costs Spark more than a small cut costs otherwise.
"""
_POLL_MS, _POLL_MS_MAX = Options.poll_ms, 1000
"""How long a capture may wait for the next cut before it answers that there is none: as long as the
trigger's interval, within these.
"""
_INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""Of the query alone, whose batches have one row: Spark would load a compiler of Java for it."""
_LOOK_S, _FIRST_LOOKS_S = 1.0, 0.1
"""How often the query is looked at, and before it has begun."""
_end_requested = threading.Event()
"""Set by a SIGTERM that comes before the query has begun."""


_LOG_VERSION, _LOG_LINES = "v1", 3
"""Of Spark's offset log: its lines are a version, metadata, and the one source's offset."""


def main(argv: Sequence[str]) -> int:
    """Run the job; returns the exit code."""
    try:
        arguments = Arguments.parse(argv)
        if not is_attached():
            check_java()
        if arguments.follow_parent:
            threading.Thread(target=_follow_parent, name="parent-watch", daemon=True).start()
        with tracing.sending("tidemark-lake-job", _warn):
            return _run_and_report(arguments, own_output())
    except Exception as err:  # noqa: BLE001 - whatever it is, the job ends with a code
        error = _error_of(err)
        if error.code != _LOST and (error is not err or err.__cause__ is not None):
            traceback.print_exc()
        sys.stderr.write(f"{error}\n")
        return EXIT_AGAIN if error.retryable else EXIT_ERROR


def _run_and_report(arguments: Arguments, out: IO[str]) -> int:
    """Run the job, and report to the captures how it ended."""
    changefeed = Changefeed(parse(arguments.source_options | {"cuts": "true"}))
    reporter = Reporter(changefeed)
    try:
        status = _run(arguments, changefeed, reporter, out)
    except Exception as err:
        reporter.failed(_error_of(err))
        raise
    reporter.stopped()
    return status


def _error_of(err: Exception) -> SourceError:
    """The error by which the job ends. Where Spark is gone, that is the cause of whatever else was
    raised.
    """
    if is_lost():
        return SourceError(
            _LOST,
            "the Spark application that the jobs share has ended: by an error of its own, which "
            "the log of `tidemark spark keep` has, or because another changefeed's job was killed",
            retryable=True,
        )
    return named(err)


def _run(arguments: Arguments, changefeed: Changefeed, reporter: Reporter, out: IO[str]) -> int:
    session = functools.cache(functools.partial(_session, arguments))
    if arguments.target.has_place or arguments.target.is_topic:
        # Before the manifest is opened, which stops the job that had it: whoever cannot read the
        # changefeed must not stop a job that can.
        changefeed.describe()
    with opened_manifest(arguments, session) as manifest:
        check_mode(manifest.last, arguments.mode)
        described = changefeed.describe()
        skipped = skip(manifest, described, arguments.mode)
        if skipped is not None:
            _show_skipped(skipped, out)
        start_ts = described.checkpoint_ts if manifest.last is None else manifest.last.end_ts
        arguments = _ending_with_changefeed(arguments, described.target_ts)
        if arguments.until_ts is not None and start_ts >= arguments.until_ts:
            if start_ts > described.checkpoint_ts:
                # An earlier job died between its last cut and the acknowledgement.
                changefeed.ack(start_ts)
            _finish(changefeed, start_ts, out)
            return EXIT_OK

        if _end_requested.is_set():
            return EXIT_OK
        spark = session()
        target = open_target(arguments, spark, manifest)
        writers = TableWriters(
            arguments.source_options,
            spark,
            arguments.parallel,
            arguments.write,
            arguments.tasks_from_bytes,
        )
        applier = CutApplier(
            changefeed,
            arguments.changefeed,
            target,
            manifest,
            policy=arguments.policy,
            writers=writers,
        )
        maintenance = Maintenance(target, manifest, arguments.keep_hours)
        job = Job(
            _with_query_directory(arguments, manifest.last), applier, maintenance, reporter, out
        )
        changefeed.pause = job.pause
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, job.stop)
        if _end_requested.is_set():
            job.stop()
        ui = spark.sparkContext.uiWebUrl or ""
        reporter.start(0 if manifest.last is None else start_ts, manifest.commits, ui)
        try:
            job.run(spark, start_ts)
        finally:
            maintenance.close()
        close_session(spark)
        if arguments.until_ts is not None and applier.applied_ts >= arguments.until_ts:
            _finish(changefeed, applier.applied_ts, out)
    return EXIT_OK


def _session(arguments: Arguments) -> SparkSession:
    if is_attached():
        silence_arrow()
        return attached_session(arguments.target.format)
    return open_session(
        master=arguments.master,
        driver_memory=arguments.driver_memory,
        directory=arguments.checkpoint_dir,
        lake=arguments.target.format,
        extra=arguments.conf,
    )


def _ending_with_changefeed(arguments: Arguments, target_ts: int | None) -> Arguments:
    """The arguments of a job that ends at its changefeed's target_ts, if not before."""
    if target_ts is None or (arguments.until_ts is not None and arguments.until_ts <= target_ts):
        return arguments
    return dataclasses.replace(arguments, until_ts=target_ts)


def _with_query_directory(arguments: Arguments, last: CutRecord | None) -> Arguments:
    """The arguments with a checkpoint directory of their own after a skipped stretch: a query goes
    on from the checkpoint in its directory, and another one has to begin above the stretch.
    """
    if last is None or not last.skipped:
        return arguments
    return dataclasses.replace(
        arguments, checkpoint_dir=arguments.checkpoint_dir / f"after-{last.skipped[-1][1]}"
    )


def _show_skipped(cut: CutRecord, out: IO[str]) -> None:
    """Show a skipped stretch in the job's log and its lines; the manifest has it, too."""
    write_line(out, {"skipped": {"start_ts": cut.start_ts, "end_ts": cut.end_ts}})
    sys.stderr.write(
        f"WARNING: changefeed {cut.changefeed} was told to skip the changes in ({cut.start_ts}, "
        f"{cut.end_ts}]: this "
        f"lake does not have them. `tidemark cli verify -c {cut.changefeed}` shows the rows that "
        "differ, and --repair "
        "mends them\n"
    )


def _finish(changefeed: Changefeed, ts: int, out: IO[str]) -> None:
    """The lake is where the job was to end: at --until-ts, or at the changefeed's target_ts.

    There the changefeed has to finish, too: a capture that dies before it has kept the last
    acknowledgement hears of it from nobody else.
    """
    deadline = time.monotonic() + _FINISH_S
    while time.monotonic() < deadline and _runs_until(changefeed.describe(), ts):
        changefeed.ack_again(ts)
        time.sleep(_FINISH_STEP_S)
    write_line(out, {"finished": {"at_ts": ts}})


def _runs_until(described: ChangefeedMeta, ts: int) -> bool:
    """Whether a changefeed runs that ends at `ts`."""
    return described.target_ts == ts and described.state in ("normal", "warning")


class _StoppedError(Exception):
    """Raised in a batch that begins, or cannot end, after `Job.stop` was called."""


class Job:
    """The query, from the first cut to the stop."""

    def __init__(
        self,
        arguments: Arguments,
        applier: CutApplier,
        maintenance: Maintenance,
        reporter: Reporter,
        out: IO[str],
    ) -> None:
        self._arguments = arguments
        self._applier = applier
        self._maintenance = maintenance
        self._reporter = reporter
        self._out = out
        self._stop = threading.Event()
        self._wake = threading.Event()
        """Set when `stop` was called or a cut has failed, so that `run` looks at once."""
        self._in_batch = threading.Lock()
        self._writing = threading.Lock()
        self._failure: SourceError | None = None
        self._trigger_s = self._next_cut_s = 0.0
        self._applied_beyond_ts = -1
        """The end of the newest cut that was applied beyond the range of Spark's batch: the next
        batch begins below it.
        """

    def stop(self, *_: Any) -> None:
        """End after the cut that is being applied; also a signal handler."""
        self._stop.set()
        self._wake.set()

    def pause(self, seconds: float) -> bool:
        """Wait before the captures are asked again. True: `stop` was called, and the caller must
        not go on waiting: captures of a paused changefeed do not answer any more.
        """
        return self._stop.wait(seconds)

    def run(self, spark: SparkSession, start_ts: int) -> None:
        """Apply cuts until stopped or until `--until-ts`.

        Raises:
            SourceError: what a batch failed with.
        """
        self._trigger_s = trigger_s(spark, self._arguments.trigger)
        query = self._start_query(spark, start_ts)
        self._write({"ready": True, "query": query.id, "start_ts": start_ts})
        is_reading, starts_left = False, _STARTS_MORE
        try:
            while self._reporter.failure is None:
                if not query.isActive:
                    if not starts_left or not self._lacked_worker(query):
                        break
                    starts_left, is_reading = starts_left - 1, False
                    query.stop()
                    query = self._start_query(spark, start_ts)
                if self._wake.wait(_LOOK_S if is_reading else _FIRST_LOOKS_S):
                    break
                if not is_reading:
                    is_reading = query.status["message"] != _INITIALIZING and query.isActive
                    if is_reading:
                        # Whoever starts many jobs on few cores waits for it before the next one.
                        self._write({"reading": True})
            stopped = self._stop.is_set()
            self._stop.set()
            # A cut that is being applied ends first: `query.stop` interrupts its threads.
            with self._in_batch:
                pass
        finally:
            self._stop.set()
            failed = query.exception() if not query.isActive else None
            query.stop()
        failure = self._failure or self._reporter.failure
        if failure is not None:
            raise failure
        if not stopped:
            raise _query_failure(failed)

    def _lacked_worker(self, query: StreamingQuery) -> bool:
        """Whether a query has ended because Spark's Python did not begin in time."""
        # Where many jobs start on few cores, a job that began anew would keep the others from it.
        return self._failure is None and _NO_WORKER in str(query.exception())

    def _start_query(self, spark: SparkSession, start_ts: int) -> StreamingQuery:
        arguments = self._arguments
        options = arguments.source_options | {"cuts": "true", "startTs": str(start_ts)}
        options["maxRowsPerTrigger"] = str(arguments.max_rows)
        checkpoint = arguments.checkpoint_dir / "query"
        if arguments.until_ts is not None:
            options["endTs"] = str(arguments.until_ts)
        usual = {name: str(spark.conf.get(name)) for name in _INTERPRETED}
        # The query has a copy of the session's settings as they are when it starts.
        for name, value in _INTERPRETED.items():
            spark.conf.set(name, value)
        query = (
            spark.readStream.format("tidemark")
            .options(**options)
            .load()
            .writeStream.queryName("tidemark")
            .option("checkpointLocation", checkpoint.absolute().as_uri())
            .trigger(processingTime=arguments.trigger)
            .foreachBatch(
                lambda cuts, batch: self._apply(
                    cuts, batch, logged_range(checkpoint, batch, start_ts)
                )
            )
            .start()
        )
        for name, value in usual.items():
            spark.conf.set(name, value)
        return query

    def _apply(self, cuts: DataFrame, batch: int, logged: tuple[int, int] | None) -> None:
        with self._in_batch:
            if self._stop.is_set():
                # An exception, not a return: Spark must not count the batch as done.
                raise _StoppedError
            try:
                round_ends_s = time.monotonic() + _ROUND_S
                for start_ts, end_ts in cuts.collect() if logged is None else [logged]:
                    if end_ts > self._applied_beyond_ts:
                        self._apply_one(Cut(batch, start_ts, end_ts))
                self._apply_further(batch, round_ends_s)
            except Exception as err:
                failure = named(err)
                if self._stop.is_set() and failure.retryable:
                    raise _StoppedError from err
                self._failure = failure
                self._wake.set()
                raise

    def _apply_further(self, batch: int, round_ends_s: float) -> None:
        """Apply the cuts that come until `round_ends_s` within the same batch of Spark's.

        Spark's log stays behind: it gives a job that is started again a range of which the lake has
        a part already, and the job applies the rest.
        """
        wait_ms = min(max(_POLL_MS, int(self._trigger_s * 1000)), _POLL_MS_MAX)
        while not self._stop.wait(self._next_cut_s - time.monotonic()):
            asked_s = time.monotonic()
            if asked_s >= round_ends_s or self._reporter.failure is not None:
                return
            start_ts = self._applier.applied_ts
            try:
                end_ts = self._applier.next_end(self._arguments.max_rows, wait_ms)
            except SourceError as err:
                if self._stop.is_set() and err.retryable:
                    return
                raise
            if self._arguments.until_ts is not None:
                end_ts = min(end_ts, self._arguments.until_ts)
            if end_ts > start_ts:
                self._apply_one(Cut(batch, start_ts, end_ts), time.monotonic() - asked_s)
                self._applied_beyond_ts = self._applier.applied_ts

    def _apply_one(self, cut: Cut, awaited_s: float = 0.0) -> None:
        """Apply a cut that was waited for `awaited_s`, and write its lines."""
        started = time.monotonic()
        self._next_cut_s = started + self._trigger_s
        replayed = cut.end_ts <= self._applier.applied_ts
        record = self._applier.apply(cut)
        rows = {} if replayed else {item.table: item.rows for item in record.tables}
        if not replayed and (
            again := {item.table: item.replaced for item in record.tables if item.replaced}
        ):
            self._write({"replaced": again})
        if altered := self._applier.take_altered():
            self._write({"altered": altered})
        checkpoint_ts = self._applier.acknowledge()
        self._reporter.applied(record.end_ts)
        seconds = time.monotonic() - started
        self._write_cut(record, cut.batch, rows, seconds=seconds, checkpoint_ts=checkpoint_ts)
        self._write_progress(cut, record.end_ts, awaited_s, seconds)
        if (health := self._maintenance.maintain()) is not None:
            self._write({"maintenance": health})

    def _write_cut(
        self,
        record: CutRecord,
        batch: int,
        rows: dict[str, int],
        *,
        seconds: float,
        checkpoint_ts: int,
    ) -> None:
        self._write(
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
            self.stop()

    def _write_progress(self, cut: Cut, end_ts: int, awaited_s: float, seconds: float) -> None:
        steps = {
            "latestOffset": awaited_s,
            "addBatch": seconds,
            "triggerExecution": awaited_s + seconds,
        }
        line = document(cut.batch, end_ts, self._applier.resolved_ts, time.time(), steps)
        self._write({"progress": line})

    def _write(self, line: dict[str, Any]) -> None:
        with self._writing:
            write_line(self._out, line)


def _query_failure(failed: BaseException | None) -> SourceError:
    """The error of a query that ended outside of our code: of its source, whose code is in Spark's
    text, or of Spark itself.
    """
    if failed is not None:
        error = named(failed)
        if "[TM:" in str(failed) or error.code == "ErrTargetFull":
            return error
    # Spark's text goes on with the query's state, of many lines. `tidemark spark` reports the job's
    # last line of text, and a report that says the same as the job's own is not logged once more.
    cause = next((line for line in str(failed).splitlines() if line.strip()), str(failed))
    if _NO_WORKER in cause:
        cause += " Spark gives it ten seconds to begin: the machine is too busy, or short of memory"
    return SourceError("ErrQueryFailed", f"Spark ended the query: {cause}", retryable=True)


def logged_range(checkpoint: Path, batch: int, first_ts: int) -> tuple[int, int] | None:
    """`(start_ts, end_ts)` of a batch, from the offset log in the query's checkpoint directory;
    the first batch starts at `first_ts`.

    None where the log is not as we know it: another version of Spark may write another one.
    """
    # The batch's one row says the same, but to collect it is a Spark job with a Python worker:
    # half of a small cut's CPU. The log is written before the batch begins.
    start_ts = first_ts if batch == 0 else _logged(checkpoint, batch - 1)
    end_ts = _logged(checkpoint, batch)
    return None if start_ts is None or end_ts is None else (start_ts, end_ts)


def _logged(checkpoint: Path, batch: int) -> int | None:
    try:
        lines = (checkpoint / "offsets" / str(batch)).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    if len(lines) != _LOG_LINES or lines[0] != _LOG_VERSION:
        return None
    try:
        offset = json.loads(lines[-1])
    except ValueError:
        return None
    ts = offset.get("ts") if isinstance(offset, dict) else None
    return ts if isinstance(ts, int) else None


def _warn(message: str) -> None:
    sys.stderr.write(f"WARNING: {message}\n")


def _follow_parent() -> None:
    """End at once when standard input closes, as it does when the supervisor dies."""
    while os.read(0, 4096):
        pass
    os._exit(EXIT_ERROR)


def run_until_exit(argv: Sequence[str]) -> int:
    """Run `main` so that its exit code is reliable, by which `spark keep` tells whether a write may
    still be under way in the JVM that several jobs share: SIGTERM ends the job between its steps
    only, and not while Python exits.
    """
    if is_attached():
        signal.signal(signal.SIGTERM, lambda *_: _end_requested.set())
    status = main(argv)
    # Python takes its handlers down before it ends. A SIGTERM then would make a job that has ended
    # look like one that was killed in a write, for which `spark keep` ends the application of all.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return status


if __name__ == "__main__":
    sys.path[:] = [
        entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent
    ]
    sys.exit(run_until_exit(sys.argv[1:]))
