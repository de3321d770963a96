"""The audit beside a lake's job: what it finds is written,
and nothing of it ever reaches the job.
"""

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from prometheus_client import REGISTRY

from server.capture.audit import Finding
from server.changefeed import keys
from server.changefeed.info import ChangefeedInfo
from server.rpc.credentials import SecurityConfig
from server.spark import auditor as module
from server.spark.auditor import Auditor, AuditSettings
from server.spark.job import LakeJobError
from server.verify.catalog import LakeCut
from server.verify.comparison import TableReport
from server.verify.difference import Difference
from server.verify.errors import VerifyLakeError
from server.verify.spans import Extent, KeySpans
from server.verify.upstream import Cluster
from server.verify.verify import AuditRecords
from storage.model.ts import compose

FEED = "audited"
DAY_S = 86_400
SCHEMA = pa.schema([("id", pa.int64())])


@dataclass(frozen=True)
class Table:
    """Stands in for `catalog.Table`."""

    name: str
    spans: KeySpans | None = None
    key: tuple[str, ...] = ("id",)
    schema: pa.Schema = SCHEMA
    span_column: str = "id"

    @property
    def target_name(self):
        return self.name.replace("shop.", "lake.")


@dataclass
class Lakes:
    """Stands in for `verify`, and for the lake that it opens."""

    rows: dict[str, int]
    mode: str = "upsert"
    differing: dict[str, str] = field(default_factory=dict)
    """Tables whose reports differ, with their notes."""
    failing: set[str] = field(default_factory=set)
    stuck: bool = False
    turns: int = 0
    ended: int = 0
    compared: list[tuple[str, KeySpans | None]] = field(default_factory=list)

    async def extent(self, table):
        return Extent(self.rows[table.name], 0, self.rows[table.name] - 1)

    async def verify(self, cluster, request, progress):
        self.turns += 1
        assert request.gently
        assert request.options.rows_per_s == 1000
        try:
            if self.stuck:
                await asyncio.Event().wait()
            for table in await request.choose(
                self, LakeCut(7, self.mode), list(map(Table, self.rows))
            ):
                progress.enter("compared", table.name)
                if table.name in self.failing:
                    raise VerifyLakeError("no such file")
                self.compared.append((table.name, table.spans))
                await request.on_report(self.report(table))
            progress.enter("closed")
        finally:
            self.ended += 1

    def report(self, table):
        note = self.differing.get(table.name)
        report = TableReport(table.name, 10, 10, ts=7, sampled=table.spans)
        if note is not None:
            low = 0 if table.spans is None else table.spans.spans[0][0] or 0
            report.differing_ranges = report.differing_rows = 1
            report.differences = [Difference({"id": low}, "differs")]
            report.missing_rows, report.note = (1, note) if note else (0, "")
        return report


@pytest.fixture
def lakes(monkeypatch):
    lakes = Lakes({"shop.a": 500_000, "shop.b": 5})
    monkeypatch.setattr(module, "verify", lakes.verify)
    short = {
        "_LOOK_S": 0.01,
        "_WATCH_S": 0.01,
        "_QUIET_S": 0.0,
        "_BACKOFF_S": 0.01,
        "_BACKOFF_S_MAX": 0.05,
    }
    for name, seconds in short.items():
        monkeypatch.setattr(module, name, seconds)
    return lakes


@pytest.fixture
async def audit(meta, monkeypatch, lakes):
    """Makes an audit of the changefeed, of which a cut is in the lake just now."""

    @asynccontextmanager
    async def cluster(self):
        yield Cluster(None, None, meta)

    async def made(period_s=DAY_S):
        info = ChangefeedInfo(
            id=FEED,
            sink_uri="delta:///lake",
            start_ts=1,
            target_ts=0,
            create_time="",
            audit_s=period_s,
        )
        await meta.put(keys.info(FEED), info.to_json())
        settings = AuditSettings(
            coordinator="here",
            rows_per_s=1000,
            max_lag_s=3600,
            security=SecurityConfig(),
            turns=asyncio.Lock(),
        )
        auditor = Auditor(FEED, settings)
        auditor.take({"end_ts": now_ts()})
        return auditor

    monkeypatch.setattr(Auditor, "_cluster", cluster)
    return made


def now_ts(ago_s=0):
    return compose(int((time.time() - ago_s) * 1000), 0)


async def until(condition):
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


def metric(name, **labels):
    return (
        REGISTRY.get_sample_value(f"tidemark_spark_audit_{name}", {"changefeed": FEED, **labels})
        or 0.0
    )


