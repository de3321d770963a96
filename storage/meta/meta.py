"""The metadata store as its users see it: the `Meta` Protocol and its values;
revisions grow with each write.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, Self


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A stored pair; `lease == 0` means none, `version` counts the puts since it was created."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change; of a deleted pair only `key` and `mod_revision` are set."""

    deleted: bool
    pair: KeyValue


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction; an absent key has version and revisions 0."""

    key: bytes
    target: Literal["version", "create_revision", "mod_revision", "value", "lease"]
    result: Literal["==", "!=", ">", "<"]
    operand: int | bytes

    @classmethod
    def absent(cls, key: bytes) -> Self:
        """The key does not exist."""
        return cls(key, "create_revision", "==", 0)

    @classmethod
    def unchanged(cls, key: bytes, mod_revision: int) -> Self:
        """The key was last written at `mod_revision`; 0: it does not exist."""
        return cls(key, "mod_revision", "==", mod_revision)

    @classmethod
    def created_at(cls, key: bytes, create_revision: int) -> Self:
        """The key is the one created at `create_revision`: the fence of an elected leader."""
        return cls(key, "create_revision", "==", create_revision)


@dataclass(frozen=True, slots=True)
class Put:
    """Set a key."""

    key: bytes
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    r"""Delete a key, or `[key, range_end)`; `b"\0"`: to the end."""

    key: bytes
    range_end: bytes = b""


@dataclass(frozen=True, slots=True)
class Get:
    r"""Read a key, or `[key, range_end)`; `b"\0"`: to the end."""

    key: bytes
    range_end: bytes = b""


Op = Put | Delete | Get


@dataclass(frozen=True, slots=True)
class TxnResult:
    """The outcome of a transaction; `pairs` has one list for each `Get` of the branch that ran, in
    order.
    """

    succeeded: bool
    revision: int
    pairs: list[list[KeyValue]] = field(default_factory=list)


class Lease(Protocol):
    """A lease that renews itself inside its `async with`, and is revoked at the end of it."""

    id: int
    ttl_s: int
    deadline: float
    """Loop time until which the lease is surely alive,
    counted from before the last renewal was sent.

    Compare the clock with it where it matters: in a process that was stopped and continues, `lost`
    is set late.
    """
    lost: asyncio.Event
    """Set when the server no longer holds the lease, or when that cannot be known;
    never cleared.
    """

    async def __aenter__(self) -> Self:
        """Start renewing."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop renewing and revoke."""
        ...


class Meta(Protocol):
    """The metadata store; every call raises `MetaUnavailableError` when no server answers in
    time.
    """

    async def get(self, key: bytes) -> KeyValue | None:
        """The pair of `key`, or None."""
        ...

    async def get_prefix(self, prefix: bytes) -> list[KeyValue]:
        """All pairs whose key starts with `prefix`, in key order."""
        ...

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        """Set `key`; durable when it returns the revision."""
        ...

    async def delete(self, key: bytes) -> int:
        """Delete `key`, whether or not it exists; returns the revision."""
        ...

    async def delete_prefix(self, prefix: bytes) -> int:
        """Delete all keys that start with `prefix`; returns how many."""
        ...

    async def txn(
        self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()
    ) -> TxnResult:
        """Run `success` if all `compares` hold, else `failure`; atomic, durable when it returns,
        <= 128 of each.
        """
        ...

    async def write_all(self, ops: Sequence[Op]) -> int:
        """Apply any number of writes that need neither order nor atomicity;
        returns the last revision.

        They go in as many transactions as needed: after an error some are applied, and the call may
        be repeated.
        """
        ...

    async def grant_lease(self, ttl_s: int) -> Lease:
        """A new lease; use it as `async with await meta.grant_lease(5) as lease`."""
        ...

    def watch(self, prefix: bytes, start_revision: int = 0) -> AsyncIterator[list[WatchEvent]]:
        """Changes of keys under `prefix` from `start_revision` (0: from now), in order,
        none missed over reconnects.

        Raises:
            CompactedError: `start_revision` is no longer kept; read again and watch from there.
        """
        ...

    async def campaign(self, key: bytes, value: bytes, lease: int) -> int:
        """Wait until `key` is created under `lease`; returns its create revision,
        for `Compare.created_at`.
        """
        ...
