"""The dump of the cluster's tables over a store in memory: what counts, and what is read again."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from server.changefeed import keys
from server.changefeed.info import status_json
from server.changefeed.table import SourceTable
from server.dump import job as dump_job
from server.dump.cluster import engine
from server.dump.cluster.chunks import ChunkLostError, LocalChunks
from server.dump.cluster.engine import EVERY_TABLE, ClusterDump
from server.dump.cluster.holds import HoldableRows, PulledTables
from server.dump.cluster.survey import SMALL_ROWS, Surveyor
from server.dump.job import PAUSED, DumpRecords, Job
from server.dump.progress import TableProgress, TableState
from server.puller.open_transactions import OpenTransactions
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.model.errors import InvalidError, UnavailableError
from storage.model.span import Span
from storage.model.ts import compose

PARTS = (Span(8, b"a", b"b"), Span(9, b"c", b"d"))
SPAN = Span(7, b"a", b"d")
TABLE: Any = SimpleNamespace(span=SPAN, name="shop.t")
ROWS = {part.start_key + b"%04d" % number: b"v" for part in PARTS for number in range(150)}
WAIT_S = 50
MANY = {b"a%06d" % number: b"v" for number in range(3 * SMALL_ROWS)}


class Store:
    """Rows that nobody changes; `ts` is the clock."""

    def __init__(self) -> None:
        self.ts = 100
        self.rows = ROWS
        self.failure: Exception | None = None
        self.is_lost = False
        self.spans: Sequence[Span] = PARTS
        self.pages: list[int] = []

    async def now(self) -> int:
        self.ts += 10
        return self.ts

    async def page(
        self, begin: bytes, end: bytes, ts: int, limit: int
    ) -> tuple[pa.Array, pa.Array]:
        assert ts == self.ts
        if self.failure is not None:
            raise self.failure
        self.pages.append(limit)
        keys = await self.keys(begin, end, ts, limit)
        return pa.array(keys, pa.binary()), pa.array([self.rows[key] for key in keys], pa.binary())

    async def check_kept(self, ts: int) -> None:
        if self.is_lost:
            raise ChunkLostError(f"GC has passed {ts}")

    async def keys(self, begin: bytes, end: bytes, ts: int, limit: int) -> list[bytes]:
        return sorted(key for key in self.rows if begin <= key < end)[:limit]

    async def last(self, begin: bytes, end: bytes, ts: int) -> bytes | None:
        return max((key for key in self.rows if begin <= key < end), default=None)

    async def region_bounds(self, begin: bytes, end: bytes) -> list[bytes]:
        return []

    def parts(self, table: SourceTable) -> Sequence[Span]:
        assert table.span is SPAN
        return self.spans


class Sorter:
    """The keys that came, with the commit_ts they came at."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.open_transactions = OpenTransactions()
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
        self.store, self.tables = Store(), PulledTables()
        store: Any = self.store
        chunks = LocalChunks(self.tables, store)
        self.dump = ClusterDump("shop", self.records, Surveyor(store), chunks)
        self.job = Job("j")
        self._meta, self._executor = meta, executor

    def sorter(self) -> tuple[Sorter, HoldableRows]:
        sorter = Sorter(self._executor)
        return sorter, HoldableRows(SPAN, 1, sorter)

    async def checkpoint(self, ts: int) -> None:
        await self._meta.put(keys.status("shop"), status_json(ts))

    async def until(self, wanted: Callable[[TableProgress], bool]) -> TableProgress:
        found: Sequence[TableProgress] = ()
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    found = await self.records.tables(self.job)
                    if found and wanted(found[0]):
                        return found[0]
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise TimeoutError(found) from None


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(engine, "_IDLE_S", 0.02)
    monkeypatch.setattr(dump_job, "_SETTLE_S", 0.02)
    with ThreadPoolExecutor(2) as executor:
        async with EmbeddedEtcd.open(tmp_path) as etcd:
            house = House(EtcdMeta(etcd), executor)
            await house.records.put_job(None, house.job)
            async with asyncio.TaskGroup() as tasks:
                dumping = tasks.create_task(house.dump.run())
                yield house
                dumping.cancel()


async def test_what_the_checkpoint_has_not_reached_is_read_again_when_a_table_is_pulled_anew(
    house: House,
) -> None:
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


@pytest.mark.parametrize("store_fails", [True, False])
async def test_what_stopped_a_chunk_is_told_and_it_is_read_again(
    house: House, *, store_fails: bool
) -> None:
    house.store.failure = UnavailableError("locked") if store_fails else None
    house.store.is_lost = not store_fails
    said = "locked" if store_fails else "ErrDumpSnapshotLost"
    sorter, rows = house.sorter()
    with house.tables.pulled(TABLE, rows):
        assert said in (await house.until(lambda table: bool(table.error))).error
        house.store.failure, house.store.is_lost = None, False
        assert (await house.until(lambda table: table.rows_read == len(ROWS))).error == ""
    assert sorter.keys.keys() == ROWS.keys()
    assert rows.resolved_ts == 1, "the hold is over, and nothing was promised"


