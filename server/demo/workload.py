"""The bank's day: transfers between accounts from several tellers, some rolled back, some old
transfers deleted; and clients that are killed in the middle of one.

Such a client is a process of its own: `python -m server.demo.workload COORDINATOR KIND ACCOUNTS
SEED FIRST_TRANSFER`. It moves money between many accounts at once, without pause, so that a SIGKILL
finds it between prewrite and commit: what it leaves behind are orphan locks, in several regions,
that others have to resolve. It prints a line when it has committed once; whatever moment it dies
at, the bank's total is untouched.
"""

import asyncio
import random
import sys
from dataclasses import dataclass, field

from server.demo.bank import Bank
from server.demo.client import BankClient, Transaction, connect
from server.process import exit_with_parent
from storage.model.errors import ConflictError

_TRIES = 20
_RETRY_SECONDS = 0.02
_ROLLBACK_SHARE = 0.05
_PESSIMISTIC_SHARE = 0.5
_DELETE_SHARE = 0.1
_PAIRS = 12


@dataclass(slots=True)
class Tally:
    """Counts the transfers that the tellers have made."""

    committed: int = 0
    rolled_back: int = 0
    retried: int = 0
    row_changes: int = 0
    killed_clients: int = 0
    failures: list[str] = field(default_factory=list)


class Teller:
    """A sequence of transfers that a seed determines, except for other tellers' changes of the same
    accounts.
    """

    def __init__(
        self, bank: Bank, client: BankClient, seed: int, first_transfer: int, tally: Tally
    ) -> None:
        self._bank = bank
        self._client = client
        self._random = random.Random(seed)
        self._next_transfer = first_transfer
        self._own_transfers: list[int] = []
        self._tally = tally

    async def work(self, transactions: int, interval_s: float) -> None:
        """Do that many transfers, each tried again until it commits, is rolled back on purpose,
        or fails for good.

        One begins every `interval_s` seconds; a teller that is late catches up.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        for _ in range(transactions):
            await self._transfer()
            due += interval_s
            await asyncio.sleep(max(0.0, due - loop.time()))

    async def _transfer(self) -> None:
        pessimistic = self._random.random() < _PESSIMISTIC_SHARE
        source, target = sorted(self._random.sample(range(1, self._bank.accounts + 1), 2))
        # Pessimistic tellers lock in key order: no deadlocks.
        if self._random.random() < 0.5 and not pessimistic:
            source, target = target, source
        amount = self._random.randint(1, 100)
        for attempt in range(_TRIES):
            try:
                transaction = await self._client.begin(pessimistic=pessimistic)
                await self._book(transaction, source, target, amount)
            except ConflictError as err:
                self._tally.retried += 1
                self._tally.failures.append(err.message)
                del self._tally.failures[:-10]
                await asyncio.sleep(_RETRY_SECONDS * (attempt + 1) * self._random.random())
            else:
                return

    async def _book(self, transaction: Transaction, source: int, target: int, amount: int) -> None:
        try:
            changes = await self._write(transaction, source, target, amount)
        except (ConflictError, asyncio.CancelledError):
            # A client keeps the locks of a transaction that was left open alive.
            await _release(transaction)
            raise
        # Rolled back after all was written, as a client that changes its mind late: no row of it
        # may reach the lake.
        if self._random.random() < _ROLLBACK_SHARE:
            await transaction.rollback()
            self._tally.rolled_back += 1
            return
        transfer = self._next_transfer
        # Counted before the commit: one whose answer is lost may have happened, and its number must
        # not be used twice.
        self._next_transfer += 1
        await transaction.commit()
        self._own_transfers.append(transfer)
        self._tally.committed += 1
        self._tally.row_changes += changes

    async def _write(self, transaction: Transaction, source: int, target: int, amount: int) -> int:
        bank, stamp = self._bank, self._next_transfer
        for account, change in ((source, -amount), (target, amount)):
            key = bank.account_key(account)
            row = await transaction.get(key)
            if row is None:
                raise ConflictError(f"account {account} is missing")
            await transaction.put(key, bank.moved(key, row, change, stamp))
        await transaction.put(
            bank.transfer_key(stamp), bank.new_transfer(stamp, source, target, amount)
        )
        if self._own_transfers and self._random.random() < _DELETE_SHARE:
            deleted = self._own_transfers.pop(self._random.randrange(len(self._own_transfers)))
            await transaction.delete(bank.transfer_key(deleted))
            return 4
        return 3


async def _release(transaction: Transaction) -> None:
    """Roll back as far as possible; remaining locks are resolved by the transactions that meet
    them.
    """
    try:
        await transaction.rollback()
    except ConflictError:
        return


async def open_accounts(bank: Bank, client: BankClient) -> None:
    """Write all accounts in one transaction: no cut shows some of them only."""
    transaction = await client.begin(pessimistic=False)
    for account in range(1, bank.accounts + 1):
        await transaction.put(bank.account_key(account), bank.new_account(account))
    await transaction.commit()


async def transfer_until_killed(
    coordinator: str, kind: str, accounts: int, seed: int, transfer: int
) -> None:
    """The work of a client that is to be killed."""
    bank = Bank(accounts)
    chosen = random.Random(seed)
    width = min(2 * _PAIRS, accounts // 2 * 2)
    async with connect(kind, coordinator) as client:
        while True:
            try:
                await _move(bank, client, chosen.sample(range(1, accounts + 1), width), transfer)
            except ConflictError:
                await asyncio.sleep(0.01)
                continue
            print("committed", flush=True)
            transfer += _PAIRS


async def _move(bank: Bank, client: BankClient, accounts: list[int], transfer: int) -> None:
    transaction = await client.begin(pessimistic=False)
    for pair in range(len(accounts) // 2):
        source, target = accounts[2 * pair], accounts[2 * pair + 1]
        for account, change in ((source, -1), (target, 1)):
            key = bank.account_key(account)
            row = await transaction.get(key)
            if row is None:
                raise ConflictError(f"account {account} is missing")
            await transaction.put(key, bank.moved(key, row, change, transfer))
        booked = transfer + pair
        await transaction.put(
            bank.transfer_key(booked), bank.new_transfer(booked, source, target, 1)
        )
    await transaction.commit()


if __name__ == "__main__":
    exit_with_parent()
    asyncio.run(
        transfer_until_killed(
            sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
        )
    )
