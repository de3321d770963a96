"""A pump's entry in the registry, by which TiDB, Drainer and pumps find each other; how a pump
leaves the cluster, and how far the registered readers are.

`/tidb-binlog/v1/pumps/<nodeId>` holds JSON as the original Pump writes it, without a lease, renewed
every few seconds; TiDB writes to the pumps whose state is `online`. `Node` is this pump as others
see it, `Registry` keeps its entry.

`PumpLifecycle` takes a pump off the cluster: it pauses the pump, which may come back, or closes it
once every reader has everything.

    online -> pausing -> paused          online -> closing -> offline

While it is closing, the pump refuses prewrites, and takes commits and rollbacks until all prewrites
are matched. Then it stores a last heartbeat, and waits until readers have it. If they do not reach
it in time, the pump ends as paused: it can be started and closed again, and nothing is lost.

`/tidb-binlog/v1/drainers/<nodeId>` is the entry of a registered reader of pumps: TiDB's Drainer, or
a changefeed. Its maxCommitTS is what the reader has durably brought downstream; a drainer that is
offline does not come back. Source: tidb-binlog pkg/node, pump/server.go.
"""

import asyncio
import json
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from server.rpc.pd import PdClient
from server.version import VERSION
from storage.meta.meta import Meta
from storage.model.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    TidemarkError,
    UnavailableError,
)
from storage.model.ts import MAX_TS
from storage.pump.binlog import fake, parse
from storage.pump.storage import PumpStorage
from storage.whole_file import replace_file

PUMPS = b"/tidb-binlog/v1/pumps/"
DRAINERS = b"/tidb-binlog/v1/drainers/"
STARTS = b"/tidemark/default/pump/started/"
"""The start time of each pump, in milliseconds since 1970, kept beside its entry, which has no
field for it.
"""
VERSIONS = b"/tidemark/default/pump/version/"
"""The version of each pump, kept beside its entry, too."""
_WRITE_SECONDS = 3.0
ONLINE, PAUSING, PAUSED, CLOSING, OFFLINE = "online", "pausing", "paused", "closing", "offline"
_NODE_ID_FILE = "node-id"
_POLL_SECONDS = 0.5
_STATES = {"pause": PAUSING, "close": CLOSING}

_log = structlog.get_logger(__name__)


class RegistryUnavailableError(UnavailableError):
    """The registry entry cannot be written now."""

    code = "ErrPumpRegistry"


class NodeUnknownError(NotFoundError):
    """The request is for another pump."""

    code = "ErrPumpUnknown"


class ActionUnknownError(InvalidError):
    """The action is unknown."""

    code = "ErrPumpAction"


class StateConflictError(ConflictError):
    """The pump is leaving already."""

    code = "ErrPumpState"


@dataclass(slots=True)
class Node:
    """This pump, as others see it; `leaves_as` is its state after it has ended.

    Once `drained_ts` is set, its entry shows that as maxCommitTS: only heartbeats follow it.
    """

    node_id: str
    host: str
    state: str = PAUSED
    leaves_as: str = PAUSED
    drained_ts: int = 0

    def record(self, max_commit_ts: int, update_ts: int) -> bytes:
        """The value of its registry entry."""
        entry = {
            "nodeId": self.node_id,
            "host": self.host,
            "state": self.state,
            "isAlive": False,
            "score": 0,
            "label": None,
            "maxCommitTS": self.drained_ts or max_commit_ts,
            "updateTS": update_ts,
        }
        return json.dumps(entry, separators=(",", ":")).encode()