async def test_a_table_that_was_chosen_by_its_name_is_dumped_under_another_one_as_well(
    house: House,
) -> None:
    house.store.rows, house.store.spans = MANY, (SPAN,)
    chosen = replace(house.job, tables=(TABLE.name,), rows_per_s=400)
    await house.records.put_job(house.job, chosen)
    before, rows = house.sorter()
    with house.tables.pulled(TABLE, rows):
        await house.until(lambda table: table.rows_read > 0)
    await house.records.put_job(chosen, replace(chosen, rows_per_s=0))
    after, rows = house.sorter()
    with house.tables.pulled(SimpleNamespace(span=SPAN, name="shop.renamed"), rows):  # type: ignore[arg-type]
        await house.until(lambda table: table.rows_read == len(MANY))
    assert before.keys.keys() < MANY.keys() == after.keys.keys(), (
        "nothing of it had reached the checkpoint"
    )


async def test_a_table_with_other_partitions_is_read_anew(house: House) -> None:
    _, rows = house.sorter()
    with house.tables.pulled(TABLE, rows):
        await house.until(lambda table: table.rows_read == len(ROWS))
    house.store.spans = (Span(7, b"a", b"e"),)
    sorter, rows = house.sorter()
    with house.tables.pulled(TABLE, rows):
        await house.until(lambda table: len(table.ranges) == 1 and len(sorter.keys) == len(ROWS))
    assert sorter.keys.keys() == ROWS.keys()


async def test_a_table_that_ended_after_its_last_chunk_does_not_count_it(house: House) -> None:
    sorter, rows = house.sorter()
    with house.tables.pulled(TABLE, rows):
        await house.until(lambda table: table.rows_read == len(ROWS))
    await house.checkpoint(house.store.ts)  # of others: the table itself was given up
    found = await house.until(lambda table: table.rows_read == 0)
    assert (found.rows, found.state) == (0, TableState.DUMPING)
    assert sorter.keys.keys() == ROWS.keys()


async def test_a_large_table_has_several_readers_and_a_share_that_never_goes_back(
    house: House,
) -> None:
    house.store.rows, house.store.spans = MANY, (SPAN,)
    sorter, rows = house.sorter()
    shares: list[float] = []

    def looked(table: TableProgress) -> bool:
        if table.rows_estimated:
            shares.append(table.rows / table.rows_estimated)
        return table.state is TableState.DONE

    with house.tables.pulled(TABLE, rows):
        found = await house.until(lambda table: table.rows_estimated > 0)
        assert len(found.ranges) > 4
        assert 0.8 * len(MANY) < found.rows_estimated < 1.2 * len(MANY)
        acknowledging = asyncio.create_task(acknowledged(house))  # noqa: TID251 - ended here
        done = await house.until(looked)
        acknowledging.cancel()
    assert shares == sorted(shares)
    assert len(set(shares)) > 3
    assert (done.rows, done.rows_read) == (len(MANY), len(MANY))
    assert sorter.keys.keys() == MANY.keys()


async def acknowledged(house: House) -> None:
    """A reader that is always a little behind."""
    ts = 100
    while True:
        await house.checkpoint(ts)
        await asyncio.sleep(0.02)
        ts = min(ts + 10, house.store.ts)


async def test_rates_bound_chunks_so_that_a_pause_is_seen_at_once(house: House) -> None:
    house.store.rows, house.store.spans = MANY, (SPAN,)
    slow = replace(house.job, rows_per_s=400)
    await house.records.put_job(house.job, slow)
    _, rows = house.sorter()
    with house.tables.pulled(TABLE, rows):
        await house.until(lambda table: table.rows_read >= 400)
        assert house.store.pages[-1] <= 100
        await house.records.put_job(slow, replace(slow, state=PAUSED))
        seen = len(house.store.pages)
        await asyncio.sleep(0.1)
        assert len(house.store.pages) <= seen + 2 * slow.parallel


async def test_a_page_that_is_too_large_becomes_smaller_until_it_is_had(house: House) -> None:
    page = house.store.page

    async def bounded(begin: bytes, end: bytes, ts: int, limit: int) -> tuple[pa.Array, pa.Array]:
        if limit > 1:
            raise InvalidError("larger than a message may be")
        return await page(begin, end, ts, limit)

    house.store.page = bounded  # type: ignore[method-assign]  # of this house
    house.store.rows = dict(list(ROWS.items())[:3])
    sorter, rows = house.sorter()
    with house.tables.pulled(TABLE, rows):
        await house.until(lambda table: table.rows_read == 3)
    assert len(sorter.keys) == 3


async def test_a_table_that_lags_is_not_read_from(house: House) -> None:
    house.store.ts = compose(60_000)
    house.store.rows, house.store.spans = MANY, (SPAN,)
    sorter, rows = house.sorter()
    with house.tables.pulled(TABLE, rows):
        assert "behind" in (await house.until(lambda table: bool(table.error))).error
        before = len(sorter.keys)
        assert 0 < before < len(MANY)
        rows.resolve(SPAN, house.store.ts)
        await house.until(lambda table: table.rows_read > before and not table.error)


async def test_what_an_older_version_said_of_all_tables_is_taken_back(house: House) -> None:
    await house.records.put_tables(
        [TableProgress("*", EVERY_TABLE, "j", TableState.FAILED, "workers")]
    )
    _, rows = house.sorter()
    await house.records.put_job(house.job, job := replace(house.job, id="k"))
    await house.records.put_tables(
        [TableProgress("*", EVERY_TABLE, "k", TableState.FAILED, "workers")]
    )
    house.job = job
    with house.tables.pulled(TABLE, rows):
        await house.until(
            lambda table: table.table_id != EVERY_TABLE and table.rows_read == len(ROWS)
        )
    assert EVERY_TABLE not in {each.table_id for each in await house.records.tables(job)}
