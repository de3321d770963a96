"""Which changefeeds get a lake job."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc.aio
import pytest
from prometheus_client import REGISTRY
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.changefeed.info import lake_format
from server.config import ConfigError
from server.rpc.credentials import SecurityConfig
from server.spark import keep
from server.spark.config import KeepConfig, job_config
from server.spark.keep import CheckpointDirectories, LakeJobSupervisor


def test_a_lake_is_known_by_its_format_wherever_it_lies():
    kept = [
        "delta:///lake",
        "delta+hdfs://nn:8020/lake",
        "parquet+s3a://bucket/lake",
        "mysql://me@db/lake",
    ]
    assert all(lake_format(uri) for uri in kept)
    assert not any(
        lake_format(uri) for uri in ("pulsar://broker/topic", "hdfs://nn/lake", "x+delta://a/b")
    )


@asynccontextmanager
async def supervised(monkeypatch, tmp_path, script):
    """A supervisor whose jobs are a script, and the one changefeed that it is told of."""
    monkeypatch.setattr(
        keep, "job_command", lambda config, security: [sys.executable, "-c", script]
    )
    monkeypatch.setattr(keep, "captures_reporter", lambda command: None)
    feed = pb.Changefeed(id="feed", sink_uri="delta:///lake", state=pb.CHANGEFEED_STATE_NORMAL)

    async def listed(request, timeout):  # noqa: ASYNC109 - the stub's signature
        return pb.ListChangefeedsResponse(changefeeds=[feed])

    async def endpoint():
        return "grpc://127.0.0.1:1"

    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel, asyncio.TaskGroup() as tasks:
        supervisor = LakeJobSupervisor(
            KeepConfig(checkpoint_dir=str(tmp_path), share_spark=False),
            SecurityConfig(),
            channel,
            tasks,
        )
        supervisor._changefeeds = SimpleNamespace(ListChangefeeds=listed)
        supervisor._flight_endpoint = endpoint
        yield supervisor, feed


async def test_a_job_that_has_given_up_is_left_alone_until_its_changefeed_is_resumed(
    monkeypatch, tmp_path
):
    """Found by strangers: such a job was started again for ever, or, once it had ended,
    only after a pause.
    """
    starts = tmp_path / "starts"
    starts.touch()
    script = f"import sys; open({str(starts)!r}, 'a').write('x'); sys.exit(1)"

    async def polled(count):
        async with asyncio.timeout(60):
            while True:
                await supervisor._follow()
                if starts.stat().st_size == count and "feed" in supervisor._ended:
                    return
                await asyncio.sleep(0.01)

    async with supervised(monkeypatch, tmp_path, script) as (supervisor, feed):
        await polled(1)
        for _ in range(3):  # the captures do not know it yet: an older one never will
            await polled(1)
        feed.state, feed.lake_job.failed_changefeed = pb.CHANGEFEED_STATE_FAILED, True
        await polled(1)
        feed.state, feed.lake_job.failed_changefeed = pb.CHANGEFEED_STATE_NORMAL, False
        await polled(2)
        feed.state = pb.CHANGEFEED_STATE_STOPPED
        await supervisor._follow()
        assert not supervisor._jobs


async def test_a_changefeed_that_is_paused_shows_no_lag_of_its_lake_any_more(monkeypatch, tmp_path):
    line = json.dumps({"end_ts": 5, "rows": {}, "seconds": 0, "checkpoint": 4})
    script = f"import signal; print({line!r}, flush=True); signal.pause()"

    def lag():
        return REGISTRY.get_sample_value("tidemark_spark_lag_seconds", {"changefeed": "feed"})

    async def until(shown):
        async with asyncio.timeout(60):
            while (lag() is not None) != shown:  # noqa: ASYNC110 - a registry has no event
                await asyncio.sleep(0.01)

    async with supervised(monkeypatch, tmp_path, script) as (supervisor, feed):
        await supervisor._follow()
        await until(True)
        feed.state = pb.CHANGEFEED_STATE_STOPPED
        await supervisor._follow()
        await until(False)


async def test_checkpoints_go_with_their_changefeed_and_never_serve_the_next_one(
    monkeypatch, tmp_path
):
    """Found by hand: a changefeed that was removed and made again for an empty lake stopped with
    ErrCutGap, as Spark's checkpoint was still that of the first one.
    """
    left, foreign = tmp_path / "left", tmp_path / "foreign"
    CheckpointDirectories(str(tmp_path)).prepare(pb.Changefeed(id="left", create_time="long ago"))
    foreign.mkdir()
    offsets, application = tmp_path / "feed" / "query", tmp_path / "_application"
    script = "import signal; signal.pause()"
    async with supervised(monkeypatch, tmp_path, script) as (supervisor, feed):
        feed.create_time = "1"
        await supervisor._follow()
        assert not left.exists(), "removed while nobody looked"
        offsets.mkdir()
        application.mkdir()

        feed.state = pb.CHANGEFEED_STATE_STOPPED
        await until_ended(supervisor)
        feed.state = pb.CHANGEFEED_STATE_NORMAL
        await supervisor._follow()
        assert offsets.exists(), "paused and resumed"

        feed.create_time = "2"  # between two looks
        await until_ended(supervisor)
        await supervisor._follow()
        assert not offsets.exists()
        assert "feed" in supervisor._jobs

        feed.id = "another"
        await until_ended(supervisor)
        await supervisor._follow()
        assert {path.name for path in tmp_path.iterdir()} == {"_application", "foreign", "another"}
        feed.state = pb.CHANGEFEED_STATE_STOPPED
        await until_ended(supervisor)


async def test_a_job_that_does_not_end_keeps_no_other_changefeed_waiting(monkeypatch, tmp_path):
    """Each pause waited up to a minute for the one before."""
    monkeypatch.setattr(keep, "_POLL_SECONDS", 0.01)
    ended = asyncio.Event()
    script = "import signal; signal.pause()"
    async with supervised(monkeypatch, tmp_path, script) as (supervisor, feed):
        await supervisor._follow()
        job, drain = supervisor._jobs["feed"], supervisor._jobs["feed"].drain

        async def drained_late():
            await ended.wait()
            await drain()

        monkeypatch.setattr(job, "drain", drained_late)
        feed.sink_uri = "delta:///other"
        async with asyncio.timeout(60):
            await supervisor._follow()
            assert not supervisor._jobs, "its next job begins when this one has ended"
            feed.id = "another"
            await supervisor._follow()
        assert supervisor._jobs.keys() == {"another"}
        ended.set()
        feed.state = pb.CHANGEFEED_STATE_STOPPED
        await until_ended(supervisor)


async def until_ended(supervisor):
    """A look at the captures, and until the jobs that it ends have ended."""
    async with asyncio.timeout(60):
        await supervisor._follow()
        await asyncio.gather(*supervisor._ending.values())


def test_every_job_has_the_shared_options_and_its_own():
    config = KeepConfig(
        token_file="/run/token",
        compact_every=8,
        conf=("a=1",),
        job=("orders:compact-every=16", "orders:conf=b=2", "orders:mode=append", "x:on-drop=drop"),
    )
    config.checked()
    orders = job_config(config, "orders", "delta:///lake", "grpc://c:1")
    assert (orders.compact_every, orders.conf, orders.mode) == (16, ("a=1", "b=2"), "append")
    assert (orders.token_file, orders.on_drop) == ("/run/token", "keep")
    assert orders.checkpoint_dir == "data/checkpoints/orders"
    other = job_config(config, "other", "delta:///lake", "grpc://c:1")
    assert (other.compact_every, other.conf, other.mode) == (8, ("a=1",), "")


def test_a_sink_uri_says_how_its_lake_is_kept_and_only_job_overrules_it():
    config = KeepConfig(compact_every=8, on_drop="drop", job=("orders:trigger=9 seconds",))
    uri = "delta:///lake?mode=append&on-drop=keep&keep-cuts-hours=72&trigger=5+seconds"
    orders = job_config(config, "orders", uri, "grpc://c:1")
    assert (orders.target, orders.mode, orders.on_drop) == ("delta:///lake", "append", "keep")
    assert (orders.keep_cuts_hours, orders.trigger, orders.compact_every) == (72, "9 seconds", 8)


def test_a_stored_uri_that_cannot_be_read_is_left_to_its_own_job():
    """It was taken before options of URIs were checked; the other changefeeds' jobs go on."""
    assert (
        job_config(KeepConfig(), "old", "delta:///x?y=z", "grpc://c:1").target == "delta:///x?y=z"
    )


