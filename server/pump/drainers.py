"""Who reads from pumps and registered for it: `/tidb-binlog/v1/drainers/<nodeId>`,
by TiDB's Drainer or a changefeed.

The entry's maxCommitTS is what it has brought downstream, durably; a drainer that is offline does
not come back.
"""

import json

from server.pump.node import OFFLINE
from storage.meta.meta import Meta
from storage.model.ts import MAX_TS

PREFIX = b"/tidb-binlog/v1/drainers/"


async def drainers_behind(meta: Meta, ts: int) -> list[str]:
    """The names of the registered drainers that have not brought everything up to `ts` downstream.

    Raises:
        TidemarkError: the coordinator does not answer.
    """
    pairs = await meta.get_prefix(PREFIX)
    return [
        pair.key.removeprefix(PREFIX).decode(errors="replace")
        for pair in pairs
        if _is_behind(pair.value, ts)
    ]


async def slowest_drainer(meta: Meta) -> tuple[int, str]:
    """How far the registered drainers have all come, and who is the slowest;
    MAX_TS when there is none.

    Raises:
        TidemarkError: the coordinator does not answer.
    """
    pairs = await meta.get_prefix(PREFIX)
    places = (
        (_position(pair.value), pair.key.removeprefix(PREFIX).decode(errors="replace"))
        for pair in pairs
    )
    return min(((ts, name) for ts, name in places if ts is not None), default=(MAX_TS, ""))


def _position(value: bytes) -> int | None:
    """None: it is offline; an entry that cannot be read is believed to have nothing."""
    try:
        entry = json.loads(value)
        return None if entry.get("state") == OFFLINE else int(entry.get("maxCommitTS", 0))
    except (ValueError, TypeError, AttributeError):
        return 0


def _is_behind(value: bytes, ts: int) -> bool:
    """An entry that cannot be read is behind: nothing is thrown away on a guess."""
    position_ts = _position(value)
    return position_ts is not None and position_ts < ts
