"""`tidemark spark run`: one lake job as a child process in a group of its own, started, followed,
and started again when it dies.

The job holds the read end of a pipe as its standard input (`--follow-parent`): when this process
dies, however it dies, the job ends too. It prints JSON lines to standard output, and errors as
`[TM:ErrName] …` to standard error.

A job that ends by an error after which it may succeed later is started again after a pause, which
doubles until a cut is applied. Any other error ends it for good. Both are reported to the captures:
a job that was killed cannot do it itself. When the job has done its work, the daemon ends.

The jobs of `tidemark spark keep` begin a few at a time (`Turns`): Spark gives a Python worker ten
seconds to begin, and where all began at once, as after a restart of the machine, none had them.
They may share one Spark application (`Application`). A job that ends by itself leaves nothing in
it. One that was killed may: a write that its JVM is at goes on, beside the next job of the same
lake. So the application is killed then, too, and all jobs start again.
"""

import asyncio
import json
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from server.config import ConfigError
from server.daemon import Endpoints
from server.process import LINE_BYTES, ChildFailedError, drain, kill_group, start_child
from server.rpc.credentials import SecurityConfig
from server.spark.auditor import Auditor, audit_settings
from server.spark.config import SparkConfig, job_command
from server.spark.metrics import ERRORS, STARTS, observe
from storage.backoff import Backoff
from storage.model.errors import TidemarkError
from storage.tasks import wait_at_most

DRAIN_SECONDS = 60.0
EXIT_AGAIN = 75
"""The job's own status for "the same command may succeed later" (EX_TEMPFAIL)."""
BACKOFF_SECONDS, BACKOFF_SECONDS_MAX = 0.5, 60.0
_ENDED = (0, 1, EXIT_AGAIN, -signal.SIGTERM)
"""Statuses of a job that has nothing under way in a JVM; with any other one it was killed. A job
dies of SIGTERM while Python still imports its modules, as when its changefeed fails at once; later
it answers it (`run_until_exit`).
"""
_DAMAGED: Final = "ErrLakeDamaged"
_DAMAGES_MOST: Final = 8
"""A file that is gone may be one that another engine has just removed with a part of the table's
history; one that stays away is nothing that a start can mend. Eight starts take some two minutes.
"""
_CODE = re.compile(r"\[TM:(?P<code>Err[A-Za-z0-9]+)\] (?P<message>.*)", re.S)
_TURN_S = 60.0
_LOOK_S = 0.2

_log = structlog.get_logger(__name__)


class LakeJobError(TidemarkError):
    """The job ended by an error; code and message are the job's own where it said them."""

    code = "ErrSparkJob"

    def __init__(self, said: str, status: int) -> None:
        parts = _CODE.fullmatch(said)
        # Shown by `changefeed query` and `doctor`, too, far from the log.
        end = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        super().__init__(
            parts["message"]
            if parts
            else f"the Spark job {end}; its lines are in the log of `tidemark spark`, which ran it"
        )
        self.code = parts["code"] if parts else type(self).code


ReportError = Callable[[LakeJobError, bool], None]
"""Tell the captures why the job ended, and whether it is started again; blocks,
and raises nothing.
"""


