"""What a dump reads of the cluster's store: pages of rows at a timestamp, and how its keys lie,
to plan by.
"""

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from server.changefeed.table import SourceTable
from server.dump.errors import ChunkLostError
from server.puller.tidb.table import physical_spans
from server.rpc.lock_resolver import LockResolver
from server.rpc.pd import PdClient
from server.rpc.region_cache import region_start
from server.rpc.tikv import KvClient
from server.rpc.transaction import Snapshot
from storage.codec import encode_bytes
from storage.model.span import Span

_TIMEOUT_S: Final = 30.0
_REGIONS_MAX: Final = 1024


class ClusterStore:
    """Reads through the cluster's clients, past locks as any snapshot read; holds nothing."""

    def __init__(self, pd: PdClient, kv: KvClient) -> None:
        self._pd = pd
        self._kv = kv
        self._resolver = LockResolver(pd, kv)

    async def now(self) -> int:
        """A timestamp above all that anybody has."""
        return await self._pd.tso()

    async def page(
        self, begin: bytes, end: bytes, ts: int, limit: int
    ) -> tuple[pa.Array, pa.Array]:
        """Keys and values of the first `limit` rows of `[begin, end)` at `ts`.

        Raises:
            GaveUpError: a live transaction kept a key locked for too long, or no store answered.
        """
        keys, values = await self._snapshot(ts).scan_columns(begin, end, limit)
        return pa.array(keys, pa.binary()), pa.array(values, pa.binary())

    async def check_kept(self, ts: int) -> None:
        """What was read at `ts` was all there: GC had not passed it afterwards.

        Raises:
            ChunkLostError: it had.
        """
        safe_point = await self._pd.gc_safe_point()
        if ts < safe_point:
            raise ChunkLostError(
                f"the store's GC passed {ts} while a chunk was read at it, and stands at "
                f"{safe_point}: it is read again at a later timestamp; if this is said again and "
                "again, GC keeps too little history"
            )

    async def keys(self, begin: bytes, end: bytes, ts: int, limit: int) -> list[bytes]:
        """The first `limit` keys of `[begin, end)` at `ts`; raises as `page`."""
        return [key for key, _ in await self._snapshot(ts).scan(begin, end, limit, key_only=True)]

    async def last(self, begin: bytes, end: bytes, ts: int) -> bytes | None:
        """The last key of `[begin, end)` at `ts`, if there is one; raises as `page`."""
        return await self._snapshot(ts).last_key(begin, end)

    async def region_bounds(self, begin: bytes, end: bytes) -> list[bytes]:
        """Where regions begin within `(begin, end)`;
        none if these are more than can be asked for at once.
        """
        routes = await self._pd.scan_regions(encode_bytes(begin), encode_bytes(end), _REGIONS_MAX)
        starts = [region_start(route) for route in routes] if len(routes) < _REGIONS_MAX else []
        return [key for key in starts if begin < key < end]

    def parts(self, table: SourceTable) -> Sequence[Span]:
        """Where the rows of a table lie, in key order: its own span, or those of its partitions."""
        return sorted(physical_spans(table.record), key=lambda part: part.start_key)

    def _snapshot(self, ts: int) -> Snapshot:
        return Snapshot(self._kv, self._resolver, ts, timeout_s=_TIMEOUT_S)
