"""Who reads from pumps and registered for it: `/tidb-binlog/v1/drainers/<nodeId>`, written by TiDB's Drainer.

The entry's maxCommitTS is what it has brought downstream, durably; a drainer that is offline does not come back.
"""

import json

from server.pump.node import OFFLINE
from storage.meta.meta import Meta

PREFIX = b"/tidb-binlog/v1/drainers/"


async def drainers_behind(meta: Meta, ts: int) -> list[str]:
    """The names of the registered drainers that have not brought everything up to `ts` downstream.

    Raises:
        TidemarkError: the coordinator does not answer.
    """
    pairs = await meta.get_prefix(PREFIX)
    return [pair.key.removeprefix(PREFIX).decode(errors="replace") for pair in pairs if _is_behind(pair.value, ts)]


def _is_behind(value: bytes, ts: int) -> bool:
    """An entry that cannot be read is believed to be behind: nothing is thrown away on a guess."""
    try:
        entry = json.loads(value)
        return entry.get("state") != OFFLINE and int(entry.get("maxCommitTS", 0)) < ts
    except (ValueError, TypeError, AttributeError):
        return True
