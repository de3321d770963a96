"""Watermarks whose lag is looked at: what comes late, or never,
and what comes with the lag of somebody else.
"""

from prometheus_client import REGISTRY

from server.dump.mysql.listener import DumpListener
from server.dump.mysql.pace import QUIET_FIRST
from server.dump.mysql.watermarks import WatermarkWriter
from server.puller.mysql.session.errors import MySqlUnavailableError

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
