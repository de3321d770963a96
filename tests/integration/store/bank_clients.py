"""Clients of a bank on raw requests: every way to commit, dying in every place;
they write down what they saw.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.lock_resolver import LockResolver
from server.rpc.tikv import KvClient
from server.rpc.transaction import Snapshot
from tests.integration.store.isolation import End, Txn
from tests.integration.store.stubs import Stubs, row_key

ACCOUNTS = [row_key(table, handle) for table in (101, 102) for handle in (800, 801, 802)]
_KINDS = ("2pc", "async", "1pc")
_TRIES = 30


class DiedError(Exception):
    """The client is no more."""


class RefusedError(Exception):
    """The transaction cannot commit."""


@dataclass
class Bank:
    """What all clients of one run share."""

    stubs: Stubs
    kv: KvClient
    contexts: dict[bytes, kvrpcpb.Context]
    resolver: LockResolver = field(init=False)

    def __post_init__(self) -> None:
        self.resolver = LockResolver(self.stubs.pd, self.kv)

    async def read(self, keys: Sequence[bytes], ts: int) -> dict[bytes, int]:
        """Balances as of `ts`, past every lock."""
        found = await Snapshot(self.kv, self.resolver, ts, timeout_s=60.0).batch_get(keys)
        return {key: int(found.get(key, b"0")) for key in keys}

    def by_region(self, keys: Sequence[bytes]) -> list[list[bytes]]:
        """The keys, a list for each region."""
        parts: dict[int, list[bytes]] = defaultdict(list)
        for key in keys:
            parts[self.contexts[key].region_id].append(key)
        return list(parts.values())


class Transfer:
    """One transaction; it dies after `steps` requests."""

    def __init__(self, bank: Bank, rng: random.Random, txn: Txn, steps: int) -> None:
        self._bank = bank
        self._rng = rng
        self._txn = txn
        self._steps = steps
        self._ttl_ms = 60_000 if steps > _TRIES else 1
        self._keys = rng.sample(ACCOUNTS, 2)
        self._for_update_ts = 0

    async def run(self) -> None:
        """Move money, one way or the other.

        Raises:
            RefusedError: others were in the way; nothing of it stays.
            DiedError: anything may be left.
        """
        txn = self._txn
        if self._rng.random() < 0.4:
            await self._lock()
            balances = txn.locked_reads
        else:
            balances = txn.reads = await self._bank.read(self._keys, txn.start_ts)
        amount = self._rng.randint(1, 9)
        source, target = self._keys
        txn.writes = {source: balances[source] - amount, target: balances[target] + amount}
        computed = await self._prewrite(self._rng.choice(_KINDS))
        if not txn.commit_ts:
            txn.commit_ts = await self._commit(computed)

    async def undo(self) -> None:
        """Roll back what was prewritten, give back what was locked."""
        for key in self._keys:
            owner = {
                "context": self._bank.contexts[key],
                "start_version": self._txn.start_ts,
                "keys": [key],
            }
            await self._bank.stubs.tikv.KvBatchRollback(kvrpcpb.BatchRollbackRequest(**owner))

    async def _sent(self, call: Any, request: Any) -> Any:
        if self._steps == 0:
            raise DiedError
        self._steps -= 1
        answer = await call(request)
        assert not answer.HasField("region_error"), answer
        return answer

    async def _lock(self) -> None:
        for key in self._keys:
            value = await self._lock_key(key)
            self._txn.locked_reads[key] = int(value or b"0")

    async def _lock_key(self, key: bytes) -> bytes:
        for _ in range(_TRIES):
            self._for_update_ts = await self._bank.stubs.pd.tso()
            request = kvrpcpb.PessimisticLockRequest(
                context=self._bank.contexts[key],
                mutations=[kvrpcpb.Mutation(op=kvrpcpb.PessimisticLock, key=key)],
                primary_lock=self._keys[0],
                start_version=self._txn.start_ts,
                for_update_ts=self._for_update_ts,
                lock_ttl=self._ttl_ms,
                wait_timeout=100,
                return_values=True,
            )
            answer = await self._sent(self._bank.stubs.tikv.KvPessimisticLock, request)
            if not answer.errors:
                value: bytes = answer.values[0]
                return value
            if answer.errors[0].HasField("locked"):
                await self._bank.resolver.resolve([answer.errors[0].locked], 0)
            elif not answer.errors[0].HasField("conflict"):
                break  # a deadlock, or somebody took us for dead
        raise RefusedError

    async def _prewrite(self, kind: str) -> int:
        """Prewrite region by region; returns the commit_ts that async commit computed,
        0 for an ordinary commit.
        """
        parts = self._bank.by_region(self._keys)
        one_pc, async_commit = kind == "1pc" and len(parts) == 1, kind == "async"
        computed: list[int] = []
        for part in parts:
            request = kvrpcpb.PrewriteRequest(
                context=self._bank.contexts[part[0]],
                mutations=[
                    kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=b"%d" % self._txn.writes[key])
                    for key in part
                ],
                primary_lock=self._keys[0],
                start_version=self._txn.start_ts,
                lock_ttl=self._ttl_ms,
                min_commit_ts=max(self._txn.start_ts, self._for_update_ts) + 1,
                for_update_ts=self._for_update_ts,
                pessimistic_actions=[1] * len(part) if self._for_update_ts else [],
                use_async_commit=async_commit,
                try_one_pc=one_pc,
                secondaries=self._keys[1:] if async_commit and self._keys[0] in part else [],
            )
            answer = await self._prewrite_part(request)
            self._txn.commit_ts = answer.one_pc_commit_ts
            computed.append(answer.min_commit_ts)
        return max(computed) if all(computed) else 0

    async def _prewrite_part(self, request: kvrpcpb.PrewriteRequest) -> kvrpcpb.PrewriteResponse:
        for _ in range(_TRIES):
            answer: kvrpcpb.PrewriteResponse = await self._sent(
                self._bank.stubs.tikv.KvPrewrite, request
            )
            if not answer.errors:
                return answer
            if not all(error.HasField("locked") for error in answer.errors):
                break
            if await self._bank.resolver.resolve([error.locked for error in answer.errors], 0) > 0:
                await asyncio.sleep(self._rng.random() * 0.02)
        raise RefusedError

    async def _commit(self, computed: int) -> int:
        """Commit both keys, primary first; a reader may have pushed min_commit_ts,
        then it is later.
        """
        commit_ts = computed or await self._bank.stubs.pd.tso()
        for key in self._keys:
            for _ in range(_TRIES):
                request = kvrpcpb.CommitRequest(
                    context=self._bank.contexts[key],
                    start_version=self._txn.start_ts,
                    keys=[key],
                    commit_version=commit_ts,
                )
                answer = await self._sent(self._bank.stubs.tikv.KvCommit, request)
                if not answer.HasField("error"):
                    break
                assert not computed, f"an async commit was not taken: {answer}"
                if not answer.error.HasField("commit_ts_expired"):
                    raise RefusedError
                commit_ts = await self._bank.stubs.pd.tso()
        return commit_ts


async def client(bank: Bank, rng: random.Random, transfers: int, death_rate: float) -> list[Txn]:
    """Try that many transfers; `death_rate` of them are abandoned somewhere."""
    txns: list[Txn] = []
    for _ in range(transfers):
        txn = Txn(await bank.stubs.pd.tso())
        txns.append(txn)
        transfer = Transfer(
            bank, rng, txn, rng.randint(0, 6) if rng.random() < death_rate else 1000
        )
        try:
            await transfer.run()
            txn.end = End.COMMITTED
        except DiedError:
            continue
        except RefusedError:
            txn.end = End.FAILED
            await transfer.undo()
    return txns
