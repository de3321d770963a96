"""The upstream's side: all rows of a table as they were at its cut,
whatever kind of upstream it is.

`StoreUpstream` reads the store at a ts, as any client does; changefeeds of the cluster's change
feed and those of its pumps both replicate what is in the store. Other kinds are in modules of their
own, which their `SourceKind` names.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa

from server.changefeed.info import ChangefeedInfo
from server.changefeed.source import find_kind, load, scheme_of
from server.rpc.lock_resolver import LockResolver
from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from server.rpc.transaction import Snapshot
from server.verify.catalog import Table
from server.verify.errors import VerifyHistoryError
from storage.meta.meta import Meta
from storage.model.event import snapshot_rows
from storage.tasks import background_tasks
from storage.tidb.record import record_key, table_span
from storage.tidb.schema import TableInfo

_PAGE_ROWS: Final = 4096
_READ_S: Final = 60.0
_SAFEPOINT_TTL_S: Final = 600
_SAFEPOINT_RENEW_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster that knows the changefeed."""

    pd: PdClient
    kv: KvClient
    meta: Meta


class Upstream(Protocol):
    """Tables as of their cuts; may be read any number of times, one table at a time."""

    def rows(self, table: Table) -> AsyncIterator[pa.RecordBatch]:
        """All rows, in the table's own columns."""


class OpenUpstream(Protocol):
    """Opens a source for `verify`; each `SourceKind` has one. See `open_upstream`."""

    def __call__(
        self, cluster: Cluster, info: ChangefeedInfo, tables: Sequence[Table], *, gently: bool
    ) -> AbstractAsyncContextManager[Upstream]:
        """The upstream for the block."""


def open_upstream(
    cluster: Cluster, info: ChangefeedInfo, tables: Sequence[Table], *, gently: bool = False
) -> AbstractAsyncContextManager[Upstream]:
    """The upstream for the block; a slow reader that goes `gently` keeps no statement of others
    waiting for long.

    Raises:
        VerifyHistoryError, VerifyMovedError, VerifyBehindError: it cannot be read at the cut.
    """
    opened: OpenUpstream = load(find_kind(scheme_of(info.source_uri)).upstream_at)
    return opened(cluster, info, tables, gently=gently)


def open_store(
    cluster: Cluster,
    info: ChangefeedInfo,
    tables: Sequence[Table],
    *,
    gently: bool,
) -> AbstractAsyncContextManager[Upstream]:
    """The store, which keeps nobody waiting for a reader: see `OpenUpstream`."""
    del gently
    return StoreUpstream.open(cluster.pd, cluster.kv, info, tables)


class StoreUpstream:
    """Implements `Upstream`: tables read from the store at their ts, mounted as by the capture."""

    def __init__(self, pd: PdClient, kv: KvClient) -> None:
        self._kv = kv
        self._resolver = LockResolver(pd, kv)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, pd: PdClient, kv: KvClient, info: ChangefeedInfo, tables: Sequence[Table]
    ) -> AsyncIterator["StoreUpstream"]:
        """The store for the block; a service safepoint keeps its history.

        Raises:
            VerifyHistoryError: it is gone.
        """
        # One service a run: if several shared one, the first to end would remove the safepoint of
        # all.
        service = f"tidemark-verify-{info.id}-{uuid.uuid4().hex[:8]}"
        async with service_safepoint(pd, service, min(table.ts for table in tables)):
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
                    rows = snapshot_rows(
                        pa.array(keys, pa.binary()), pa.array(values, pa.binary()), table.ts
                    )
                    yield await asyncio.to_thread(table.mounted, rows)


def key_ranges(table: Table) -> list[tuple[bytes, bytes]]:
    """Return key ranges that contain the compared rows; they contain others, too, unless the key is
    the rows' handle.
    """
    info = TableInfo.parse(table.source.record.table_info)
    handle, spans = info.handle_column, table.spans
    # Record keys order handles as signed numbers; an unsigned key above 2^63 would be looked for at
    # the wrong end.
    signed = spans is not None and pa.types.is_signed_integer(table.schema.field(spans.column).type)

    ranges = []
    for table_id in info.physical_ids:
        whole = table_span(table_id)
        if spans is None or handle is None or handle.name != spans.column or not signed:
            ranges.append((whole.start_key, whole.end_key))
            continue
        for low, high in spans.spans:
            start_key = whole.start_key if low is None else record_key(table_id, low)
            ranges.append(
                (start_key, whole.end_key if high is None else record_key(table_id, high))
            )
    return ranges


@asynccontextmanager
async def service_safepoint(pd: PdClient, service: str, ts: int) -> AsyncIterator[None]:
    """Keep GC from passing `ts` for the block, by UpdateServiceGCSafePoint.

    Raises:
        VerifyHistoryError: it has.
    """
    await _update_safepoint(pd, service, ts)

    async def renew() -> None:
        while True:
            await asyncio.sleep(_SAFEPOINT_RENEW_S)
            await _update_safepoint(pd, service, ts)

    try:
        async with background_tasks(renew()):
            yield
    finally:
        # A TTL of 0 removes the service.
        await pd.update_service_gc_safe_point(service, 0, 0)


async def _update_safepoint(pd: PdClient, service: str, ts: int) -> None:
    least = await pd.update_service_gc_safe_point(service, _SAFEPOINT_TTL_S, ts - 1)
    # PD keeps no safepoint below the least one of all services, and answers with that one.
    passed = max(await pd.gc_safe_point(), least.safe_point if least.safe_point > ts - 1 else 0)
    if passed > ts:
        raise VerifyHistoryError(
            f"GC has come to {passed}: the upstream can no longer be read at {ts}; verify a newer "
            "cut"
        )
