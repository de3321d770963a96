"""How the job ends: well only when it was asked to, or reached its end."""

import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from pyspark_tidemark.application import PORT
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import ChangefeedMeta
from pyspark_tidemark.job import Job, _finish, _StoppedError
from pyspark_tidemark.lake.cut_record import CutRecord


class Query:
    """A streaming query that lives until it is looked at `looks` times."""

    id = "q"
    status = {"message": "Waiting for data to arrive"}  # noqa: RUF012

    def __init__(self, looks, failure=None):
        self._looks = looks
        self._failure = failure
        self.stopped = False

    @property
    def isActive(self):
        self._looks -= 1
        return self._looks >= 0

    def exception(self):
        return self._failure

    def stop(self):
        self.stopped = True


def job_with(monkeypatch, query):
    reporter = SimpleNamespace(failure=None)
    job = Job(SimpleNamespace(until_ts=None, trigger=""), None, None, reporter, io.StringIO())
    monkeypatch.setattr(job, "_start_query", lambda spark, start_ts: query)
    return job


SPARK = SimpleNamespace()


@pytest.fixture(autouse=True)
def trigger(monkeypatch):
    """Without a JVM to ask."""
    monkeypatch.setattr("pyspark_tidemark.job.trigger_s", lambda spark, interval: 0.0)


@pytest.mark.parametrize("failure", [None, RuntimeError("Python worker failed to connect back")])
def test_a_query_that_ends_by_itself_is_an_error_after_which_the_job_is_started_again(
    monkeypatch, failure
):
    """Found by the kill matrix: the job ended with status 0,
    and its supervisor took that for the end of its work.
    """
    query = Query(2, failure)
    with pytest.raises(SourceError, match=r"ErrQueryFailed.*Spark ended the query") as caught:
        job_with(monkeypatch, query).run(SPARK, 0)
    assert caught.value.retryable
    assert query.stopped


def test_a_query_whose_python_did_not_begin_in_time_is_started_again_in_the_same_job(monkeypatch):
    """Ten jobs on two busy cores ended and began again for ever: a job's own start costs ten times
    what its query's does.
    """
    late = RuntimeError("Python worker failed to connect back")
    queries = [Query(1, late), Query(0, late), Query(1, RuntimeError("something else"))]
    first, second, last = queries
    job = job_with(monkeypatch, None)
    monkeypatch.setattr(job, "_start_query", lambda spark, start_ts: queries.pop(0))
    with pytest.raises(SourceError, match="something else"):
        job.run(SPARK, 0)
    assert not queries
    assert all(query.stopped for query in (first, second, last))


def test_a_job_that_was_told_to_stop_ends_well(monkeypatch):
    query = Query(1 << 30)
    job = job_with(monkeypatch, query)
    job.stop()
    job.run(SPARK, 0)
    assert query.stopped


def test_an_idle_job_ends_once_its_acknowledgements_count_no_more(monkeypatch):
    query = Query(1 << 30)
    job = job_with(monkeypatch, query)
    job._reporter.failure = SourceError("ErrChangefeedMovedBack", "moved back")
    with pytest.raises(SourceError, match="ErrChangefeedMovedBack"):
        job.run(SPARK, 0)
    assert query.stopped


@pytest.mark.parametrize("target_ts", [7, None])
def test_a_job_that_is_at_the_end_of_its_changefeed_sees_that_the_changefeed_knows_it(target_ts):
    """A capture that dies takes what it had not kept yet with it, and the job was gone."""
    states, acks, out = ["normal", "warning", "finished"], [], io.StringIO()
    changefeed = SimpleNamespace(
        describe=lambda: ChangefeedMeta(0, 0, {}, target_ts=target_ts, state=states.pop(0)),
        ack_again=acks.append,
    )
    _finish(changefeed, 7, out)
    assert acks == ([7, 7] if target_ts else [])
    assert out.getvalue() == '{"finished": {"at_ts": 7}}\n'