@pytest.mark.parametrize(
    ("option", "fault"),
    [
        ("compact-every=16", "CHANGEFEED:NAME=VALUE"),
        ("orders:compact-evry=16", "compact-evry"),
        ("orders:compact-every=often", "compact-every must be a whole number"),
        ("orders:conf=fs.s3a.secret.key=x", "secret"),
        ("orders:target=delta:///other", "target"),
    ],
)
def test_options_of_a_job_are_checked_before_anything_starts(option, fault):
    with pytest.raises(ConfigError, match=fault):
        KeepConfig(job=(option,)).checked()


async def test_a_job_is_tried_again_where_nobody_has_seen_that_it_gave_up(monkeypatch, tmp_path):
    """As when its changefeed is resumed right behind a capture's restart: no look of ours was
    between the two.
    """
    starts = tmp_path / "starts"
    starts.touch()
    script = f"import sys\nopen({str(starts)!r}, 'a').write('x')\nsys.exit(1)"
    async with supervised(monkeypatch, tmp_path, script) as (supervisor, feed):
        async with asyncio.timeout(60):
            while "feed" not in supervisor._ended:
                await supervisor._follow()
                await asyncio.sleep(0.01)
        await supervisor._follow()
        assert "feed" in supervisor._ended, "not at once: the captures may be told any moment"
        monkeypatch.setattr(keep, "_DOUBT_SECONDS", 0.0)
        async with asyncio.timeout(60):
            while starts.stat().st_size < 2:
                await supervisor._follow()
                await asyncio.sleep(0.01)
        feed.state = pb.CHANGEFEED_STATE_STOPPED
        await supervisor._follow()


async def test_a_job_whose_process_ends_after_its_changefeed_was_resumed_is_started_again(
    monkeypatch, tmp_path
):
    starts, ends = tmp_path / "starts", tmp_path / "ends"
    starts.touch()
    script = (
        f"import pathlib, sys, time; open({str(starts)!r}, 'a').write('x')\n"
        f"while not pathlib.Path({str(ends)!r}).exists(): time.sleep(0.01)\n"
        "sys.exit(1)"
    )
    async with supervised(monkeypatch, tmp_path, script) as (supervisor, feed):
        await supervisor._follow()
        feed.state, feed.lake_job.failed_changefeed = pb.CHANGEFEED_STATE_FAILED, True
        await supervisor._follow()  # it has reported, and its process is still there
        feed.state, feed.lake_job.failed_changefeed = pb.CHANGEFEED_STATE_NORMAL, False
        await supervisor._follow()
        ends.touch()
        async with asyncio.timeout(60):
            while starts.stat().st_size < 2:
                await supervisor._follow()
                await asyncio.sleep(0.01)
        feed.state = pb.CHANGEFEED_STATE_STOPPED
        await supervisor._follow()
