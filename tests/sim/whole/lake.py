"""A lake and the job that keeps it: it reads cuts of one changefeed as the product's job does, over
the functions behind the Flight port, commits each in one step, and acknowledges it afterwards.
"""

import asyncio
import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

from server.capture.errors import NotOwnerError
from sink.flight.feeds import Poll
from storage.model.errors import TidemarkError
from tests.sim.whole.history import Row, Tables, Writes, apply
from tests.sim.whole.machine import Machine

_ROUND_S = (0.05, 0.8)
_STEP_S = (0.001, 0.4)
_CALL_S = 20.0
_TWICE = 0.15
"""How often a range that was read is read once more, later, before it is committed."""
_DIES = 0.05
"""How often the job dies after one of its steps, and begins anew where the lake ends."""
_LOOKS_BACK = 0.3
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
        self.cuts = self.looks_back = 0
        self.is_resting = False
        self._captures = captures
        self._chance = chance
        self._committed = committed
        self._read_before: dict[tuple[str, int, int], list[Row]] = {}

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
                    await self._look_back()

    async def _cut(self, started_at: Callable[[int], Tables]) -> None:
        if not self.end_ts:
            self.end_ts = (await self._ask("describe")).start_ts
        end_ts = await self._ask("latest", None, self.end_ts, None, None, Poll(0.0, 500))
        if end_ts <= self.end_ts:
            # Whoever was told may have died before that was saved: the product's job repeats it.
            if self.cuts:
                await self.acknowledge()
            return
        self._perhaps_dies()
        await self._pause(*_STEP_S)
        writes = await self._rows(self.end_ts, end_ts)
        if self._chance.random() < _TWICE:
            await self._pause(0.1, 4.0)
            writes = await self._rows(self.end_ts, end_ts)
        if not self.tables:
            # Only now: what was open at the start is decided by the time of the first cut.
            self.tables = started_at(self.end_ts)
        await self._cross(self.end_ts)
        for commit_ts in sorted(writes):
            apply(self.tables, writes[commit_ts])
        self.end_ts = end_ts
        self.cuts += 1
        self._committed(self, end_ts)
        self._perhaps_dies()
        await self._pause(*_STEP_S)
        await self.acknowledge()

    async def _look_back(self) -> None:
        """Read once more what was read a while ago, perhaps: history is kept."""
        if self._read_before and self._chance.random() < _LOOKS_BACK:
            asked = self._chance.choice(list(self._read_before))
            self._check_same(asked, await self._ask("read", *asked))
            self.looks_back += 1

    async def _cross(self, ts: int) -> None:
        """Do what DDL at `ts` did, before the first row above it; without a pause to the commit."""
        described = await self._ask("describe", ts)
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
        self.acked_ts = max(self.acked_ts, self.end_ts)
        await self._ask("ack", None, self.end_ts)

    async def _rows(self, start_ts: int, end_ts: int) -> dict[int, Writes]:
        """The changes of a cut, by commit_ts."""
        parts = await self._ask("plan", None, start_ts, end_ts)
        changes: dict[int, Writes] = {}
        for part in parts:
            await self._pause(*_STEP_S)
            rows = await self._ask("read", part.table, part.start_ts, part.end_ts)
            self._check_same((part.table, part.start_ts, part.end_ts), rows)
            table = part.table.partition(".")[2]
            for row in rows:
                columns = {
                    name: value for name, value in row.items() if name[0] != "_" and name != "id"
                }
                writes, key = changes.setdefault(row["_commit_ts"], {}), (table, row["id"])
                if key in writes:
                    raise ReadError(f"{self.changefeed}: twice in a cut: {row} of {table}")
                writes[key] = None if row["_op"] in ("d", "D", "delete") else columns
        return changes

    def _check_same(self, asked: tuple[str, int, int], rows: list[Row]) -> None:
        # What a dump has read is lost with whoever pulls the table, if that one goes before it is
        # acknowledged: it comes again, later.
        known = [row for row in rows if not _is_dumped(row)]
        before = self._read_before.setdefault(asked, known)
        if before != known:
            differ = [row for row in (*before, *known) if (row in before) != (row in known)]
            raise ReadError(f"{self.changefeed}: other rows of {asked} the second time: {differ}")
        while len(self._read_before) > _REMEMBERED:
            del self._read_before[next(iter(self._read_before))]

    async def _ask(self, method: str, *args: Any) -> Any:
        """What the capture that runs the changefeed says, as its Flight port would: in a thread.

        Raises:
            TidemarkError: none does now, or it refuses.
        """
        capture = await self._serving()
        process = capture.process
        try:
            loop: Any = asyncio.get_running_loop()
            return await loop.in_thread(
                process, _asked, capture.feeds, method, self.changefeed, *args
            )
        except asyncio.CancelledError:
            if process.is_dead:
                raise NotOwnerError("it was killed") from None
            raise

    async def _serving(self) -> Machine:
        """The capture that runs the changefeed.

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

    async def _listening(self, capture: Machine) -> Machine:
        await capture.process.runs()
        if capture.feeds is None:
            raise NotOwnerError("nobody listens")
        return capture

    def _perhaps_dies(self) -> None:
        if self._chance.random() < _DIES:
            raise JobDiedError("the job was killed")

    async def _pause(self, least_s: float, most_s: float) -> None:
        await asyncio.sleep(self._chance.uniform(least_s, most_s))


def _asked(feeds: Any, method: str, *args: Any) -> Any:
    answer = getattr(feeds, method)(*args)
    if method == "read":
        return [row for batch in answer[1] for row in batch.to_pylist()]
    return answer


def _is_dumped(row: Row) -> bool:
    return bool(row["_op"] == "update" and row["_start_ts"] == row["_commit_ts"] - 1)
