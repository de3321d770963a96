"""What clients do: transfers between accounts, in both of TiDB's kinds of transactions; some are
given up, and some left behind where their client dies. And DDL, as TiDB writes it.

No transaction goes on while a DDL comes in force: TiDB's servers see to that, and here `Bank` does.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from random import Random

from server.rpc.credentials import SecurityConfig
from server.rpc.transaction import Transaction, TransactionClient, UndeterminedError
from storage.codec import encode_bytes
from storage.model.errors import TidemarkError
from storage.tidb.ddl import JOB_META_COLUMN_ID, Action, job_key
from storage.tidb.record import decode_record, encode_record, record_key
from storage.tidb.row import encode_row
from storage.tidb.schema import Column, TableInfo
from tests.sim.whole.history import Ddl, History, Row, Txn, Writes
from tests.sim.whole.machine import PD
from tests.tidb_encoding import database_key, table_key

SCHEMA = "bank"
ACCOUNTS = TableInfo.build(101, "accounts", [Column.bigint("id"), Column.bigint("balance")])
TRANSFERS = TableInfo.build(
    102, "transfers", [Column.bigint("id"), Column.bigint("src"), Column.bigint("amount")]
)
COUNT, OPENING = 6, 100
SPLIT_KEYS = ",".join(
    record_key(table_id, number).hex()
    for table_id, number in ((101, 3), (101, 5), (102, 8), (102, 20))
)
_DATABASE_ID = 1
_PAUSE_S = (0.02, 1.2)
_THINKS_S = (0.0, 0.3)
_GIVES_UP_S = 12.0
_PESSIMISTIC, _CHANGES_MIND, _DELETES = 0.4, 0.05, 0.25
_DECIDED_WITHIN_S = 60.0
_MOST_COLUMNS = 6
_DONE = 6
"""model.JobStateSynced"""


@asynccontextmanager
async def client(timeout_s: float = _GIVES_UP_S) -> AsyncIterator[TransactionClient]:
    """A client of the cluster for the block."""
    async with TransactionClient.open(
        PD, SecurityConfig(), timeout_s=timeout_s, lock_wait_s=3.0
    ) as opened:
        yield opened


class Bank:
    """The tables and who writes to them; `history` gets all that happens."""

    def __init__(self, history: History, chance: Random) -> None:
        self.history = history
        self._chance = chance
        self._numbers = itertools.count(1)
        self._ids = itertools.count(200)
        self._kept: list[int] = []
        self._infos = {"accounts": ACCOUNTS, "transfers": TRANSFERS}
        self._writing = 0
        self._may_write = asyncio.Event()
        self._may_write.set()

    async def open(self) -> None:
        """Write the schema as TiDB does, and the accounts in one transaction.

        Raises:
            TidemarkError: it did not work; try again.
        """
        async with client() as opened:
            schema = await opened.begin()
            await schema.put(
                database_key(_DATABASE_ID), b'{"id":1,"db_name":{"O":"bank","L":"bank"}}'
            )
            for info in self._infos.values():
                await schema.put(table_key(_DATABASE_ID, info.id), info.to_json().encode())
            await schema.commit()
            writes: Writes = {
                ("accounts", number): {"balance": OPENING} for number in range(1, COUNT + 1)
            }
            txn = await opened.begin()
            for (table, number), row in writes.items():
                await self._write(txn, table, number, row)
            await self._commit(txn, self._txn(txn, writes))

    async def run(self) -> None:
        """Transfer until cancelled."""
        while True:
            with suppress(TidemarkError):
                async with client() as opened:
                    while True:
                        await asyncio.sleep(self._chance.uniform(*_PAUSE_S))
                        await self._may_write.wait()
                        self._writing += 1
                        try:
                            with suppress(TidemarkError):
                                await self._transfer(opened)
                        finally:
                            self._writing -= 1
            await asyncio.sleep(0.5)

    async def write_one(self) -> None:
        """Commit a row of an account, whatever else there is.

        Raises:
            TidemarkError: it did not work; try again.
        """
        async with client() as opened:
            txn = await opened.begin()
            writes: Writes = {("accounts", 1): {"balance": await self._balance(txn, 1)}}
            for (table, number), row in writes.items():
                await self._write(txn, table, number, row)
            await self._commit(txn, self._txn(txn, writes))

    async def change(self) -> None:
        """A DDL: the transfers get a column, or are truncated."""
        if not self._may_write.is_set():
            return
        self._may_write.clear()
        try:
            while self._writing:  # noqa: ASYNC110 - clients tell no events
                await asyncio.sleep(0.05)
            with suppress(TidemarkError):
                async with client() as opened:
                    await self._change(opened)
        finally:
            self._may_write.set()

    async def split(self) -> None:
        """Regions begin at some rows from now on, if the stores can do so now."""
        keys = [
            encode_bytes(record_key(self._infos[table].id, self._chance.randint(1, most)))
            for table, most in (("accounts", COUNT), ("transfers", 40))
        ]
        with suppress(TidemarkError):
            async with client() as opened:
                await opened.pd.split_regions(keys)

    async def _change(self, opened: TransactionClient) -> None:
        old, job_id = self._infos["transfers"], next(self._ids)
        if self._chance.random() < 0.5 and len(old.columns) < _MOST_COLUMNS:
            column = f"c{job_id}"
            new = _with(old, Column.bigint(column))
            kind, ddl = Action.ADD_COLUMN, Ddl("transfers", column)
        else:
            new = replace(old, id=next(self._ids))
            kind, ddl = Action.TRUNCATE_TABLE, Ddl("transfers")
        txn = await opened.begin()
        writes: dict[bytes, bytes | None] = {
            job_key(job_id): encode_row({JOB_META_COLUMN_ID: _job(job_id, kind, old, new)}),
            table_key(_DATABASE_ID, old.id): None,
        }
        writes[table_key(_DATABASE_ID, new.id)] = new.to_json().encode()
        for key, value in writes.items():
            await (txn.delete(key) if value is None else txn.put(key, value))
        known = Txn(txn.start_ts, {}, list(writes), ddl)
        try:
            await self._commit(txn, known)
        except UndeterminedError:
            await self._decided(opened, known)
        if known.commit_ts:
            self._infos["transfers"] = new
            if not ddl.column:
                self._kept.clear()

    async def _decided(self, opened: TransactionClient, txn: Txn) -> None:
        """Wait until it is known what became of a transaction; what is open is rolled back."""
        async with asyncio.timeout(_DECIDED_WITHIN_S):
            while txn.commit_ts is None:
                with suppress(TidemarkError):
                    await opened.kv.batch_rollback(txn.keys, txn.start_ts)
                await asyncio.sleep(0.5)

    async def _transfer(self, opened: TransactionClient) -> None:
        chance, number = self._chance, next(self._numbers)
        pessimistic = chance.random() < _PESSIMISTIC
        source, target = chance.sample(range(1, COUNT + 1), 2)
        amount = chance.randint(1, 20)
        known_ts = self.history.newest_ts
        txn = await opened.begin(pessimistic=pessimistic)
        assert txn.start_ts > known_ts, f"a timestamp {txn.start_ts} after {known_ts}"
        writes: Writes = {}
        try:
            for account, change in sorted(((source, -amount), (target, amount))):
                balance = await self._balance(txn, account)
                writes["accounts", account] = {"balance": balance + change}
            writes["transfers", number] = self._new_transfer(source, amount)
            if self._kept and chance.random() < _DELETES:
                writes["transfers", self._kept.pop(chance.randrange(len(self._kept)))] = None
            for (table, key), row in writes.items():
                await self._write(txn, table, key, row)
            await asyncio.sleep(chance.uniform(*_THINKS_S))
        except TidemarkError:
            await txn.rollback()
            raise
        if chance.random() < _CHANGES_MIND:
            await txn.rollback()
            return
        await self._commit(txn, self._txn(txn, writes))
        self._kept.append(number)

    def _new_transfer(self, source: int, amount: int) -> Row:
        row: Row = {"src": source, "amount": amount}
        for column in self._infos["transfers"].columns[3:]:
            row[column.name] = self._chance.choice((None, amount * 2))
        return row

    async def _balance(self, txn: Transaction, account: int) -> int:
        key = record_key(ACCOUNTS.id, account)
        value = await txn.get_for_update(key)
        assert value is not None, f"account {account} is missing"
        return int(str(decode_record(ACCOUNTS, key, value)["balance"]))

    async def _write(self, txn: Transaction, table: str, number: int, row: Row | None) -> None:
        info = self._infos[table]
        if row is None:
            await txn.delete(record_key(info.id, number))
        else:
            await txn.put(*encode_record(info, {"id": number, **row}))

    def _txn(self, txn: Transaction, writes: Writes) -> Txn:
        keys = [record_key(self._infos[table].id, number) for table, number in writes]
        return Txn(txn.start_ts, writes, keys)

    async def _commit(self, txn: Transaction, known: Txn) -> None:
        self.history.begin(known)
        try:
            commit_ts = await txn.commit()
        except UndeterminedError:
            raise
        except TidemarkError:
            self._end(known, 0)
            raise
        self._end(known, commit_ts)

    def _end(self, txn: Txn, commit_ts: int) -> None:
        # The stores may have told it meanwhile.
        if txn.commit_ts is None:
            self.history.end(txn, commit_ts)
        else:
            assert txn.commit_ts == commit_ts, (txn.start_ts, txn.commit_ts, commit_ts)


def _with(info: TableInfo, column: Column) -> TableInfo:
    number = max(each.id for each in info.columns) + 1
    return replace(
        info, columns=(*info.columns, replace(column, id=number, offset=len(info.columns)))
    )


def _job(job_id: int, kind: Action, old: TableInfo, new: TableInfo) -> bytes:
    """The job's row of mysql.tidb_ddl_job, as far as it is read."""
    job = {
        "id": job_id,
        "type": int(kind),
        "state": _DONE,
        "schema_id": _DATABASE_ID,
        "table_id": old.id,
        "schema_name": SCHEMA,
        "query": f"{kind.name} {old.name}",
        "binlog": {"SchemaVersion": job_id, "TableInfo": json.loads(new.to_json())},
    }
    return json.dumps(job).encode()
