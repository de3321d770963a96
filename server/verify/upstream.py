"""The rows of a table as the store has them at a ts: read as by any client, mounted as by the capture."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pyarrow as pa

from server.rpc.pd import PdClient
from server.rpc.snapshot import Snapshot
from server.verify.catalog import Table
from server.verify.errors import VerifyHistoryError
from storage.model.event import INSERT, raw_batch
from storage.tidb.key import table_span

_PAGE_ROWS = 4096
_HOLD_TTL_S = 600
_HOLD_EVERY_S = 120.0


async def rows(snapshot: Snapshot, table: Table) -> AsyncIterator[pa.RecordBatch]:
    """All rows, the columns of the table only."""
    for table_id in table.info.physical_ids:
        span = table_span(table_id)
        key, full = span.start_key, True
        while full:
            pairs = await snapshot.scan(key, span.end_key, _PAGE_ROWS)
            full = len(pairs) == _PAGE_ROWS
            if pairs:
                key = pairs[-1][0] + b"\0"
                yield await asyncio.to_thread(_mounted, table, pairs)


def _mounted(table: Table, pairs: list[tuple[bytes, bytes]]) -> pa.RecordBatch:
    keys, values = zip(*pairs, strict=True)
    count = len(pairs)
    raw = raw_batch([2] * count, [1] * count, [INSERT] * count, keys, values, [None] * count)
    return table.mounter.mount(raw).select(table.schema.names)


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
        async with asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(renewed(), name="hold the history")
            yield
            renewing.cancel()
    finally:
        await pd.update_service_gc_safe_point(service, 0, 0)


async def _hold(pd: PdClient, service: str, ts: int) -> None:
    least = await pd.update_service_gc_safe_point(service, _HOLD_TTL_S, ts - 1)
    passed = max(await pd.gc_safe_point(), least.safe_point if least.safe_point > ts - 1 else 0)
    if passed > ts:
        raise VerifyHistoryError(
            f"GC has come to {passed}: the upstream can no longer be read at {ts}; verify a newer cut"
        )
