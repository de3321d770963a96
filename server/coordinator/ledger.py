"""The coordinator's writes: every transaction carries the leader's fence, so a deposed leader can write nothing."""

from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice

from server.coordinator.errors import LeadershipLostError
from storage.meta.meta import Compare, KeyValue, Meta, Op, TxnResult, WatchEvent

MAX_OPS = 100


class Ledger:
    """Fenced access to the metadata; `fence` is empty when nobody else can write (embedded metadata)."""

    def __init__(self, meta: Meta, fence: Sequence[Compare] = ()) -> None:
        self.meta = meta
        self._fence = list(fence)

    async def txn(self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()) -> TxnResult:
        """As `Meta.txn`, under the fence.

        Raises:
            LeadershipLostError: the leader's key is no longer ours.
        """
        result = await self.meta.txn([*self._fence, *compares], success, failure)
        if not result.succeeded and self._fence:
            await self._check_fence()
        return result

    async def write(self, ops: Sequence[Op]) -> None:
        """Write without other conditions; more than `MAX_OPS` go in several transactions, in order."""
        for part in _parts(ops):
            await self.txn((), part)

    async def get_prefix(self, prefix: bytes) -> list[KeyValue]:
        """See `Meta.get_prefix`."""
        return await self.meta.get_prefix(prefix)

    def watch(self, prefix: bytes, start_revision: int = 0) -> AsyncIterator[list[WatchEvent]]:
        """See `Meta.watch`."""
        return self.meta.watch(prefix, start_revision)

    async def _check_fence(self) -> None:
        held = await self.meta.txn(self._fence, ())
        if not held.succeeded:
            raise LeadershipLostError("another coordinator holds the leader key; this one stops, restart it to follow")


def _parts(ops: Sequence[Op]) -> Iterator[list[Op]]:
    rest = iter(ops)
    while part := list(islice(rest, MAX_OPS)):
        yield part
