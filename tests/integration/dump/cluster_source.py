"""A small TiDB: writes rows and DDL jobs to a real store,
and remembers what was there at each timestamp.
"""

import asyncio
import json
import random
import threading
from bisect import bisect_right
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.key_error import CommitTsExpiredError
from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from storage.tidb.ddl import job_key
from storage.tidb.record import encode_record
from storage.tidb.row import encode_row
from storage.tidb.schema import Column, TableInfo
from tests.integration.dump.cluster_binlogs import Binlogs, Written, converted
from tests.tidb_encoding import database_key, table_key

T = TypeVar("T")
Rows = dict[int, int]
DATABASE_ID = 1
CREATE, DROP, ADD_COLUMN, TRUNCATE, MODIFY_COLUMN, RENAME, SEVERAL = 3, 4, 5, 11, 12, 14, 61
WRITE_REORGANIZATION = 3
RUNNING, DONE = 1, 4
_BATCH = 250
_STEP_S = 0.3
"""Between the steps of a job, in which rows change."""


@dataclass
class Known:
    """A table, and its rows at each commit_ts: None is a row that is gone, a number None:
    all are.
    """

    info: TableInfo
    history: list[tuple[int, int | None, int | None]] = field(default_factory=list)

    def at(self, ts: int) -> Rows:
        """The rows as of `ts`."""
        rows: Rows = {}
        for _, number, value in self.history[
            : bisect_right(self.history, ts, key=lambda it: it[0])
        ]:
            if number is None:
                rows.clear()
            elif value is None:
                rows.pop(number, None)
            else:
                rows[number] = value
        return rows