async def test_a_difference_is_written_and_counted(audit, lakes, meta):
    lakes.differing = {"shop.a": ""}
    before, rows = metric("differences_total", table="shop.a"), metric("rows_total", table="shop.a")
    auditor = await audit()
    auditor.take({"altered": ["shop.a"]})
    async with auditor.running():
        await until(lambda: lakes.ended)
    [finding] = (await AuditRecords(meta, FEED).findings()).values()
    assert (finding.table, finding.ts, finding.mode, finding.column) == (
        "shop.a",
        7,
        "upsert",
        "id",
    )
    [(_, compared)] = [each for each in lakes.compared if each[0] == "shop.a"]
    assert finding.spans == (compared.spans[0],)
    assert metric("differences_total", table="shop.a") == before + 1
    assert metric("rows_total", table="shop.a") == rows + 10


async def test_rows_that_no_dump_has_brought_are_no_difference_and_a_right_round_ends_the_warning(
    audit, lakes, meta
):
    lakes.rows = {"shop.b": 5}
    lakes.differing = {"shop.b": "the table was not dumped"}
    records = AuditRecords(meta, FEED)
    auditor = await audit()
    for gone in ("shop.b", "shop.dropped"):
        await records.save(Finding(table=gone, ts=3, time=""))
    auditor.take({"altered": ["lake.b"]})
    async with auditor.running():
        await until(lambda: lakes.ended)
        await until(lambda: auditor._on_time_s > 0)
    assert await records.findings() == {}
    assert (await meta.get(keys.audit(FEED))).value.startswith(b"20")


async def test_a_ddl_has_a_sample_at_once(audit, lakes):
    auditor = await audit()
    async with auditor.running():
        await until(lambda: lakes.ended == 1)
        lakes.compared.clear()
        auditor.take({"altered": ["shop.a"]})
        await until(lambda: lakes.ended == 2)
        [(_, spans)] = [each for each in lakes.compared if each[0] == "shop.a"]
        assert 1 <= len(spans.spans) < 50
        await asyncio.sleep(0.05)
        assert lakes.turns == 2, "the rest of the day's ranges wait"


async def test_an_error_is_told_counted_and_tried_again_and_others_are_compared(audit, lakes):
    lakes.failing = {"shop.a"}
    before = metric("errors_total", code="ErrVerifyLake")
    auditor = await audit()
    auditor.take({"altered": ["shop.a", "shop.b"]})
    async with auditor.running():
        await until(lambda: [table for table, _ in lakes.compared] == ["shop.b"])
        await until(lambda: metric("errors_total", code="ErrVerifyLake") == before + 1)
    assert auditor._plan.late_s(time.monotonic() + 2 * DAY_S) > 0


async def test_changes_and_unexpected_errors_end_no_job(audit, lakes, monkeypatch):
    lakes.mode = "append"
    refused, defects = (
        metric("errors_total", code="ErrVerifyUnsupported"),
        metric("errors_total", code="ErrInternal"),
    )
    auditor = await audit()
    async with auditor.running():
        await until(lambda: metric("errors_total", code="ErrVerifyUnsupported") > refused + 1)
        monkeypatch.setattr(module, "changefeed_info", lambda *_: 1 / 0)
        await until(lambda: metric("errors_total", code="ErrInternal") > defects + 1)


async def test_a_turn_gives_way_to_lag_and_goes_on_later(audit, lakes):
    lakes.stuck = True
    auditor = await audit(60)
    async with auditor.running():
        await until(lambda: lakes.turns == 1)
        auditor.take({"end_ts": now_ts(7200)})
        await until(lambda: lakes.ended == 1)
        await asyncio.sleep(0.05)
        assert lakes.turns == 1
        auditor._began_s = float("-inf")
        auditor.take({"end_ts": now_ts()})
        await until(lambda: lakes.turns == 2)


async def test_a_turn_that_hangs_ends(audit, lakes):
    lakes.stuck = True
    before = metric("errors_total", code="ErrVerifyTimeout")
    auditor = await audit()
    async with auditor.running():
        await until(lambda: lakes.turns == 1)
        auditor._began_s = float("-inf")  # long ago
        await until(lambda: metric("errors_total", code="ErrVerifyTimeout") > before)


async def test_it_ends_with_the_job_whose_error_is_passed_on_as_it_is(audit, lakes):
    lakes.stuck = True
    auditor = await audit()

    async def job():
        async with auditor.running():
            await until(lambda: lakes.turns == 1)
            raise LakeJobError("", 7)

    with pytest.raises(LakeJobError, match="status 7"):
        await job()
    assert lakes.ended == 1


async def test_nothing_is_audited_where_nobody_asked_for_it_or_before_the_first_cut(audit, lakes):
    auditor = await audit(0)
    async with auditor.running():
        await asyncio.sleep(0.1)
    waiting = await audit()
    waiting._cut_ts = 0
    async with waiting.running():
        await asyncio.sleep(0.1)
    assert lakes.turns == 0
