"""The registered pumps, as TiDB sees them: `/tidb-binlog/v1/pumps/<nodeId>`.

A pump is registered before TiDB writes to it, and a transaction takes its commit_ts after its
prewrite is in a pump. So whoever takes a timestamp, then reads the registry, knows every pump that
has transactions up to that timestamp.
"""

import json
from dataclasses import dataclass

from server.pump.registry import OFFLINE, PUMPS
from server.rpc.pd import PdClient
from storage.meta.meta import Meta, Put
from storage.model.errors import CorruptError


@dataclass(frozen=True, slots=True)
class PumpNode:
    """One entry; a pump that is not offline may come back with binlogs, wherever it is now."""

    name: str
    host: str
    state: str
    max_commit_ts: int

    @property
    def is_offline(self) -> bool:
        """Whether it said that all its binlogs have been read."""
        return self.state == OFFLINE


@dataclass(frozen=True, slots=True)
class Membership:
    """All pumps that may have transactions up to `ts`."""

    ts: int
    nodes: tuple[PumpNode, ...]


async def read_membership(pd: PdClient, meta: Meta) -> Membership:
    """The pumps of now.

    Raises:
        UnavailableError: the coordinator does not answer.
        CorruptError: an entry cannot be read.
    """
    ts = await pd.tso()
    pairs = await meta.get_prefix(PUMPS)
    return Membership(
        ts, tuple(_node(pair.key.removeprefix(PUMPS).decode(), pair.value) for pair in pairs)
    )


def drainer_entry(key: bytes, checkpoint_ts: int, update_ts: int) -> Put:
    """By which pumps know how far a reader has brought their binlogs, durably."""
    name = key.rpartition(b"/")[2].decode()
    entry = {
        "nodeId": name,
        "host": "",
        "state": "online",
        "isAlive": False,
        "score": 0,
        "label": None,
    }
    entry |= {"maxCommitTS": checkpoint_ts, "updateTS": update_ts}
    return Put(key, json.dumps(entry, separators=(",", ":")).encode())


def _node(name: str, value: bytes) -> PumpNode:
    try:
        entry = json.loads(value)
        return PumpNode(
            name, str(entry["host"]), str(entry["state"]), int(entry.get("maxCommitTS") or 0)
        )
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise CorruptError(f"the registry entry of pump {name} cannot be read: {err!r}") from err
