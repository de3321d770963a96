"""The lake job's supervisor over real processes: what is started again, when,
and what the captures are told.
"""

import asyncio
import sys

import pytest

from server.spark import job
from server.spark.job import ALL_LINES, IdleCuts, LakeJob, LakeJobError, Turns, _lines_to
from storage.backoff import Backoff

SAYS = "import sys; sys.stderr.write({!r}); sys.exit({})"


def supervised(script, told, *, once=False):
    return LakeJob(
        "supervised",
        [sys.executable, "-c", script],
        once=once,
        on_line=lambda line: None,
        on_error=lambda error, again: told.append((error.code, error.message, again)),
    )


def test_lines_about_cuts_without_rows_are_told_from_others():
    lines = [
        ({"ready": True}, False),
        ({"batch": 0, "end_ts": 5, "rows": {"shop.a": 1}}, False),
        ({"progress": {"batch": 0}}, False),
        ({"batch": 1, "end_ts": 6, "rows": {}}, True),
        ({"altered": "shop.a"}, False),
        ({"progress": {"batch": 1}}, True),
        ({"batch": 2, "end_ts": 7, "rows": {"shop.a": 2}}, False),
        ({"progress": {"batch": 2}}, False),
    ]
    idle_cuts = IdleCuts()
    assert [idle_cuts.is_about_one(line) for line, _ in lines] == [idle for _, idle in lines]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (SAYS.format("[TM:ErrTargetRefused] shop.t: no\n", 1), "ErrTargetRefused"),
        (SAYS.format("Traceback …\n", 1), "ErrSparkJob"),
        (SAYS.format("usage: …\n", 2), "ErrSparkJob"),
    ],
)
async def test_a_job_that_cannot_heal_ends_with_its_code_and_is_reported(script, code):
    told = []
    with pytest.raises(LakeJobError) as caught:
        await supervised(script, told).run()
    assert caught.value.code == code
    assert [(found, again) for found, _, again in told] == [(code, False)]


async def test_a_job_that_was_killed_says_so_and_where_its_lines_are():
    told = []
    with pytest.raises(LakeJobError, match=r"was killed by signal 9; its lines are in the log of"):
        await supervised("import os; os.kill(os.getpid(), 9)", told, once=True).run()


