"""Watermarks whose lag is looked at: what comes late, or never,
and what comes with the lag of somebody else.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from prometheus_client import REGISTRY

from server.dump.job import RUNNING, DumpRecords, Job
from server.dump.mysql import watermarks
from server.dump.mysql.engine import ROUNDS_MAX, DumpEngine
from server.dump.mysql.listener import DumpListener
from server.dump.mysql.pace import QUIET_FIRST
from server.dump.mysql.reader import ServerThreads
from server.dump.mysql.watermarks import WatermarkWriter
from server.dump.mysql.window import HIGH, LOW, Chunk
from server.dump.progress import Cell, ChunkRead, Range, TableState
from server.puller.mysql.session.errors import MySqlUnavailableError
from server.puller.mysql.session.options import MySqlOptions
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from tests.unit.server.dump.mysql.test_copying import table

Values = dict[str, object]


class Log:
    """Passes each mark when it is waited for; some of them never."""

    def __init__(self, *, lost: bool = False, changefeed: str = "feed") -> None:
        self.listener = DumpListener("feed", [])
        self.marks = WatermarkWriter(changefeed, self.listener, self.commit, self.wait)
        self.lost = lost
        self.waiting: list[str] = []

    async def commit(self, unique_identifier: str, kind: int) -> None:
        del kind
        self.listener.written(unique_identifier)
        self.waiting.append(unique_identifier)

    async def wait(self, seconds: float) -> None:
        del seconds
        if not self.lost:
            self.passed(self.waiting.pop())

    def passed(self, unique_identifier: str) -> None:
        values: Values = {
            "changefeed_id": "feed",
            "unique_identifier": unique_identifier,
            "event_type": 1,
        }
        self.listener.watermark(values, 7)


async def test_what_is_usual_is_measured_before_anything_is_read() -> None:
    log = Log()
    assert await log.marks.measure_lag()
    assert not log.marks.guard.quiet_wanted(0.0)
    assert log.marks.guard.limit_s < 0.5


async def test_how_hard_a_dump_reads_is_told_of_each_changefeed() -> None:
    for changefeed, ease in (("one", 0.25), ("two", 1.0)):
        log = Log(changefeed=changefeed)
        log.marks.guard.ease = ease
        await log.marks.measure_lag()
    told = [
        REGISTRY.get_sample_value("tidemark_dump_ease_ratio", {"changefeed": changefeed})
        for changefeed in ("one", "two")
    ]
    assert told == [0.25, 1.0]


async def test_a_round_that_the_log_passes_meanwhile_is_not_taken_for_the_usual_lag() -> None:
    log = Log()
    log.listener.expect("of a round")
    log.listener.written("of a round")
    log.waiting.append("of a round")
    for _ in range(QUIET_FIRST):
        await log.marks._measure()
    log.passed("of a round")
    await log.marks._measure()
    assert log.marks.guard.limit_s < 0.5
    assert log.listener.lags() == {}


async def test_rounds_under_way_are_waited_for_and_refused_marks_are_forgotten() -> None:
    log = Log()
    log.listener.begin("low", "high", [])
    assert not await log.marks.measure_lag()

    async def refuse(unique_identifier: str, kind: int) -> None:
        raise MySqlUnavailableError(f"{unique_identifier} {kind}")

    marks = WatermarkWriter("feed", log.listener, refuse, log.wait)
    try:
        await marks.write("x", 1)
    except MySqlUnavailableError:
        log.listener.written("x")
        log.passed("x")
    assert log.listener.lags() == {}


class Server:
    """One that a dump writes its watermarks to, and reads no rows of; also its own threads."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, int]] = []

    def write(self, unique_identifier: str, kind: int) -> None:
        self.marks.append((unique_identifier, kind))

    def xa_prepared(self) -> frozenset[str]:
        return frozenset()

    async def connected(self) -> "Server":
        return self

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


async def test_rounds_whose_watermarks_were_lost_end_and_their_chunks_are_read_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A failover loses what the server before it had committed last."""
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        records, server = DumpRecords(EtcdMeta(etcd), "feed"), Server()
        await records.put_job(None, Job("j", RUNNING))
        listener = DumpListener("feed", [table("a", 1)])
        options = MySqlOptions(addresses=(), user="somebody")
        engine = DumpEngine("feed", options, records, listener)
        engine._threads = cast("ServerThreads", server)
        await engine._follow_job(await records.job())
        with listener.locked():
            dump = listener.dump(1)
            assert dump is not None
            dump.begin((Range(),), 10)
            read = ChunkRead(0, dump.unread(0)[1], (Cell(3, b"1"),), False, 1, 1)
        for number in range(ROUNDS_MAX):
            listener.begin(f"low {number}", f"high {number}", [1])
        nothing = pa.array([], pa.binary())
        listener.fill("high 0", [Chunk(1, 0, read, nothing, nothing)], frozenset())

        assert not await engine._run_next()
        assert not server.marks, "they may still come"

        monkeypatch.setattr(watermarks, "LOST_S", -1.0)
        assert await engine._run_next()
        assert [kind for _, kind in server.marks] == [LOW, HIGH]
        for unique_identifier, kind in server.marks:
            values = {
                "changefeed_id": "feed",
                "unique_identifier": unique_identifier,
                "event_type": kind,
            }
            assert not listener.watermark(values, 7)
        assert listener.rounds == 0
        with listener.locked():
            assert dump.unread(0) == (Range(), read.epoch + 1), "nothing was read of it"
        assert dump.durable.state is TableState.DUMPING


def test_watermarks_seem_lost_only_while_rounds_wait_and_later_the_more_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("server.dump.mysql.listener.time", SimpleNamespace(monotonic=lambda: now))
    log = Log()
    now += 100 * watermarks.LOST_S
    assert not log.marks.seem_lost()
    log.listener.written("low")
    log.listener.begin("low", "high", [])
    assert not log.marks.seem_lost()
    now += 1.5 * watermarks.LOST_S
    assert log.marks.seem_lost()
    log.listener.begin("low 2", "high 2", [])
    assert not log.marks.seem_lost()
    now += watermarks.LOST_S
    assert log.marks.seem_lost()
    log.passed("low")
    assert not log.marks.seem_lost(), "the log goes on"