class Lake:
    """Stands for the applier of a changefeed whose cuts end at these ts."""

    def __init__(self, *offered):
        self.applied_ts = 10
        self.resolved_ts = 0
        self.ranges = []
        self.acknowledged = []
        self._offered = list(offered)

    def next_end(self, max_rows, wait_ms):
        assert (max_rows, wait_ms) == (100, 200)
        offered = self._offered.pop(0)
        if isinstance(offered, Exception):
            raise offered
        return offered

    def apply(self, cut):
        if cut.end_ts > self.applied_ts:
            self.ranges.append((cut.start_ts, cut.end_ts))
        self.applied_ts = max(self.applied_ts, cut.end_ts)
        return CutRecord("shop", cut.start_ts, self.applied_ts, cut.batch, "", ())

    def take_altered(self):
        return []

    def acknowledge(self):
        self.acknowledged.append(self.applied_ts)
        return self.applied_ts


def job_of(lake, until_ts=None):
    arguments = SimpleNamespace(until_ts=until_ts, max_rows=100, trigger="")
    reporter = SimpleNamespace(failure=None, applied=lambda ts: None)
    maintenance = SimpleNamespace(maintain=lambda: None)
    return Job(arguments, lake, maintenance, reporter, io.StringIO())


def test_a_batch_of_sparks_goes_on_with_the_cuts_that_come_meanwhile():
    lake = Lake(30, 30, 45)
    job = job_of(lake, until_ts=40)
    job._apply(None, 3, (10, 20))
    assert lake.ranges == [(10, 20), (20, 30), (30, 40)]
    assert lake.acknowledged == [20, 30, 40]
    lines = [json.loads(line) for line in job._out.getvalue().splitlines()]
    assert [line["batch"] for line in lines if "end_ts" in line] == [3, 3, 3]
    steps = [line["progress"]["ms"] for line in lines if "progress" in line]
    assert [step.keys() for step in steps] == [{"latestOffset", "addBatch", "triggerExecution"}] * 3


def test_a_batch_that_the_lake_has_in_part_is_applied_from_where_the_lake_is():
    """Spark's log is behind the lake by as many cuts as the batch went on with."""
    lake = Lake(20)
    job_of(lake, until_ts=20)._apply(None, 4, (3, 8))
    assert lake.ranges == [(10, 20)]
    assert lake.acknowledged == [10, 20]


def test_a_range_that_the_batch_before_went_on_beyond_is_told_once():
    lake = Lake(30, 50)
    job = job_of(lake, until_ts=50)
    # The first batch ends after the cut that it went on with.
    job._reporter.applied = lambda ts: setattr(job._reporter, "failure", ts == 30 or None)
    job._apply(None, 0, (10, 20))
    assert lake.applied_ts == 30
    job._reporter.failure = None
    job._apply(None, 1, (20, 30))
    lines = [json.loads(line) for line in job._out.getvalue().splitlines()]
    assert [line["end_ts"] for line in lines if "end_ts" in line] == [20, 30, 50]


def test_a_batch_ends_once_its_time_is_over(monkeypatch):
    monkeypatch.setattr("pyspark_tidemark.job._ROUND_S", 0.0)
    lake = Lake()
    job_of(lake)._apply(None, 0, (10, 20))
    assert lake.ranges == [(10, 20)]


def test_a_batch_ends_when_the_job_has_to_end_by_an_error():
    lake = Lake()
    job = job_of(lake)
    job._reporter.failure = SourceError("ErrChangefeedMovedBack", "moved back")
    job._apply(None, 0, (10, 20))
    assert lake.ranges == [(10, 20)]


def test_captures_that_cannot_be_asked_for_the_next_cut_end_the_job(monkeypatch):
    lake, query = Lake(SourceError("ErrNoCapture", "none", retryable=True)), Query(1 << 30)
    job = job_of(lake)

    def started(spark, start_ts):
        with pytest.raises(SourceError):
            job._apply(None, 0, (10, 20))
        return query

    monkeypatch.setattr(job, "_start_query", started)
    with pytest.raises(SourceError, match="ErrNoCapture"):
        job.run(SPARK, 0)
    assert lake.ranges == [(10, 20)]
    assert query.stopped


