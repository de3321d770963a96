"""A client that is to be killed: `python -m server.demo.killed_client COORDINATOR KIND ACCOUNTS
SEED FIRST_TRANSFER`.

It moves money between many accounts at once, without pause, so that a SIGKILL finds it between
prewrite and commit: what it leaves behind are orphan locks, in several regions, that others have to
resolve. It prints a line when it has committed once; whatever moment it dies at, the bank's total
is untouched.
"""

import asyncio
import random
import sys

from server.demo.bank import Bank
from server.demo.client import BankClient, connect
from server.process import exit_with_parent
from storage.model.errors import ConflictError

_PAIRS = 12


async def main(coordinator: str, kind: str, accounts: int, seed: int, transfer: int) -> None:
    """Transfer until killed."""
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
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    )
