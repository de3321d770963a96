"""The Spark application that jobs share, with scripts in its place and theirs."""

import asyncio
import sys

import pytest

from server.spark.job import Application, LakeJob, LakeJobError, Shared

SCRIPT = """
import json, os, sys
open({starts!r}, "a").write("x")
print(json.dumps({{"ready": True}}), flush=True)
for line in sys.stdin:
    document = json.loads(line)
    asked = document["changefeed"]
    if document.get("ended"):
        open({starts!r} + ".closed", "a").write(asked)
        print(json.dumps({{"closed": True}}), flush=True)
        continue
    print(json.dumps({{"port": os.getpid(), "secret": "of " + asked}}), flush=True)
"""
FAILING = """
import sys
sys.stderr.write("a warning\\n[TM:ErrJavaNotFound] there is no java\\n")
sys.exit(1)
"""


@pytest.fixture
async def shared(tmp_path):
    starts = tmp_path / "starts"
    starts.touch()
    async with asyncio.TaskGroup() as tasks:
        command = [sys.executable, "-c", SCRIPT.format(starts=str(starts))]
        application = Application(command, tasks)
        application.starts = lambda: starts.stat().st_size
        yield application
        await application.kill()


async def test_each_job_gets_a_gateway_of_the_one_application(shared):
    answers = await asyncio.gather(*(shared.gateway(name) for name in ("a", "b", "c")))
    assert len({answer["PYSPARK_GATEWAY_PORT"] for answer in answers}) == 1
    assert [answer["PYSPARK_GATEWAY_SECRET"] for answer in answers] == ["of a", "of b", "of c"]
    assert shared.starts() == 1


async def test_the_gateway_of_a_changefeed_that_is_gone_is_closed(shared, tmp_path):
    await shared.close_gateway("a")
    assert shared.starts() == 0, "it is not started for that"
    await asyncio.gather(*(shared.gateway(name) for name in ("a", "b")))
    await shared.close_gateway("a")
    assert (tmp_path / "starts.closed").read_text() == "a"
    await shared.kill()
    await shared.close_gateway("b")
    assert shared.starts() == 1


async def test_one_that_has_died_is_started_again(shared):
    first = await shared.gateway("a")
    await shared.kill()
    second = await shared.gateway("a")
    assert first["PYSPARK_GATEWAY_PORT"] != second["PYSPARK_GATEWAY_PORT"]
    assert shared.starts() == 2


async def test_one_that_dies_while_it_is_asked_says_why():
    async with asyncio.TaskGroup() as tasks:
        application = Application([sys.executable, "-c", FAILING], tasks)
        for _ in range(2):
            with pytest.raises(LakeJobError, match="there is no java") as caught:
                await application.gateway("a")
            assert caught.value.code == "ErrJavaNotFound"


@pytest.mark.parametrize(
    ("ending", "starts"), [("sys.exit(75)", 1), ("os.kill(os.getpid(), 9)", 3)]
)
async def test_a_job_that_was_killed_takes_the_application_with_it(
    shared, tmp_path, ending, starts
):
    """What it had begun in the JVM could go on beside the next job of the same lake."""
    lives = tmp_path / "lives"
    lives.touch()
    script = f"""
import os, sys
assert os.environ["PYSPARK_GATEWAY_SECRET"] == "of feed"
with open({str(lives)!r}, "a+") as lives:
    lives.write("x")
    lives.seek(0)
    if len(lives.read()) == 3:
        sys.exit(0)
{ending}
"""
    command = [sys.executable, "-c", script]
    await LakeJob("feed", command, once=False, on_line=print, shared=Shared(shared)).run()
    assert lives.stat().st_size == 3
    assert shared.starts() == starts


async def test_a_job_whose_application_does_not_start_tries_again_and_says_why(tmp_path):
    told, twice, loop = [], asyncio.Event(), asyncio.get_running_loop()

    def tell(error, again):
        told.append((error.code, again))
        if len(told) == 2:
            loop.call_soon_threadsafe(twice.set)

    async with asyncio.TaskGroup() as tasks:
        job = LakeJob(
            "feed",
            ["never"],
            once=False,
            on_line=print,
            on_error=tell,
            shared=Shared(Application([sys.executable, "-c", FAILING], tasks)),
        )
        running = tasks.create_task(job.run())
        await twice.wait()
        await job.drain()
        await running
    assert told[:2] == [("ErrJavaNotFound", True)] * 2


async def test_one_that_is_ended_while_it_starts_leaves_nothing():
    """Found by reading: `spark keep` that was ended then waited for ever."""
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        starting = "import sys; sys.stdin.read()"
        application = Application([sys.executable, "-c", starting], tasks)
        asked = tasks.create_task(_refused(application))
        while application._process is None:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
        process = application._process
        await application.close()
        await asked
        assert process.returncode is not None
        await _refused(application)


async def _refused(application):
    with pytest.raises(LakeJobError):
        await application.gateway("a")
