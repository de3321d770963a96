"""The bank's client of the store: `tikv-client`, an independent implementation, or our own where it
has no wheels.

Both raise `ConflictError` for whatever a bank would answer by trying again: conflicts, expired
locks, lost connections. A commit that raised it may still have happened (the answer was lost); the
bank's invariants hold either way.
"""

import asyncio
import ctypes
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from server.rpc.transaction import TransactionClient
from storage.model.errors import ConflictError, InvalidError

FOREIGN, OWN = "tikv-client", "own"
_PAGE = 4096
_FAILURES_MAX = 8
_CALL_SECONDS = 30.0
T = TypeVar("T")


class TransactionFailedError(ConflictError):
    """The store or the client refused; try the whole transaction again."""

    code = "ErrTransactionFailed"


class ClientMissingError(InvalidError):
    """The requested client cannot be imported."""

    code = "ErrClientMissing"


class Transaction(Protocol):
    """One transaction of the bank; end it with `commit` or `rollback`."""

    async def get(self, key: bytes) -> bytes | None:
        """The value at the transaction's snapshot; pessimistic transactions lock the key and read
        the newest.
        """
        ...

    async def put(self, key: bytes, value: bytes) -> None:
        """Buffer a write."""
        ...

    async def delete(self, key: bytes) -> None:
        """Buffer a delete."""
        ...

    async def commit(self) -> None:
        """Two-phase commit."""
        ...

    async def rollback(self) -> None:
        """Give up, releasing locks."""
        ...


class BankClient(Protocol):
    """A connection to the cluster."""

    name: str

    async def begin(self, *, pessimistic: bool) -> Transaction:
        """Start a transaction at a fresh timestamp."""
        ...

    async def now(self) -> int:
        """A fresh timestamp."""
        ...

    async def scan(self, start: bytes, end: bytes, ts: int) -> dict[bytes, bytes]:
        """All pairs in `[start, end)` as of `ts`."""
        ...


def default_client() -> str:
    """`tikv-client` where it is installed, else our own."""
    return FOREIGN if importlib.util.find_spec("tikv_client") else OWN


@asynccontextmanager
async def connect(kind: str, coordinator: str) -> AsyncIterator[BankClient]:
    """Connect to the cluster behind `coordinator` (host:port) for the block.

    Raises:
        ClientMissingError: tikv-client is asked for and not installed.
    """
    if kind == OWN:
        async with TransactionClient.open(coordinator) as inner:
            yield OwnClient(inner)
        return
    if importlib.util.find_spec("tikv_client") is None:
        raise ClientMissingError(
            "tikv-client has no wheel for this platform; run with --client own"
        )
    from tikv_client import asynchronous

    async def reach() -> Any:
        return await guarded(asynchronous.TransactionClient.connect([coordinator]))

    yield ForeignClient(await reach(), reach)


