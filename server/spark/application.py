"""The Spark application that the lake jobs of `tidemark spark keep` share, as a child process in a
group of its own (`pyspark_tidemark.application`).

A job that ends by itself leaves nothing in it. One that was killed may: a write that its JVM is at
goes on, beside the next job of the same lake. So the application is killed then, too, and all jobs
start again.
"""

import asyncio
import json
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import Any

import structlog

from server.process import kill_group
from server.spark.job import LINE_BYTES, LakeJobError, pass_on_errors

_log = structlog.get_logger(__name__)


class Application:
    """Started when the first job asks for it, and again when it has died."""

    def __init__(self, command: Sequence[str], tasks: asyncio.TaskGroup) -> None:
        self._command = list(command)
        self._tasks = tasks
        self.formats: set[str] = set()
        """Those of the jobs' lakes: their jars are fetched when it starts."""
        self._process: Process | None = None
        self._errors: asyncio.Task[None] | None = None
        self._said = ""
        self._asking = asyncio.Lock()
        self._closed = False

    async def gateway(self, changefeed: str) -> dict[str, str]:
        """What a job's environment needs to come in; the gateway of the job before is closed.

        Raises:
            LakeJobError: the application does not start, or is gone.
        """
        async with self._asking:
            if self._process is None or self._process.returncode is not None:
                await self._start()
            process = self._process
            if process is None or self._closed:
                raise LakeJobError("[TM:ErrSparkLost] the Spark application was ended", 1)
            assert process.stdin is not None
            process.stdin.write(json.dumps({"changefeed": changefeed}).encode() + b"\n")
            answer = await self._answer(process)
        return {
            "PYSPARK_GATEWAY_PORT": str(answer["port"]),
            "PYSPARK_GATEWAY_SECRET": str(answer["secret"]),
        }

    async def kill(self) -> None:
        """End it at once, with whatever it is at; the next job that asks starts another one."""
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
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *(f"--format={lake}" for lake in sorted(self.formats)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,
            limit=LINE_BYTES,
        )
        self._errors = self._tasks.create_task(
            pass_on_errors(process, self._note_error), name="application-errors"
        )
        # At once: whoever ends it now need not wait until Spark has started.
        self._process = process
        if self._closed:
            await self.kill()
        await self._answer(process)
        _log.info("Spark application started", pid=process.pid)

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
