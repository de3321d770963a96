"""What the job tells the captures: ready only after a cut, why it ends;
nothing of it holds the job up.
"""

import threading

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.reporter import Reporter

REFUSED = SourceError("ErrTargetRefused", "no")


class Captures:
    def __init__(self, answer=None):
        self.reports = []
        self.reported = threading.Condition()
        self._answer = answer

    def report(self, state, cut_ts, error=None):
        with self.reported:
            self.reports.append((state, cut_ts, error and error.code))
            self.reported.notify_all()
        if self._answer is not None:
            raise self._answer

    def wait_for(self, count):
        with self.reported:
            assert self.reported.wait_for(lambda: len(self.reports) >= count, timeout=30)


def test_a_job_is_ready_once_a_cut_is_in_the_lake_and_says_so_again():
    captures = Captures()
    reporter = Reporter(captures, every_s=0.001)
    reporter.start()
    reporter.applied(7)
    captures.wait_for(3)
    reporter.applied(8)
    reporter.stopped()
    assert captures.reports[0] == ("ready", 7, None)
    assert captures.reports[-1] == ("stopped", 8, None)


def test_a_job_that_never_applied_a_cut_was_never_ready():
    captures = Captures()
    reporter = Reporter(captures)
    reporter.start()
    reporter.failed(REFUSED)
    assert captures.reports == [("failed", 0, "ErrTargetRefused")]


@pytest.mark.parametrize(("retryable", "state"), [(True, "retrying"), (False, "failed")])
def test_the_last_report_says_why_the_job_ends(retryable, state):
    captures = Captures()
    reporter = Reporter(captures, every_s=60)
    reporter.start()
    reporter.applied(7)
    captures.wait_for(1)
    reporter.failed(SourceError("ErrX", "why", retryable=retryable))
    assert captures.reports == [("ready", 7, None), (state, 7, "ErrX")]


def test_what_the_captures_said_themselves_is_not_told_them():
    captures = Captures()
    Reporter(captures).failed(SourceError("ErrChangefeedFailed", "changefeed feed has failed"))
    assert not captures.reports


def test_a_capture_that_knows_no_reports_is_told_once_only():
    captures = Captures(SourceError("ErrFlightRequestInvalid", "no action 'report'"))
    reporter = Reporter(captures, every_s=0.001)
    reporter.start()
    reporter.applied(7)
    captures.wait_for(1)
    reporter.stopped()
    assert captures.reports == [("ready", 7, None)]


def test_captures_that_are_away_are_no_trouble():
    captures = Captures(SourceError("ErrFlight", "gone", retryable=True))
    reporter = Reporter(captures, every_s=0.001)
    reporter.start()
    reporter.applied(7)
    captures.wait_for(2)
    reporter.failed(REFUSED)
    assert captures.reports[-1] == ("failed", 7, "ErrTargetRefused")


def test_an_answer_that_makes_no_sense_does_not_hide_why_the_job_ended():
    captures = Captures(IndexError("list index out of range"))
    Reporter(captures).failed(REFUSED)
    assert captures.reports == [("failed", 0, "ErrTargetRefused")]