class ForeignClient:
    """`tikv-client` 0.0.4: the Rust client behind Python's asyncio.

    Once it has met a coordinator that knew no leader, as during an election, its Rust half panics
    at every call, for ever. So after some failures one after the other there is a new one.
    """

    name = "tikv-client 0.0.4 (not our code)"

    def __init__(self, inner: Any, connect: Callable[[], Awaitable[Any]]) -> None:
        """`connect` makes another `inner`."""
        self._inner = inner
        self._connect = connect
        self._failures = 0

    async def begin(self, *, pessimistic: bool) -> "ForeignTransaction":
        """See `BankClient.begin`."""
        inner = await self._asked(lambda: self._inner.begin(pessimistic))
        return ForeignTransaction(inner, pessimistic=pessimistic)

    async def now(self) -> int:
        """See `BankClient.now`."""
        return int(await self._asked(self._inner.current_timestamp))

    async def _asked(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            answer = await guarded(call())
        except ConflictError:
            self._failures += 1
            if self._failures >= _FAILURES_MAX:
                self._inner = await self._connect()
                self._failures = 0
            raise
        self._failures = 0
        return answer

    async def scan(self, start: bytes, end: bytes, ts: int) -> dict[bytes, bytes]:
        """See `BankClient.scan`."""
        pairs: dict[bytes, bytes] = {}
        while True:
            snapshot = self._inner.snapshot(ts, False)  # noqa: FBT003 - the foreign signature
            page = await guarded(snapshot.scan(start, end, _PAGE))
            # The next page begins behind the last key: no key lies between it and key + b"\0".
            pairs.update((bytes(key), bytes(value)) for key, value in page)
            if len(page) < _PAGE:
                return pairs
            start = bytes(page[-1][0]) + b"\x00"


class GuardedTransaction:
    """One transaction of either client, whose errors become ours."""

    def __init__(self, inner: Any, *, pessimistic: bool) -> None:
        self._inner = inner
        self._pessimistic = pessimistic

    async def get(self, key: bytes) -> bytes | None:
        """See `Transaction.get`."""
        read = self._inner.get_for_update if self._pessimistic else self._inner.get
        value = await guarded(read(key))
        return None if value is None else bytes(value)

    async def put(self, key: bytes, value: bytes) -> None:
        """See `Transaction.put`."""
        await guarded(self._inner.put(key, value))

    async def delete(self, key: bytes) -> None:
        """See `Transaction.delete`."""
        await guarded(self._inner.delete(key))

    async def commit(self) -> None:
        """See `Transaction.commit`."""
        await guarded(self._inner.commit())

    async def rollback(self) -> None:
        """See `Transaction.rollback`."""
        await guarded(self._inner.rollback())


class ForeignTransaction(GuardedTransaction):
    """One transaction of `tikv-client`.

    Its Rust half keeps its locks alive until it is freed, in the background, and panics when it is
    freed before its end was asked for. So one whose end nobody asked for is never freed, and its
    locks never expire: call `rollback`, even where the cluster is gone.
    """

    def __init__(self, inner: Any, *, pessimistic: bool) -> None:
        super().__init__(inner, pessimistic=pessimistic)
        self._ending = False

    def __del__(self) -> None:
        if not self._ending:
            # One reference more than Python knows of: the Rust half is never freed, so it cannot
            # panic.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._inner))

    async def commit(self) -> None:
        """See `Transaction.commit`."""
        self._ending = True
        await super().commit()

    async def rollback(self) -> None:
        """See `Transaction.rollback`."""
        self._ending = True
        await super().rollback()


class OwnClient:
    """Our own client (server/rpc/transaction.py), for platforms without a `tikv-client` wheel."""

    name = "our own transaction client"

    def __init__(self, inner: TransactionClient) -> None:
        self._inner = inner

    async def begin(self, *, pessimistic: bool) -> GuardedTransaction:
        """See `BankClient.begin`."""
        return GuardedTransaction(
            await guarded(self._inner.begin(pessimistic=pessimistic)), pessimistic=pessimistic
        )

    async def now(self) -> int:
        """See `BankClient.now`."""
        return await guarded(self._inner.current_timestamp())

    async def scan(self, start: bytes, end: bytes, ts: int) -> dict[bytes, bytes]:
        """See `BankClient.scan`."""
        pairs: dict[bytes, bytes] = {}
        while True:
            page = await guarded(self._inner.snapshot(ts).scan(start, end, _PAGE))
            pairs.update(page)
            if len(page) < _PAGE:
                return pairs
            start = page[-1][0] + b"\x00"


async def guarded(call: Awaitable[T]) -> T:
    """Await a client's call; the foreign one raises bare `Exception`s,
    and a bank tries again after any error.
    """
    try:
        async with asyncio.timeout(_CALL_SECONDS):
            return await call
    except Exception as err:
        raise TransactionFailedError(f"{type(err).__name__}: {err}") from err
