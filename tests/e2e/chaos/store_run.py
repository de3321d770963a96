"""A run over the store: its clients' own records are the history. Each keeps what it wrote with the
commit_ts that it was answered; of a transaction whose answer was lost, the store is asked at the
end. While all that goes on, GC collects old versions as fast as it may.
"""

import asyncio
import contextlib
import random
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from kvproto import kvrpcpb_pb2 as kvrpcpb
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.rpc.transaction import Transaction, TransactionClient
from storage.model.errors import TidemarkError
from storage.tidb.record import (
    decode_record,
    encode_record,
    record_key,
    table_span,
)
from storage.tidb.schema import Column, TableInfo
from tests.e2e.chaos import history
from tests.e2e.chaos.checks import ACCOUNTS, BANK, LISTS, OPENING_BALANCE, Checker
from tests.e2e.chaos.cluster import World
from tests.e2e.chaos.history import Change, Row, Tables
from tests.e2e.chaos.run import BULK_ROWS, DATABASE, Run

_WRITERS = 4
_MARKS_OF_WRITER = 10_000_000
_MEMBERS, _ACTIVE_LISTS, _LIST_APPENDS = 16, 3, 60
_FILL_ROWS = 500
FILLS = 1 + BULK_ROWS // _FILL_ROWS
_FOR_EVER = (1 << 64) - 1
_AGAIN_S, _TIMEOUT_S, _ANSWERS_S = 0.3, 5.0, 300.0
_ALL = 1 << 20


def _table(number: int, name: str, column: Column) -> TableInfo:
    return TableInfo.build(number, name, [Column.bigint("id"), column])


# The marks' keys are the least, and so each transaction's primary: it says whether it committed.
TABLES = {
    table.name: table
    for table in (
        _table(101, "marks", Column.varchar("kind", 20)),
        *(_table(102 + n, name, Column.bigint("balance")) for n, name in enumerate(BANK)),
        *(_table(105 + n, name, Column.varchar("elements", 9000)) for n, name in enumerate(LISTS)),
        _table(107, "members", Column.varchar("name", 20)),
        _table(108, "bulk", Column.bigint("v")),
    )
}
COLUMNS = {name: tuple(c.name for c in table.columns) for name, table in TABLES.items()}


@dataclass
class Record:
    """What a client knows of one transaction."""

    mark: int
    start_ts: int
    writes: dict[tuple[str, int], Row | None] = field(default_factory=dict)
    """The rows that it left behind, by table and key; None: it removed the row."""
    commit_ts: int = 0
    """0: not known; or it was rolled back."""

    def transaction(self) -> history.Transaction:
        """As a part of the history."""
        changes = [
            Change(table, [key], []) if row is None else Change(table, [], list(row))
            for (table, key), row in self.writes.items()
        ]
        return history.Transaction(str(self.commit_ts), changes)


class Ledger:
    """One transaction that is being written, and its record."""

    def __init__(self, inner: Transaction, mark: int, *, pessimistic: bool) -> None:
        self.record = Record(mark, inner.start_ts)
        self._inner = inner
        self._pessimistic = pessimistic

    async def get(self, table: str, key: int) -> Row | None:
        """The row, which this transaction will write."""
        place = record_key(TABLES[table].id, key)
        read = self._inner.get_for_update if self._pessimistic else self._inner.get
        value = await read(place)
        return None if value is None else _row(table, place, value)

    async def put(self, table: str, *row: int | str) -> None:
        """Write a row."""
        named = dict(zip(COLUMNS[table], row, strict=True))
        await self._inner.put(*encode_record(TABLES[table], named))
        self.record.writes[table, int(row[0])] = row

    async def delete(self, table: str, key: int) -> None:
        """Remove a row that is there."""
        await self._inner.delete(record_key(TABLES[table].id, key))
        self.record.writes[table, key] = None


