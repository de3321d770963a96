"""A transaction rolls back only what cannot have been committed."""

from typing import Any

import pytest

from server.rpc.key_error import CommitTsExpiredError, TxnAbortedError
from server.rpc.region_router import StoreRefusedError
from server.rpc.transaction import TransactionClient, UndeterminedError
from storage.backoff import GaveUpError


class Clock:
    """Counts."""

    def __init__(self) -> None:
        self.last = 0

    async def tso(self) -> int:
        self.last += 1
        return self.last


class Store:
    """Takes all but commits, which fail with `failures` first."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.committed: list[tuple[list[bytes], int]] = []
        self.rolled_back: list[bytes] = []

    async def prewrite(self, mutations: Any, **_: Any) -> None: ...

    async def commit(self, keys: Any, start_ts: int, commit_ts: int) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.committed.append((sorted(keys), commit_ts))

    async def batch_rollback(self, keys: Any, start_ts: int) -> None:
        self.rolled_back = sorted(keys)


async def commit(store: Store) -> int:
    client: Any = TransactionClient(Clock(), store, timeout_s=1, lock_wait_s=1)
    transaction = await client.begin()
    await transaction.put(b"a", b"1")
    await transaction.put(b"b", b"2")
    return await transaction.commit()


@pytest.mark.parametrize(
    "failure",
    [GaveUpError("no answer in time"), StoreRefusedError("the store answered INTERNAL: no answer")],
    ids=["no answer", "an answer that says nothing of the commit"],
)
async def test_a_commit_whose_outcome_is_not_known_is_not_rolled_back(failure: Exception) -> None:
    store = Store(failure)
    with pytest.raises(UndeterminedError, match="may or may not have happened"):
        await commit(store)
    assert store.rolled_back == []


async def test_a_commit_that_was_refused_is_rolled_back() -> None:
    store = Store(TxnAbortedError("rolled back by somebody else"))
    with pytest.raises(TxnAbortedError):
        await commit(store)
    assert store.rolled_back == [b"a", b"b"]


async def test_a_commit_below_what_a_reader_saw_is_tried_again_later() -> None:
    store = Store(CommitTsExpiredError("too early"))
    commit_ts = await commit(store)
    assert store.committed == [([b"a"], commit_ts), ([b"b"], commit_ts)]
