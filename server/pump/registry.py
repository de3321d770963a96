"""The registry where TiDB, Drainer and pumps find each other: this pump's entry, and the readers'.

`/tidb-binlog/v1/pumps/<nodeId>` holds JSON as the original Pump writes it, without a lease, renewed
every few seconds; TiDB writes to the pumps whose state is `online`. `Node` is this pump as others
see it, `Registry` keeps its entry.

`/tidb-binlog/v1/drainers/<nodeId>` names who reads from pumps and registered for it, TiDB's Drainer
or a changefeed. The entry's maxCommitTS is what it has brought downstream, durably; a drainer that
is offline does not come back. Source: tidb-binlog pkg/node.
"""

import asyncio
import json
import socket
from dataclasses import dataclass
from pathlib import Path

import structlog

from server.rpc.pd import PdClient
from storage.meta.meta import Meta
from storage.model.errors import TidemarkError, UnavailableError
from storage.model.ts import MAX_TS
from storage.pump.storage import PumpStorage

PUMPS = b"/tidb-binlog/v1/pumps/"
_WRITE_SECONDS = 3.0
ONLINE, PAUSING, PAUSED, CLOSING, OFFLINE = "online", "pausing", "paused", "closing", "offline"
_NODE_ID_FILE = "node-id"
DRAINERS = b"/tidb-binlog/v1/drainers/"

_log = structlog.get_logger(__name__)


class RegistryUnavailableError(UnavailableError):
    """The registry entry cannot be written now."""

    code = "ErrPumpRegistry"


@dataclass(slots=True)
class Node:
    """This pump, as others see it; `leaves_as` is the state that it will have when it has ended.

    Once it is `drained_ts`, it has nothing above that but heartbeats, and says so.
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

    async def leave(self) -> None:
        """Say that this pump has ended, if anybody can still be told."""
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


def node_id(data_dir: Path, given: str, address: str) -> str:
    """The name of this node: the given one, else the one it had before, else hostname:port;
    kept in `data_dir`.
    """
    file = data_dir / _NODE_ID_FILE
    name = given or (file.read_text().strip() if file.exists() else "")
    name = name or f"{socket.gethostname()}:{address.rpartition(':')[2]}"
    file.write_text(f"{name}\n")
    return name


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
    """How far the registered drainers have all come, and who is the slowest;
    MAX_TS when there is none.

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
    """None: it is offline; an entry that cannot be read is believed to have nothing."""
    try:
        entry = json.loads(value)
        # Offline says that it will not come back; every other state holds GC back.
        return None if entry.get("state") == OFFLINE else int(entry.get("maxCommitTS", 0))
    except (ValueError, TypeError, AttributeError):
        return 0


def _is_behind(value: bytes, ts: int) -> bool:
    """An entry that cannot be read is behind: nothing is thrown away on a guess."""
    position_ts = _position(value)
    return position_ts is not None and position_ts < ts
