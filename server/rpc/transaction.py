"""Our own transaction client: Percolator's two phases over KvClient, optimistic and pessimistic,
as in client-go; and snapshots of the store.

A `Snapshot` reads at one timestamp. It resolves the locks of dead transactions, and passes those of
live ones whose min_commit_ts can be pushed beyond its timestamp. A `Transaction` reads its
snapshot, and buffers its writes until `commit`. The commit of the primary key decides; the
secondary keys may be committed by readers or GC as well. `Heartbeats` keep the locks of long
pessimistic transactions alive.

Tests drive the store with it, and the demo does where tikv-client has no wheel; method names are
tikv-client's.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import structlog
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.credentials import SecurityConfig
from server.rpc.key_error import CommitTsExpiredError, LockedError, WriteConflictError
from server.rpc.lock_resolver import LockResolver
from server.rpc.pd import PdClient
from server.rpc.region_router import StoreRefusedError
from server.rpc.tikv import BypassedLocks, KvClient, Pairs
from storage.backoff import Backoffer, GaveUpError
from storage.model.errors import ClosedError, ConflictError, TidemarkError
from storage.tasks import background_tasks

T = TypeVar("T")
_OPTIMISTIC_TTL_MS = 3_000
_PESSIMISTIC_TTL_MS = 20_000
_LOCK_WAIT_MS = 1_000
_HEARTBEAT_S = 10.0

_log = structlog.get_logger(__name__)


class UndeterminedError(ConflictError):
    """The answer to the deciding commit was lost: read the keys to learn whether it happened."""

    code = "ErrUndetermined"


class LockWaitError(ConflictError):
    """Others kept a key locked for too long, perhaps because they wait for us:
    roll back and begin again.
    """

    code = "ErrLockWaitTimeout"


class TransactionEndedError(ClosedError):
    """The transaction was committed or rolled back already."""

    code = "ErrTransactionEnded"


class Snapshot:
    """The store as of `ts`: reads see exactly what was committed at or before it."""

    def __init__(self, kv: KvClient, resolver: LockResolver, ts: int, *, timeout_s: float) -> None:
        self.ts = ts
        self._kv = kv
        self._resolver = resolver
        self._timeout_s = timeout_s

    async def get(self, key: bytes) -> bytes | None:
        """The value of `key`.

        Raises:
            GaveUpError: a live transaction kept it locked for too long, or no store answered.
        """
        return await self._unlocked(lambda passing: self._kv.get(key, self.ts, passing))

    async def batch_get(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """The values of those `keys` that exist. Raises as `get`."""
        requested = list(keys)
        return await self._unlocked(lambda passing: self._kv.batch_get(requested, self.ts, passing))

    async def scan(
        self, start_key: bytes, end_key: bytes, limit: int, *, key_only: bool = False
    ) -> Pairs:
        """Return at most `limit` pairs of `[start_key, end_key)` in key order; an empty end is
        unbounded.

        Raises as `get`.
        """
        return await self._unlocked(
            lambda passing: self._kv.scan(
                start_key, end_key, self.ts, limit, key_only=key_only, passing=passing
            )
        )

    async def scan_columns(
        self, start_key: bytes, end_key: bytes, limit: int
    ) -> tuple[list[bytes], list[bytes]]:
        """See `KvClient.scan_columns`. Raises as `get`."""
        return await self._unlocked(
            lambda passing: self._kv.scan_columns(
                start_key, end_key, self.ts, limit, passing=passing
            )
        )

    async def last_key(self, start_key: bytes, end_key: bytes) -> bytes | None:
        """The greatest key of `[start_key, end_key)`, if there is one. Raises as `get`."""
        return await self._unlocked(
            lambda passing: self._kv.last_key(start_key, end_key, self.ts, passing=passing)
        )

    async def _unlocked(self, read: Callable[[BypassedLocks], Awaitable[T]]) -> T:
        backoff, passing = Backoffer(self._timeout_s), BypassedLocks()
        while True:
            try:
                return await read(passing)
            except LockedError as err:
                passable, wait_s = await self._resolver.resolve_for_read(err.locks, self.ts)
                passing |= passable
                if wait_s > 0 or backoff.remaining_s == 0:
                    await backoff.wait(err)


async def clear_or_wait(
    resolver: LockResolver, err: LockedError, caller_start_ts: int, backoff: Backoffer
) -> None:
    """Resolve the locks of `err`; sleep before the next attempt if one of them lives.

    Raises:
        GaveUpError: the deadline of `backoff` passed.
    """
    if await resolver.resolve(err.locks, caller_start_ts) > 0 or backoff.remaining_s == 0:
        await backoff.wait(err)


class TransactionClient:
    """A cluster to run transactions on; made by `open`."""

    def __init__(self, pd: PdClient, kv: KvClient, *, timeout_s: float, lock_wait_s: float) -> None:
        self.pd = pd
        self.kv = kv
        self.timeout_s = timeout_s
        self.lock_wait_s = lock_wait_s
        self.resolver = LockResolver(pd, kv)
        self.heartbeats = Heartbeats()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        coordinator: str,
        security: SecurityConfig | None = None,
        *,
        timeout_s: float = 40.0,
        lock_wait_s: float = 5.0,
    ) -> AsyncIterator["TransactionClient"]:
        """Connect for the block.

        Reads and commits wait at most `timeout_s` seconds for locks and stores, pessimistic locks
        `lock_wait_s` seconds for each other: stores need not detect deadlocks, so waiting has to
        end.
        """
        async with (
            PdClient.open(coordinator, security) as pd,
            KvClient.open(pd, security) as kv,
        ):
            client = cls(pd, kv, timeout_s=timeout_s, lock_wait_s=lock_wait_s)
            async with background_tasks(client.heartbeats.run()):
                yield client

    async def current_timestamp(self) -> int:
        """A fresh timestamp."""
        return await self.pd.tso()

    async def begin(self, *, pessimistic: bool = False) -> "Transaction":
        """A transaction that reads as of now; it must be ended by `commit` or `rollback`."""
        return Transaction(self, await self.pd.tso(), pessimistic=pessimistic)

    def snapshot(self, ts: int) -> Snapshot:
        """Reads as of `ts`."""
        return Snapshot(self.kv, self.resolver, ts, timeout_s=self.timeout_s)


class WriteBuffer:
    """A transaction's uncommitted writes, the last mutation of each key; its own reads see them
    before the store's values. Pure.
    """

    def __init__(self) -> None:
        self._mutations: dict[bytes, kvrpcpb.Mutation] = {}

    def __bool__(self) -> bool:
        return bool(self._mutations)

    def __contains__(self, key: bytes) -> bool:
        return key in self._mutations

    @property
    def mutations(self) -> Collection[kvrpcpb.Mutation]:
        """The last mutation of each key."""
        return self._mutations.values()

    @property
    def keys(self) -> set[bytes]:
        """The keys that were written or locked."""
        return set(self._mutations)

    def add(self, mutation: kvrpcpb.Mutation) -> None:
        """Record a mutation, in place of an earlier one of its key."""
        self._mutations[mutation.key] = mutation

    def lock(self, keys: Iterable[bytes]) -> None:
        """Mutations that change nothing, for those of `keys` that have none."""
        for key in keys:
            self._mutations.setdefault(key, kvrpcpb.Mutation(op=kvrpcpb.Lock, key=key))

    def value(self, key: bytes) -> bytes | None:
        """The value that a read gives of a key in the buffer; None if it was deleted."""
        mutation = self._mutations[key]
        return mutation.value if mutation.op in (kvrpcpb.Put, kvrpcpb.Insert) else None

    def between(self, start_key: bytes, end_key: bytes) -> set[bytes]:
        """Its keys in `[start_key, end_key)`; an empty end is no end."""
        return {
            key for key in self._mutations if start_key <= key and (not end_key or key < end_key)
        }

    def over(self, stored: Mapping[bytes, bytes], keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """The store's pairs as the transaction sees them, which wrote `keys`."""
        seen = {**stored, **{key: self.value(key) for key in keys}}
        return {key: value for key, value in seen.items() if value is not None}


