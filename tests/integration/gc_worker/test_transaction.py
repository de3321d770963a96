"""Our own transaction client on a real coordinator and store: isolation, conflicts,
locks of others.
"""

import asyncio
import contextlib
import random
from typing import Any

import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.key_error import AlreadyExistError, WriteConflictError
from server.rpc.transaction import LockWaitError, TransactionClient, TransactionEndedError
from storage.model.errors import ConflictError, TidemarkError, UnavailableError

ACCOUNTS = [b"account%d" % number for number in range(6)]
TOTAL = 600


async def test_a_transaction_reads_its_own_writes_and_others_only_its_commit(cluster: Any) -> None:
    client: TransactionClient = cluster.client
    await cluster.put((b"a", b"1"), (b"h", b"1"), (b"z", b"1"))
    transaction = await client.begin()
    await transaction.put(b"b", b"2")
    await transaction.delete(b"h")
    assert await transaction.get(b"h") is None
    assert await transaction.batch_get([b"a", b"b", b"h"]) == {b"a": b"1", b"b": b"2"}
    assert await transaction.scan(b"", b"", 10) == [(b"a", b"1"), (b"b", b"2"), (b"z", b"1")]
    assert await transaction.scan(b"", b"", 2) == [(b"a", b"1"), (b"b", b"2")]
    before = await client.current_timestamp()
    commit_ts = await transaction.commit()
    assert [key for key, _ in await client.snapshot(before).scan(b"", b"", 10)] == [
        b"a",
        b"h",
        b"z",
    ]
    assert [key for key, _ in await client.snapshot(commit_ts).scan(b"", b"", 10)] == [
        b"a",
        b"b",
        b"z",
    ]


async def test_of_two_writers_of_a_key_the_second_to_commit_loses(cluster: Any) -> None:
    one, two = await cluster.client.begin(), await cluster.client.begin()
    for transaction, value in ((one, b"1"), (two, b"2")):
        await transaction.put(b"a", value)
        await transaction.put(b"z", value)
    await one.commit()
    with pytest.raises(WriteConflictError):
        await two.commit()
    assert await cluster.locked_keys() == []
    assert dict(await cluster.client.kv.scan(b"", b"", await cluster.now(), 9)) == {
        b"a": b"1",
        b"z": b"1",
    }


async def test_an_insert_of_what_is_there_fails_whole(cluster: Any) -> None:
    await cluster.put((b"a", b"1"))
    transaction = await cluster.client.begin()
    await transaction.insert(b"a", b"2")
    await transaction.put(b"z", b"2")
    with pytest.raises(AlreadyExistError):
        await transaction.commit()
    assert await cluster.client.kv.get(b"z", await cluster.now()) is None
    assert await cluster.locked_keys() == []


async def test_what_was_only_locked_makes_a_conflicting_writer_fail(cluster: Any) -> None:
    await cluster.put((b"a", b"1"))
    one, two = await cluster.client.begin(), await cluster.client.begin()
    assert await one.get_for_update(b"a") == b"1"
    await one.put(b"z", b"1")
    await two.put(b"a", b"2")
    await one.commit()
    with pytest.raises(WriteConflictError):
        await two.commit()


async def test_a_pessimistic_lock_is_waited_for_but_not_for_ever(cluster: Any) -> None:
    holder = await cluster.client.begin(pessimistic=True)
    await holder.put(b"a", b"1")
    async with TransactionClient.open(cluster.coordinator, lock_wait_s=0.5) as impatient:
        other = await impatient.begin(pessimistic=True)
        with pytest.raises(LockWaitError, match="begin again"):
            await other.put(b"a", b"2")
        await other.rollback()
    await holder.commit()
    with pytest.raises(TransactionEndedError):
        await holder.put(b"b", b"1")
    assert await cluster.locked_keys() == []


async def test_rolling_back_leaves_neither_data_nor_locks(cluster: Any) -> None:
    for pessimistic in (False, True):
        transaction = await cluster.client.begin(pessimistic=pessimistic)
        for key in (b"a", b"h", b"z"):
            await transaction.put(key, b"1")
        await transaction.rollback()
    assert await cluster.locked_keys() == []
    assert await cluster.client.kv.scan(b"", b"", await cluster.now(), 9) == []


async def test_a_reader_passes_the_expired_locks_of_the_dead(cluster: Any) -> None:
    kv, start_ts = cluster.client.kv, await cluster.now()
    mutations = [
        kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=b"new") for key in (b"a", b"h", b"z")
    ]
    await kv.prewrite(mutations, primary=b"a", start_version=start_ts, lock_ttl_ms=1)
    commit_ts = await cluster.now()
    await kv.commit([b"a"], start_ts, commit_ts)
    undone = await cluster.now()
    await kv.prewrite(
        [kvrpcpb.Mutation(op=kvrpcpb.Put, key=b"b", value=b"never")],
        primary=b"b",
        start_version=undone,
        lock_ttl_ms=1,
    )
    now = await cluster.now()
    found = dict(await cluster.client.snapshot(now).scan(b"", b"", 10))
    assert found == dict.fromkeys((b"a", b"h", b"z"), b"new")
    assert (
        b"b" not in await cluster.locked_keys()
    )  # committed ones may be read through instead of removed


async def test_the_banks_total_is_the_same_in_every_snapshot(cluster: Any) -> None:
    client: TransactionClient = cluster.client
    await cluster.put(*((account, b"%d" % (TOTAL // len(ACCOUNTS))) for account in ACCOUNTS))
    done = asyncio.Event()
    totals: list[int] = []

    async def audit() -> None:
        while not done.is_set():
            seen = await client.snapshot(await client.current_timestamp()).scan(
                b"account", b"accounu", 100
            )
            totals.append(sum(int(value) for _, value in seen))

    async def teller(seed: int) -> int:
        chosen, committed = random.Random(seed), 0
        for _ in range(12):
            source, target = sorted(chosen.sample(ACCOUNTS, 2))
            pessimistic = chosen.random() < 0.5
            transaction = await client.begin(pessimistic=pessimistic)
            read = transaction.get_for_update if pessimistic else transaction.get
            try:
                balances = [int(await read(account) or b"0") for account in (source, target)]
                await transaction.put(source, b"%d" % (balances[0] - 1))
                await transaction.put(target, b"%d" % (balances[1] + 1))
                await transaction.commit()
                committed += 1
            except (
                ConflictError,
                UnavailableError,
            ):  # somebody was faster, perhaps again and again
                with contextlib.suppress(TidemarkError):
                    await transaction.rollback()
        return committed

    async with asyncio.TaskGroup() as tasks:
        auditor = tasks.create_task(audit())
        async with asyncio.TaskGroup() as tellers:
            working = [tellers.create_task(teller(seed)) for seed in range(4)]
        done.set()
    assert auditor.done()
    assert sum(task.result() for task in working) > 0
    assert totals
    assert set(totals) == {TOTAL}
