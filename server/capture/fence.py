"""What lets a capture write for changefeeds: a key in the metadata that only one capture holds.

Every write compares the key, in the metadata's server, with the one that this capture created. So a
capture that lost it and does not know that yet (it hung, or was cut off) changes nothing: neither
records and checkpoints, nor what a source keeps, such as positions of a log and a dump's progress.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from server.capture.errors import NotOwnerError
from server.changefeed import keys
from server.changefeed.records import parts
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


@dataclass(slots=True)
class Fence:
    """The key, and the revision at which this capture created it; 0: it does not hold the key."""

    key: bytes = keys.OWNER
    revision: int = 0

    @property
    def compare(self) -> Compare:
        """Holds while the key is this capture's."""
        # A key that does not exist has revision 0: without the key nothing is to be written.
        return Compare.created_at(self.key, self.revision or -1)


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
        fence = self._fence.compare
        result = await self._meta.txn([fence, *compares], success, failure)
        # A failed comparison may be the caller's own: the fence alone is asked, to tell them apart.
        if not result.succeeded and not (
            compares and (await self._meta.txn([fence], ())).succeeded
        ):
            raise NotOwnerError("another capture runs the changefeed by now; ask again")
        return result

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