class Writer:
    """One client."""

    def __init__(self, client: TransactionClient, number: int, dice: random.Random) -> None:
        self.records: list[Record] = []
        """Of transactions that committed, or may have."""
        self._client = client
        self._number = number
        self._dice = dice
        self._begun = 0

    async def run(self, pause_s: float, ending: asyncio.Event) -> None:
        """One transaction after the other, until it is to end."""
        while not ending.is_set():
            await asyncio.sleep(self._dice.random() * 2 * pause_s)
            try:
                await self.one()
            except TidemarkError:
                await asyncio.sleep(_AGAIN_S)

    async def one(self) -> None:
        """One transaction of any kind."""
        kinds: list[tuple[str, Callable[[Ledger], Awaitable[None]]]] = [
            ("transfer", self._transfer),
            ("append", self._append),
            ("keys", self._move_members),
            ("bulk", self._change_bulk),
        ]
        await self.transact(*self._dice.choices(kinds, (35, 30, 25, 10))[0])

    async def transact(
        self, kind: str, write: Callable[[Ledger], Awaitable[None]], *, surely: bool = False
    ) -> None:
        """One transaction. Raises what it was refused with, or what became of its answer."""
        self._begun += 1
        mark = self._number * _MARKS_OF_WRITER + self._begun
        pessimistic = not surely and self._dice.random() < 0.5
        inner = await self._client.begin(pessimistic=pessimistic)
        ledger = Ledger(inner, mark, pessimistic=pessimistic)
        try:
            await ledger.put("marks", mark, kind)
            await write(ledger)
        except TidemarkError:
            await inner.rollback()
            raise
        if not surely and self._dice.random() < 0.05:
            await inner.rollback()
            return
        self.records.append(ledger.record)
        ledger.record.commit_ts = await inner.commit()

    async def fill(self) -> None:
        """What tables hold at first, in FILLS transactions."""
        await self.transact("fill", self._fill_bank, surely=True)
        for first in range(0, BULK_ROWS, _FILL_ROWS):
            await self.transact("fill", partial(self._fill_bulk, first), surely=True)

    async def _fill_bank(self, ledger: Ledger) -> None:
        for table in BANK:
            for account in range(ACCOUNTS):
                await ledger.put(table, account, OPENING_BALANCE)

    async def _fill_bulk(self, first: int, ledger: Ledger) -> None:
        for number in range(first, first + _FILL_ROWS):
            await ledger.put("bulk", number, 0)

    async def _transfer(self, ledger: Ledger) -> None:
        amount = self._dice.randint(1, 50)
        places = [(table, account) for table in BANK for account in range(ACCOUNTS)]
        # In one order for all: no deadlocks.
        for change, (table, account) in zip(
            (-amount, amount), sorted(self._dice.sample(places, 2)), strict=True
        ):
            row = await ledger.get(table, account)
            assert row is not None
            await ledger.put(table, account, int(str(row[1])) + change)

    async def _append(self, ledger: Ledger) -> None:
        first = self._begun // _LIST_APPENDS * _ACTIVE_LISTS
        places = [(table, first + number) for table in LISTS for number in range(_ACTIVE_LISTS)]
        for table, number in sorted(self._dice.sample(places, self._dice.randint(1, 3))):
            row = await ledger.get(table, number)
            before = f"{row[1]} " if row else ""
            await ledger.put(table, number, f"{before}{ledger.record.mark}")

    async def _move_members(self, ledger: Ledger) -> None:
        one, two = sorted(self._dice.sample(range(_MEMBERS), 2))
        rows = {key: await ledger.get("members", key) for key in (one, two)}
        for old, new in ((one, two), (two, one)):
            row = rows[old]
            if row is not None:
                await ledger.put("members", new, str(row[1]))
            elif rows[new] is not None:
                await ledger.delete("members", new)
        if rows[one] is None and rows[two] is None:
            await ledger.put("members", one, f"n{ledger.record.mark}")

    async def _change_bulk(self, ledger: Ledger) -> None:
        first = self._dice.randrange(BULK_ROWS)
        for number in range(first, min(first + self._dice.choice((1, 4, 20)), BULK_ROWS)):
            row = await ledger.get("bulk", number)
            if row is None or self._dice.random() < 0.7:
                await ledger.put("bulk", number, ledger.record.mark)
            else:
                await ledger.delete("bulk", number)


