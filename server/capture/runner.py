"""Keeps a changefeed's processor running: the state that each error leads to, and when to try
again.
"""

import asyncio
import time
from datetime import UTC, datetime

import structlog

from server.capture import metrics
from server.capture.feed import Feed
from server.capture.job_report import JobReport, accepted
from server.capture.safepoint import ChangefeedSafePoints
from server.changefeed.info import RunningError, State
from server.rpc.pd import PdRefusedError
from sink.flight.feeds import FAILED, Report
from sorter.errors import TableDamagedError
from storage.backoff import Backoff
from storage.defect import request_error
from storage.model.errors import Kind, TidemarkError, leaves
from storage.tasks import run_in_task

_RETRY_S = (1.0, 30.0)
# TiCDC's changefeed-error-stuck-duration.
_STUCK_S = 1800.0
_PASSING = (Kind.UNAVAILABLE, Kind.CLOSED, Kind.CONFLICT)

_log = structlog.get_logger(__name__)


async def keep_running(feed: Feed, safepoints: ChangefeedSafePoints) -> None:
    """Run the processor; after an error that can pass, again from the checkpoint.

    Returns when it has failed.
    """
    loop = asyncio.get_running_loop()
    backoff = Backoff(*_RETRY_S)
    moved_at, checkpoint_ts = loop.time(), feed.checkpoint_ts
    while True:
        error = await run_in_task(_attempt(feed, safepoints))
        if feed.checkpoint_ts > checkpoint_ts:
            moved_at, checkpoint_ts = loop.time(), feed.checkpoint_ts
            backoff.reset()
        # A table that is read again keeps the checkpoint for as long as that takes: it is not
        # stuck.
        if feed.catalog.holds.open_since:
            moved_at = loop.time()
        if not _can_pass(error) or loop.time() - moved_at > _STUCK_S:
            note(feed, State.FAILED, error)
            return
        note(feed, State.WARNING, error)
        await asyncio.sleep(backoff.next_s())


def note(feed: Feed, state: State, error: TidemarkError, *, hint: str = "") -> None:
    """Move to a state of error; the checkpoint saver saves it."""
    metrics.ERRORS.labels(error.code).inc()
    log = _log.error if state is State.FAILED else _log.warning
    log(
        "changefeed error",
        changefeed=feed.id,
        state=state.value,
        code=error.code,
        error=error.message,
    )
    feed.info = feed.info.moved_to(state, RunningError(error.code, error.message + hint, utc_now()))
    feed.info_saved = False


def note_job(feed: Feed, report: Report) -> None:
    """Note the report of a lake job; called from any thread. The checkpoint saver saves it if it
    must be durable.
    """
    before = feed.job
    if report.code and (before is None or before.report != report):
        metrics.JOB_ERRORS.labels(feed.id).inc()
        log = _log.error if report.state == FAILED else _log.warning
        log(
            "lake job error",
            changefeed=feed.id,
            state=report.state,
            code=report.code,
            error=report.message,
        )
    feed.job = accepted(
        before, JobReport(report=report, time=utc_now(), received_s=time.monotonic())
    )


def worst(group: ExceptionGroup[Exception]) -> TidemarkError:
    """The first error that trying again does not help against; else the first.

    Logs what nobody expected.
    """
    _, unexpected = group.split(TidemarkError)
    errors = [*leaves(group), *([request_error(unexpected, "changefeed")] if unexpected else [])]
    return next((error for error in errors if not _can_pass(error)), errors[0])


def utc_now() -> str:
    """The wall clock, RFC 3339."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


async def _attempt(feed: Feed, safepoints: ChangefeedSafePoints) -> TidemarkError:
    """Run the processor until it fails; returns the error."""
    error: TidemarkError | None = None
    try:
        await safepoints.hold(feed.source, feed.info, feed.checkpoint_ts, failed_s=feed.failed_s)
        if feed.info.salt is not None:
            # Before readers are told of rows that nobody here could show them.
            await asyncio.to_thread(feed.info.salt.secret)
        await feed.processor.run()
    except* Exception as group:  # noqa: BLE001 - nobody expected it: it is logged and ends this alone
        error = worst(group)
    assert error is not None, "a processor runs until it is cancelled"
    return error


def _can_pass(error: TidemarkError) -> bool:
    """Whether trying again can help: the coordinator may get a new leader, and damaged rows can be
    pulled again.
    """
    return error.kind in _PASSING or isinstance(error, PdRefusedError | TableDamagedError)