class Registry:
    """Writes the entry of one node."""

    def __init__(
        self, node: Node, meta: Meta, pd: PdClient, storage: PumpStorage, interval_seconds: float
    ) -> None:
        self.node = node
        self._meta = meta
        self._pd = pd
        self._storage = storage
        self._interval_seconds = interval_seconds

    async def announce(self, state: str) -> None:
        """Change the state and write it.

        Raises:
            RegistryUnavailableError: the coordinator does not answer in time.
            TidemarkError: it refuses.
        """
        self.node.state = state
        try:
            async with asyncio.timeout(_WRITE_SECONDS):
                # Read anew for each renewal: Drainer takes maxCommitTS and updateTS from here.
                record = self.node.record(self._storage.max_commit_ts, await self._pd.tso())
                await self._meta.put(PUMPS + self.node.node_id.encode(), record)
        except TimeoutError as err:
            raise RegistryUnavailableError(
                f"the coordinator did not take the registry entry of {self.node.node_id} in "
                f"{_WRITE_SECONDS} s"
            ) from err

    async def write_start(self) -> None:
        """Write that the pump was started now, and its version, for the console's map.

        Raises:
            TidemarkError: the coordinator does not take it.
        """
        name, now_ms = self.node.node_id.encode(), int(time.time() * 1000)
        await self._meta.put(STARTS + name, str(now_ms).encode())
        await self._meta.put(VERSIONS + name, VERSION.encode())

    async def leave(self) -> None:
        """Record that this pump has ended, if the coordinator still answers."""
        try:
            await self.announce(self.node.leaves_as)
        except TidemarkError as err:
            _log.warning("registry entry not renewed", error=str(err))

    async def run(self) -> None:
        """Renew the entry until cancelled."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            try:
                await self.announce(self.node.state)
            except TidemarkError as err:
                _log.warning("registry entry not renewed", error=str(err))


class PumpLifecycle:
    """Carries out `pause` and `close`, and then ends the daemon."""

    def __init__(
        self,
        node: Node,
        registry: Registry,
        storage: PumpStorage,
        pd: PdClient,
        meta: Meta,
        close_seconds: float,
    ) -> None:
        self._node = node
        self._registry = registry
        self._storage = storage
        self._pd = pd
        self._meta = meta
        self._close_seconds = close_seconds
        self._leaving = asyncio.Event()

    async def apply(self, node_id: str, action: str) -> str:
        """Begin to leave; returns the new state.

        Raises:
            NodeUnknownError, ActionUnknownError, StateConflictError: not this node, not an action,
                not online.
            TidemarkError: the registry does not take the new state.
        """
        if node_id != self._node.node_id:
            raise NodeUnknownError(f"nodeID {node_id} not exists; this is {self._node.node_id}")
        if action not in _STATES:
            raise ActionUnknownError(f"invalid action {action}; there are {', '.join(_STATES)}")
        if self._node.state != ONLINE:
            raise StateConflictError(
                f"this pump's state is {self._node.state}, apply {action} failed!"
            )
        try:
            # In the registry before anything is done: TiDB must stop writing prewrites here first.
            await self._registry.announce(_STATES[action])
        except BaseException:
            # Also when the client has given the call up: nobody else would end a state that is only
            # half begun. The next renewal tells the registry.
            if self._node.state == _STATES[action]:
                self._node.state = ONLINE
            raise
        self._leaving.set()
        return self._node.state

    async def run(self) -> None:
        """Leave the cluster on request; then the daemon ends."""
        await self._leaving.wait()
        _log.info("pump is leaving", state=self._node.state)
        self._node.leaves_as = (
            OFFLINE if self._node.state == CLOSING and await self._is_drained() else PAUSED
        )
        # The same way out as an operator's: drain, leave the registry, exit 0.
        os.kill(os.getpid(), signal.SIGTERM)

    async def _is_drained(self) -> bool:
        try:
            async with asyncio.timeout(self._close_seconds):
                await self._drain()
        except TimeoutError:
            _log.error(
                "readers have not had everything: the pump is paused, not offline; start it and "
                "close it again",
                seconds=self._close_seconds,
                waiting_prewrites=self._storage.statistics().waiting_prewrites,
            )
            return False
        return True

    async def _drain(self) -> None:
        last_ts = 0
        while not (last_ts and await self._have_all(last_ts)):
            # Only when every prewrite has its outcome: a heartbeat above an open one would let
            # readers pass its commit.
            if not last_ts and self._storage.all_matched:
                last_ts = await self._last_heartbeat()
            await asyncio.sleep(_POLL_SECONDS)
        # Heartbeats may follow; Drainer compares its position with this number, and would wait for
        # ever for a moving one.
        self._node.drained_ts = last_ts

    async def _last_heartbeat(self) -> int:
        try:
            ts = await self._pd.tso()
            await self._storage.write([parse(fake(ts))])
        except TidemarkError as err:
            _log.warning("last heartbeat not written", error=str(err))
            return 0
        return ts

    async def _have_all(self, ts: int) -> bool:
        if self._storage.max_commit_ts < ts or self._storage.readers.behind(ts):
            return False
        try:
            behind = await drainers_behind(self._meta, ts)
        except TidemarkError as err:
            _log.warning("drainers not known", error=str(err))
            return False
        if behind:
            _log.info("waiting for drainers", drainers=behind[:8], ts=ts)
        return not behind


def node_id(data_dir: Path, given: str, address: str) -> str:
    """The name of this node: the given one, else the one it had before, else hostname:port;
    kept in `data_dir`, durable when it returns.
    """
    file = data_dir / _NODE_ID_FILE
    kept = file.read_text().strip() if file.exists() else ""
    name = given or kept or f"{socket.gethostname()}:{address.rpartition(':')[2]}"
    if name != kept:
        replace_file(file, f"{name}\n".encode())
    return name


def read_entry(value: bytes) -> dict[str, Any] | None:
    """The JSON of a registry entry, which others write, too; None: it cannot be read."""
    try:
        entry = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


async def drainers_behind(meta: Meta, ts: int) -> list[str]:
    """The names of the registered drainers that have not brought everything up to `ts` downstream.

    Raises:
        TidemarkError: the coordinator does not answer.
    """
    pairs = await meta.get_prefix(DRAINERS)
    return [
        pair.key.removeprefix(DRAINERS).decode(errors="replace")
        for pair in pairs
        if _is_behind(pair.value, ts)
    ]


async def slowest_drainer(meta: Meta) -> tuple[int, str]:
    """The timestamp that all registered drainers have reached, and the slowest of them; MAX_TS when
    there is none.

    Raises:
        TidemarkError: the coordinator does not answer.
    """
    pairs = await meta.get_prefix(DRAINERS)
    places = (
        (_position(pair.value), pair.key.removeprefix(DRAINERS).decode(errors="replace"))
        for pair in pairs
    )
    return min(((ts, name) for ts, name in places if ts is not None), default=(MAX_TS, ""))


def _position(value: bytes) -> int | None:
    """The ts that a drainer has brought downstream; None: it is offline. An unreadable entry counts
    as 0, so that nothing is deleted on a guess.
    """
    entry = read_entry(value)
    if entry is None:
        return 0
    # Offline says that it will not come back; every other state holds GC back.
    if entry.get("state") == OFFLINE:
        return None
    position_ts = entry.get("maxCommitTS")
    return position_ts if isinstance(position_ts, int) else 0


def _is_behind(value: bytes, ts: int) -> bool:
    """Whether a drainer has not reached `ts`; an unreadable entry counts as behind."""
    position_ts = _position(value)
    return position_ts is not None and position_ts < ts
