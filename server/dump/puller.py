"""A log with a dump beside it: one puller of two parts, which begin and end together."""

import asyncio

from server.dump.engine import DumpEngine
from server.puller.source import Puller


class DumpingPuller:
    """Implements `server.puller.source.Puller` by the log's, while `engine` adds rows at its watermarks."""

    def __init__(self, log: Puller, engine: DumpEngine) -> None:
        self._log = log
        self._engine = engine

    @property
    def resolved_ts(self) -> int:
        """See `Puller.resolved_ts`."""
        return self._log.resolved_ts

    async def run(self) -> None:
        """See `Puller.run`."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._log.run(), name="log")
            tasks.create_task(self._engine.run(), name="dump")
