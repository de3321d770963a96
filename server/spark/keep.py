"""`tidemark spark keep` for the block: one lake job for each running changefeed whose sink is a
lake.

The captures say which changefeeds there are; a job is started when one appears, drained when it is
paused or removed. A job that ends for good makes its changefeed show `failed`; it is started again
when the changefeed is resumed, paused and resumed, or when this process starts anew. Spark's
checkpoints go with their changefeed (`CheckpointDirectories`).
"""

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import structlog
from pyspark_tidemark.sink_uri import redacted
from tidemarkpb.v1 import capture_pb2, changefeed_pb2
from tidemarkpb.v1.capture_pb2_grpc import CaptureServiceStub
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub

from server.changefeed.captures import OtherClusterError, registered_captures
from server.changefeed.info import lake_format
from server.daemon import Endpoints
from server.rpc.client import connect, metadata_at
from server.rpc.credentials import SecurityConfig
from server.spark import metrics
from server.spark.auditor import Auditor, audit_settings
from server.spark.config import (
    KeepConfig,
    SparkConfig,
    application_command,
    job_command,
    job_config,
)
from server.spark.job import (
    DRAIN_SECONDS,
    Application,
    IdleCuts,
    LakeJob,
    Shared,
    Turns,
    captures_reporter,
)
from storage.model.errors import TidemarkError

APPLICATION_DIRECTORY = "_application"
"""Among the checkpoints; no changefeed's id has an underscore."""
_POLL_SECONDS = 1.0
_RPC_SECONDS = 10.0
_LEAST_STARTS = 2
"""So many jobs start at the same time, or as many as there are cores, if these are more."""
_DOUBT_SECONDS = 30.0
"""A job that has given up is tried again when the captures have not shown that for so long."""
_DIFFERED_MOST = 3
"""A capture that starts anew may be registered between a look at the captures and one at the
coordinator.
"""
_MARK = "changefeed.json"
"""A file in each checkpoint directory, which says of which changefeed it is."""
_RUNNING = (changefeed_pb2.CHANGEFEED_STATE_NORMAL, changefeed_pb2.CHANGEFEED_STATE_WARNING)

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Ended:
    """A job that has ended for good."""

    seen: bool
    """Whether the captures were seen to know it."""
    at: float
    """When, by the monotonic clock."""


class _Followed(NamedTuple):
    """What a job was started for: with another one, it is started anew."""

    create_time: str
    sink_uri: str

    @classmethod
    def of(cls, feed: changefeed_pb2.Changefeed) -> "_Followed":
        return cls(feed.create_time, feed.sink_uri)


@asynccontextmanager
async def open_keep(config: KeepConfig, security: SecurityConfig) -> AsyncIterator[Endpoints]:
    """Keep all lakes current; raises ConfigError for options that cannot be used."""
    config.checked()
    channel_of = connect(config.capture, security, config.token_file)
    async with channel_of as channel, asyncio.TaskGroup() as tasks:
        supervisor = LakeJobSupervisor(config, security, channel, tasks)
        running = [
            tasks.create_task(supervisor.run(), name="lake job supervisor"),
            tasks.create_task(supervisor.check_cluster(), name="cluster check"),
        ]
        try:
            yield {}
        finally:
            for task in running:
                task.cancel()
            await supervisor.drain()


