"""The fence under which a capture writes changefeeds: a key in the metadata that one capture holds
at a time.

Every write compares the key, in the metadata's server, with the one that this capture created. So a
capture that lost it and does not know that yet (it hung, or was cut off) changes nothing: neither
records and checkpoints, nor what a source keeps, such as positions of a log and a dump's progress.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

from server.capture.errors import NotOwnerError
from server.changefeed import keys
from server.changefeed.records import parts
from storage.meta.errors import LeaseNotFoundError, MetaUnavailableError
from storage.meta.meta import (
    Compare,
    Delete,
    KeyValue,
    Lease,
    Meta,
    Op,
    Put,
    TxnResult,
    WatchEvent,
)


class Fence:
    """The key, as this capture holds it.

    A write whose outcome is not known may arrive long after, behind later ones, and would undo
    them: a checkpoint would go back, a paused changefeed would run. So the key is written again
    after each of them, and the comparison is with that (`settled`): what was sent before is refused
    from then on.
    """

    def __init__(self, key: bytes = keys.OWNER, revision: int = 0) -> None:
        """`revision` is the one at which this capture created the key; 0: it does not hold it."""
        self.key = key
        self.hold(revision)

    def hold(self, revision: int) -> None:
        """The capture has created the key, at `revision`."""
        self.revision = revision
        self._written = revision
        self._has_unknown_outcome = False
        self._settling = asyncio.Lock()

    @property
    def compare(self) -> Compare:
        """Holds while the key is this capture's, and was not written again."""
        # A key that does not exist has revision 0: without the key nothing is to be written.
        return Compare.unchanged(self.key, self._written or -1)

    @property
    def created(self) -> Compare:
        """Holds while the key is this capture's."""
        return Compare.created_at(self.key, self.revision or -1)

    def note_unknown_outcome(self) -> None:
        """Note that a write got no answer: whether it was carried out, or still will be, is not
        known.
        """
        self._has_unknown_outcome = True

    async def settled(self, meta: Meta) -> None:
        """Return when nothing that was sent before can be carried out any more.

        Raises:
            NotOwnerError: the key is lost.
            MetaUnavailableError: nobody answers.
        """
        async with self._settling:
            if not self._has_unknown_outcome:
                return
            pair = await meta.get(self.key)
            if pair is None or pair.create_revision != self.revision:
                raise _lost()
            again = Put(self.key, pair.value, pair.lease)
            try:
                result = await meta.txn([self.created], [again])
            except LeaseNotFoundError:
                raise _lost() from None
            if not result.succeeded:
                raise _lost()
            self._written, self._has_unknown_outcome = result.revision, False


async def free_from_dead(meta: Meta, key: bytes, capture: str, lease: int) -> KeyValue | None:
    """Delete the key if an earlier process of this capture has left it, whose `lease` is another.

    Returns who holds the key; None: nobody does now.
    """
    holder = await meta.get(key)
    if holder is None or holder.value != capture.encode() or holder.lease == lease:
        return holder
    # A capture's id lies in its data directory, which is locked: that process is dead, and its key
    # would keep everybody waiting until its lease ends.
    await meta.txn([Compare.unchanged(key, holder.mod_revision)], [Delete(key)])
    return None


class FencedMeta:
    """Implements `Meta`; whatever writes raises NotOwnerError once the fence's key is lost, and
    has changed nothing then. Reads, leases and watches are as before.
    """

    def __init__(self, meta: Meta, fence: Fence) -> None:
        self._meta = meta
        self._fence = fence

    async def get(self, key: bytes) -> KeyValue | None:
        """See `Meta.get`."""
        return await self._meta.get(key)

    async def get_prefix(self, prefix: bytes) -> list[KeyValue]:
        """See `Meta.get_prefix`."""
        return await self._meta.get_prefix(prefix)

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        """See `Meta.put`."""
        return (await self.txn((), [Put(key, value, lease)])).revision

    async def delete(self, key: bytes) -> int:
        """See `Meta.delete`."""
        return (await self.txn((), [Delete(key)])).revision

    async def delete_prefix(self, prefix: bytes) -> int:
        """Not offered: nothing that is fenced needs it."""
        raise NotImplementedError(prefix)

    async def txn(
        self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()
    ) -> TxnResult:
        """See `Meta.txn`; `failure` may only read."""
        while True:
            await self._fence.settled(self._meta)
            fence = self._fence.compare
            try:
                result = await self._meta.txn([fence, *compares], success, failure)
            except (MetaUnavailableError, asyncio.CancelledError):
                self._fence.note_unknown_outcome()
                raise
            if result.succeeded or (compares and await self._holds(fence)):
                return result
            # The key is lost, which `settled` finds out, or it was written again: for another write
            # whose outcome was unknown, or by a request for that which has arrived only now.
            if fence == self._fence.compare:
                self._fence.note_unknown_outcome()

    async def _holds(self, fence: Compare) -> bool:
        """Whether the transaction failed because of the caller's own comparison, not because the
        fence was lost.
        """
        return (await self._meta.txn([fence], ())).succeeded

    async def write_all(self, ops: Sequence[Op]) -> int:
        """See `Meta.write_all`."""
        revision = 0
        for part in parts(ops):
            revision = (await self.txn((), part)).revision
        return revision

    async def grant_lease(self, ttl_s: int) -> Lease:
        """See `Meta.grant_lease`."""
        return await self._meta.grant_lease(ttl_s)

    def watch(self, prefix: bytes, start_revision: int = 0) -> AsyncIterator[list[WatchEvent]]:
        """See `Meta.watch`."""
        return self._meta.watch(prefix, start_revision)

    async def campaign(self, key: bytes, value: bytes, lease: int) -> int:
        """See `Meta.campaign`."""
        return await self._meta.campaign(key, value, lease)


def _lost() -> NotOwnerError:
    return NotOwnerError("another capture runs the changefeed by now; ask again")
