"""What a lake job reports is seen at its changefeed: errors that heal and those that do not,
after restarts, too.
"""

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from prometheus_client import CollectorRegistry
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.capture.errors import (
    ChangefeedNotExistsError,
    ChangefeedStateError,
    StartTsBeforeGcError,
)
from server.capture.flight import OwnerFeeds
from server.capture.job_report import READY_EXPIRES_S, RETRYING_EXPIRES_S, JobReport, accepted
from server.capture.metrics import FeedCollector
from server.capture.service import changefeed_message
from server.changefeed import keys
from server.changefeed.info import State
from server.changefeed.view import detail, summary
from sink.flight.feeds import FAILED, READY, RETRYING, STOPPED, Poll, Report
from storage.model.errors import CorruptError, UnavailableError
from tests.unit.server.capture.conftest import new

GAVE_UP = Report(FAILED, 0, "ErrTargetRefused", "shop.t: PostgreSQL says: no")
LATER = Report(RETRYING, 1010, "ErrTargetUnavailable", "the database is away")


async def until(condition):
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


@pytest.fixture
async def owner(capture, upstream):
    owner = await capture.start()
    await owner.create(new("feed", "delta:///lake", 1000, 0, [capture.table]))
    await until(lambda: upstream.subscriptions)
    return owner


def shown(owner):
    """State and code as `changefeed list` shows them."""
    short = summary(changefeed_message(owner.feed("feed")), 0.0)["summary"]
    return short["state"], short["error"] and short["error"]["code"]


def tell(owner, report):
    OwnerFeeds(owner).report("feed", report)


async def test_an_error_is_shown_until_the_job_applies_cuts_again(owner):
    assert shown(owner) == ("normal", None)
    tell(owner, LATER)
    assert shown(owner) == ("warning", "TM:ErrTargetUnavailable")
    tell(owner, GAVE_UP)
    assert shown(owner) == ("failed", "TM:ErrTargetRefused")
    document = detail(changefeed_message(owner.feed("feed")))
    assert document["error"]["message"] == "shop.t: PostgreSQL says: no"
    assert document["lake_job"]["state"] == "failed"
    tell(owner, Report(READY, 1010))
    assert shown(owner) == ("normal", None)
    assert detail(changefeed_message(owner.feed("feed")))["lake_job"]["cut_tso"] == 1010


async def test_a_changefeed_that_starts_is_pending_and_one_that_is_paused_is_stopped(owner):
    feed = owner.feed("feed")
    sink, feed.processor.sink = feed.processor.sink, None
    document = detail(changefeed_message(feed))
    assert {table["state"] for table in document["tables"]} == {"pending"}
    assert document["reading"] == {"idle_seconds": 0, "never": True}
    feed.processor.sink = sink
    document = detail(changefeed_message(await owner.pause("feed")))
    assert {table["state"] for table in document["tables"]} == {"stopped"}
    assert "reading" not in document


async def test_rows_are_pulled_and_read_while_the_job_has_given_up(owner, upstream):
    tell(owner, GAVE_UP)
    upstream.commit(1010, 1, 7)
    upstream.resolve(1030)
    feeds = OwnerFeeds(owner)
    assert await asyncio.to_thread(feeds.latest, "feed", None, 1000, None, None, Poll(10.0)) == 1030
    assert feeds.describe("feed").state == "normal"


async def test_a_job_that_was_stopped_takes_its_reports_back_but_not_why_an_earlier_one_failed(
    owner,
):
    tell(owner, LATER)
    tell(owner, Report(STOPPED))
    assert shown(owner) == ("normal", None)
    tell(owner, GAVE_UP)
    tell(owner, Report(STOPPED))
    assert shown(owner) == ("failed", "TM:ErrTargetRefused")


async def test_a_new_owner_knows_that_the_job_has_given_up_until_it_is_ready_again(
    capture, owner, meta
):
    tell(owner, GAVE_UP)
    await until(lambda: owner.feed("feed").job_saved is not None)
    await capture.stop()
    owner = await capture.start()
    assert shown(owner) == ("failed", "TM:ErrTargetRefused")
    tell(owner, Report(READY, 1010))
    await until(lambda: owner.feed("feed").job_saved is None)
    assert not await meta.get_prefix(keys.JOBS)
    await capture.stop()
    assert shown(await capture.start()) == ("normal", None)


