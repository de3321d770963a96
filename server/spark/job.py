"""One lake job as a child process in a group of its own: started, followed, started again when it dies.

The job holds the read end of a pipe as its standard input (`--follow-parent`): when this process dies, however it
dies, the job ends too. It prints JSON lines to standard output, and errors as `[TM:ErrName] …` to standard error.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from server.process import drain
from server.spark.metrics import STARTS, observe
from storage.model.errors import TidemarkError

DRAIN_SECONDS = 60.0
EXIT_AGAIN = 75
"""The job's own status for "the same command may succeed later" (EX_TEMPFAIL)."""
_BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)
_LINE_BYTES = 1 << 20

_log = structlog.get_logger(__name__)


class LakeJobError(TidemarkError):
    """The job ended for good; code and message are the job's own."""

    code = "ErrSparkJob"

    def __init__(self, said: str, status: int) -> None:
        code, bracket, message = said.removeprefix("[TM:").partition("] ")
        super().__init__(message if bracket else f"the Spark job ended with status {status}; its log is above")
        self.code = code if bracket else type(self).code


class LakeJob:
    """Keeps one changefeed's lake current for as long as it runs."""

    def __init__(
        self, changefeed: str, command: Sequence[str], *, once: bool, on_line: Callable[[dict[str, Any]], None]
    ) -> None:
        self._changefeed = changefeed
        self._command = list(command)
        self._once = once
        self._on_line = on_line
        self._process: Process | None = None
        self._stopping = False
        self._said = ""
        self._failures = 0

    async def run(self) -> None:
        """Until the job ends by itself with status 0, or is drained.

        Raises:
            LakeJobError: it ended in a way that starting again cannot mend, or `once` is set.
        """
        while not self._stopping:
            status = await self._run_once()
            if status == 0 or self._stopping:
                return
            if self._once or not self._may_succeed_later(status):
                raise LakeJobError(self._said, status)
            pause_s = _BACKOFF_SECONDS[min(self._failures, len(_BACKOFF_SECONDS) - 1)]
            self._failures += 1
            _log.error("job died, restarting", changefeed=self._changefeed, status=status, said=self._said)
            await asyncio.sleep(pause_s)

    async def drain(self) -> None:
        """SIGTERM: the job finishes the cut it is at. SIGKILL if that takes too long; its group goes with it."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        if not await drain(process, DRAIN_SECONDS):
            _log.warning("job did not drain in time and was killed", changefeed=self._changefeed)

    async def _run_once(self) -> int:
        self._said = ""
        STARTS.labels(self._changefeed).inc()
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, limit=_LINE_BYTES
        )
        self._process = process
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_lines(process), name="job-lines")
                tasks.create_task(self._follow_errors(process), name="job-errors")
            return await process.wait()
        finally:
            _kill_group(process)  # the JVM and its Python workers must not outlive the driver

    async def _follow_lines(self, process: Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            document = json.loads(line)
            if "end_ts" in document:
                self._failures = 0
            observe(self._changefeed, document)
            self._on_line(document)

    async def _follow_errors(self, process: Process) -> None:
        assert process.stderr is not None
        while line := await process.stderr.readline():
            text = line.decode(errors="replace").rstrip()
            if text.startswith("[TM:"):
                self._said = text
            else:
                sys.stderr.write(text + "\n")

    @staticmethod
    def _may_succeed_later(status: int) -> bool:
        return status == EXIT_AGAIN or status < 0


def _kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