class StoreRun(Run):
    """See `Run`; writers live in an event loop of their own."""

    columns = COLUMNS
    fills = FILLS

    def __init__(self, world: World, dice: random.Random) -> None:
        super().__init__(world, dice)
        self._writers: list[Writer] = []
        self._ready = threading.Event()
        self._may_write = threading.Event()
        self._rate = 0.0
        self._ending: asyncio.Event | None = None
        self._loop = asyncio.new_event_loop()
        self._result: Future[Tables] = Future()

    def prepare(self) -> None:
        pass

    def changefeed(self) -> pb.CreateChangefeedRequest:
        tables = [
            pb.Table(schema_name=DATABASE, table_info_json=table.to_json())
            for table in TABLES.values()
        ]
        return pb.CreateChangefeedRequest(tables=tables)

    def fill(self) -> None:
        def run() -> None:
            try:
                self._result.set_result(asyncio.run(self._write()))
            except BaseException as err:  # noqa: BLE001 - told when writers are stopped
                self._result.set_exception(err)
                self._ready.set()

        threading.Thread(target=run, daemon=True).start()
        self._ready.wait()
        if self._result.done():
            self._result.result()

    def start_writers(self, rate: float) -> None:
        self._rate = rate
        self._may_write.set()

    def stop_writers(self) -> None:
        if self._ending is not None and not self._result.done():
            self._loop.call_soon_threadsafe(self._ending.set)
        self._result.result(_ANSWERS_S)

    def checker(self) -> Checker:
        records = sorted(
            (record for writer in self._writers for record in writer.records if record.commit_ts),
            key=lambda record: record.commit_ts,
        )
        return Checker(
            [record.transaction() for record in records],
            commit_ts=[record.commit_ts for record in records],
            dumped=self.dumped,
        )

    def at_source(self) -> Tables:
        return self._result.result()

    async def _write(self) -> Tables:
        """Until it is told to end; then what the store holds."""
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        address = self._world.addresses("coordinator", 2379)
        async with TransactionClient.open(address, timeout_s=_TIMEOUT_S) as client:
            self._writers = [
                Writer(client, number, random.Random(self._dice.getrandbits(64)))
                for number in range(1, _WRITERS + 1)
            ]
            await self._writers[0].fill()
            self._ready.set()
            await asyncio.to_thread(self._may_write.wait)
            async with asyncio.TaskGroup() as tasks:
                for writer in self._writers:
                    tasks.create_task(writer.run(_WRITERS / self._rate, self._ending))
            async with asyncio.timeout(_ANSWERS_S):
                await self._learn_outcomes(client)
                return await self._scan(client)

    async def _learn_outcomes(self, client: TransactionClient) -> None:
        """Of transactions whose answer was lost."""
        lost = [each for writer in self._writers for each in writer.records if not each.commit_ts]
        print(f"{len(lost)} transactions have an unknown outcome", file=sys.stderr)
        for record in lost:
            key = record_key(TABLES["marks"].id, record.mark)
            request = kvrpcpb.CheckTxnStatusRequest(
                primary_key=key,
                lock_ts=record.start_ts,
                caller_start_ts=_FOR_EVER,
                current_ts=_FOR_EVER,
                rollback_if_not_exist=True,
            )
            while True:
                with contextlib.suppress(TidemarkError):
                    answer = await client.kv.check_txn_status(request)
                    record.commit_ts = answer.commit_version
                    break
                await asyncio.sleep(_AGAIN_S)

    async def _scan(self, client: TransactionClient) -> Tables:
        snapshot = client.snapshot(await client.current_timestamp())
        tables: Tables = {}
        for name, table in TABLES.items():
            span = table_span(table.id)
            pairs = await snapshot.scan(span.start_key, span.end_key, _ALL)
            rows = [_row(name, key, value) for key, value in pairs]
            tables[name] = {row[0]: row for row in rows}
        return tables


def _row(table: str, key: bytes, value: bytes) -> Row:
    decoded = decode_record(TABLES[table], key, value)
    return tuple(cell if isinstance(cell, int) else str(cell) for cell in decoded.values())
