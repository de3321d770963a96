"""What the job tells the captures: ready only after a cut, why it ends;
nothing of it holds the job up.
"""

import threading

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.failure import named
from pyspark_tidemark.lake.reporter import Reporter

REFUSED = SourceError("ErrTargetRefused", "no")


class Captures:
    def __init__(self, answer=None):
        self.reports = []
        self.acks = []
        self.reported = threading.Condition()
        self._answer = answer

    def report(self, state, cut_ts, error=None, commits="", ui=""):
        self.commits, self.ui = commits, ui
        with self.reported:
            self.reports.append((state, cut_ts, error and error.code))
            self.reported.notify_all()
        if self._answer is not None:
            raise self._answer

    def ack_again(self, ts):
        with self.reported:
            self.acks.append(ts)
            self.reported.notify_all()

    def wait_for(self, count, acks=0):
        with self.reported:
            assert self.reported.wait_for(
                lambda: len(self.reports) >= count and len(self.acks) >= acks, timeout=60
            )


def test_a_job_is_ready_once_a_cut_is_in_the_lake_and_says_so_again():
    captures = Captures()
    reporter = Reporter(captures, every_s=0.001)
    reporter.start(commits="cut")
    reporter.applied(7)
    captures.wait_for(3)
    assert captures.commits == "cut"
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


def test_an_idle_job_repeats_its_last_acknowledgement_as_a_capture_may_have_lost_it():
    """Also one that was started again, and has applied no cut since."""
    captures = Captures()
    reporter = Reporter(captures, every_s=0.001)
    reporter.start(7)
    captures.wait_for(0, acks=2)
    assert not captures.reports
    reporter.applied(8)
    captures.wait_for(1, acks=len(captures.acks) + 2)
    reporter.stopped()
    assert captures.acks[0] == 7
    assert captures.acks[-1] == 8


def test_a_lake_that_has_nothing_acknowledges_nothing():
    captures = Captures()
    reporter = Reporter(captures, every_s=0.001)
    reporter.start()
    threading.Event().wait(0.01)
    reporter.stopped()
    assert not captures.acks


def test_a_job_whose_acknowledgements_count_no_more_has_to_end(monkeypatch):
    """Started again, it is told the new epoch, and goes on where its lake ends."""
    captures = Captures()

    def refuse(ts):
        raise SourceError("ErrChangefeedMovedBack", "the checkpoint was moved back")

    monkeypatch.setattr(captures, "ack_again", refuse)
    reporter = Reporter(captures, every_s=0.001)
    reporter.start(7)
    reporter._thread.join(30)
    assert reporter.failure.code == "ErrChangefeedMovedBack"
    reporter.failed(named(reporter.failure))
    assert named(reporter.failure).retryable
    assert not captures.reports
