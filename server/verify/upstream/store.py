"""The rows of a table as the store has them at a ts: read as by any client, mounted as by the capture.

Changefeeds of the cluster's change feed and those of its pumps both replicate what is in the store.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import pyarrow as pa

from server.changefeed.info import ChangefeedInfo
from server.rpc.lock_resolver import LockResolver
from server.rpc.pd import PdClient
from server.rpc.snapshot import Snapshot
from server.rpc.tikv import KvClient
from server.verify.catalog import Table
from server.verify.errors import VerifyHistoryError
from storage.model.event import snapshot_rows
from storage.tasks import beside
from storage.tidb.key import record_key, table_span
from storage.tidb.schema import TableInfo

_PAGE_ROWS: Final = 4096
_READ_S: Final = 60.0
_HOLD_TTL_S: Final = 600
_HOLD_EVERY_S: Final = 120.0


class StoreUpstream:
    """Implements `server.verify.upstream.upstream.Upstream`."""

    def __init__(self, pd: PdClient, kv: KvClient) -> None:
        self._kv = kv
        self._resolver = LockResolver(pd, kv)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, pd: PdClient, kv: KvClient, info: ChangefeedInfo, tables: Sequence[Table]
    ) -> AsyncIterator["StoreUpstream"]:
        """The store for the block, its history held.

        Raises:
            VerifyHistoryError: it is gone.
        """
        service = f"tidemark-verify-{info.id}-{uuid.uuid4().hex[:8]}"  # others may verify it, too
        async with held(pd, service, min(table.ts for table in tables)):
            yield cls(pd, kv)

    async def rows(self, table: Table) -> AsyncIterator[pa.RecordBatch]:
        """See `Upstream.rows`."""
        snapshot = Snapshot(self._kv, self._resolver, table.ts, timeout_s=_READ_S)
        for start_key, end_key in key_ranges(table):
            key, full = start_key, True
            while full:
                keys, values = await snapshot.scan_columns(key, end_key, _PAGE_ROWS)
                full = len(keys) == _PAGE_ROWS
                if keys:
                    key = keys[-1] + b"\0"
                    rows = snapshot_rows(pa.array(keys, pa.binary()), pa.array(values, pa.binary()), table.ts)
                    yield await asyncio.to_thread(table.mounted, rows)


def key_ranges(table: Table) -> list[tuple[bytes, bytes]]:
    """Where the rows lie that are compared, and others too, unless the key is the rows' handle."""
    info = TableInfo.parse(table.source.record.table_info)
    handle, spans = info.handle_column, table.spans
    signed = spans is not None and pa.types.is_signed_integer(table.schema.field(spans.column).type)
    found = []
    for table_id in info.physical_ids:
        whole = table_span(table_id)
        if spans is None or handle is None or handle.name != spans.column or not signed:
            found.append((whole.start_key, whole.end_key))
            continue
        for low, high in spans.spans:
            start_key = whole.start_key if low is None else record_key(table_id, low)
            found.append((start_key, whole.end_key if high is None else record_key(table_id, high)))
    return found


@asynccontextmanager
async def held(pd: PdClient, service: str, ts: int) -> AsyncIterator[None]:
    """Keep GC from passing `ts` for the block.

    Raises:
        VerifyHistoryError: it has.
    """
    await _hold(pd, service, ts)

    async def renewed() -> None:
        while True:
            await asyncio.sleep(_HOLD_EVERY_S)
            await _hold(pd, service, ts)

    try:
        async with beside(renewed()):
            yield
    finally:
        await pd.update_service_gc_safe_point(service, 0, 0)


async def _hold(pd: PdClient, service: str, ts: int) -> None:
    least = await pd.update_service_gc_safe_point(service, _HOLD_TTL_S, ts - 1)
    passed = max(await pd.gc_safe_point(), least.safe_point if least.safe_point > ts - 1 else 0)
    if passed > ts:
        raise VerifyHistoryError(
            f"GC has come to {passed}: the upstream can no longer be read at {ts}; verify a newer cut"
        )