class PausedLake(Lake):
    """Its changefeed is paused, and the job told to stop, while the captures are asked."""

    job: Job

    def next_end(self, max_rows, wait_ms):
        raise self._unanswered()

    def _unanswered(self):
        self.job.stop()
        assert self.job.pause(60)
        return SourceError("ErrChangefeedNotRunning", "it is stopped", retryable=True)


class LakePausedAmidACut(PausedLake):
    def acknowledge(self):
        raise self._unanswered()


def test_a_job_of_a_paused_changefeed_ends_its_batch_without_waiting_for_the_captures(monkeypatch):
    lake = PausedLake()
    lake.job = job = job_of(lake)
    query = Query(1 << 30)
    monkeypatch.setattr(job, "_start_query", lambda *_: job._apply(None, 0, (10, 20)) or query)
    job.run(SPARK, 0)
    assert lake.acknowledged == [20]
    assert query.stopped


def test_a_job_that_is_told_to_stop_while_captures_are_away_ends_well_amid_its_cut(monkeypatch):
    lake = LakePausedAmidACut()
    lake.job = job = job_of(lake)
    query = Query(1 << 30)

    def started(spark, start_ts):
        with pytest.raises(_StoppedError):
            job._apply(None, 0, (10, 20))
        return query

    monkeypatch.setattr(job, "_start_query", started)
    job.run(SPARK, 0)
    assert query.stopped


def test_the_query_is_interpreted_and_the_session_keeps_the_settings_of_its_user(tmp_path):
    settings = {f"spark.sql.codegen.{name}": "theirs" for name in ("wholeStage", "factoryMode")}
    of_query = {}
    spark = MagicMock()
    spark.conf = SimpleNamespace(get=settings.get, set=settings.__setitem__)
    reading = spark.readStream.format().options().load()
    writing = reading.writeStream.queryName().option().trigger().foreachBatch()
    writing.start = lambda: of_query.update(settings) or "query"
    arguments = SimpleNamespace(
        source_options={}, max_rows=1, until_ts=None, trigger="0 s", checkpoint_dir=tmp_path
    )
    job = Job(arguments, None, None, None, io.StringIO())
    assert job._start_query(spark, 7) == "query"
    assert set(of_query.values()) == {"false", "NO_CODEGEN"}
    assert set(settings.values()) == {"theirs"}


def test_no_batch_begins_after_the_job_was_told_to_stop():
    job, lake = job_of(Lake()), Lake()
    job.stop()
    with pytest.raises(_StoppedError):
        job._apply(None, 0, (10, 20))
    assert not lake.ranges


LATE = """
import os, signal, sys
from pyspark_tidemark import job

def late():
    os.kill(os.getpid(), signal.SIGTERM)

class Ends:
    def __del__(self, late=late):
        late()

job.main = lambda argv: 75
job.ends = Ends()
signal.signal(signal.SIGTERM, lambda number, frame: None)
sys.exit(job.run_until_exit([]))
"""


def test_a_sigterm_while_python_ends_does_not_make_an_ended_job_look_killed():
    done = subprocess.run([sys.executable, "-c", LATE], check=False, timeout=60)
    assert done.returncode == 75


EARLY = """
import os, signal, sys
from pyspark_tidemark import job

def main(argv):
    os.kill(os.getpid(), signal.SIGTERM)
    return 0 if job._end_requested.is_set() else 1

job.main = main
sys.exit(job.run_until_exit([]))
"""


@pytest.mark.parametrize(("attached", "status"), [({PORT: "1"}, 0), ({}, -15)])
def test_a_job_that_shares_a_jvm_is_not_ended_amid_a_step_by_an_early_sigterm(attached, status):
    done = subprocess.run(
        [sys.executable, "-c", EARLY], env=os.environ | attached, check=False, timeout=60
    )
    assert done.returncode == status