class CheckpointDirectories:
    """Spark's checkpoints on this machine, a directory for each changefeed, marked with the time of
    its creation.

    A lost one costs nothing, since the lake knows where it ends. One that outlives its changefeed
    would be taken for that of the next one with the same name, whose lake is empty: the job
    refuses that (`ErrCutGap`).
    """

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def prepare(self, feed: changefeed_pb2.Changefeed) -> None:
        """Make the directory of a changefeed, without what an earlier one of its name has left.

        Raises:
            OSError: the disk is full, or fails.
        """
        directory, mark = self._root / feed.id, {"create_time": feed.create_time}
        if directory.is_dir() and _marked(directory) not in (None, mark):
            self._remove(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if _marked(directory) != mark:
            (directory / _MARK).write_text(json.dumps(mark), encoding="utf-8")

    def remove_others(self, changefeeds: Collection[str]) -> None:
        """Remove those of all changefeeds but these. Directories without a mark stay: they are of
        an earlier version of this program, or of somebody else.
        """
        directories = list(self._root.iterdir()) if self._root.is_dir() else []
        for directory in directories:
            if directory.name not in changefeeds and _marked(directory) is not None:
                self._remove(directory)

    @staticmethod
    def _remove(directory: Path) -> None:
        shutil.rmtree(directory)
        _log.info("checkpoint of a removed changefeed removed", directory=str(directory))


def _marked(directory: Path) -> dict[str, str] | None:
    """What the mark of a directory says; None: it has none that is whole."""
    try:
        mark = json.loads((directory / _MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return mark if isinstance(mark, dict) else None


class LakeJobSupervisor:
    """Starts and drains lake jobs as changefeeds come and go."""

    def __init__(
        self,
        config: KeepConfig,
        security: SecurityConfig,
        channel: grpc.aio.Channel,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._config = config
        self._security = security
        self._audits = asyncio.Lock()
        self._starts = Turns(max(len(os.sched_getaffinity(0)), _LEAST_STARTS))
        directory = str(Path(config.checkpoint_dir) / APPLICATION_DIRECTORY)
        self._application = Application(
            application_command(config, config.application_memory, directory), tasks
        )
        self._changefeeds = ChangefeedServiceStub(channel)
        self._captures = CaptureServiceStub(channel)
        self._tasks = tasks
        self._jobs: dict[str, LakeJob] = {}
        self._followed: dict[str, _Followed] = {}
        """What the jobs were started for."""
        self._ending: dict[str, asyncio.Task[None]] = {}
        """Jobs that are finishing the cut they are at."""
        self._checkpoints = CheckpointDirectories(config.checkpoint_dir)
        self._kept: set[str] | None = None
        """The changefeeds that had checkpoints at the last look; None: there was no look yet."""
        self._ended: dict[str, _Ended] = {}
        """Changefeeds whose job has ended for good."""
        self._seen_failed: set[str] = set()
        """Changefeeds that the captures have shown as `failed` by the job that there is now."""

    async def run(self) -> None:
        """Follow the captures' list of changefeeds until cancelled."""
        while True:
            try:
                await self._follow()
            except grpc.aio.AioRpcError as err:
                _log.warning(
                    "no capture answers", capture=self._config.capture, error=err.details()
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def check_cluster(self) -> None:
        """Check that the captures belong to the coordinator's cluster, once both answer: an audit
        would compare lakes with the rows of another cluster.

        Raises:
            OtherClusterError: they do not.
        """
        coordinator, differed = self._config.coordinator, 0
        if not coordinator:
            return
        while differed < _DIFFERED_MOST:
            try:
                captures = {capture.id for capture in await self._list_captures()}
                registered = await self._registered(coordinator)
            except (grpc.aio.AioRpcError, TidemarkError, TimeoutError):
                pass  # whoever needs it says what is wrong there
            else:
                if not captures.isdisjoint(registered):
                    return
                differed += bool(captures)
            await asyncio.sleep(_POLL_SECONDS)
        raise OtherClusterError.of_capture(self._config.capture, coordinator, "--coordinator")

    async def _registered(self, coordinator: str) -> set[str]:
        async with (
            asyncio.timeout(_RPC_SECONDS),
            metadata_at(coordinator, self._security) as meta,
        ):
            return {*await registered_captures(meta)}

    async def drain(self) -> None:
        """End all jobs after the cuts they are at."""
        await asyncio.gather(*(job.drain() for job in list(self._jobs.values())))
        if self._ending:
            # Not for longer: they ask the application, which may hang.
            await asyncio.wait(self._ending.values(), timeout=DRAIN_SECONDS)
        await self._application.close()

    async def _follow(self) -> None:
        listed = await self._changefeeds.ListChangefeeds(
            changefeed_pb2.ListChangefeedsRequest(), timeout=_RPC_SECONDS
        )
        lakes = {
            feed.id: feed
            for feed in listed.changefeeds
            if _is_running(feed) and lake_format(feed.sink_uri)
        }
        resumed = self._resumed(
            {feed.id for feed in listed.changefeeds if feed.lake_job.failed_changefeed}
        )
        updated = {
            name
            for name in self._jobs.keys() & lakes.keys()
            if self._followed[name] != _Followed.of(lakes[name])
        }
        # A job whose changefeed is resumed, has another sink URI, or was made anew under its name
        # is drained here and started below or later: it finishes the cut it is at before the next
        # one begins there.
        for changefeed in (self._jobs.keys() - lakes.keys()) | resumed | updated:
            self._end(changefeed)
        if self._ending:
            # One that does not end soon keeps no other changefeed waiting.
            await asyncio.wait(self._ending.values(), timeout=_POLL_SECONDS)
        await self._remove_checkpoints({feed.id for feed in listed.changefeeds})
        new = lakes.keys() - self._jobs.keys() - self._ending.keys()
        endpoint = await self._flight_endpoint() if new else ""
        for changefeed in new:
            await self._start(lakes[changefeed], endpoint)

    def _end(self, changefeed: str) -> None:
        self._ended.pop(changefeed, None)
        del self._followed[changefeed]
        task = self._tasks.create_task(self._drain(changefeed, self._jobs.pop(changefeed)))
        self._ending[changefeed] = task

    async def _drain(self, changefeed: str, job: LakeJob) -> None:
        try:
            await job.drain()
            await self._application.close_gateway(changefeed)
        finally:
            del self._ending[changefeed]

    async def _remove_checkpoints(self, changefeeds: set[str]) -> None:
        """Remove those of changefeeds that were removed, also before this process began."""
        before, self._kept = self._kept, changefeeds | self._ending.keys()
        if before is not None and before <= self._kept:
            return
        try:
            await asyncio.to_thread(self._checkpoints.remove_others, self._kept)
        except OSError as err:
            _log.warning("checkpoints of removed changefeeds stay for now", error=str(err))

    def _resumed(self, failed: set[str]) -> set[str]:
        """Changefeeds of ended jobs that the captures showed as `failed` by their job, and do not
        any more; or that they have not shown so for long: whoever resumed one may have been faster
        than our looks, as while a capture was away.
        """
        self._seen_failed |= failed
        doubtful = time.monotonic() - _DOUBT_SECONDS
        resumed = {
            changefeed
            for changefeed, ended in self._ended.items()
            if changefeed not in failed and (ended.seen or ended.at < doubtful)
        }
        for changefeed in self._ended.keys() & failed:
            self._ended[changefeed].seen = True
        return resumed

    async def _flight_endpoint(self) -> str:
        scheme = "grpc+tls" if self._security.enabled else "grpc"
        captures = await self._list_captures()
        return ",".join(f"{scheme}://{capture.flight_address}" for capture in captures)

    async def _list_captures(self) -> Sequence[capture_pb2.Capture]:
        request = capture_pb2.ListCapturesRequest()
        answer = await self._captures.ListCaptures(request, timeout=_RPC_SECONDS)
        return answer.captures

    async def _start(self, feed: changefeed_pb2.Changefeed, endpoint: str) -> None:
        changefeed, target = feed.id, feed.sink_uri
        config = job_config(self._config, changefeed, target, endpoint)
        try:
            await asyncio.to_thread(self._checkpoints.prepare, feed)
        except OSError as err:
            # The job meets the same, and the captures hear of it.
            _log.warning("no checkpoint directory", changefeed=changefeed, error=str(err))
        # One lock for all jobs: one lake is audited at a time, whatever each job's settings are.
        audits = replace(audit_settings(config, self._security), turns=self._audits)
        auditor = Auditor(changefeed, audits)
        command = job_command(config, self._security)

        idle_cuts = IdleCuts()

        def on_line(line: dict[str, Any]) -> None:
            if not idle_cuts.is_about_one(line):
                _show(changefeed, line)
            auditor.take(line)

        self._application.formats.add(lake_format(target))
        job = LakeJob(
            changefeed,
            command,
            once=False,
            on_line=on_line,
            on_error=captures_reporter(command),
            shared=Shared(self._application if self._shares(config) else None, self._starts),
        )
        self._jobs[changefeed], self._followed[changefeed] = job, _Followed.of(feed)
        self._seen_failed.discard(changefeed)
        self._tasks.create_task(self._guarded(changefeed, job, auditor), name=f"lake {changefeed}")
        _log.info("lake job started", changefeed=changefeed, target=redacted(target))

    def _shares(self, config: SparkConfig) -> bool:
        """Whether a job runs in the application of all: not if it wants another Spark."""
        own, shared = (
            (each.master, each.driver_memory, tuple(each.conf)) for each in (config, self._config)
        )
        return self._config.share_spark and own == shared

    async def _guarded(self, changefeed: str, job: LakeJob, auditor: Auditor) -> None:
        try:
            async with auditor.running():
                await job.run()
        except TidemarkError as err:
            _log.error("lake job failed", changefeed=changefeed, code=err.code, error=err.message)
            if self._jobs.get(changefeed) is job:
                # Its process may take longer to end than somebody takes to resume the changefeed.
                seen = changefeed in self._seen_failed
                self._ended[changefeed] = _Ended(seen, time.monotonic())
        finally:
            # Paused or removed: its lake is behind nothing.
            if changefeed not in self._jobs:
                metrics.forget(changefeed)


def _is_running(feed: changefeed_pb2.Changefeed) -> bool:
    """Whether rows are pulled for it: also where it shows `failed` as its job has given up."""
    return feed.state in _RUNNING or feed.lake_job.failed_changefeed


def _show(changefeed: str, line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"changefeed": changefeed, **line}) + "\n")
    sys.stdout.flush()
