"""A capture's place in the cluster: its record, alive by a lease, and the election of the owner.

A capture that loses its lease stops all work as owner at once and begins again with a new lease;
whoever is elected next starts from the metadata.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from server.capture.errors import CaptureUnknownError, LastCaptureError, NotOwnerError
from server.capture.fence import Fence, free_from_dead
from server.capture.maintainers import Maintainers
from server.capture.owner import captures_of, is_log
from server.changefeed import keys
from server.changefeed.captures import CaptureRecord, living_captures
from server.changefeed.info import read_info
from storage.meta.errors import LeaseNotFoundError
from storage.meta.meta import Compare, Delete, Meta, Put
from storage.model.errors import CorruptError, UnavailableError
from storage.tasks import background_tasks, run_in_task, wait_at_most

_LEASE_S = 10
_RETRY_S = 1.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """A living capture."""

    record: CaptureRecord
    is_owner: bool
    is_draining: bool = False
    maintained: int = 0
    """The number of log changefeeds that it runs."""


class Membership:
    """This capture's membership and its part in the election of the owner; `settled` is set once an
    owner is known.
    """

    def __init__(
        self, meta: Meta, identity: str, maintainers: Maintainers, owner_fence: Fence
    ) -> None:
        self.id = identity
        self.settled = asyncio.Event()
        self._resigning = asyncio.Event()
        self._meta = meta
        self._maintainers = maintainers
        self._owner = maintainers.owner
        self._owner_fence = owner_fence

    async def run(self, address: str, flight_address: str) -> None:
        """Be a member at these addresses, and the owner when elected, until cancelled."""
        record = CaptureRecord(
            self.id, address, flight_address, started=datetime.now(UTC).isoformat()
        )
        while True:
            try:
                await run_in_task(self._session(record))
                _log.warning("session lost", capture=self.id)
            except* (UnavailableError, LeaseNotFoundError) as group:
                _log.warning("session ended", capture=self.id, error=str(group.exceptions[0]))
            await asyncio.sleep(_RETRY_S)

    async def _session(self, record: CaptureRecord) -> None:
        """Register under a new lease, and work until that is lost."""
        async with await self._meta.grant_lease(_LEASE_S) as lease:
            await self._register(record, lease.id)
            async with asyncio.TaskGroup() as tasks:
                parts = [
                    tasks.create_task(self._serve_as_owner(lease.id), name="owner"),
                    tasks.create_task(self._wait_for_owner(), name="settle"),
                    tasks.create_task(self._maintainers.run(lease), name="maintainers"),
                ]
                # Set when the lease could not be renewed for a whole TTL. Another capture may be
                # the owner a moment before; until this one notices, fences refuse its writes.
                await lease.lost.wait()
                for part in parts:
                    part.cancel()

    async def members(self) -> list[Member]:
        """All living captures; one whose record cannot be read is left out."""
        captures = await living_captures(self._meta)
        draining = {pair.key for pair in await self._meta.get_prefix(keys.DRAINING)}
        maintained = Counter((await captures_of(self._meta, keys.MAINTAINERS)).values())
        for identity, err in captures.unreadable.items():
            _log.warning("record of a capture left out", capture=identity, error=err.message)
        return [
            Member(
                record,
                is_owner=record.id == captures.owner,
                is_draining=keys.draining(record.id) in draining,
                maintained=maintained[record.id],
            )
            for record in captures.records
        ]

    async def sharing(self) -> list[CaptureRecord]:
        """The captures among which this one divides tables; none while it is not the owner."""
        if not self._owner.is_active:
            return []
        return [member.record for member in _working(await self.members())]

    async def drain(self, identity: str, *, cancel: bool = False) -> CaptureRecord:
        """Mark a capture as draining: it gets no tables and is not elected until it is started
        again; `cancel` removes the mark. Changefeeds that no other capture can run stay. Durable.

        Raises:
            CaptureUnknownError: no living capture has that id.
            LastCaptureError: all others are gone, or are drained themselves.
        """
        members = await self.members()
        member = next((each for each in members if each.record.id == identity), None)
        pair = await self._meta.get(keys.capture(identity))
        if member is None or pair is None:
            raise CaptureUnknownError(
                f"there is no capture {identity[:256]!r}; see `tidemark cli capture list`"
            )
        if cancel:
            await self._meta.write_all([Delete(keys.draining(identity))])
            return member.record
        if not any(not each.is_draining for each in members if each is not member):
            raise LastCaptureError(
                f"no other capture could take the place of {identity}: start another one first"
            )
        # With the capture's own lease: one that is started again takes part again.
        marked = Put(keys.draining(identity), b"", pair.lease)
        is_same = Compare.unchanged(pair.key, pair.mod_revision)
        if not (await self._meta.txn([is_same], [marked])).succeeded:
            raise NotOwnerError(f"capture {identity} was started again just now; ask again")
        return member.record

    def resign(self) -> None:
        """Let another capture be elected, if this one is the owner."""
        self._resigning.set()

    async def check_term(self, term: int) -> None:
        """See that `term` is the present owner's.

        Raises:
            NotOwnerError: it is not.
        """
        owner = await self._meta.get(keys.OWNER)
        if owner is None or owner.create_revision != term:
            raise NotOwnerError("shares of changefeeds are started by their present owner only")

    async def owner(self) -> CaptureRecord:
        """The owner.

        Raises:
            NotOwnerError: there is none at this moment.
        """
        for member in await self.members():
            if member.is_owner:
                return member.record
        raise NotOwnerError(
            "no capture owns the changefeeds at this moment; an election is under way, ask again"
        )

    async def has_maintainer(self, changefeed: str) -> bool:
        """Whether the changefeed reads a log, so that a capture maintains it now or will soon."""
        pair = await self._meta.get(keys.info(changefeed))
        if pair is None:
            return False
        try:
            return is_log(read_info(pair.key, pair.value).source_uri)
        except CorruptError:
            # It stays with the capture that has it: see `server.capture.owner`.
            return await self._meta.get(keys.placement(changefeed)) is not None

    async def maintainer(self, changefeed: str) -> CaptureRecord | None:
        """The capture that runs a log's changefeed; None: none does now."""
        pair = await self._meta.get(keys.maintainer(changefeed))
        record = pair and await self._meta.get(keys.CAPTURES + pair.value)
        return CaptureRecord.from_json(record.value) if record else None

    async def maintaining(self) -> list[CaptureRecord]:
        """The captures that run changefeeds of logs."""
        return [each.record for each in await self.members() if each.maintained]

    async def maintained_by(self, identity: str) -> list[str]:
        """The changefeeds of logs that a capture runs, or is to run, or to stop."""
        # In this order: a log that is given away is placed elsewhere before it is stopped, and one
        # that comes is placed before it is run.
        running = await captures_of(self._meta, keys.MAINTAINERS)
        placed = await captures_of(self._meta, keys.PLACEMENTS)
        of_both = (*running.items(), *placed.items())
        return sorted({changefeed for changefeed, capture in of_both if capture == identity})

    async def _register(self, record: CaptureRecord, lease: int) -> None:
        """Announce this capture, and take an owner key back that an earlier process left."""
        if await free_from_dead(self._meta, keys.OWNER, self.id, lease) is not None:
            self.settled.set()
        await self._meta.put(keys.capture(self.id), record.to_json(), lease)

    async def _wait_for_owner(self) -> None:
        """Set `settled` once another capture is the owner."""
        # There may be no owner when this capture registers, if two start at the same time or this
        # one has just deleted an earlier process's key. The loser of the election must become
        # ready, too.
        while not self.settled.is_set():
            with suppress(UnavailableError):
                owner = await self._meta.get(keys.OWNER)
                if owner is not None and owner.value != self.id.encode():
                    self.settled.set()
            await asyncio.sleep(_RETRY_S)

    async def _serve_as_owner(self, lease: int) -> None:
        while True:
            while await self._is_replaced():  # noqa: ASYNC110 - the metadata is asked
                await asyncio.sleep(_RETRY_S)
            fence = self._owner_fence
            fence.hold(await self._meta.campaign(fence.key, self.id.encode(), lease))
            self._resigning.clear()
            _log.info("elected owner", capture=self.id)
            async with background_tasks(self._owner.run(self.settled.set)):
                await self._wait_until_replaced()
                await self._owner.drain_changes()
            # Everything is saved by now, so that the next owner goes on where this one ended.
            await self._meta.txn([fence.created], [Delete(fence.key)])
            _log.info("resigned as owner", capture=self.id)
            # Let another capture, which waits for the key, win the next election.
            await asyncio.sleep(_RETRY_S)

    async def _wait_until_replaced(self) -> None:
        """Wait until this capture has to give up the ownership: it was asked to, or is drained."""
        while not (self._resigning.is_set() or await self._is_replaced()):
            await wait_at_most(self._resigning, _RETRY_S)

    async def _is_replaced(self) -> bool:
        """Whether this capture is being drained while other captures can take over; False if the
        metadata does not answer.
        """
        with suppress(UnavailableError):
            if await self._meta.get(keys.draining(self.id)) is not None:
                return self.id not in {each.record.id for each in _working(await self.members())}
        return False


def _working(members: Sequence[Member]) -> Sequence[Member]:
    """The captures that are not drained, or all if every one is drained, because the one that was
    to take over has died: without an owner no drain could be cancelled either.
    """
    return [each for each in members if not each.is_draining] or members
