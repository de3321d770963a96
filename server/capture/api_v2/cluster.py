"""What the API asks of the cluster itself, past its changefeeds: timestamps, and what TiCDC calls
unsafe: the metadata as it is, locks of dead transactions, and safepoints that nobody needs.
"""

import json
from typing import Any, Protocol

from server.capture.errors import ParameterError
from server.capture.fence import Fence
from server.capture.records import Records
from server.capture.safepoint import ChangefeedSafePoints
from server.changefeed import keys
from server.changefeed.view import record_document, record_text
from server.rpc.lock_resolver import LockResolver, region_locks
from server.rpc.pd import PdClient, RegionMissingError
from server.rpc.tikv import KvClient
from storage.meta.meta import Meta


class Cluster(Protocol):
    """See `LiveCluster`."""

    async def tso(self) -> int:
        """A new timestamp."""
        ...

    async def metadata(self) -> list[dict[str, str]]:
        """See `LiveCluster`."""
        ...

    async def resolve_locks(self, region_id: int, ts: int) -> None:
        """See `LiveCluster`."""
        ...

    async def remove_safe_points(self) -> None:
        """See `LiveCluster`."""
        ...


class LiveCluster:
    """Implements `Cluster` by the coordinator, the stores and the metadata."""

    def __init__(self, pd: PdClient, kv: KvClient, meta: Meta) -> None:
        self._pd = pd
        self._kv = kv
        self._meta = meta

    async def tso(self) -> int:
        """A new timestamp."""
        return await self._pd.tso()

    async def metadata(self) -> list[dict[str, str]]:
        """All records of captures and changefeeds; where a URI may hold a secret, it is masked."""
        pairs = await self._meta.get_prefix(keys.ROOT)
        return [
            {"key": record_text(pair.key), "value": _text(record_document(pair.value))}
            for pair in pairs
        ]

    async def resolve_locks(self, region_id: int, ts: int) -> None:
        """Commit or roll back what transactions that began up to `ts`, and whose clients are gone,
        have locked in a region; 0: up to now. Locks of living ones stay.

        Raises:
            ParameterError: there is no such region.
        """
        now = await self._pd.tso()
        resolver = LockResolver(self._pd, self._kv)
        try:
            async for locks in region_locks(self._pd, self._kv, region_id, min(ts or now, now)):
                await resolver.resolve(locks, 0)
        except RegionMissingError as err:
            raise ParameterError(f"region_id {region_id}: {err.message}") from None

    async def remove_safe_points(self) -> None:
        """Remove the safepoints of changefeeds that there are not any more."""
        services = await Records(self._meta, Fence()).left_services(self._pd.cluster_id)
        await ChangefeedSafePoints(self._pd).delete_all(services)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
