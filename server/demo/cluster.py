"""The demo's cluster: one `tidemark up`, which can be killed and started again on the same addresses."""

import contextlib
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from server.demo.process import DRAIN_SECONDS, json_line, spawn
from server.process import drain

_LISTENERS = ("coordinator", "store", "capture", "flight", "pump", "gc-worker", "http")


class Cluster:
    """`tidemark up --no-spark` as a child process."""

    def __init__(self, data: Path, *, any_ports: bool) -> None:
        self.endpoints: dict[str, str] = {}
        self.cluster_id = ""
        self._log = data / "logs" / "cluster.log"
        places = zip(_LISTENERS, _free_addresses(len(_LISTENERS)), strict=True) if any_ports else ()
        ports = [flag for name, address in places for flag in (f"--{name}-addr", address)]
        self._arguments = ["up", "--follow-parent", "--data-dir", str(data / "cluster"), "--no-spark", *ports]
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
            await drain(self._process, DRAIN_SECONDS)

    async def kill(self) -> None:
        """`kill -9` of the whole tree."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


def _free_addresses(count: int) -> list[str]:
    """Where nobody listens now, all different."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
