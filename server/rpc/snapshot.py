"""Reads at one timestamp, past the locks of dead transactions,
and of live ones that can be made to commit later.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from server.rpc.key_error import LockedError
from server.rpc.lock_resolver import LockResolver
from server.rpc.tikv import KvClient
from server.rpc.tikv_reads import Pairs, Passing
from storage.backoff import Backoffer

T = TypeVar("T")


class Snapshot:
    """The store as of `ts`: every read sees exactly what was committed at or before it."""

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
        """At most `limit` pairs of `[start_key, end_key)` in key order; an empty end is no end.

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

    async def _unlocked(self, read: Callable[[Passing], Awaitable[T]]) -> T:
        backoff, passing = Backoffer(self._timeout_s), Passing()
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
