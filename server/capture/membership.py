"""A capture's place in the cluster: its record, alive by a lease, and the election of the owner.

A capture that loses its lease stops all work as owner at once and begins again with a new lease;
whoever is elected next starts from the metadata.
"""

import asyncio
import json
from contextlib import suppress
from dataclasses import asdict, dataclass

import structlog

from server.capture.errors import NotOwnerError
from server.capture.owner import Owner
from server.capture.records import Records
from server.changefeed import keys
from server.changefeed.info import CREATOR_VERSION
from storage.meta.errors import LeaseNotFoundError
from storage.meta.meta import Compare, Delete, Meta
from storage.model.errors import UnavailableError

_LEASE_S = 10
_RETRY_S = 1.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """One capture as the metadata holds it."""

    id: str
    address: str
    flight_address: str
    version: str = CREATOR_VERSION


@dataclass(frozen=True, slots=True)
class Member:
    """A living capture."""

    record: CaptureRecord
    is_owner: bool


class Membership:
    """This capture's membership; `settled` is set once it is known who owns the changefeeds."""

    def __init__(self, meta: Meta, identity: str, owner: Owner, records: Records) -> None:
        self.settled = asyncio.Event()
        self._meta = meta
        self._id = identity
        self._owner = owner
        self._records = records

    async def run(self, address: str, flight_address: str) -> None:
        """Be a member at these addresses, and the owner when elected, until cancelled."""
        record = CaptureRecord(self._id, address, flight_address)
        while True:
            try:
                async with await self._meta.grant_lease(_LEASE_S) as lease:
                    await self._register(record, lease.id)
                    async with asyncio.TaskGroup() as tasks:
                        owning = tasks.create_task(self._own(lease.id), name="owner")
                        settling = tasks.create_task(self._settle(), name="settle")
                        # Set when the lease could not be renewed for a whole TTL. Until this
                        # capture notices, the fence of `Records` keeps it from writing.
                        await lease.lost.wait()
                        owning.cancel()
                        settling.cancel()
                _log.warning("session lost", capture=self._id)
            except* (UnavailableError, LeaseNotFoundError) as group:
                _log.warning("session ended", capture=self._id, error=str(group.exceptions[0]))
            await asyncio.sleep(_RETRY_S)

    async def members(self) -> list[Member]:
        """All living captures."""
        owner = await self._meta.get(keys.OWNER)
        pairs = await self._meta.get_prefix(keys.CAPTURES)
        records = [CaptureRecord(**json.loads(pair.value)) for pair in pairs]
        return [
            Member(record, owner is not None and owner.value == record.id.encode())
            for record in records
        ]

    async def sharing(self) -> list[CaptureRecord]:
        """The captures among which this one divides tables; none while it is not the owner."""
        if not self._owner.is_active:
            return []
        return [member.record for member in await self.members()]

    async def check_term(self, term: int) -> None:
        """See that `term` is the present owner's.

        Raises:
            NotOwnerError: it is not.
        """
        owner = await self._meta.get(keys.OWNER)
        if owner is None or owner.create_revision != term:
            raise NotOwnerError("shares of changefeeds are started by their present owner only")

    async def owner_address(self) -> str:
        """The gRPC address of the owner.

        Raises:
            NotOwnerError: there is none at this moment.
        """
        for member in await self.members():
            if member.is_owner:
                return member.record.address
        raise NotOwnerError(
            "no capture owns the changefeeds at this moment; an election is under way, ask again"
        )

    async def _register(self, record: CaptureRecord, lease: int) -> None:
        """Announce this capture, and take an owner key back that an earlier process left."""
        # Our id lies in the data directory, which is locked: a process that had it before is dead.
        # Without this its key would keep everybody from owning until its lease ends.
        name = self._id.encode()
        owner = await self._meta.get(keys.OWNER)
        if owner is not None and owner.value == name and owner.lease != lease:
            await self._meta.txn(
                [Compare.unchanged(keys.OWNER, owner.mod_revision)], [Delete(keys.OWNER)]
            )
        elif owner is not None:
            self.settled.set()
        await self._meta.put(keys.capture(self._id), json.dumps(asdict(record)).encode(), lease)

    async def _settle(self) -> None:
        """Set `settled` when another capture is seen to own the changefeeds."""
        # Nobody may own them when this capture registers: two start at a time, or this one has just
        # given an earlier process's key back. Whoever then loses the election would never be ready.
        while not self.settled.is_set():
            with suppress(UnavailableError):
                owner = await self._meta.get(keys.OWNER)
                if owner is not None and owner.value != self._id.encode():
                    self.settled.set()
            await asyncio.sleep(_RETRY_S)

    async def _own(self, lease: int) -> None:
        self._records.fence = await self._meta.campaign(keys.OWNER, self._id.encode(), lease)
        _log.info("elected owner", capture=self._id)
        await self._owner.run(self.settled.set)
