"""A number that only grows, kept in the metadata twice: the end of the timestamps, or ids,
that may be handed out.

Invariants:
1. Nothing at or above the number is handed out before the number is durable.
2. Both records are written in one transaction, on condition that neither has changed since: a write
   that was given up for lost may still arrive, and must not undo a later one.
3. Only the leader writes them. If either is not what the leader wrote, somebody else did it behind
   its back: the leader puts back the larger number and steps down, and the next term reads afresh.
4. A new term goes on from the larger of the two. So neither deleting one of them nor setting it
   back makes the number smaller; only when both are gone is it unknown what was handed out.
"""

import struct
from collections.abc import Sequence

import structlog

from server.coordinator.keys import COPY_PREFIX
from server.coordinator.leadership.leadership import FencedMetadata
from storage.meta.meta import Compare, Get, KeyValue, Op, Put
from storage.model.errors import CorruptError

_U64 = struct.Struct(">Q")

_log = structlog.get_logger(__name__)


class StateLostError(CorruptError):
    """The metadata no longer has the number that was handed out last; continuing could hand out a
    number twice.
    """

    code = "ErrCoordinatorStateLost"


class DurableLimit:
    """One number; `load` before anything else. The record is 8 bytes, big-endian, as PD has it."""

    def __init__(self, metadata: FencedMetadata, key: bytes) -> None:
        self._metadata = metadata
        self._keys = (key, COPY_PREFIX + key)
        self._revisions = [0, 0]
        self._attempts: set[int] = set()
        self.value = 0
        """The number that is durable; 0 if there was none."""

    async def load(self, *, must_exist: bool = False) -> None:
        """Read both records and take the larger one.

        Raises:
            StateLostError: there is none although there must be, or none that can be read.
        """
        records = await self._read()
        numbers = [number for record in records if (number := _number(record)) is not None]
        unreadable = [
            record.key for record in records if record is not None and _number(record) is None
        ]
        name = self._keys[0].decode(errors="backslashreplace")
        if not numbers and (unreadable or must_exist):
            raise StateLostError(
                f"{name} and its copy below {COPY_PREFIX.decode()} are gone or cannot be read, so "
                "it is not known what this cluster has handed out already; restore the metadata "
                "from a snapshot, or put a number above all that was handed out at that key (8 "
                "bytes, big-endian), then start again"
            )
        if unreadable:
            _log.error(
                "a record of the coordinator cannot be read; its copy is used",
                keys=[repr(key) for key in unreadable],
            )
        # The larger of the two: the smaller one was set back or lost a write, and going on from it
        # would hand out numbers twice.
        self.value = max(numbers, default=0)
        self._revisions = [record.mod_revision if record else 0 for record in records]

    async def raise_to(self, number: int) -> None:
        """Make `number` durable, unless an earlier write has made another one durable meanwhile;
        see `value`.

        Raises:
            NotLeaderError: somebody else wrote the records, or leads; the term is over.
        """
        # Remembered before it is sent: a write whose answer is lost may still arrive, and is then
        # recognised as ours.
        self._attempts.add(number)
        guards = [
            Compare.unchanged(key, revision)
            for key, revision in zip(self._keys, self._revisions, strict=True)
        ]
        result = await self._metadata.txn(
            guards, self._puts(number), [Get(key) for key in self._keys]
        )
        if result.succeeded:
            self.value = number
            # Both records were written by one transaction, so both have its revision.
            self._revisions = [result.revision] * len(self._keys)
            self._attempts.clear()
        else:
            await self._adopt([pairs[0] if pairs else None for pairs in result.pairs])

    async def put_back(self) -> None:
        """Write the largest known number to both records, whatever they hold now."""
        stored = [
            number for record in await self._read() if (number := _number(record)) is not None
        ]
        if number := max([self.value, *self._attempts, *stored]):
            await self._metadata.txn((), self._puts(number))

    async def _adopt(self, records: Sequence[KeyValue | None]) -> None:
        """Continue from an earlier write of this coordinator that arrived late; any other value was
        written by somebody else.
        """
        numbers = {_number(record) for record in records}
        if len(numbers) == 1 and numbers <= self._attempts:
            self.value = max(self._attempts & numbers)
            self._revisions = [record.mod_revision if record else 0 for record in records]
            return
        # First restore the number, then step down: the next term reads it, and must not hand out
        # anything twice.
        await self.put_back()
        key = self._keys[0].decode(errors="backslashreplace")
        self._metadata.leadership.end(f"{key}, or its copy, was changed by somebody else")
        self._metadata.leadership.check()

    def _puts(self, number: int) -> list[Op]:
        return [Put(key, _U64.pack(number)) for key in self._keys]

    async def _read(self) -> list[KeyValue | None]:
        result = await self._metadata.txn((), [Get(key) for key in self._keys])
        return [pairs[0] if pairs else None for pairs in result.pairs]


def _number(record: KeyValue | None) -> int | None:
    """The number that a record holds; None if there is no record, or none of 8 bytes."""
    if record is None or len(record.value) != _U64.size:
        return None
    return int(_U64.unpack(record.value)[0])