class ClusterSource(threading.Thread):
    """Its own thread writes, until it is stopped; DDL and large writes are done in between."""

    def __init__(self, coordinator: str, pump: str = "", seed: int = 1) -> None:
        super().__init__(daemon=True)
        self.tables: dict[str, Known] = {}
        self._coordinator = coordinator
        self._pump = pump
        self._chance = random.Random(seed)
        self._ids = 100
        self._ready, self._over, self._churn = threading.Event(), asyncio.Event(), asyncio.Event()
        self._turn = asyncio.Lock()
        self._failure: Exception | None = None

    def run(self) -> None:
        """Serve until stopped."""
        asyncio.run(self._serve())

    def opened(self) -> "ClusterSource":
        """Begin; raises what it fails with, as every other call."""
        self.start()
        assert self._ready.wait(120)
        if self._failure is not None:
            self.stop()
        return self

    def names(self, *names: str) -> list[str]:
        """Which of these tables there are."""
        return [name for name in names if name in self.tables]

    def create(self, name: str, rows: int, partitions: int = 0) -> None:
        """CREATE TABLE, and rows in it."""
        self._call(self._create(name, partitions))
        self._call(self._fill(name, rows))

    def drop(self, name: str) -> None:
        """DROP TABLE."""
        self._call(self._drop(name))

    def truncate(self, name: str) -> None:
        """TRUNCATE TABLE."""
        self._call(self._truncate(name))

    def add_column(self, name: str) -> None:
        """ALTER TABLE … ADD COLUMN."""
        self._call(self._add_column(name))

    def modify(self, name: str, *, several: bool = False) -> None:
        """ALTER TABLE … MODIFY, which changes every value: a reorganization,
        while rows go on changing.

        As one of `several` changes it is in force for a while before its job is done.
        """
        self._call(self._modify(name, several=several))

    def rename(self, name: str, new: str) -> None:
        """RENAME TABLE, within the database."""
        self._call(self._rename(name, new))

    def churn(self) -> None:
        """Change rows from now on."""
        self._loop.call_soon_threadsafe(self._churn.set)

    def settle(self) -> None:
        """What is committed by now is remembered when this returns."""
        if self.is_alive():
            self._call(self._settled())

    async def _settled(self) -> None:
        async with self._turn:
            return

    def stop(self) -> None:
        """Write no more."""
        self._loop.call_soon_threadsafe(self._over.set)
        self.join()
        if self._failure is not None:
            raise self._failure

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(self._done(work), self._loop).result(200)

    async def _done(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            if self._failure is None:
                return await work
            work.close()
        except Exception:
            if self._failure is None:
                raise
        raise self._failure

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self._write()
        except Exception as failure:  # noqa: BLE001 - raised in the test's thread by its next call
            self._failure = failure
            self._ready.set()
            await self._over.wait()

    async def _write(self) -> None:
        async with (
            PdClient.open(self._coordinator) as self._pd,
            KvClient.open(self._pd) as self._kv,
            Binlogs.open(self._pump, self._pd) as self._binlogs,
            asyncio.TaskGroup() as tasks,
        ):
            await self._commit(
                {database_key(DATABASE_ID): b'{"id":1,"db_name":{"O":"shop","L":"shop"}}'},
                Written(),
            )
            tasks.create_task(self._change_rows())
            self._ready.set()
            await self._over.wait()

    async def _change_rows(self) -> None:
        value = 1000
        while not self._over.is_set():
            await asyncio.sleep(0.01)
            if not self._churn.is_set():
                continue
            async with self._turn:
                name = self._chance.choice(sorted(self.tables))
                rows = self.tables[name].at(1 << 63)
                value += 1
                wanted: dict[int, int | None] = {}
                for _ in range(3):
                    number = self._chance.choice([*list(rows)[:50], self._chance.randrange(4000)])
                    wanted[number] = None if self._chance.random() < 0.25 else value
                await self._put(name, wanted)

    async def _put(self, name: str, wanted: dict[int, int | None]) -> None:
        table = self.tables[name]
        before = table.at(1 << 63)
        wanted = {
            number: value
            for number, value in wanted.items()
            if value is not None or number in before
        }
        if not wanted:
            return
        writes: dict[bytes, bytes | None] = {}
        for number, value in wanted.items():
            key, row = _record(table.info, number, value or 0)
            writes[key] = None if value is None else row
        changes = {number: (before.get(number), value) for number, value in wanted.items()}
        column_ids = tuple(column.id for column in _values(table.info))
        commit_ts = await self._commit(writes, Written(table.info.id, changes, column_ids))
        table.history += [(commit_ts, number, value) for number, value in wanted.items()]

    async def _fill(self, name: str, count: int) -> None:
        for first in range(0, count, _BATCH):
            async with self._turn:
                if name in self.tables:
                    await self._put(
                        name, dict.fromkeys(range(first, min(first + _BATCH, count)), 0)
                    )

    # DDL

    async def _create(self, name: str, partitions: int) -> None:
        async with self._turn:
            info = TableInfo.build(self._new_id(), name, [Column.bigint("id"), Column.bigint("v")])
            info = replace(info, partition_ids=tuple(self._new_id() for _ in range(partitions)))
            await self._ddl(CREATE, info.id, f"create table {name}", info)
            self.tables[name] = Known(info)

    async def _drop(self, name: str) -> None:
        async with self._turn:
            table = self.tables.pop(name)
            await self._ddl(DROP, table.info.id, f"drop table {name}")

    async def _truncate(self, name: str) -> None:
        async with self._turn:
            table = self.tables[name]
            old, parts = table.info, tuple(self._new_id() for _ in table.info.partition_ids)
            table.info = replace(old, id=self._new_id(), partition_ids=parts)
            ts = await self._ddl(TRUNCATE, old.id, f"truncate table {name}", table.info)
            table.history.append((ts, None, None))

    async def _add_column(self, name: str) -> None:
        async with self._turn:
            table = self.tables[name]
            table.info = _with(table.info, Column.bigint(f"more{len(table.info.columns)}"))
            await self._ddl(ADD_COLUMN, table.info.id, f"alter table {name} add column", table.info)

    async def _modify(self, name: str, *, several: bool) -> None:
        async with self._turn:
            table = self.tables[name]
            built = _with(
                table.info, replace(Column.bigint("_Col$_v_0"), state=WRITE_REORGANIZATION)
            )
            await self._commit(
                {table_key(DATABASE_ID, built.id): built.to_json().encode()}, Written()
            )
            table.info = built
        numbers = list(table.at(1 << 63))
        for first in range(0, len(numbers), _BATCH):
            async with self._turn:
                rows = table.at(1 << 63)
                some = [number for number in numbers[first : first + _BATCH] if number in rows]
                if some:
                    await self._commit(
                        dict(_record(built, number, rows[number]) for number in some), Written()
                    )
        async with self._turn:
            old, new = _values(built)
            others = [column for column in built.columns if column not in (old, new)]
            columns = (*others, replace(new, name=old.name, offset=old.offset, state=old.state))
            table.info = replace(
                built, columns=tuple(sorted(columns, key=lambda column: column.offset))
            )
            job = _job(
                self._new_id(),
                SEVERAL if several else MODIFY_COLUMN,
                table.info.id,
                f"alter table {name}",
            )
            job |= {"state": RUNNING if several else DONE}
            job |= (
                {"multi_schema_info": {"sub_jobs": [{"type": MODIFY_COLUMN}], "revertible": False}}
                if several
                else {}
            )
            ts = await self._write_job(job, table.info)
            table.history += [
                (ts + 1, number, converted(value)) for number, value in table.at(ts).items()
            ]
        if several:
            await asyncio.sleep(_STEP_S)
            async with self._turn:
                await self._write_job(job | {"state": DONE}, table.info)

    async def _rename(self, name: str, new: str) -> None:
        async with self._turn:
            table = self.tables.pop(name)
            table.info = replace(table.info, name=new)
            await self._ddl(RENAME, table.info.id, f"rename table {name} to {new}", table.info)
            self.tables[new] = table

    async def _ddl(
        self,
        kind: int,
        table_id: int,
        query: str,
        info: TableInfo | None = None,
        *,
        raw_args: Any = None,
    ) -> int:
        """Returns the commit_ts from which on it is in force."""
        return await self._write_job(
            _job(self._new_id(), kind, table_id, query) | {"raw_args": raw_args}, info
        )

    async def _write_job(self, job: dict[str, Any], info: TableInfo | None) -> int:
        """Write the job's row and the meta keys in one transaction; returns its commit_ts."""
        document = json.loads(info.to_json()) if info else None
        job |= {"binlog": {"SchemaVersion": self._ids, "TableInfo": document}}
        writes: dict[bytes, bytes | None] = {
            job_key(job["id"]): encode_row({5: json.dumps(job).encode()}),
            table_key(DATABASE_ID, job["table_id"]): None,
        }
        if info is not None:
            writes[table_key(DATABASE_ID, info.id)] = info.to_json().encode()
        return await self._commit(writes, Written(ddl_job_id=job["id"], query=job["query"]))

    def _new_id(self) -> int:
        self._ids += 1
        return self._ids

    async def _commit(self, writes: dict[bytes, bytes | None], written: Written) -> int:
        start_ts = await self._pd.tso()
        keys = sorted(writes)
        await self._binlogs.prewrite(written, start_ts)
        mutations = [_mutation(key, writes[key]) for key in keys]
        await self._kv.prewrite(
            mutations, primary=keys[0], start_version=start_ts, lock_ttl_ms=600_000
        )
        commit_ts = await self._commit_primary(keys[0], start_ts)
        await self._kv.commit(keys, start_ts, commit_ts)
        await self._binlogs.commit(written, start_ts, commit_ts)
        return commit_ts

    async def _commit_primary(self, key: bytes, start_ts: int) -> int:
        """Returns the commit_ts; a dump that read past it in the meantime asks for a later one,
        as TiDB does.
        """
        while True:
            commit_ts = await self._pd.tso()
            with suppress(CommitTsExpiredError):
                await self._kv.commit([key], start_ts, commit_ts)
                return commit_ts


def _part(info: TableInfo, number: int) -> TableInfo:
    parts = info.partition_ids
    return replace(info, id=parts[number % len(parts)]) if parts else info


def _job(number: int, kind: int, table_id: int, query: str) -> dict[str, Any]:
    job = {
        "id": number,
        "type": kind,
        "state": DONE,
        "schema_id": DATABASE_ID,
        "table_id": table_id,
    }
    return job | {"schema_name": "shop", "query": query}


def _with(info: TableInfo, column: Column) -> TableInfo:
    """The table with one more column."""
    number = max(each.id for each in info.columns) + 1
    return replace(
        info, columns=(*info.columns, replace(column, id=number, offset=len(info.columns)))
    )


def _values(info: TableInfo) -> list[Column]:
    """The column of the value, and the one that is built to take its place."""
    return [column for column in info.columns if column.name in {"v", "_Col$_v_0"}]


def _record(info: TableInfo, number: int, value: int) -> tuple[bytes, bytes]:
    values = {
        column.name: cell
        for column, cell in zip(_values(info), (value, converted(value)), strict=False)
    }
    return encode_record(_part(info, number), {"id": number} | values)


def _mutation(key: bytes, value: bytes | None) -> kvrpcpb.Mutation:
    return kvrpcpb.Mutation(
        op=kvrpcpb.Del if value is None else kvrpcpb.Put, key=key, value=value or b""
    )
