"""A puller with a dump beside it: one puller of two parts, which begin and end together."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from server.puller.source import Merging, Peer, Puller


class Dump(Protocol):
    """Copies tables beside a log."""

    async def run(self) -> None:
        """Look after the job until cancelled."""
        ...


class DumpingPuller:
    """Implements `server.puller.source.Puller` by the log's,
    while `engine` adds rows at its watermarks.
    """

    def __init__(self, log: Puller, engine: Dump) -> None:
        self._log = log
        self._engine = engine

    @property
    def resolved_ts(self) -> int:
        """See `Puller.resolved_ts`."""
        return self._log.resolved_ts

    @property
    def table_pullers(self) -> Sequence[Puller]:
        """The log's, if it pulls regions."""
        pullers: Sequence[Puller] = getattr(self._log, "table_pullers", ())
        return pullers

    @property
    def slowest_peer(self) -> Peer | None:
        """The log's, if it merges several."""
        return self._log.slowest_peer if isinstance(self._log, Merging) else None

    async def run(self) -> None:
        """See `Puller.run`."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._log.run(), name="log")
            tasks.create_task(self._engine.run(), name="dump")