async def test_a_damaged_report_stops_no_owner(capture, owner, meta):
    await capture.stop()
    await meta.put(keys.job("feed"), b"[" * 100)
    await meta.put(keys.JOBS + b"\xff", b"{}")
    assert shown(await capture.start()) == ("normal", None)


async def test_resume_takes_a_failure_of_the_job_away_and_stops_no_pulling(owner, upstream):
    tell(owner, GAVE_UP)
    pullers = list(upstream.subscriptions)
    await owner.resume("feed")
    assert shown(owner) == ("normal", None)
    assert list(upstream.subscriptions) == pullers
    with pytest.raises(ChangefeedStateError):
        await owner.resume("feed")


async def test_a_pause_takes_it_away_and_a_paused_changefeed_takes_no_reports(owner):
    tell(owner, GAVE_UP)
    await owner.pause("feed")
    tell(owner, GAVE_UP)
    assert shown(owner) == ("stopped", None)
    await owner.resume("feed")
    assert shown(owner) == ("normal", None)


async def test_a_removed_changefeed_leaves_no_report(owner, meta):
    tell(owner, GAVE_UP)
    await until(lambda: owner.feed("feed").job_saved is not None)
    await owner.remove("feed")
    assert not await meta.get_prefix(keys.JOBS)
    with pytest.raises(ChangefeedNotExistsError):
        tell(owner, GAVE_UP)


async def test_the_changefeeds_own_error_is_shown_before_its_jobs(owner, upstream):
    tell(owner, GAVE_UP)
    upstream.fail(UnavailableError("the store is away"))
    await until(lambda: owner.feed("feed").info.state is State.WARNING)
    assert shown(owner)[0] == "warning"
    assert shown(owner)[1] != "TM:ErrTargetRefused"


@pytest.mark.parametrize(
    ("report", "expires_s"),
    [(Report(READY, 5), READY_EXPIRES_S), (LATER, RETRYING_EXPIRES_S), (GAVE_UP, None)],
)
def test_reports_expire_when_the_job_is_silent_but_for_that_it_has_given_up(report, expires_s):
    job = JobReport(report=report, time="2026-11-22T00:00:00Z", received_s=100.0)
    assert job.state(100.0 + (expires_s or 1e9)) == report.state
    if expires_s:
        assert job.state(100.1 + expires_s) == "silent"


def test_a_record_reads_as_it_was_written_and_garbage_is_named():
    job = JobReport(report=GAVE_UP, time="2026-11-22T00:00:00Z", received_s=7.0)
    assert JobReport.from_json(job.to_json(), 7.0) == job
    job = replace(job, report=Report(READY, 5, commits="cut", ui="http://127.0.0.1:4040"))
    assert JobReport.from_json(job.to_json(), 7.0) == job
    for garbage in (b"", b"[]", b'{"state": 3}'):
        with pytest.raises(CorruptError):
            JobReport.from_json(garbage, 0.0)


async def test_jobs_are_counted_and_their_states_scraped(owner):
    registry = CollectorRegistry()
    registry.register(FeedCollector(owner.feeds.values))

    def sample(name, **labels):
        return registry.get_sample_value(
            f"tidemark_capture_{name}", {"changefeed": "feed", **labels}
        )

    assert sample("job_state", state="ready") is None
    tell(owner, Report(READY, (int(time.time()) - 30) * 1000 << 18))
    assert (sample("job_state", state="ready"), sample("job_state", state="failed")) == (1, 0)
    assert 29 <= sample("job_lag_seconds") < 60
    tell(owner, GAVE_UP)
    assert (sample("job_state", state="failed"), sample("changefeed_state", state="failed")) == (
        1,
        1,
    )


async def test_an_older_client_reads_the_state_where_it_always_was(owner):
    tell(owner, GAVE_UP)
    found = changefeed_message(owner.feed("feed"))
    assert found.state == pb.CHANGEFEED_STATE_FAILED
    assert found.error.code == "ErrTargetRefused"
    assert owner.feed("feed").info.error is None