class Transaction:
    """One transaction; not to be used by several tasks at a time."""

    def __init__(self, client: TransactionClient, start_ts: int, *, pessimistic: bool) -> None:
        self.start_ts = start_ts
        self._client = client
        self._kv = client.kv
        self._snapshot = client.snapshot(start_ts)
        self._pessimistic = pessimistic
        self._began = asyncio.get_running_loop().time()
        self._writes = WriteBuffer()
        self._locked: set[bytes] = set()  # pessimistically, in the store
        self._lock_only: set[bytes] = set()
        self._for_update_ts = 0
        self._primary: bytes | None = None
        self._ended = False

    async def get(self, key: bytes) -> bytes | None:
        """The value of `key`, own writes included."""
        if key in self._writes:
            return self._writes.value(key)
        return await self._snapshot.get(key)

    async def batch_get(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """The values of those `keys` that exist, own writes included."""
        keys = set(keys)
        own = keys & self._writes.keys
        return self._writes.over(await self._snapshot.batch_get(keys - own), own)

    async def scan(self, start_key: bytes, end_key: bytes, limit: int) -> Pairs:
        """Return at most `limit` pairs of `[start_key, end_key)` in key order, own writes included;
        an empty end is unbounded.
        """
        own = self._writes.between(start_key, end_key)
        # As many more as it may have deleted itself.
        stored = await self._snapshot.scan(start_key, end_key, limit + len(own))
        return sorted(self._writes.over(dict(stored), own).items())[:limit]

    async def get_for_update(self, key: bytes) -> bytes | None:
        """Lock `key` and return its newest value, own writes first: a pessimistic read before a
        write.

        An optimistic one reads its snapshot, and fails at commit if the key has changed since.

        Raises:
            LockWaitError: others kept it locked for too long.
            DeadlockError: waiting would never end; roll back.
        """
        if not self._pessimistic:
            self._lock_only.add(key)
            return await self.get(key)
        newest = await self._lock([key])
        return self._writes.value(key) if key in self._writes else newest.get(key)

    async def put(self, key: bytes, value: bytes) -> None:
        """Set `key`; a pessimistic transaction locks it first, and raises as `get_for_update`."""
        await self._write(kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=value))

    async def insert(self, key: bytes, value: bytes) -> None:
        """Set `key`, which must not exist; `commit` raises AlreadyExistError if it does."""
        await self._write(kvrpcpb.Mutation(op=kvrpcpb.Insert, key=key, value=value))

    async def delete(self, key: bytes) -> None:
        """Remove `key`; a pessimistic transaction locks it first,
        and raises as `get_for_update`.
        """
        await self._write(kvrpcpb.Mutation(op=kvrpcpb.Del, key=key))

    async def commit(self) -> int:
        """Two-phase commit; returns the commit_ts (0 if nothing was written).

        Durable when it returns.

        Raises:
            ConflictError: somebody else was first; everything is rolled back, begin again.
            UndeterminedError: the deciding answer was lost.
        """
        self._end()
        self._writes.lock(self._locked | self._lock_only)
        if not self._writes:
            return 0
        primary = self._primary or min(self._writes.keys)
        try:
            await self._prewrite(primary)
            commit_ts = await self._commit_primary(primary)
        except UndeterminedError:
            # Not rolled back: the primary may be committed.
            raise
        except TidemarkError:
            await self._undo()
            raise
        await self._commit_secondaries(self._writes.keys - {primary}, commit_ts)
        return commit_ts

    async def rollback(self) -> None:
        """Forget the writes and release the locks; after `commit`, or a second time,
        it does nothing.
        """
        if not self._ended:
            self._end()
            await self._undo()

    async def heartbeat(self) -> None:
        """Keep the locks of a long pessimistic transaction alive."""
        assert self._primary is not None
        try:
            await self._kv.heartbeat(self._primary, self.start_ts, self._ttl_ms())
        except TidemarkError as err:
            _log.warning(
                "transaction heartbeat failed",
                start_ts=self.start_ts,
                code=err.code,
                error=err.message,
            )

    async def _write(self, mutation: kvrpcpb.Mutation) -> None:
        if self._ended:
            raise TransactionEndedError("the transaction has ended; begin another one")
        if self._pessimistic and mutation.key not in self._locked:
            await self._lock([mutation.key])
        self._writes.add(mutation)

    async def _lock(self, keys: list[bytes]) -> dict[bytes, bytes]:
        if self._ended:
            raise TransactionEndedError("the transaction has ended; begin another one")
        self._primary = self._primary or min(keys)
        # Before the answer: if that is lost, the locks must be rolled back as well.
        self._locked.update(keys)
        backoff = Backoffer(self._client.lock_wait_s)
        while True:
            try:
                return await self._lock_once(keys, self._primary)
            except LockedError as err:
                await self._wait_for(err, backoff)
            except WriteConflictError as err:
                await backoff.wait(err)

    async def _lock_once(self, keys: list[bytes], primary: bytes) -> dict[bytes, bytes]:
        self._for_update_ts = await self._client.pd.tso()
        values = await self._kv.pessimistic_lock(
            keys,
            primary=primary,
            start_version=self.start_ts,
            for_update_ts=self._for_update_ts,
            lock_ttl_ms=self._ttl_ms(),
            wait_ms=_LOCK_WAIT_MS,
        )
        self._client.heartbeats.add(self)
        return values

    async def _wait_for(self, err: LockedError, backoff: Backoffer) -> None:
        try:
            await clear_or_wait(self._client.resolver, err, 0, backoff)
        except GaveUpError as late:
            raise LockWaitError(f"{err.message}; roll back and begin again") from late

    async def _prewrite(self, primary: bytes) -> None:
        backoff = Backoffer(self._client.timeout_s)
        while True:
            try:
                return await self._kv.prewrite(
                    self._writes.mutations,
                    primary=primary,
                    start_version=self.start_ts,
                    lock_ttl_ms=self._ttl_ms(),
                    for_update_ts=self._for_update_ts,
                    pessimistic_keys=frozenset(self._locked),
                )
            except LockedError as err:
                await clear_or_wait(self._client.resolver, err, 0, backoff)

    async def _commit_primary(self, primary: bytes) -> int:
        while True:
            commit_ts = await self._client.pd.tso()
            try:
                await self._kv.commit([primary], self.start_ts, commit_ts)
            except CommitTsExpiredError:
                # A reader has pushed the lock's min_commit_ts above it: commit at a later one.
                continue
            # A refusal may come after the commit, too, as of a store that fails to answer it.
            except (GaveUpError, StoreRefusedError) as err:
                raise UndeterminedError(
                    f"the commit of {self.start_ts} may or may not have happened: {err}"
                ) from err
            return commit_ts

    async def _commit_secondaries(self, keys: Iterable[bytes], commit_ts: int) -> None:
        try:
            await self._kv.commit(keys, self.start_ts, commit_ts)
        except TidemarkError as err:
            _log.warning(
                "secondary locks left behind",
                start_ts=self.start_ts,
                code=err.code,
                error=err.message,
            )

    async def _undo(self) -> None:
        try:
            if self._locked:
                await self._kv.pessimistic_rollback(
                    self._locked, self.start_ts, self._for_update_ts
                )
            if self._writes:
                await self._kv.batch_rollback(self._writes.keys, self.start_ts)
        except TidemarkError as err:
            _log.warning(
                "locks left behind", start_ts=self.start_ts, code=err.code, error=err.message
            )

    def _ttl_ms(self) -> int:
        """Counted from start_ts, as stores do."""
        elapsed_s = asyncio.get_running_loop().time() - self._began
        return int(elapsed_s * 1000) + (
            _PESSIMISTIC_TTL_MS if self._pessimistic else _OPTIMISTIC_TTL_MS
        )

    def _end(self) -> None:
        if self._ended:
            raise TransactionEndedError("the transaction has ended; begin another one")
        self._ended = True
        self._client.heartbeats.remove(self)


class Heartbeats:
    """Keeps the locks of a client's transactions from expiring (TxnHeartBeat)."""

    def __init__(self) -> None:
        self._transactions: dict[Transaction, None] = {}

    def add(self, transaction: Transaction) -> None:
        """Keep the transaction's locks from expiring."""
        self._transactions[transaction] = None

    def remove(self, transaction: Transaction) -> None:
        """Let the transaction's locks expire from now on."""
        self._transactions.pop(transaction, None)

    async def run(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            for transaction in list(self._transactions):
                # It may have ended while the heartbeat of another one was under way.
                if transaction in self._transactions:
                    await transaction.heartbeat()
