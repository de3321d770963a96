"""The coordinator's writes: every transaction carries the leader's fence, so a deposed leader can write nothing."""

from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice

from server.coordinator.leadership.leader import Leadership
from storage.meta.meta import Compare, KeyValue, Meta, Op, TxnResult, WatchEvent

MAX_OPS = 100


class Ledger:
    """Fenced access to the metadata."""

    def __init__(self, meta: Meta, leadership: Leadership) -> None:
        self._meta = meta
        self.leadership = leadership

    async def txn(self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()) -> TxnResult:
        """As `Meta.txn`, under the fence.

        Raises:
            NotLeaderError: the leader's key is no longer ours; nothing was written.
        """
        fence = self.leadership.fence
        result = await self._meta.txn([*fence, *compares], success, failure)
        if not result.succeeded and fence and not (await self._meta.txn(fence, ())).succeeded:
            self.leadership.end()
            self.leadership.check()
        return result

    async def write(self, ops: Sequence[Op]) -> None:
        """Write without other conditions; more than `MAX_OPS` go in several transactions, in order."""
        for part in _parts(ops):
            await self.txn((), part)

    async def get(self, key: bytes) -> KeyValue | None:
        """See `Meta.get`."""
        return await self._meta.get(key)

    async def get_prefix(self, prefix: bytes) -> list[KeyValue]:
        """See `Meta.get_prefix`."""
        return await self._meta.get_prefix(prefix)

    def watch(self, prefix: bytes, start_revision: int = 0) -> AsyncIterator[list[WatchEvent]]:
        """See `Meta.watch`."""
        return self._meta.watch(prefix, start_revision)


def _parts(ops: Sequence[Op]) -> Iterator[list[Op]]:
    rest = iter(ops)
    while part := list(islice(rest, MAX_OPS)):
        yield part
