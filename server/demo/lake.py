"""The demo's lake: where it lies, and the Spark job that keeps it current."""

import asyncio
from abc import ABC, abstractmethod
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from server.config import ConfigError
from server.demo.process import json_line, started

FORMATS = ("delta", "parquet")


@dataclass(frozen=True, slots=True)
class Lake:
    """A directory of tables in one format."""

    format: str
    path: Path

    @classmethod
    def at(cls, directory: Path, lake_format: str) -> "Lake":
        """The lake of that format in `directory`.

        Raises:
            ConfigError: an unknown format.
        """
        if lake_format not in FORMATS:
            raise ConfigError(f"--lake is {' or '.join(FORMATS)}, not {lake_format!r}")
        return cls(lake_format, directory)

    @property
    def uri(self) -> str:
        """The sink URI, as `tidemark spark run --target` takes it."""
        return f"{self.format}://{self.path}"


class Applied(ABC):
    """How far the lake is, whoever runs its Spark job."""

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self.applied_ts = 0
        self.rows = 0
        self.cuts = 0
        self._moved = asyncio.Event()

    @abstractmethod
    async def follow(self) -> None:
        """Keep the fields current until cancelled."""

    async def wait_applied(self, ts: int) -> None:
        """Wait until a cut that ends at or after `ts` is visible in the lake."""
        while self.applied_ts < ts:
            self._moved.clear()
            await self._moved.wait()

    def _move_to(self, ts: int, rows: int) -> None:
        """A cut of `rows` changes that ends at `ts` is visible; a replayed one does not go back."""
        self.applied_ts = max(self.applied_ts, ts)
        self.rows += rows
        self.cuts += 1
        self._moved.set()


class LakeJob(Applied):
    """A running `tidemark spark run`, followed by the lines it prints, one a batch."""

    def __init__(self, lake: Lake, process: Process, log: Path) -> None:
        super().__init__(lake)
        self._process = process
        self._log = log

    @classmethod
    @asynccontextmanager
    async def started(cls, flight: str, changefeed: str, lake: Lake, data: Path) -> AsyncIterator["LakeJob"]:
        """The job for the block; it drains on the way out."""
        log = data / "logs" / "spark.log"
        checkpoint = data / "checkpoints"
        arguments = [
            *("spark", "run", "--follow-parent", "--endpoint", f"grpc://{flight}", "--changefeed", changefeed),
            *("--target", lake.uri, "--checkpoint-dir", str(checkpoint), "--http-addr", "127.0.0.1:0"),
        ]
        async with started("server.cli.main", arguments, log) as process:
            yield cls(lake, process, log)

    async def follow(self) -> None:
        """Read the job's lines until cancelled.

        Raises:
            ProcessFailedError: the job ended.
        """
        while True:
            batch = await json_line(self._process, self._log)
            if "end_ts" in batch:
                self._move_to(int(batch["end_ts"]), sum(batch["rows"].values()))
