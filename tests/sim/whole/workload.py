"""What clients do: transfers between accounts, in both of TiDB's kinds of transactions; some are
given up, and some left behind where their client dies.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

from server.rpc.credentials import SecurityConfig
from server.rpc.transaction import Transaction, TransactionClient, UndeterminedError
from storage.model.errors import TidemarkError
from storage.tidb.ddl import database_key, table_key
from storage.tidb.record import decode_record, encode_record, record_key
from storage.tidb.schema import Column, TableInfo
from tests.sim.whole.history import TABLE_IDS, History, Row, Txn
from tests.sim.whole.machine import PD

SCHEMA = "bank"
INFOS = {
    "accounts": TableInfo.build(
        TABLE_IDS["accounts"], "accounts", [Column.bigint("id"), Column.bigint("balance")]
    ),
    "transfers": TableInfo.build(
        TABLE_IDS["transfers"],
        "transfers",
        [Column.bigint("id"), Column.bigint("src"), Column.bigint("amount")],
    ),
}
COUNT, OPENING = 6, 100
SPLIT_KEYS = ",".join(
    record_key(table_id, number).hex() for table_id, number in ((101, 0), (101, 4), (102, 0))
)
_DATABASE_ID = 1
_PAUSE_S = (0.02, 1.2)
_THINKS_S = (0.0, 0.3)
_GIVES_UP_S = 12.0
_PESSIMISTIC, _CHANGES_MIND, _DELETES = 0.4, 0.05, 0.25


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
        self._kept: list[int] = []

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
            for info in INFOS.values():
                await schema.put(table_key(_DATABASE_ID, info.id), info.to_json().encode())
            await schema.commit()
            rows = {("accounts", number): {"balance": OPENING} for number in range(1, COUNT + 1)}
            await self._commit(await opened.begin(), dict(rows))

    async def run(self) -> None:
        """Transfer until cancelled."""
        while True:
            with suppress(TidemarkError):
                async with client() as opened:
                    while True:
                        await asyncio.sleep(self._chance.uniform(*_PAUSE_S))
                        with suppress(TidemarkError):
                            await self._transfer(opened)
            await asyncio.sleep(0.5)

    async def _transfer(self, opened: TransactionClient) -> None:
        chance, number = self._chance, next(self._numbers)
        pessimistic = chance.random() < _PESSIMISTIC
        source, target = chance.sample(range(1, COUNT + 1), 2)
        amount = chance.randint(1, 20)
        known_ts = self.history.newest_ts
        txn = await opened.begin(pessimistic=pessimistic)
        assert txn.start_ts > known_ts, f"a timestamp {txn.start_ts} after {known_ts}"
        try:
            writes: dict[tuple[str, int], Row | None] = {}
            for account, change in sorted(((source, -amount), (target, amount))):
                balance = await self._balance(txn, account)
                writes["accounts", account] = {"balance": balance + change}
                await self._write(txn, "accounts", account, writes["accounts", account])
            writes["transfers", number] = {"src": source, "amount": amount}
            await self._write(txn, "transfers", number, writes["transfers", number])
            if self._kept and chance.random() < _DELETES:
                gone = self._kept.pop(chance.randrange(len(self._kept)))
                writes["transfers", gone] = None
                await self._write(txn, "transfers", gone, None)
            await asyncio.sleep(chance.uniform(*_THINKS_S))
        except TidemarkError:
            await txn.rollback()
            raise
        if chance.random() < _CHANGES_MIND:
            await txn.rollback()
            return
        await self._commit(txn, writes, written=True)
        self._kept.append(number)

    async def _balance(self, txn: Transaction, account: int) -> int:
        key = record_key(TABLE_IDS["accounts"], account)
        value = await txn.get_for_update(key)
        assert value is not None, f"account {account} is missing"
        key = record_key(TABLE_IDS["accounts"], account)
        return int(str(decode_record(INFOS["accounts"], key, value)["balance"]))

    async def _write(self, txn: Transaction, table: str, number: int, row: Row | None) -> None:
        key = record_key(TABLE_IDS[table], number)
        if row is None:
            await txn.delete(key)
        else:
            await txn.put(key, encode_record(INFOS[table], {"id": number, **row})[1])

    async def _commit(
        self, txn: Transaction, writes: dict[tuple[str, int], Row | None], *, written: bool = False
    ) -> None:
        if not written:
            for (table, number), row in writes.items():
                await self._write(txn, table, number, row)
        known = Txn(txn.start_ts, writes)
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
