"""The last report of a changefeed's lake job, and the state that the changefeed shows because of
it.

Pure.

The job reports by Flight (docs/format/flight.md, `report`). A report never stops the pulling of
rows: a job that gave up leaves the changefeed's checkpoint where it is, and its rows are kept until
a job goes on from there.

1. The changefeed's own error is shown before its job's, and that before what its audit found.
2. `failed` stays until a job reports `ready` again or the changefeed is paused, resumed or removed;
   it is durable.
3. Other reports expire when the job is silent.
"""

import json
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from server.capture.audit import Audit, audit_error
from server.changefeed.info import ChangefeedInfo, RunningError, State
from sink.flight.feeds import FAILED, READY, RETRYING, STOPPED, Report
from storage.model.errors import CorruptError

SILENT: Final = "silent"
"""The state of a job that has not reported for too long."""
JOB_STATES: Final = (READY, RETRYING, FAILED, SILENT)
READY_EXPIRES_S: Final = 60.0
"""A running job reports every 10 s."""
RETRYING_EXPIRES_S: Final = 600.0
"""A job that starts again pauses for a minute at most,
and a start of Spark may take minutes on a busy machine.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """A report and when it came: `time` is RFC 3339, UTC; `received_s` is the monotonic clock's."""

    report: Report
    time: str
    received_s: float
    failed_since: str = ""
    """The time of the first of successive reports of `failed`, as in `time`; empty: the last report
    was not `failed`.
    """

    def state(self, now_s: float) -> str:
        """One of `JOB_STATES`."""
        limits_s = {READY: READY_EXPIRES_S, RETRYING: RETRYING_EXPIRES_S}
        limit_s = limits_s.get(self.report.state)
        if limit_s is not None and now_s - self.received_s > limit_s:
            return SILENT
        return self.report.state

    def to_json(self) -> bytes:
        """The value of its record."""
        report = self.report
        members = {"state": report.state, "code": report.code, "message": report.message}
        members |= {"failed_since": self.failed_since} if self.failed_since else {}
        members |= {"commits": report.commits} if report.commits else {}
        members |= {"ui": report.ui} if report.ui else {}
        return json.dumps(members | {"cut_ts": report.cut_ts, "time": self.time}).encode()

    @classmethod
    def from_json(cls, value: bytes, now_s: float) -> "JobReport":
        """Read what `to_json` wrote.

        Raises:
            CorruptError: it is something else.
        """
        try:
            doc = json.loads(value)
            report = Report(
                str(doc["state"]),
                int(doc["cut_ts"]),
                str(doc["code"]),
                str(doc["message"]),
                str(doc.get("commits", "")),
                str(doc.get("ui", "")),
            )
            time, since = str(doc["time"]), str(doc.get("failed_since", ""))
            return cls(report=report, time=time, received_s=now_s, failed_since=since)
        except (ValueError, KeyError, TypeError, RecursionError) as err:
            raise CorruptError(
                f"a lake job's report in the metadata cannot be read: {err!r}"
            ) from err


def accepted(before: JobReport | None, new: JobReport) -> JobReport | None:
    """The report that counts from now on; None if there is none.

    A job that was stopped on purpose takes back what it reported, but not why the one before it
    failed. One that fails again has failed since the first time: its changefeed must not hold GC
    back for ever.
    """
    # The first of several failures counts. A job that is started again and fails each time would
    # otherwise keep its changefeed's safepoint for another day, each time.
    if new.report.state == FAILED:
        repeated = before is not None and before.report.state == FAILED
        return replace(
            new,
            failed_since=(before.failed_since or before.time) if before and repeated else new.time,
        )
    if new.report.state != STOPPED:
        return new
    return before if before is not None and before.report.state == FAILED else None


def shown_state(
    info: ChangefeedInfo, job: JobReport | None, audit: Audit, now_s: float
) -> tuple[State, RunningError | None]:
    """The state and the error that a changefeed shows: its own, else those of its job,
    else of its audit.
    """
    if info.state is not State.NORMAL:
        return info.state, info.error
    if job is not None:
        states = {FAILED: State.FAILED, RETRYING: State.WARNING}
        state = states.get(job.state(now_s))
        if state is not None:
            return state, RunningError(job.report.code, job.report.message, job.time)
    difference = audit_error(info, audit)
    if difference is not None:
        return State.WARNING, difference
    return info.state, info.error


def failed_for_s(info: ChangefeedInfo, job: JobReport | None, now: datetime) -> float:
    """Return the number of seconds since the changefeed's job gave up; 0 if it has not, or if the
    clock was set back.
    """
    if job is None or not failed_by_job(info, job):
        return 0.0
    try:
        return max(
            0.0, (now - datetime.fromisoformat(job.failed_since or job.time)).total_seconds()
        )
    except (ValueError, TypeError):  # a record that we did not write: as if it had failed just now
        return 0.0


def failed_by_job(info: ChangefeedInfo, job: JobReport | None) -> bool:
    """Whether the changefeed runs but its job has given up."""
    return info.state.is_running and job is not None and job.report.state == FAILED
