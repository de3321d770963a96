"""The dump of the cluster's tables over a store in memory: what counts, and what is read again."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from server.capture import keys
from server.capture.changefeed import status_json
from server.dump.cluster import ClusterDump
from server.dump.held import HeldRows, HeldTables
from server.dump.job import DumpRecords, Job
from server.dump.progress import TableProgress, TableState
from server.puller.table import SourceTable
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.model.errors import UnavailableError
from storage.model.span import Span

PARTS = (Span(8, b"a", b"b"), Span(9, b"c", b"d"))
SPAN = Span(7, b"a", b"d")
TABLE: Any = SimpleNamespace(span=SPAN, name="shop.t")
ROWS = {part.start_key + b"%03d" % number: b"v" for part in PARTS for number in range(150)}


class Store:
    """Rows that nobody changes; `ts` is the clock."""

    def __init__(self) -> None:
        self.ts = 100
        self.failures = 0
        self.spans: Sequence[Span] = PARTS

    async def now(self) -> int:
        self.ts += 10
        return self.ts

    async def page(self, begin: bytes, end: bytes, ts: int, limit: int) -> Sequence[tuple[bytes, bytes]]:
        assert ts == self.ts
        if self.failures:
            self.failures -= 1
            raise UnavailableError("locked")
        return sorted((key, value) for key, value in ROWS.items() if begin <= key < end)[:limit]

    def parts(self, table: SourceTable) -> Sequence[Span]:
        assert table is TABLE
        return self.spans


class Sorter:
    """The keys that came, with the commit_ts they came at."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.keys: dict[bytes, int] = {}

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        assert span == SPAN
        self.keys |= zip(batch["key"].to_pylist(), batch["commit_ts"].to_pylist(), strict=True)

    def resolve(self, span: Span, ts: int) -> None:
        assert span == SPAN
        assert ts


class House:
    """One run of a changefeed with one table."""

    def __init__(self, meta: EtcdMeta, executor: Executor) -> None:
        self.records = DumpRecords(meta, "shop")
        self.store, self.tables = Store(), HeldTables()
        self.dump = ClusterDump("shop", self.records, self.store, self.tables)
        self.job = Job("j")
        self._meta, self._executor = meta, executor

    def sorter(self) -> tuple[Sorter, HeldRows]:
        sorter = Sorter(self._executor)
        return sorter, HeldRows(SPAN, 1, sorter)

    async def checkpoint(self, ts: int) -> None:
        await self._meta.put(keys.status("shop"), status_json(ts))

    async def until(self, wanted: Callable[[TableProgress], bool]) -> TableProgress:
        for _ in range(500):
            found = await self.records.tables(self.job)
            if found and wanted(found[0]):
                return found[0]
            await asyncio.sleep(0.02)
        raise TimeoutError(found)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    with ThreadPoolExecutor(2) as executor:
        async with EmbeddedEtcd.open(tmp_path) as etcd:
            house = House(EtcdMeta(etcd), executor)
            await house.records.put_job(None, house.job)
            async with asyncio.TaskGroup() as tasks:
                dumping = tasks.create_task(house.dump.run())
                yield house
                dumping.cancel()


async def test_what_the_checkpoint_has_not_reached_is_read_again_when_a_table_is_pulled_anew(house: House) -> None:
    lost, rows = house.sorter()
    with house.tables.pulled(TABLE, rows):
        await house.until(lambda table: table.rows_read == len(ROWS))
        assert lost.keys.keys() == ROWS.keys()
        first = min(lost.keys.values())
        await house.checkpoint(first)
        durable = await house.until(lambda table: table.rows > 0)
    again, rows = house.sorter()
    with house.tables.pulled(TABLE, rows):
        await house.until(lambda _: len(again.keys) == len(ROWS) - durable.rows)
        assert again.keys.keys() == {key for key, ts in lost.keys.items() if ts > first}
        await house.checkpoint(house.store.ts)
        done = await house.until(lambda table: table.state is TableState.DONE)
        assert (done.rows, done.high_ts) == (len(ROWS), max(again.keys.values()))


async def test_a_store_that_does_not_answer_is_told_and_asked_again(house: House) -> None:
    house.store.failures = 1
    sorter, rows = house.sorter()
    with house.tables.pulled(TABLE, rows):
        assert "locked" in (await house.until(lambda table: bool(table.error))).error
        assert (await house.until(lambda table: table.rows_read == len(ROWS))).error == ""
    assert sorter.keys.keys() == ROWS.keys()


async def test_a_table_with_other_partitions_is_read_anew(house: House) -> None:
    _, rows = house.sorter()
    with house.tables.pulled(TABLE, rows):
        await house.until(lambda table: table.rows_read == len(ROWS))
    house.store.spans = (SPAN,)
    sorter, rows = house.sorter()
    with house.tables.pulled(TABLE, rows):
        await house.until(lambda table: len(table.ranges) == 1 and len(sorter.keys) == len(ROWS))
    assert sorter.keys.keys() == ROWS.keys()
