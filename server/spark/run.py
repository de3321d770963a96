"""`tidemark spark run` for the block: the job, its lines passed on,
the daemon ended when the job has done its work.
"""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from server.config import ConfigError
from server.daemon import Endpoints
from server.rpc.credentials import SecurityConfig
from server.spark.auditor import Auditor, audit_settings
from server.spark.config import SparkConfig, job_command
from server.spark.job import LakeJob, captures_reporter


@asynccontextmanager
async def open_run(config: SparkConfig, security: SecurityConfig) -> AsyncIterator[Endpoints]:
    """Keep one lake current.

    Raises:
        ConfigError: settings are missing, or the progress file cannot be written.
        LakeJobError: the job ended for good.
    """
    command = job_command(config, security)
    auditor = Auditor(config.changefeed, audit_settings(config, security))
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
    # the daemon's own way to end: drain, status 0
    signal.raise_signal(signal.SIGTERM)


@contextmanager
def _lines_to(path: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    outputs = [sys.stdout]
    try:
        if path:
            outputs.append(Path(path).open("a", encoding="utf-8"))  # noqa: SIM115 - closed below, with the block
    except OSError as err:
        raise ConfigError(f"cannot write to --progress-json {path}: {err.strerror}") from err

    def write(document: dict[str, Any]) -> None:
        for output in outputs:
            output.write(json.dumps(document) + "\n")
            output.flush()

    try:
        yield write
    finally:
        for output in outputs[1:]:
            output.close()
