"""Child processes: how they are ended, and daemons as children that are kept alive.

A child is ended by SIGTERM, and by SIGKILL if that takes too long. It ends by itself when its
parent dies: it holds the read end of a pipe as its standard input (`--follow-parent` of a daemon,
`exit_with_parent`), which closes however the parent dies. So `kill -9` of the parent is a crash of
the whole tree.

`start_child` starts one whose output is lines. `Child` is one daemon: start, wait for its ready
line, restart when it dies, drain.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from typing import IO

import structlog

from storage.backoff import Backoff
from storage.model.errors import UnavailableError

READY_SECONDS = 60.0
DRAIN_SECONDS = 15.0
LINE_BYTES = 1 << 20
_BACKOFF_S = (0.2, 5.0)

_log = structlog.get_logger(__name__)


async def drain(process: Process, limit_s: float) -> bool:
    """End `process` and wait for it; returns False if it had to be killed."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(limit_s):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return False
    return True


def kill_group(process: Process) -> None:
    """SIGKILL a process that leads a group of its own, and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def exit_with_parent() -> None:
    """End this process at once when standard input closes:
    a pipe whose other end only its parent has.

    It closes however the parent dies. What this process started in the same way ends with it.
    """

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


class ChildFailedError(UnavailableError):
    """A process could not be started, or ended before it was ready; the message says why."""

    code = "ErrDaemonFailed"


async def start_child(
    name: str,
    command: Sequence[str],
    *,
    stderr: int | IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
    line_bytes: int = LINE_BYTES,
) -> Process:
    """Start a process that writes lines of at most `line_bytes` to its standard output, in a group
    of its own: Ctrl-C reaches its parent only, which ends it in order.

    `name` is for errors; `environment` is added to this process's own.

    Raises:
        ChildFailedError: none can be started now, as where a container's limit of processes is
            reached.
    """
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            env=os.environ | (environment or {}),
            stdin=PIPE,
            stdout=PIPE,
            stderr=stderr,
            limit=line_bytes,
            start_new_session=True,
        )
    except (OSError, RuntimeError) as err:  # the second: asyncio's thread cannot be started
        raise ChildFailedError(
            f"{name} cannot be started: {err}; look at the limits of processes and memory"
        ) from err


class Child:
    """One daemon of the tree; `name` is its command, and its name in logs and metrics."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self.endpoints: dict[str, str] = {}
        self._arguments = list(arguments)
        self._process: Process | None = None

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process and wait until it says that it is ready.

        Raises:
            ChildFailedError: it cannot be started, ended, or said nothing in time.
        """
        command = (sys.executable, "-m", "server.cli.main", *self.name.split(), "--follow-parent")
        self._process = await start_child(self.name, (*command, *self._arguments))
        try:
            async with asyncio.timeout(READY_SECONDS):
                self.endpoints = await self._ready_line(self._process)
            self._arguments = pinned(self._arguments, self.name, self.endpoints)
        except TimeoutError:
            self._process.kill()
            raise ChildFailedError(
                f"{self.name} was not ready within {READY_SECONDS:.0f} s; see its log"
            ) from None

    def kill(self) -> None:
        """End the process at once, as one that does not answer; `run` starts it again."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def run(self) -> None:
        """Keep the daemon alive until cancelled: restart it, on the same addresses,
        whenever it dies.
        """
        backoff = Backoff(*_BACKOFF_S)
        while True:
            status = await self._until_death()
            _log.error("daemon died, restarting", child=self.name, status=status)
            await asyncio.sleep(backoff.next_s())
            try:
                await self.start()
                backoff.reset()
            except ChildFailedError as err:
                _log.error("daemon did not restart", child=self.name, error=err.message)

    async def drain(self) -> None:
        """SIGTERM, then SIGKILL if it takes too long."""
        if self._process is None or self._process.returncode is not None:
            return
        if not await drain(self._process, DRAIN_SECONDS):
            _log.warning("daemon did not drain in time and was killed", child=self.name)

    async def _until_death(self) -> int:
        """Forward the daemon's output after its ready line, and wait for its end."""
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            sys.stderr.write(line.decode(errors="replace"))
        return await self._process.wait()

    async def _ready_line(self, process: Process) -> dict[str, str]:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            status = await process.wait()
            raise ChildFailedError(
                f"{self.name} ended with status {status} before it was ready; its error is above"
            )
        endpoints: dict[str, str] = json.loads(line)["endpoints"]
        return endpoints


def pinned(arguments: Sequence[str], name: str, endpoints: Mapping[str, str]) -> list[str]:
    """The same arguments with the bound addresses,
    so that a restarted daemon is found where it was (port 0).
    """
    bound = {"--addr": endpoints.get(name), "--http-addr": endpoints.get("http")}
    bound |= {
        f"--{other}-addr": address
        for other, address in endpoints.items()
        if other not in (name, "http")
    }
    pinned = list(arguments)
    for position, flag in enumerate(arguments[:-1]):
        if address := bound.get(flag):
            pinned[position + 1] = address
    return pinned
