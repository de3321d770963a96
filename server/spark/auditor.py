"""The audit of one lake, in the process of its job, which knows the lake's cuts and how far it is
behind (docs/design/0030).

Some key ranges are compared with the source at the lake's newest cut, turn by turn, as
`server.verify.audit_plan` says. Nothing of it ever reaches the job: an error is logged, counted,
and tried again later; a turn gives way when the lake is behind, and ends with the job.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog
from pyspark_tidemark.lake.format import APPEND

from server.capture.audit import Finding
from server.capture.runner import utc_now
from server.rpc.client import metadata_at
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from server.spark import metrics
from server.spark.config import JobSettings
from server.verify.audit_plan import AuditPlan, Pick
from server.verify.catalog import LakeCut, Table, changefeed_info
from server.verify.comparison import TableReport, VerifyOptions
from server.verify.errors import VerifyTimeoutError, VerifyUnsupportedError
from server.verify.lake.client import Lake
from server.verify.progress import LAKE, Progress
from server.verify.spans import Extent
from server.verify.upstream import Cluster
from server.verify.verify import AuditRecords, Request, verify
from storage.backoff import Backoff
from storage.defect import request_error
from storage.model.errors import UnavailableError, ours_alone
from storage.model.ts import MAX_TS, physical_ms
from storage.tasks import background_tasks, wait_at_most

_LOOK_S: Final = 5.0
_QUIET_S: Final = 10.0
"""The shortest pause between two turns, however many DDLs there are."""
_BACKOFF_S, _BACKOFF_S_MAX = 10.0, 600.0
_LONGEST_S: Final = 600.0
"""The time limit of a turn in seconds; a whole period, if that is longer."""
_WATCH_S: Final = 1.0

_log = structlog.get_logger(__name__)


class LakeBehindError(UnavailableError):
    """The lake is behind: the audit gives way."""

    code = "ErrAuditGivesWay"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """`coordinator` empty: there are no audits; `turns` is shared by all audits of a process,
    as each takes memory.
    """

    coordinator: str
    rows_per_s: int
    max_lag_s: float
    security: SecurityConfig
    turns: asyncio.Lock


def audit_settings(section: JobSettings, security: SecurityConfig) -> AuditSettings:
    """The settings that all audits of one process share."""
    return AuditSettings(
        coordinator=section.coordinator,
        rows_per_s=section.audit_rows_per_s,
        max_lag_s=section.audit_max_lag_s,
        security=security,
        turns=asyncio.Lock(),
    )


class Auditor:
    """Audits one lake; `running` does it for a block, `take` gets the lines of the lake's job."""

    def __init__(self, changefeed: str, settings: AuditSettings) -> None:
        self._changefeed = changefeed
        self._settings = settings
        self._altered: set[str] = set()
        self._wake = asyncio.Event()
        self._cut_ts = 0
        self._plan: AuditPlan | None = None
        self._began_s = self._ended_s = self._on_time_s = float("-inf")

    def take(self, line: dict[str, Any]) -> None:
        """Note the progress in a line of the job."""
        if "end_ts" in line:
            self._cut_ts = int(line["end_ts"])
        elif "altered" in line:
            self._altered |= set(line["altered"])
            self._wake.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Audit for the block; what that raises is passed on as it is."""
        if not self._settings.coordinator:
            yield
            return
        late = metrics.AUDIT_LATE.labels(self._changefeed)
        late.set_function(self._late_s)
        try:
            async with background_tasks(self._run()):
                yield
        except ExceptionGroup as group:  # only the block fails
            raise ours_alone(group)[0] from None
        finally:
            late.set_function(lambda: 0.0)

    async def _run(self) -> None:
        backoff = Backoff(_BACKOFF_S, _BACKOFF_S_MAX)
        while True:
            try:
                async with self._cluster() as cluster:
                    while True:
                        await self._look(cluster)
                        backoff.reset()
                        await self._pause(_LOOK_S)
            except Exception as err:  # noqa: BLE001 - whatever it is, the job goes on
                self._log_failure(err)
            await asyncio.sleep(backoff.next_s())

    @asynccontextmanager
    async def _cluster(self) -> AsyncIterator[Cluster]:
        coordinator, security = self._settings.coordinator, self._settings.security
        async with (
            PdClient.open(coordinator, security) as pd,
            metadata_at(coordinator, security) as meta,
            KvClient.open(pd, security) as kv,
        ):
            yield Cluster(pd, kv, meta)

    async def _look(self, cluster: Cluster) -> None:
        """Take a turn, if one is due."""
        info = await changefeed_info(cluster.meta, self._changefeed)
        if not info.audit_s:
            self._plan = None
        elif self._plan is None or self._plan.period_s != info.audit_s:
            self._plan = AuditPlan(info.audit_s, self._settings.rows_per_s, random.Random())  # noqa: S311 - no secret
        plan, now_s = self._plan, time.monotonic()
        # Taken before the turn: a DDL that comes during it is due in the next one.
        altered, self._altered = self._altered, set()
        self._wake.clear()
        if plan is None:
            return
        plan.note_altered(altered)
        next_s = self._ended_s + _QUIET_S if plan.is_urgent(now_s) else self._began_s + plan.turn_s
        if self._lag_s() <= self._settings.max_lag_s and now_s >= next_s and plan.is_due(now_s):
            # One turn at a time in this process: the sums of a turn take memory.
            async with self._settings.turns:
                await self._turn(cluster, plan)
        now_s = time.monotonic()
        if plan.is_known and not plan.late_s(now_s) and now_s >= self._on_time_s + plan.turn_s:
            await AuditRecords(cluster.meta, self._changefeed).save_on_time(utc_now())
            self._on_time_s = now_s

    async def _turn(self, cluster: Cluster, plan: AuditPlan) -> None:
        self._began_s = time.monotonic()
        turn = _Turn(self._changefeed, plan, AuditRecords(cluster.meta, self._changefeed))
        options = VerifyOptions(rows_per_s=self._settings.rows_per_s)
        request = Request(
            self._changefeed,
            options=options,
            choose=turn.choose,
            on_report=turn.compared,
            gently=True,
        )
        try:
            async with background_tasks(self._give_way(plan)):
                await verify(cluster, request, turn.progress)
        except Exception as err:
            table, error = (
                turn.progress.table,
                request_error(err, "audit", changefeed=self._changefeed),
            )
            if isinstance(error, LakeBehindError):
                _log.info("audit gives way", changefeed=self._changefeed, reason=error.message)
                return
            if not table:
                # No table was reached, so nothing was compared. The backoff says when to try again,
                # not the length of a turn.
                self._began_s = float("-inf")
                raise error from err
            plan.failed(table, time.monotonic())
            self._log_failure(error, table=table)
        finally:
            self._ended_s = time.monotonic()

    async def _give_way(self, plan: AuditPlan) -> None:
        """End a turn that is in the way, or hangs."""
        limit_s = max(plan.period_s, _LONGEST_S)
        while True:
            if self._lag_s() > self._settings.max_lag_s:
                raise LakeBehindError(
                    f"the lake is {self._lag_s():.0f} s behind: the audit goes on when it is not"
                )
            if time.monotonic() - self._began_s > limit_s:
                raise VerifyTimeoutError(f"a turn of the audit took more than {limit_s:.0f} s")
            await asyncio.sleep(_WATCH_S)

    def _late_s(self) -> float:
        return 0.0 if self._plan is None else self._plan.late_s(time.monotonic())

    def _lag_s(self) -> float:
        return time.time() - physical_ms(self._cut_ts) / 1e3

    async def _pause(self, seconds: float) -> None:
        await wait_at_most(self._wake, seconds)

    def _log_failure(self, err: Exception, **context: Any) -> None:
        error = request_error(err, "audit", changefeed=self._changefeed)
        metrics.AUDIT_ERRORS.labels(self._changefeed, error.code).inc()
        _log.warning(
            "audit goes on later",
            changefeed=self._changefeed,
            code=error.code,
            error=error.message,
            **context,
        )


class _Turn:
    """One turn: its picks and their results."""

    def __init__(self, changefeed: str, plan: AuditPlan, records: AuditRecords) -> None:
        self.progress = Progress()
        self._changefeed = changefeed
        self._plan = plan
        self._records = records
        self._picks: dict[str, Pick] = {}
        self._mode = ""

    async def choose(self, lake: Lake, cut: LakeCut, tables: Sequence[Table]) -> list[Table]:
        """Implements `server.verify.verify.Choose`."""
        if cut.mode == APPEND:
            raise VerifyUnsupportedError(
                "the lake keeps changes (--mode append), which are not audited"
            )
        self._mode = cut.mode
        by_name = {table.name: table for table in tables}
        self._plan.keep({table.name: table.target_name for table in tables})
        for gone in (await self._records.findings()).keys() - by_name.keys():
            await self._records.remove(gone, MAX_TS)
        for table in tables:
            await self._begin(lake, table, len(tables))
        self.progress.enter("ranges are chosen")
        self._picks = self._plan.picks(time.monotonic())
        return [replace(by_name[name], spans=pick.spans) for name, pick in self._picks.items()]

    async def _begin(self, lake: Lake, table: Table, tables: int) -> None:
        column, now_s = table.span_column, time.monotonic()
        if not self._plan.needs_round(table.name, column, now_s):
            return
        extent = Extent(0)
        if column is not None:
            self.progress.enter("the lake's keys are counted, to choose ranges", table.name)
            with self.progress.awaiting(LAKE):
                extent = await lake.extent(table)
        self._plan.begin(table.name, column, extent, tables, now_s)

    async def compared(self, report: TableReport) -> None:
        """Note the result for a table."""
        differs = _differs(report)
        all_equal = self._plan.compared(report.table, self._picks[report.table], equal=not differs)
        metrics.AUDIT_ROWS.labels(self._changefeed, report.table).inc(report.upstream_rows)
        if all_equal:
            await self._records.remove(report.table, report.ts)
        if not differs:
            return
        spans = tuple(report.differing_spans)
        column = "" if report.sampled is None else report.sampled.column
        finding = Finding(
            table=report.table,
            ts=report.ts,
            time=utc_now(),
            mode=self._mode,
            column=column,
            spans=spans,
            ranges=max(len(spans), 1),
        )
        metrics.AUDIT_DIFFERENCES.labels(self._changefeed, report.table).inc(finding.ranges)
        _log.warning(
            "lake differs from its source",
            changefeed=self._changefeed,
            found=finding.text(self._changefeed),
        )
        await self._records.save(finding)


def _differs(report: TableReport) -> bool:
    """Whether rows differ for another reason than an absent or unfinished dump of the table."""
    if report.equal or not report.note:
        return not report.equal
    return report.differing_rows > report.missing_rows