@pytest.mark.parametrize(
    "error", [BlockingIOError(11, "Resource temporarily unavailable"), RuntimeError("no thread")]
)
async def test_a_job_for_which_no_process_can_be_started_is_tried_again(monkeypatch, error):
    """Where a container's limit of processes is reached, say: the other jobs go on."""
    monkeypatch.setattr(job, "BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(job, "BACKOFF_SECONDS_MAX", 0.0)
    failures, start = [error], asyncio.create_subprocess_exec

    async def starting(*command, **options):
        if failures:
            raise failures.pop()
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", starting)
    told = []
    await supervised("", told).run()
    [(code, message, again)] = told
    assert (code, again) == ("ErrSparkJob", True)
    assert f"the Spark job cannot be started: {error}; look at the limits" in message


class Shared:
    """Counts how often the application that the jobs share is ended."""

    def __init__(self):
        self.kills = 0

    async def gateway(self, changefeed):
        return {}

    async def kill(self):
        self.kills += 1


@pytest.mark.parametrize(("number", "kills"), [(15, 0), (9, 1)])
async def test_a_job_that_was_asked_to_end_while_it_starts_ends_no_other_one(number, kills):
    """Found by a stranger: a changefeed that failed as soon as it was resumed stopped all lakes."""
    shared = Shared()
    one = LakeJob(
        "one",
        [sys.executable, "-c", f"import os; os.kill(os.getpid(), {number})"],
        once=True,
        on_line=lambda line: None,
        shared=job.Shared(shared),
    )
    with pytest.raises(LakeJobError):
        await one.run()
    assert shared.kills == kills


async def test_a_job_whose_lake_stays_damaged_gives_up(monkeypatch, tmp_path):
    monkeypatch.setattr(Backoff, "next_s", lambda backoff: 0.0)
    monkeypatch.setattr(job, "_DAMAGES_MOST", 2)
    count, told = tmp_path / "count", []
    count.touch()
    script = f"""
import os, sys
with open({str(count)!r}, "a") as file: file.write("x")
if os.path.getsize({str(count)!r}) == 2: print('{{"end_ts": 5, "rows": {{}}, "seconds": 0, "checkpoint": 4}}')
sys.stderr.write("[TM:ErrLakeDamaged] a manifest is gone\\n")
sys.exit(75)
"""
    with pytest.raises(LakeJobError, match="a manifest is gone"):
        await supervised(script, told).run()
    assert [again for _, _, again in told] == [True, True, False]


async def test_a_job_that_may_heal_is_started_again_each_time_later_and_reported(
    monkeypatch, tmp_path
):
    """It ends with status 75 three times, then is killed, then ends well."""
    pauses, told = [], []
    next_s = Backoff.next_s
    monkeypatch.setattr(Backoff, "next_s", lambda backoff: pauses.append(next_s(backoff)) or 0.001)
    count = tmp_path / "count"
    count.touch()
    script = f"""
import os, signal, sys
with open({str(count)!r}, "a") as file: file.write("x")
starts = os.path.getsize({str(count)!r})
if starts == 4: os.kill(os.getpid(), signal.SIGKILL)
if starts == 5: sys.exit(0)
sys.stderr.write("[TM:ErrTargetUnavailable] away\\n")
sys.exit(75)
"""
    await supervised(script, told).run()
    assert [(code, again) for code, _, again in told] == [("ErrTargetUnavailable", True)] * 3 + [
        ("ErrSparkJob", True)
    ]
    assert "was killed by signal 9" in told[-1][1]
    assert all(
        full_s / 2 <= pause_s <= full_s
        for full_s, pause_s in zip([0.5, 1.0, 2.0, 4.0], pauses, strict=True)
    )


async def test_a_job_that_is_drained_in_its_pause_ends_at_once(monkeypatch):
    monkeypatch.setattr(Backoff, "next_s", lambda _: pausing.set() or 3600.0)
    pausing = asyncio.Event()
    lake_job = supervised(SAYS.format("[TM:ErrTargetUnavailable] away\n", 75), [])
    running = asyncio.get_running_loop().create_task(lake_job.run())
    async with asyncio.timeout(60):
        await pausing.wait()
        await lake_job.drain()
        await running


async def test_a_line_that_is_too_long_ends_neither_job_nor_supervisor(monkeypatch):
    monkeypatch.setattr(job, "LINE_BYTES", 1 << 12)
    told = []
    script = "import sys; sys.stderr.write('x' * 100_000 + '\\n[TM:ErrX] why\\n'); sys.exit(1)"
    with pytest.raises(LakeJobError, match="why") as caught:
        await supervised(script, told).run()
    assert caught.value.code == "ErrX"


STARTS = """
import json, pathlib, sys, time
place, name = pathlib.Path(sys.argv[1]), sys.argv[2]
(place / name).touch()
print(json.dumps({"ready": True, "starting": len(list(place.iterdir()))}), flush=True)
while not (place.parent / "go").exists():
    time.sleep(0.01)
(place / name).unlink()
print(json.dumps({"reading": True}), flush=True)
sys.stdin.read()
"""


async def test_jobs_start_two_at_a_time_and_the_next_when_one_reads(tmp_path):
    place = tmp_path / "starting"
    place.mkdir()
    starting, reading, both = [], [], asyncio.Event()

    def on_line(line):
        if "ready" in line:
            starting.append(line["starting"])
            if len(starting) == 2:
                both.set()
        else:
            reading.append(line)

    turns = Turns(2)
    jobs = [
        LakeJob(
            "feed",
            [sys.executable, "-c", STARTS, str(place), str(number)],
            once=True,
            on_line=on_line,
            shared=job.Shared(turns=turns),
        )
        for number in range(5)
    ]
    async with asyncio.timeout(50), asyncio.TaskGroup() as tasks:
        for each in jobs:
            tasks.create_task(each.run())
        await both.wait()
        # One that waits for its turn is drained at once, and takes none.
        waiting = next(each for each in jobs if each._process is None)
        await waiting.drain()
        assert len(starting) == 2
        (tmp_path / "go").touch()
        while len(reading) < 4:  # noqa: ASYNC110 - processes tell no events
            await asyncio.sleep(0.01)
        assert max(starting) <= 2
        for each in jobs:
            await each.drain()
    assert turns.free == 2


async def test_a_turn_ends_with_its_job_and_after_a_minute(monkeypatch):
    monkeypatch.setattr(job, "_TURN_S", 0.01)
    turns = Turns(1)
    hanging = LakeJob(
        "feed",
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        once=True,
        on_line=print,
        shared=job.Shared(turns=turns),
    )
    failing = LakeJob(
        "feed",
        [sys.executable, "-c", "raise SystemExit(1)"],
        once=True,
        on_line=print,
        shared=job.Shared(turns=turns),
    )
    async with asyncio.timeout(50), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(hanging.run())
        with pytest.raises(LakeJobError):
            await failing.run()
        await hanging.drain()
        await running
    assert turns.free == 1


@pytest.mark.parametrize(("path", "shown"), [("", 1), (ALL_LINES, 2)])
def test_standard_output_has_idle_cuts_where_it_is_asked_for(path, shown, capsys):
    with _lines_to(path) as write:
        write({"batch": 1, "end_ts": 7, "rows": {}})
        write({"batch": 2, "end_ts": 8, "rows": {"t": 3}})
    assert len(capsys.readouterr().out.splitlines()) == shown
