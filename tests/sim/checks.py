"""What must hold at every moment, and at the end."""

import asyncio
import json
from typing import Any

from server.changefeed import keys
from server.changefeed.info import ChangefeedInfo, State, checkpoint_of
from tests.sim.cluster import FEEDS, KEEPING, Capture, Cluster
from tests.sim.source import CHUNKS

_LOOK_EVERY_S = 0.2
_ENDS_WITHIN_S = 120.0
_IDLE_S = 8.0
_SERVICE = f"ticdc-default-{KEEPING}"


class BrokenError(AssertionError):
    """What must hold does not."""


class Checks:
    """Looks at a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._checkpoints = dict.fromkeys(FEEDS, 0)
        self._idle_since: dict[tuple[str, int], float] = {}

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """See that everything holds now.

        Raises:
            BrokenError: it does not.
        """
        for capture in self._cluster.alive():
            _expect(not capture.process.end, f"{capture.name} ended: {capture.process.end}")
        owners = [each.name for each in self._running() if each.maintainers.owner.is_active]
        _expect(len(owners) <= 1, f"owners at a time: {owners}")
        for name in FEEDS:
            serving = [each.name for each in self._running() if _serves(each, name)]
            _expect(len(serving) <= 1, f"{name} is served by {serving}")
            await self._check_records(name)
        await self._check_keys()

    async def _check_keys(self) -> None:
        """A capture that could run a changefeed, and has its key, runs it before long."""
        now, idle = asyncio.get_running_loop().time(), {}
        for pair in await self._cluster.meta.get_prefix(keys.MAINTAINERS):
            name = pair.key.removeprefix(keys.MAINTAINERS).decode()
            capture = self._cluster.captures[pair.value.decode()]
            if capture.is_well and not _runs(capture, name):
                key = name, pair.create_revision
                idle[key] = self._idle_since.get(key, now)
                _expect(now - idle[key] < _IDLE_S, f"{capture.name} has {name}, and does nothing")
        self._idle_since = idle

    async def _check_records(self, name: str) -> None:
        meta, reader = self._cluster.meta, self._cluster.readers[name]
        status, info = await meta.get(keys.status(name)), await meta.get(keys.info(name))
        if status is None or info is None:
            return
        checkpoint_ts = checkpoint_of(status.value)
        before, self._checkpoints[name] = self._checkpoints[name], checkpoint_ts
        _expect(checkpoint_ts >= before, f"{name}: checkpoint {before} → {checkpoint_ts}")
        record = ChangefeedInfo.from_json(info.value)
        _expect(record.state is not State.FAILED, f"{name} has failed: {record.error}")
        has_read = reader.at_ts or record.start_ts
        _expect(checkpoint_ts <= has_read, f"{name}: {checkpoint_ts} is not at the target")
        kept = await meta.get(keys.source(name) + b"chunks")
        durable = set(json.loads(kept.value)) if kept else set()
        _expect(durable <= reader.chunks, f"{name}: {durable - reader.chunks} never came")
        log = [ts for ts in self._cluster.logs[name].rows if record.start_ts < ts <= reader.at_ts]
        _expect(reader.rows == log, f"{name}: the lake has other rows than the log")
        if name == KEEPING:
            self._check_safepoint(checkpoint_ts)

    def _check_safepoint(self, checkpoint_ts: int) -> None:
        pd = self._cluster.pd
        least = min(ts for service, ts in pd.safepoints.items() if service != "gc_worker")
        _expect(least < checkpoint_ts, f"the safepoint {least} is not below {checkpoint_ts}")
        pd.gc_ts = max(pd.gc_ts, pd.safepoints.get(_SERVICE, 0))
        pd.safepoints["gc_worker"] = pd.gc_ts

    def _running(self) -> list[Capture]:
        """Those whose keys are surely theirs, as far as they know."""
        return [each for each in self._cluster.alive() if each.is_held]

    async def end(self) -> None:
        """See that all lakes get all rows and chunks, once nothing is harmed any more.

        Raises:
            BrokenError: one does not.
        """
        for log in self._cluster.logs.values():
            log.write()
        deadline = asyncio.get_running_loop().time() + _ENDS_WITHIN_S
        while missing := self._missing():
            _expect(asyncio.get_running_loop().time() < deadline, f"never came: {missing}")
            await asyncio.sleep(_LOOK_EVERY_S)
        await self.look()

    def _missing(self) -> dict[str, Any]:
        missing = {}
        for name, reader in self._cluster.readers.items():
            rows = self._cluster.logs[name].rows
            chunks = set(range(CHUNKS)) - reader.chunks
            if reader.rows[-1:] != rows[-1:] or chunks:
                missing[name] = (len(reader.rows), len(rows), chunks)
        return missing


def _serves(capture: Capture, changefeed: str) -> bool:
    feeds = capture.maintainers.changefeeds_of(changefeed).feeds
    return changefeed in feeds and feeds[changefeed].processor.sink is not None


def _runs(capture: Capture, changefeed: str) -> bool:
    return changefeed in capture.maintainers.changefeeds_of(changefeed).feeds


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise BrokenError(what)
