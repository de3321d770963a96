"""The demo's processes: its cluster, which is one `tidemark up`, and further ones.

The cluster can be killed and started again on the same addresses. All processes print lines of JSON
and log to files. Their standard input is a pipe of the demo's: it closes when the demo dies,
however that happens, and they end, too.
"""

import contextlib
import json
import random
import shlex
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from server.process import drain, start_child
from server.up.tree import child_http_addr
from storage.model.errors import UnavailableError

_LISTENERS = ("coordinator", "store", "capture", "flight", "pump", "gc-worker")
_CHILDREN = ("coordinator", "store", "capture", "pump", "gc-worker")
_PORTS = range(20_000, 32_000)
"""Linux and others give out ports above these."""
_HTTP_PORTS = range(12_000, 20_200)
"""The tree's HTTP port comes from here, so that those of its daemons, which are derived from it,
also lie below 32,000.
"""
_DRAIN_SECONDS = 30.0


class ProcessFailedError(UnavailableError):
    """A process of the demo ended before its work was done; its log says why."""

    code = "ErrDemoProcess"


class Cluster:
    """`tidemark up --no-spark` as a child process, with its `endpoints` by name (host:port)."""

    def __init__(self, data: Path, *, any_ports: bool) -> None:
        self.endpoints: dict[str, str] = {}
        self.cluster_id = ""
        self._log = data / "logs" / "cluster.log"
        places = free_addresses() if any_ports else {}
        ports = [flag for name, address in places.items() for flag in (f"--{name}-addr", address)]
        self._arguments = [
            "up",
            "--follow-parent",
            "--data-dir",
            str(data / "cluster"),
            "--no-spark",
            *ports,
        ]
        self._process: Process | None = None

    @classmethod
    @asynccontextmanager
    async def started(cls, data: Path, *, any_ports: bool) -> AsyncIterator["Cluster"]:
        """A running cluster for the block, drained on the way out."""
        cluster = cls(data, any_ports=any_ports)
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.stop()

    async def start(self) -> None:
        """Start all daemons and wait until they serve.

        Raises:
            ProcessFailedError: they could not start; the message holds their error.
        """
        with self._log.open("ab") as stderr:
            self._process = await spawn("server.cli.main", self._arguments, stderr)
        ready = await json_line(self._process, self._log)
        self.endpoints = ready["endpoints"]
        self.cluster_id = str(ready["cluster_id"])

    async def stop(self) -> None:
        """End all daemons as an operator would, if they were started."""
        if self._process is not None:
            await drain(self._process, _DRAIN_SECONDS)

    async def kill(self) -> None:
        """`kill -9` of the whole tree."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


async def spawn(module: str, arguments: Sequence[str], stderr: IO[bytes]) -> Process:
    """Run `python -m module …` as a child process; see `start_child`."""
    return await start_child(module, (sys.executable, "-m", module, *arguments), stderr=stderr)


@asynccontextmanager
async def open_process(module: str, arguments: Sequence[str], log: Path) -> AsyncIterator[Process]:
    """`python -m module …` for the block, its stderr in `log`; ended by SIGTERM,
    or SIGKILL if that takes too long.
    """
    with log.open("ab") as stderr:
        process = await spawn(module, arguments, stderr)
    try:
        yield process
    finally:
        await drain(process, _DRAIN_SECONDS)


async def json_line(process: Process, log: Path) -> dict[str, Any]:
    """The next line of JSON that the process prints.

    Raises:
        ProcessFailedError: it ended instead.
    """
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        status, tail = await process.wait(), _tail(log)
        # The daemons' own flags are not those of the demo and the playground.
        advice = "; --any-ports uses free ports" if "ErrPortInUse" in tail else ""
        raise ProcessFailedError(
            f"a process ended with status {status}; {log} ends with: {tail}{advice}"
        )
    document: dict[str, Any] = json.loads(line)
    return document


def path_from_here(path: Path) -> str:
    """The path as it can be pasted into a shell in the working directory."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here)) if path.is_relative_to(here) else str(path))


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("[TM:")]
    # The log has earlier runs, too, which may have ended in the same way.
    return " | ".join(list(dict.fromkeys(errors or lines))[-3:]) or "(nothing)"


def free_addresses() -> dict[str, str]:
    """Return free addresses, all different, keyed by listener of `tidemark up`.

    They lie below the ports that the kernel gives to whoever asks for any: no daemon that starts
    beside the cluster, or while it is killed, is given one of them.
    """
    http, taken = _http_ports()
    free = (port for port in _shuffled(_PORTS) if port not in taken and _is_free(port))
    places = dict(zip(_LISTENERS, free, strict=False)) | {"http": http}
    return {name: f"127.0.0.1:{port}" for name, port in places.items()}


def _http_ports() -> tuple[int, set[int]]:
    """One for the tree, and all that it and its daemons answer HTTP on then."""
    for http in _shuffled(_HTTP_PORTS):
        addresses = (child_http_addr(f"127.0.0.1:{http}", name) for name in _CHILDREN)
        ports = {http, *(int(address.rpartition(":")[2]) for address in addresses)}
        if all(map(_is_free, ports)):
            return http, ports
    raise ProcessFailedError("all ports from 12000 to 32000 are taken; stop what listens there")


def _shuffled(ports: range) -> list[int]:
    # another demo may choose at the same time
    return random.SystemRandom().sample(ports, len(ports))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
