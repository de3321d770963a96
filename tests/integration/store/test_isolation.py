"""Snapshot isolation over random concurrent histories against a real store;
the checker itself is tested below.
"""

import asyncio
import random

import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.tikv import KvClient
from tests.integration.store.bank_clients import ACCOUNTS, Bank, client
from tests.integration.store.daemons import Cluster
from tests.integration.store.isolation import End, History, Txn, Version, faults, total_at
from tests.integration.store.stubs import Stubs, row_key, stubs_of

STORE_FLAGS = ("--wait-for-lock-timeout", "0.1")
CLIENTS, TRANSFERS = 6, 30


async def kept(stubs: Stubs) -> dict[bytes, list[Version]]:
    """Every version of every account."""
    history: dict[bytes, list[Version]] = {}
    for key in ACCOUNTS:
        request = kvrpcpb.MvccGetByKeyRequest(context=await stubs.context(key), key=key)
        writes = (await stubs.tikv.MvccGetByKey(request)).info.writes
        puts = [write for write in writes if write.type == kvrpcpb.Put]
        history[key] = sorted(
            (Version(write.commit_ts, write.start_ts, int(write.short_value)) for write in puts),
            key=lambda version: version.commit_ts,
        )
    return history


async def audit(bank: Bank, rounds: int) -> list[Txn]:
    """Read everything at one timestamp, again and again; some of them twice."""
    reads: list[Txn] = []
    for _ in range(rounds):
        ts = await bank.stubs.pd.tso()
        first = await bank.read(ACCOUNTS, ts)
        assert sum(first.values()) == 0, "money appeared or vanished"
        reads.append(Txn(ts, first, end=End.COMMITTED))
        await asyncio.sleep(0.01)
        assert await bank.read(ACCOUNTS, ts) == first, "a read at a timestamp changed"
    return reads


@pytest.mark.parametrize("death_rate", [0.0, 0.3])
async def test_random_concurrent_transfers_are_isolated(
    cluster: Cluster, death_rate: float
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    async with stubs_of(cluster) as stubs, KvClient.open(stubs.pd) as kv:
        bank = Bank(stubs, kv, {key: await stubs.context(key) for key in ACCOUNTS})
        async with asyncio.TaskGroup() as tasks:
            auditing = tasks.create_task(audit(bank, 10))
            running = [
                tasks.create_task(client(bank, random.Random(seed + number), TRANSFERS, death_rate))
                for number in range(CLIENTS)
            ]
        end_ts = await stubs.pd.tso()
        await bank.read(ACCOUNTS, end_ts)
        await asyncio.sleep(0.01)
        await bank.read(ACCOUNTS, await stubs.pd.tso())  # what the dead left is resolved
        history = await kept(stubs)
    txns = [txn for task in running for txn in task.result()]
    assert faults(history, [*txns, *auditing.result()]) == []
    for version in (version for versions in history.values() for version in versions):
        assert total_at(history, version.commit_ts) == 0
    committed = sum(txn.end is End.COMMITTED for txn in txns)
    assert committed > len(txns) // 4, "too few transactions came through to prove anything"


async def test_write_skew_is_allowed(cluster: Cluster) -> None:
    one, other = row_key(101, 810), row_key(101, 811)
    async with stubs_of(cluster) as stubs:
        first, second = await stubs.pd.tso(), await stubs.pd.tso()
        for start_ts, looked_at in ((first, other), (second, one)):
            assert (await stubs.get(looked_at, start_ts)).not_found
        for start_ts, written in ((first, one), (second, other)):
            await stubs.prewrite(written, b"v", start_ts=start_ts)
        await stubs.commit(one, first)
        await stubs.commit(other, second)


HISTORY: History = {
    b"a": [Version(1, 0, 100), Version(20, 10, 90)],
    b"b": [Version(1, 0, 100), Version(20, 10, 110)],
}


@pytest.mark.parametrize(
    ("txn", "right"),
    [
        (Txn(10, {b"a": 100}, {}, {b"a": 90, b"b": 110}, 20, End.COMMITTED), True),
        (Txn(10, {}, {b"a": 100}, {b"a": 90, b"b": 110}, 20, End.COMMITTED), True),
        (Txn(10, {}, {}, {b"a": 90, b"b": 110}), True),
        (Txn(15, {b"a": 100}, end=End.COMMITTED), True),
        (Txn(15, {}, {}, {b"a": 1}, 0, End.FAILED), True),
        (
            Txn(10, {}, {}, {b"a": 90, b"b": 110}, 21, End.COMMITTED),
            False,
        ),  # another commit_ts than it was told
        (Txn(10, {}, {}, {b"a": 90, b"b": 110}, 0, End.FAILED), False),  # committed after all
        (Txn(10, {}, {}, {b"a": 90, b"b": 110, b"c": 1}), False),  # torn
        (Txn(11, {}, {}, {b"a": 90}, 21, End.COMMITTED), False),  # lost
        (Txn(25, {b"a": 100}, end=End.COMMITTED), False),  # read something old
        (
            Txn(10, {}, {b"a": 99}, {b"a": 90, b"b": 110}, 20, End.COMMITTED),
            False,
        ),  # locked something else
    ],
)
def test_the_checker_knows_right_from_wrong(txn: Txn, right: bool) -> None:
    assert (faults(HISTORY, [txn]) == []) == right


def test_the_checker_finds_lost_updates_and_doubled_timestamps() -> None:
    lost = {b"a": [Version(20, 10, 1), Version(30, 15, 2)]}
    assert faults(lost, [Txn(15, {b"a": 0}, {}, {b"a": 2}, 30, End.COMMITTED)])
    assert faults({b"a": [Version(20, 10, 1), Version(20, 15, 2)]}, [])
