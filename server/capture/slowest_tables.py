"""The tables of a changefeed that are furthest behind, their slowest regions,
and the locks that hold those.

Locks are read from the store when they are asked for, only where a region stands, and only for so
long: a store that does not answer is an answer, too.
"""

import asyncio
import heapq
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvproto import kvrpcpb_pb2 as kvrpcpb
from tidemarkpb.v1 import capture_pb2 as pb

from server.capture.processor import Sink
from server.changefeed.table import SourceTable
from server.puller.source import Peer
from server.puller.tikv.puller import RegionProgress, TablePuller
from server.puller.tikv.stuck_locks import raw_bounds
from server.rpc.tikv import KvClient
from storage.model.errors import TidemarkError
from storage.model.span import Span
from storage.model.ts import physical_ms

LOCKS_MAX = 100
_STANDS_MS = 2_000
_LOCKS_S = 1.0


class Pulled(Protocol):
    """Who pulls tables here."""

    @property
    def start_ts(self) -> int:
        """As the processor's."""
        ...

    @property
    def table_pullers(self) -> Sequence[TablePuller]:
        """As the processor's."""
        ...

    @property
    def slowest_peers(self) -> Sequence[Peer]:
        """Of each log that is merged of several, the one that the others wait for."""
        ...

    @property
    def sink(self) -> Sink | None:
        """As the processor's."""
        ...


def slowest_tables(
    pulled: Pulled, tables: Sequence[SourceTable], most: int
) -> tuple[list[pb.TableBlockers], list[tuple[pb.RegionBlockers, RegionProgress]]]:
    """The tables, the slowest first, and of the slowest one the region whose locks are to be read,
    if it stands.
    """
    pullers = {puller.span: puller for puller in pulled.table_pullers}
    positions = [(table, _pulled_ts(pulled, pullers, table)) for table in tables]
    shown: list[pb.TableBlockers] = []
    stands: list[tuple[pb.RegionBlockers, RegionProgress]] = []
    for table, resolved_ts in heapq.nsmallest(most, positions, key=lambda item: item[1]):
        message = pb.TableBlockers(
            name=table.name, table_id=table.span.table_id, resolved_ts=resolved_ts
        )
        message.checkpoint_ts = (
            pulled.sink.checkpoint_ts(table.span) if pulled.sink else pulled.start_ts
        )
        regions = pullers[table.span].slowest(most) if table.span in pullers else []
        for progress in regions:
            region = message.regions.add(
                region_id=progress.region_id, resolved_ts=progress.resolved_ts, store=progress.store
            )
            if not stands and progress.part is not None and _stands(progress.resolved_ts):
                stands.append((region, progress))
        for peer in () if table.span in pullers else pulled.slowest_peers:
            message.regions.add(pump=peer.name, store=peer.address, resolved_ts=peer.position_ts)
        shown.append(message)
    return shown, stands


def _pulled_ts(pulled: Pulled, pullers: Mapping[Span, TablePuller], table: SourceTable) -> int:
    """How far the table was pulled; a log's tables are as far as they were added."""
    if table.span in pullers:
        return pullers[table.span].resolved_ts
    return pulled.sink.resolved_ts(table.span) if pulled.sink else pulled.start_ts


async def add_locks(
    stands: Sequence[tuple[pb.RegionBlockers, RegionProgress]], kv: KvClient, most: int
) -> None:
    """The locks that the regions' resolved_ts cannot pass: it stands right before the oldest."""
    async with asyncio.TaskGroup() as tasks:
        for region, progress in stands:
            tasks.create_task(_add_locks(region, progress, kv, most))


async def _add_locks(
    region: pb.RegionBlockers, progress: RegionProgress, kv: KvClient, most: int
) -> None:
    assert progress.part is not None
    start_key, end_key = raw_bounds(progress.part)
    try:
        async with asyncio.timeout(_LOCKS_S):
            page = await kv.scan_lock(start_key, end_key, progress.resolved_ts + 1, LOCKS_MAX)
    except TimeoutError:
        region.problem = f"its store does not tell its locks within {_LOCKS_S:g} s"
    except TidemarkError as err:
        region.problem = str(err)
    else:
        region.locks.extend(
            map(_lock, heapq.nsmallest(most, page.locks, key=lambda lock: lock.lock_version))
        )


def _stands(resolved_ts: int) -> bool:
    return time.time() * 1000 - physical_ms(resolved_ts) > _STANDS_MS


def _lock(info: kvrpcpb.LockInfo) -> pb.LockBlocker:
    return pb.LockBlocker(
        start_ts=info.lock_version,
        primary=info.primary_lock,
        key=info.key,
        ttl_ms=info.lock_ttl,
        kind=kvrpcpb.Op.Name(info.lock_type).lower(),
    )
