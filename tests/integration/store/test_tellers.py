"""The demo's tellers through the Rust client: one who is called away leaves no lock behind."""

import asyncio
from typing import Any

import pytest

from server.demo.bank import Bank
from server.demo.client import FOREIGN, ForeignClient, ForeignTransaction, connect
from server.demo.workload import Tally, Teller, open_accounts
from tests.integration.store.daemons import Cluster

asynchronous = pytest.importorskip(
    "tikv_client.asynchronous", reason="its wheels are for Linux x86-64 and CPython 3.11 only"
)

STORE_FLAGS = (
    "--wait-for-lock-timeout",
    "0.1",
)  # this client asks ten times, each time for as long as the store likes


class Interrupted(ForeignTransaction):
    """Its teller is called away when the first account is locked, and not written yet."""

    async def put(self, key: bytes, value: bytes) -> None:
        teller = asyncio.current_task()
        assert teller is not None
        teller.cancel()
        await asyncio.sleep(0)


class Interrupting(ForeignClient):
    """A client of which every teller is called away."""

    async def begin(self, *, pessimistic: bool) -> Interrupted:
        return Interrupted(await self._inner.begin(pessimistic), pessimistic=pessimistic)


async def test_a_teller_who_is_called_away_leaves_no_lock(cluster: Cluster) -> None:
    address = cluster.coordinator.addr

    async def reach() -> Any:
        return await asynchronous.TransactionClient.connect([address])

    client = Interrupting(await reach(), reach)
    bank = Bank(2)
    teller = Teller(bank, client, seed=1, first_transfer=1 << 30, tally=Tally())
    async with connect(FOREIGN, address) as other:
        await open_accounts(bank, other)
        async with asyncio.TaskGroup() as tasks:
            away = tasks.create_task(
                teller.work(1, 0.0)
            )  # by this seed the transfer is a pessimistic one
        assert away.cancelled()
        after = await other.begin(pessimistic=True)
        for account in (1, 2):
            assert await after.get(bank.account_key(account)) == bank.new_account(account)
        await after.rollback()
