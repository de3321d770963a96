"""Processes that the demo starts and ends: the cluster, the Spark job, clients that are to be killed."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from server.process import drain
from storage.model.errors import UnavailableError

DRAIN_SECONDS = 30.0
_LINE_BYTES = 1 << 20


class ProcessFailedError(UnavailableError):
    """A process of the demo ended before its work was done; its log says why."""

    code = "ErrDemoProcess"


async def spawn(module: str, arguments: Sequence[str], stderr: IO[bytes]) -> Process:
    """`python -m module …` in a session of its own (Ctrl-C is ours alone); its standard input closes when we die."""
    command = (sys.executable, "-m", module, *arguments)
    return await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=stderr, limit=_LINE_BYTES, start_new_session=True
    )


@asynccontextmanager
async def started(module: str, arguments: Sequence[str], log: Path) -> AsyncIterator[Process]:
    """`python -m module …` for the block, its stderr in `log`; ended by SIGTERM, or SIGKILL if that takes too long."""
    with log.open("ab") as stderr:
        process = await spawn(module, arguments, stderr)
    try:
        yield process
    finally:
        await drain(process, DRAIN_SECONDS)


async def json_line(process: Process, log: Path) -> dict[str, Any]:
    """The next line of JSON that the process prints.

    Raises:
        ProcessFailedError: it ended instead.
    """
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        status = await process.wait()
        raise ProcessFailedError(f"a process ended with status {status}; {log} ends with: {_tail(log)}")
    document: dict[str, Any] = json.loads(line)
    return document


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    ours = [line for line in lines if line.startswith("[TM:")]
    return " | ".join((ours or lines)[-3:]) or "(nothing)"