class LakeJob:
    """Keeps one changefeed's lake current for as long as it runs."""

    def __init__(
        self,
        changefeed: str,
        command: Sequence[str],
        *,
        once: bool,
        on_line: Callable[[dict[str, Any]], None],
        on_error: ReportError | None = None,
        shared: "Shared | None" = None,
    ) -> None:
        """`shared` is what it has in common with the other jobs of a `spark keep`."""
        shared = shared or Shared()
        self._spark = shared.spark
        self._turn = Turn(shared.turns or Turns(1))
        self._changefeed = changefeed
        self._command = list(command)
        self._once = once
        self._on_line = on_line
        self._on_error = on_error
        self._process: Process | None = None
        self._starting = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._said = ""
        self._backoff = Backoff(BACKOFF_SECONDS, BACKOFF_SECONDS_MAX)
        self._damages = 0
        """How often the lake was found damaged since the last cut."""

    async def run(self) -> None:
        """Until the job ends by itself with status 0, or is drained.

        Raises:
            LakeJobError: it ended in a way that starting again cannot mend, or `once` is set.
        """
        while not self._stopping.is_set():
            status = await self._run_once()
            if status == 0 or self._stopping.is_set():
                return
            error = LakeJobError(self._said, status)
            self._damages += error.code == _DAMAGED
            again = not self._once and self._may_succeed_later(status)
            ERRORS.labels(self._changefeed, error.code).inc()
            if self._on_error is not None:
                await asyncio.to_thread(self._on_error, error, again)
            if not again:
                raise error
            pause_s = self._backoff.next_s()
            _log.error(
                "lake job ended, restarting",
                changefeed=self._changefeed,
                status=status,
                code=error.code,
                error=error.message,
                pause_s=round(pause_s, 1),
            )
            await wait_at_most(self._stopping, pause_s)

    async def drain(self) -> None:
        """SIGTERM: the job finishes the cut it is at.

        SIGKILL if that takes too long; its group goes with it.
        """
        self._stopping.set()
        async with self._starting:  # one that is being started is there then
            process = self._process
        if process is None or process.returncode is not None:
            return
        if not await drain(process, DRAIN_SECONDS):
            _log.warning("job did not drain in time and was killed", changefeed=self._changefeed)

    async def _run_once(self) -> int:
        self._said = ""
        if not await self._turn.taken(self._stopping):
            return 0
        try:
            return await self._run_in_turn()
        finally:
            self._turn.give_back()

    async def _run_in_turn(self) -> int:
        STARTS.labels(self._changefeed).inc()
        environment: dict[str, str] = {}
        try:
            if self._spark is not None:
                environment = await self._spark.gateway(self._changefeed)
            async with self._starting:
                if self._stopping.is_set():
                    return 0
                process = await _started("the Spark job", self._command, environment)
                self._process = process
        except LakeJobError as err:
            self._said = f"[TM:{err.code}] {err.message}"
            return EXIT_AGAIN
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_lines(process), name="job-lines")
                tasks.create_task(pass_on_errors(process, self._note_error), name="job-errors")
            status = await process.wait()
            if self._spark is not None and status not in _ENDED:
                await self._spark.kill()
            return status
        finally:
            # The JVM and its Python workers must not outlive the driver: the next job has the same
            # checkpoint and scratch files.
            kill_group(process)

    async def _follow_lines(self, process: Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            document = json.loads(line)
            if "reading" in document:
                self._turn.give_back()
            # A cut was applied: the next failure is another one, and is tried again soon.
            if "end_ts" in document:
                self._turn.give_back()
                self._backoff.reset()
                self._damages = 0
            observe(self._changefeed, document)
            self._on_line(document)

    def _note_error(self, text: str) -> None:
        self._said = text

    def _may_succeed_later(self, status: int) -> bool:
        # A negative status is a signal, such as the kernel sends when memory ends.
        return (status == EXIT_AGAIN or status < 0) and self._damages < _DAMAGES_MOST


class Shared(NamedTuple):
    """State that several jobs share."""

    spark: "Application | None" = None
    """None: each starts a Spark of its own."""
    turns: "Turns | None" = None
    """None: each starts when it likes."""


async def _started(
    name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Process:
    """See `start_child`; its failure is the job's.

    Raises:
        LakeJobError: the process cannot be started now.
    """
    try:
        return await start_child(
            name, command, stderr=PIPE, environment=environment, line_bytes=LINE_BYTES
        )
    except ChildFailedError as err:
        raise LakeJobError(f"[TM:{LakeJobError.code}] {err.message}", EXIT_AGAIN) from err


ALL_LINES: Final = "-"
"""The value of `--progress-json` for standard output, which gets the lines of all cuts."""


class IdleCuts:
    """Tells the lines about cuts without rows, which every few seconds a lake that nothing changes
    is moved on by, from all others.
    """

    def __init__(self) -> None:
        self._is_idle = False
        """Whether the newest cut had no rows."""

    def is_about_one(self, line: Mapping[str, Any]) -> bool:
        """Whether a line of a job is about such a cut; call it with the lines in their order."""
        if "end_ts" in line:
            self._is_idle = not line.get("rows")
            return self._is_idle
        return "progress" in line and self._is_idle


class Turns:
    """Limits how many jobs start at the same time."""

    def __init__(self, count: int) -> None:
        self.free = count


class Turn:
    """One job's: from its start until it reads its changefeed, or for `_TURN_S` at most."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._ends: asyncio.TimerHandle | None = None

    async def taken(self, stopping: asyncio.Event) -> bool:
        """Wait for it; False: the job is stopping meanwhile."""
        while self._turns.free <= 0 and not stopping.is_set():
            await wait_at_most(stopping, _LOOK_S)
        if stopping.is_set():
            return False
        self._turns.free -= 1
        # One that hangs, as in a JVM that swaps, does not keep the others for ever.
        self._ends = asyncio.get_running_loop().call_later(_TURN_S, self.give_back)
        return True

    def give_back(self) -> None:
        """Let the next one start; more than once is harmless."""
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None
            self._turns.free += 1


class Application:
    """The Spark that jobs of `tidemark spark keep` share, as a child process in a group of its own
    (`pyspark_tidemark.application`).

    It is started when the first job asks for it, and again when it has died.
    """

    def __init__(self, command: Sequence[str], tasks: asyncio.TaskGroup) -> None:
        self._command = list(command)
        self._tasks = tasks
        self.formats: set[str] = set()
        """The formats of the jobs' lakes; their jars are fetched at the start."""
        self._process: Process | None = None
        self._errors: asyncio.Task[None] | None = None
        self._said = ""
        self._asking = asyncio.Lock()
        self._closed = False

    async def gateway(self, changefeed: str) -> dict[str, str]:
        """The environment by which a job connects; the gateway of the job before is closed.

        Raises:
            LakeJobError: the application does not start, or is gone.
        """
        async with self._asking:
            if self._process is None or self._process.returncode is not None:
                await self._start()
            process = self._process
            if process is None or self._closed:
                raise LakeJobError("[TM:ErrSparkLost] the Spark application was ended", 1)
            answer = await self._ask(process, {"changefeed": changefeed})
        return {
            "PYSPARK_GATEWAY_PORT": str(answer["port"]),
            "PYSPARK_GATEWAY_SECRET": str(answer["secret"]),
        }

    async def close_gateway(self, changefeed: str) -> None:
        """Close the gateway of a changefeed whose job has ended and does not start again."""
        async with self._asking:
            process = self._process
            if process is None or process.returncode is not None or self._closed:
                return
            # One that is gone has no gateways any more.
            with suppress(LakeJobError, OSError):
                await self._ask(process, {"changefeed": changefeed, "ended": True})

    async def kill(self) -> None:
        """Kill it at once; the next job that needs one starts another."""
        process, self._process = self._process, None
        if process is not None:
            kill_group(process)
            await process.wait()

    async def close(self) -> None:
        """End it for good, also while it starts."""
        self._closed = True
        await self.kill()

    async def _start(self) -> None:
        self._said = ""
        formats = (f"--format={lake}" for lake in sorted(self.formats))
        process = await _started("the Spark application", [*self._command, *formats])
        self._errors = self._tasks.create_task(
            pass_on_errors(process, self._note_error), name="application-errors"
        )
        # At once: whoever ends it now need not wait until Spark has started.
        self._process = process
        if self._closed:
            await self.kill()
        await self._answer(process)
        _log.info("Spark application started", pid=process.pid)

    async def _ask(self, process: Process, document: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None
        process.stdin.write(json.dumps(document).encode() + b"\n")
        return await self._answer(process)

    async def _answer(self, process: Process) -> dict[str, Any]:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if line:
            document: dict[str, Any] = json.loads(line)
            return document
        kill_group(process)
        status = await process.wait()
        if self._errors is not None:
            await self._errors
        raise LakeJobError(self._said, status)

    def _note_error(self, text: str) -> None:
        self._said = text


async def pass_on_errors(process: Process, note: Callable[[str], None]) -> None:
    """Pass on what a process writes to standard error, until it ends; `note` gets the lines that
    name an error, `[TM:ErrName] …`.
    """
    assert process.stderr is not None
    while True:
        # A line longer than the stream's limit, as a plan of Spark may be, raises ValueError. It is
        # skipped: unread, it would fill the pipe and stop the process.
        try:
            line = await process.stderr.readline()
        except ValueError:
            continue
        if not line:
            return
        text = line.decode(errors="replace").rstrip()
        if text.startswith("[TM:"):
            note(text)
        else:
            sys.stderr.write(text + "\n")


def captures_reporter(command: Sequence[str]) -> ReportError:
    """Reports the errors of a job, whose command line says where the captures are."""
    # Imported here: commands that start no job need not load Spark's package.
    from pyspark_tidemark.errors import (
        SourceError,
    )
    from pyspark_tidemark.flight import Changefeed
    from pyspark_tidemark.lake.arguments import Arguments
    from pyspark_tidemark.lake.reporter import Reporter
    from pyspark_tidemark.options import parse

    flags = list(command)[list(command).index("--follow-parent") :]

    def report(error: LakeJobError, again: bool) -> None:  # noqa: FBT001 - as `ReportError` says
        try:
            options = parse(Arguments.parse(flags).source_options | {"cuts": "true"})
        except SourceError as err:
            _log.warning("the captures cannot be told", code=err.code, error=err.message)
            return
        Reporter(Changefeed(options)).failed(
            SourceError(error.code, error.message, retryable=again)
        )

    return report


@asynccontextmanager
async def open_run(config: SparkConfig, security: SecurityConfig) -> AsyncIterator[Endpoints]:
    """Keep one lake current.

    Raises:
        ConfigError: settings are missing, or the progress file cannot be written.
        LakeJobError: the job ended for good.
    """
    command = job_command(config, security)
    # What an audit finds is said of the changefeed's own lake.
    audited = replace(config, coordinator="") if config.reader else config
    auditor = Auditor(config.changefeed, audit_settings(audited, security))
    with _lines_to(config.progress_json) as write:

        def on_line(line: dict[str, Any]) -> None:
            write(line)
            auditor.take(line)

        job = LakeJob(
            config.changefeed,
            command,
            once=config.once,
            on_line=on_line,
            on_error=captures_reporter(command),
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_to_the_end(job, auditor), name="job")
            try:
                yield {}
            finally:
                await job.drain()


async def _to_the_end(job: LakeJob, auditor: Auditor) -> None:
    async with auditor.running():
        await job.run()
    # The job has done its work. SIGTERM is how a daemon ends: it drains, and exits with 0.
    signal.raise_signal(signal.SIGTERM)


@contextmanager
def _lines_to(path: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    outputs = [sys.stdout]
    idle_cuts = None if path == ALL_LINES else IdleCuts()
    try:
        if path and path != ALL_LINES:
            outputs.append(Path(path).open("a", encoding="utf-8"))  # noqa: SIM115 - closed below, with the block
    except OSError as err:
        raise ConfigError(f"cannot write to --progress-json {path}: {err.strerror}") from err

    def write(document: dict[str, Any]) -> None:
        is_hidden = idle_cuts is not None and idle_cuts.is_about_one(document)
        for output in outputs[is_hidden:]:
            output.write(json.dumps(document) + "\n")
            output.flush()

    try:
        yield write
    finally:
        for output in outputs[1:]:
            output.close()
