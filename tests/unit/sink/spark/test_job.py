"""How the job ends: well only when it was asked to, or reached its end."""

import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from pyspark_tidemark.application import PORT
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import ChangefeedMeta
from pyspark_tidemark.job import Job, _finish


class Query:
    """A streaming query that lives until it is looked at `looks` times."""

    id = "q"
    lastProgress = None  # noqa: N815 - Spark's name
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
    job = Job(SimpleNamespace(until_ts=None), None, None, reporter, io.StringIO())
    monkeypatch.setattr(job, "_started", lambda spark, start_ts: query)
    return job


SPARK = SimpleNamespace()


@pytest.mark.parametrize("failure", [None, RuntimeError("Python worker failed to connect back")])
def test_a_query_that_ends_by_itself_is_an_error_after_which_the_job_is_started_again(
    monkeypatch, failure
):
    """Found by the kill matrix: the job ended with status 0,
    and its supervisor took that for the end of its work.
    """
    query = Query(2, failure)
    with pytest.raises(SourceError, match=r"ErrQueryFailed.*ended by itself") as caught:
        job_with(monkeypatch, query).run(SPARK, 0)
    assert caught.value.retryable
    assert query.stopped


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


def test_the_steps_of_a_batch_are_said_once_spark_has_noted_them(monkeypatch):
    source = {"endOffset": {"ts": 7, "changefeed": "f"}, "latestOffset": None, "numInputRows": 1}
    query = Query(1 << 30)
    query.lastProgress = SimpleNamespace(
        name="tidemark",
        id="q",
        batchId=0,
        json=json.dumps({"sources": [source]}),
        durationMs={"addBatch": 5},
    )
    job = job_with(monkeypatch, query)
    job._batch = 1
    job._say_progress(query)
    query.lastProgress.batchId = 1
    for _ in range(3):
        job._say_progress(query)
    lines = [json.loads(line)["progress"] for line in job._out.getvalue().splitlines()]
    assert [(line["batch"], line["ms"]) for line in lines] == [
        (0, {"addBatch": 5}),
        (1, {"addBatch": 5}),
    ]


def test_a_progress_that_pyspark_cannot_read_does_not_end_the_job(monkeypatch):
    """Found with `--trigger 0 seconds`: Spark left out the rate of a trigger that came within the
    millisecond of the one before, and the changefeed failed for good."""

    class Unreadable(Query):
        @property
        def lastProgress(self):
            raise KeyError("inputRowsPerSecond")

    job = job_with(monkeypatch, Unreadable(5))
    job._batch = 3
    with pytest.raises(SourceError, match="ErrQueryFailed"):
        job.run(SPARK, 0)
    assert job._said_batch == 3


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
sys.exit(job.run_to_the_end([]))
"""


def test_a_sigterm_while_python_ends_does_not_make_an_ended_job_look_killed():
    done = subprocess.run([sys.executable, "-c", LATE], check=False, timeout=60)
    assert done.returncode == 75


EARLY = """
import os, signal, sys
from pyspark_tidemark import job

def main(argv):
    os.kill(os.getpid(), signal.SIGTERM)
    return 0 if job._asked_to_end.is_set() else 1

job.main = main
sys.exit(job.run_to_the_end([]))
"""


@pytest.mark.parametrize(("attached", "status"), [({PORT: "1"}, 0), ({}, -15)])
def test_a_job_that_shares_a_jvm_is_not_ended_amid_a_step_by_an_early_sigterm(attached, status):
    done = subprocess.run(
        [sys.executable, "-c", EARLY], env=os.environ | attached, check=False, timeout=60
    )
    assert done.returncode == status
