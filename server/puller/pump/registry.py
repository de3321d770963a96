"""The registry of TiDB Binlog in the metadata: which pumps there are,
and how far this changefeed has read them.

Pumps stand at `/tidb-binlog/v1/pumps/<nodeId>`, as TiDB sees them. A pump is registered before TiDB
writes to it, and a transaction takes its commit_ts after its prewrite is in a pump. So whoever
takes a timestamp, then reads the registry, knows every pump that has transactions up to that
timestamp.

A changefeed has an entry beside Drainer's, with the checkpoint that readers reached: a pump that
goes offline waits for it, and our own pump's GC stays behind it until the forced age. The entry
outlives the process: a changefeed that is down needs its binlogs all the more. It goes with the
changefeed's records, in their transaction.
"""

import json
from dataclasses import dataclass
from typing import Final

from server.changefeed import keys
from server.changefeed.info import checkpoint_of
from server.pump.registry import OFFLINE, PUMPS
from server.rpc.pd import PdClient
from storage.meta.meta import Compare, Meta, Put
from storage.model.errors import CorruptError
from storage.model.ts import physical_ms

_RENEW_MS: Final = 10_000


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
    # The timestamp first: a pump that is registered after the read has only what commits above it.
    ts = await pd.tso()
    pairs = await meta.get_prefix(PUMPS)
    return Membership(
        ts,
        tuple(
            _node(pair.key.removeprefix(PUMPS).decode(errors="replace"), pair.value)
            for pair in pairs
        ),
    )


class Registration:
    """The entry of one changefeed."""

    def __init__(self, changefeed: str, pd: PdClient, meta: Meta, start_ts: int) -> None:
        self._changefeed = changefeed
        self._pd = pd
        self._meta = meta
        self._start_ts = start_ts
        self._written = (-1, 0)

    async def renew(self) -> None:
        """Write the checkpoint of now, if it moved or the entry is old.

        Raises:
            UnavailableError: the metadata or the coordinator does not answer.
            CorruptError: the changefeed's status cannot be read.
        """
        checkpoint_ts, now_ts = await self._checkpoint_ts(), await self._pd.tso()
        now_ms = physical_ms(now_ts)
        if checkpoint_ts == self._written[0] and now_ms - self._written[1] < _RENEW_MS:
            return
        # On condition that the changefeed exists: one that is removed at this moment takes its
        # entry with it, and nobody would remove what is written after that.
        exists = Compare(keys.info(self._changefeed), "create_revision", ">", 0)
        await self._meta.txn(
            [exists], [drainer_entry(keys.drainer(self._changefeed), checkpoint_ts, now_ts)]
        )
        self._written = checkpoint_ts, now_ms

    async def _checkpoint_ts(self) -> int:
        pair = await self._meta.get(keys.status(self._changefeed))
        return self._start_ts if pair is None else checkpoint_of(pair.value)


def drainer_entry(key: bytes, checkpoint_ts: int, update_ts: int) -> Put:
    """An entry as Drainer writes its own, by which pumps know up to where their binlogs are durable
    at a reader's.
    """
    name = key.rpartition(b"/")[2].decode()
    entry = {
        "nodeId": name,
        "host": "",
        "state": "online",
        "isAlive": False,
        "score": 0,
        "label": None,
        "maxCommitTS": checkpoint_ts,
        "updateTS": update_ts,
    }
    return Put(key, json.dumps(entry, separators=(",", ":")).encode())


def _node(name: str, value: bytes) -> PumpNode:
    try:
        entry = json.loads(value)
        return PumpNode(
            name, str(entry["host"]), str(entry["state"]), int(entry.get("maxCommitTS") or 0)
        )
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as err:
        raise CorruptError(f"the registry entry of pump {name} cannot be read: {err!r}") from err