class Holds:
    """What a changefeed's safepoint was set to, with which TTL."""

    def __init__(self, upstream, monkeypatch):
        self.ttls = []
        inner = upstream.update_service_gc_safe_point

        async def update(service_id, ttl_s, safe_point):
            if service_id == "ticdc-default-feed" and ttl_s > 0:
                self.ttls.append(ttl_s)
            return await inner(service_id, ttl_s, safe_point)

        monkeypatch.setattr(upstream, "update_service_gc_safe_point", update)


def hours_ago(hours):
    return (datetime.now(UTC) - timedelta(hours=hours)).isoformat(timespec="milliseconds")


async def restarted_with_failure(capture, owner, hours, holds=None):
    """The next owner, whose `holds` count, finds a job that has given up so long ago."""
    await owner._records.save_job(
        "feed", JobReport(report=GAVE_UP, time=hours_ago(hours), received_s=0.0)
    )
    await capture.stop()
    if holds is not None:
        holds.ttls.clear()
    return await capture.start()


async def test_a_job_that_gave_up_holds_gc_for_a_day_from_then_whoever_owns_the_changefeeds(
    capture, owner, upstream, monkeypatch
):
    holds = Holds(upstream, monkeypatch)
    owner = await restarted_with_failure(capture, owner, 10, holds)
    await until(lambda: owner.feed("feed").safepoint_time and holds.ttls)
    assert all(13.9 * 3600 < ttl_s <= 14 * 3600 for ttl_s in holds.ttls)
    assert shown(owner) == ("failed", "TM:ErrTargetRefused")
    await owner.resume("feed")
    owner.feed("feed").safepoint_time = 0.0
    await until(lambda: holds.ttls[-1] == 86_400)


async def test_after_that_day_the_changefeed_has_failed_and_gc_goes_on_without_it(
    capture, owner, upstream, monkeypatch
):
    holds = Holds(upstream, monkeypatch)
    owner = await restarted_with_failure(capture, owner, 25, holds)
    await until(lambda: shown(owner) == ("failed", "TM:ErrGCTTLExceeded"))
    assert not holds.ttls
    await until(lambda: owner.feed("feed").info_saved and owner.feed("feed").job_saved is None)
    await capture.stop()
    owner = await capture.start()
    assert shown(owner) == ("failed", "TM:ErrGCTTLExceeded"), "it stays so"

    await owner.resume("feed")  # GC has not gone on: nothing is lost
    await until(lambda: shown(owner) == ("normal", None))
    assert holds.ttls[-1] == 86_400
    await capture.stop()
    owner = await capture.start()
    assert shown(owner)[0] != "failed", "an old failure is forgotten for good"


async def test_where_gc_has_passed_by_then_the_printed_way_out_goes_on_with_a_gap(
    capture, owner, upstream, monkeypatch
):
    upstream.now_ts = 3000
    owner = await restarted_with_failure(capture, owner, 25)
    await until(lambda: shown(owner) == ("failed", "TM:ErrGCTTLExceeded"))
    assert "--overwrite-checkpoint-ts now" in owner.feed("feed").info.error.message
    upstream.safepoints.pop("ticdc-default-feed")
    upstream.safepoints["gc_worker"] = upstream.gc_ts = 2000
    with pytest.raises(StartTsBeforeGcError):
        await owner.resume("feed")
    now_ts = await upstream.tso()
    await owner.resume("feed", now_ts)
    assert [(each.start_ts, each.end_ts) for each in owner.feed("feed").info.skipped] == [
        (1000, now_ts)
    ]


def test_a_job_that_fails_again_has_failed_since_the_first_time():
    def report(state, hours):
        return JobReport(
            report=Report(state, 0, "ErrA", "b"), time=hours_ago(hours), received_s=0.0
        )

    first = accepted(None, report(FAILED, 5))
    again = accepted(first, report(FAILED, 3))
    assert (again.failed_since, again.time) == (first.time, again.time)
    assert accepted(again, report(STOPPED, 2)) is again
    assert JobReport.from_json(again.to_json(), 0.0) == again
    later = accepted(accepted(again, report(READY, 2)), report(FAILED, 1))
    assert later.failed_since == later.time
