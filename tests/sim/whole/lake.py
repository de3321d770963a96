"""A lake and the job that keeps it: it reads cuts of one changefeed as the product's job does, over
the functions behind the Flight port, commits each in one step, and acknowledges it afterwards.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from random import Random
from typing import Any

from server.capture.errors import NotOwnerError
from sink.flight.feeds import Poll
from storage.model.errors import TidemarkError
from tests.sim.whole.history import Tables, Writes, apply
from tests.sim.whole.machine import Machine

_ROUND_S = (0.05, 0.8)
_STEP_S = (0.001, 0.4)
_CALL_S = 20.0
_TWICE = 0.15
"""How often a range that was read is read once more, later, before it is committed."""
_DIES = 0.05
"""How often the job dies after one of its steps, and begins anew where the lake ends."""
_REMEMBERED = 40


class ReadError(AssertionError):
    """A range gave other rows the second time."""


class JobDiedError(TidemarkError):
    """The job is started again."""


class Lake:
    """`tables` at `end_ts`; `committed` hears of each cut."""

    def __init__(
        self,
        changefeed: str,
        captures: Callable[[], list[Machine]],
        chance: Random,
        committed: Callable[["Lake", int], None],
    ) -> None:
        self.changefeed = changefeed
        self.tables: Tables = {}
        self.end_ts = 0
        self.acked_ts = 0
        """What the job has asked to acknowledge, at most."""
        self.cuts = 0
        self.is_resting = False
        self._captures = captures
        self._chance = chance
        self._committed = committed
        self._read_before: dict[tuple[str, int, int], str] = {}

    async def run(self, started_at: Callable[[int], Tables]) -> None:
        """Keep the lake until cancelled; `started_at` gives what it holds at the changefeed's
        start.
        """
        while True:
            await self._pause(*_ROUND_S)
            if self.is_resting:
                continue
            with contextlib.suppress(TidemarkError, TimeoutError):
                async with asyncio.timeout(_CALL_S):
                    await self._cut(started_at)

    async def _cut(self, started_at: Callable[[int], Tables]) -> None:
        feeds = await self._feeds()
        if not self.end_ts:
            described = feeds.describe(self.changefeed)
            self.tables, self.end_ts = started_at(described.start_ts), described.start_ts
        end_ts = feeds.latest(self.changefeed, None, self.end_ts, None, None, Poll(0.0, 500))
        if end_ts <= self.end_ts:
            return
        self._perhaps_dies()
        await self._pause(*_STEP_S)
        writes = await self._rows(self.end_ts, end_ts)
        if self._chance.random() < _TWICE:
            await self._pause(0.1, 4.0)
            writes = await self._rows(self.end_ts, end_ts)
        await self._cross(self.end_ts)
        for commit_ts in sorted(writes):
            apply(self.tables, writes[commit_ts])
        self.end_ts = end_ts
        self.cuts += 1
        self._committed(self, end_ts)
        self._perhaps_dies()
        await self._pause(*_STEP_S)
        await self.acknowledge()

    async def _cross(self, ts: int) -> None:
        """Do what DDL at `ts` did, before the first row above it; without a pause to the commit."""
        described = (await self._feeds()).describe(self.changefeed, ts)
        for ddl in (each for each in described.ddls if each.ts == ts):
            for name in ddl.truncated:
                self.tables[name.partition(".")[2]].clear()
        for table in described.tables:
            missing = dict.fromkeys(name for name in table.schema.names if name[0] != "_")
            missing.pop("id")
            rows = self.tables[table.table.partition(".")[2]]
            for number, row in rows.items():
                rows[number] = missing | row

    async def acknowledge(self) -> None:
        """Say that everything up to the lake's end is there."""
        feeds = await self._feeds()
        self.acked_ts = max(self.acked_ts, self.end_ts)
        feeds.ack(self.changefeed, None, self.end_ts)

    async def _rows(self, start_ts: int, end_ts: int) -> dict[int, Writes]:
        """The changes of a cut, by commit_ts."""
        feeds = await self._feeds()
        parts = feeds.plan(self.changefeed, None, start_ts, end_ts)
        changes: dict[int, Writes] = {}
        for part in parts:
            await self._pause(*_STEP_S)
            feeds = await self._feeds()
            _, batches = feeds.read(self.changefeed, part.table, part.start_ts, part.end_ts)
            rows = [row for batch in batches for row in batch.to_pylist()]
            self._check_same(part.table, part.start_ts, part.end_ts, rows)
            table = part.table.partition(".")[2]
            for row in rows:
                columns = {
                    name: value for name, value in row.items() if name[0] != "_" and name != "id"
                }
                writes = changes.setdefault(row["_commit_ts"], {})
                writes[table, row["id"]] = None if row["_op"] in ("d", "D", "delete") else columns
        return changes

    def _check_same(self, table: str, start_ts: int, end_ts: int, rows: list[Any]) -> None:
        digest = hashlib.sha256(repr(rows).encode()).hexdigest()
        key = table, start_ts, end_ts
        before = self._read_before.setdefault(key, digest)
        if before != digest:
            raise ReadError(f"{self.changefeed}: other rows of {key} the second time: {rows}")
        while len(self._read_before) > _REMEMBERED:
            del self._read_before[next(iter(self._read_before))]

    async def _feeds(self) -> Any:
        """What the capture that runs the changefeed serves.

        Raises:
            TidemarkError: none does now.
        """
        captures = self._captures()
        if not captures:
            raise NotOwnerError("all captures are down")
        asked = self._chance.choice(captures)
        await self._listening(asked)
        found = await asked.feeds._forwarder._router.find(self.changefeed, 2.0)
        if found is None:
            return await self._listening(asked)
        there = [each for each in self._captures() if each.name == found.id]
        if not there:
            raise NotOwnerError("it is down")
        return await self._listening(there[0])

    async def _listening(self, capture: Machine) -> Any:
        await capture.process.runs()
        if capture.feeds is None:
            raise NotOwnerError("nobody listens")
        return capture.feeds

    def _perhaps_dies(self) -> None:
        if self._chance.random() < _DIES:
            raise JobDiedError("the job was killed")

    async def _pause(self, least_s: float, most_s: float) -> None:
        await asyncio.sleep(self._chance.uniform(least_s, most_s))
