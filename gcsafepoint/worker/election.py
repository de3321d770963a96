"""The election of the GC leader: the worker whose name stands in the record with a lease that has
not run out.

Every worker ticks; one that finds no leader, or a lease that ran out, writes itself in. Leases are
counted on the coordinator's clock (TSO, see `CoordinatorClock`), so the workers' own clocks do not
matter. A leader trusts its lease only until its monotonic clock, read *before* it asked for the
time, has advanced by the lease: a process that was stopped finds out by itself.

1. At most one worker's lease holds at any time, unless timestamps jump ahead: with a coordinator's
   clock, or by up to three seconds where another coordinator begins to lead. Others may claim
   sooner then, and the leader before goes on until its next write, which is refused
   (`write_fenced`), or until its lease is over by its own clock.
2. Nobody writes over a record that changed since it was read.
3. What runs under `while_leading` is cancelled when the lease ends, its requests and their
   repetitions with it. A process that was stopped runs its overdue timers before anything that its
   sockets bring, so this holds after SIGCONT as well.
"""

import asyncio
import enum
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gcsafepoint.worker.config import DurationError, format_instant, parse_instant_ms
from gcsafepoint.worker.records import (
    LEADER_ADDR,
    LEADER_DESC,
    LEADER_LEASE,
    LEADER_UUID,
    PREFIX,
    Record,
    Records,
)
from storage.model.errors import ConflictError

_LEADER = f"{PREFIX}tikv_gc_leader_"


class LeaseLostError(ConflictError):
    """This worker is not, or no longer, GC leader; the next leader does the work."""

    code = "ErrGCLeaseLost"


Fence = Callable[[], Mapping[str, int]]
"""Gives the comparison that a leader's writes must pass; called at each of them (`Election.fence`).
"""


async def write_fenced(records: Records, fence: Fence, changes: Mapping[str, str | None]) -> None:
    """Write as the leader; durable when it returns.

    Raises:
        LeaseLostError: another worker leads, and nothing was written.
    """
    if not await records.write(changes, fence()):
        raise LeaseLostError("another worker became GC leader while this one was in a round")


class Move(enum.Enum):
    """A worker's action at a tick."""

    CLAIM = "claim"
    RENEW = "renew"
    FOLLOW = "follow"


@dataclass(frozen=True, slots=True)
class Leader:
    """The recorded leader; absent members are empty, at revision 0."""

    uuid: str
    desc: str
    lease: str
    revisions: Mapping[str, int]
    address: str = ""
    """The address of its admin service."""


async def read_leader(records: Records) -> Leader | None:
    """The recorded leader, whether or not its lease holds; None if none is named."""
    leader = await _read_record(records)
    return leader if leader.uuid else None


async def _read_record(records: Records) -> Leader:
    fields = await records.read(_LEADER) | await records.read(LEADER_ADDR)
    absent = Record("", 0)
    return Leader(
        uuid=fields.get(LEADER_UUID, absent).value,
        desc=fields.get(LEADER_DESC, absent).value,
        lease=fields.get(LEADER_LEASE, absent).value,
        revisions={key: fields.get(key, absent).revision for key in (LEADER_UUID, LEADER_LEASE)},
        address=fields.get(LEADER_ADDR, absent).value,
    )


def next_move(leader: Leader, me: str, now_ms: int) -> Move:
    """The action of the worker `me` at a tick, given the record. A lease that cannot be read counts
    as expired. A lease that holds is waited for even if its leader's name was deleted, since that
    leader may still lead.
    """
    try:
        expired = parse_instant_ms(leader.lease) < now_ms
    except DurationError:
        expired = True
    # Ours, but over: somebody may have led in between, so it is claimed anew.
    if leader.uuid == me and not expired:
        return Move.RENEW
    return Move.CLAIM if expired else Move.FOLLOW


class Election:
    """One worker's part in the election."""

    def __init__(
        self,
        records: Records,
        *,
        uuid: str,
        desc: str,
        lease_ms: int,
        monotonic_s: Callable[[], float],
        address: str = "",
    ) -> None:
        self.uuid = uuid
        self.desc = desc
        self.address = address
        self._records = records
        self._lease_ms = lease_ms
        self._monotonic_s = monotonic_s
        self._revision = 0
        self._until_s = 0.0
        self._timeouts: set[asyncio.Timeout] = set()

    @property
    def leads(self) -> bool:
        """Whether this worker's lease is valid now."""
        return self._monotonic_s() < self._until_s

    @property
    def fence(self) -> dict[str, int]:
        """The comparison under which a leader writes."""
        return {LEADER_UUID: self._revision}

    def check(self) -> None:
        """Raises: LeaseLostError: this worker's lease does not hold."""
        if not self.leads:
            raise LeaseLostError(
                "this worker is not the GC leader; ask the leader, or wait for the lease to run out"
            )

    @asynccontextmanager
    async def while_leading(self) -> AsyncIterator[None]:
        """Run the block as long as the lease holds; renewing it gives the block more time.

        Raises:
            LeaseLostError: it does not hold, or ended before the block did.
        """
        self.check()
        try:
            async with asyncio.timeout_at(self._deadline()) as timeout:
                self._timeouts.add(timeout)
                try:
                    yield
                finally:
                    self._timeouts.discard(timeout)
        except TimeoutError as err:
            # The block's own: one of its requests took too long.
            if not timeout.expired():
                raise
            raise LeaseLostError(
                "the lease ran out in the middle of the work; the next leader does what is left"
            ) from err

    async def tick(self, marked_s: float, now_ms: int) -> bool:
        """Claim or renew the leadership as `next_move` says; returns whether this worker leads.

        `marked_s` is the monotonic clock's time before `now_ms` was requested.
        """
        leader = await _read_record(self._records)
        move = next_move(leader, self.uuid, now_ms)
        lease = format_instant(now_ms + self._lease_ms)
        changes: dict[str, str | None] = {LEADER_LEASE: lease}
        if move is Move.CLAIM:
            changes |= {LEADER_UUID: self.uuid, LEADER_DESC: self.desc, LEADER_ADDR: self.address}
        revision = 0
        if move is not Move.FOLLOW:
            # Written only if the record is still the one that was judged: of two who find the
            # lease over, one wins.
            revision = await self._records.write(changes, leader.revisions)
        if not revision:
            self._lead_until(0.0)
            return False
        self._revision = revision if move is Move.CLAIM else leader.revisions[LEADER_UUID]
        # Counted from before the time was asked for, and from the lease as it was rounded for the
        # record: this worker stops before others may claim.
        self._lead_until(marked_s + (parse_instant_ms(lease) - now_ms) / 1000)
        return self.leads

    async def resign(self) -> None:
        """Take our name out of the record, so that the next worker need not wait for the lease to
        run out.
        """
        if self._until_s:
            # Stop first: from the moment the record is free, another worker may lead.
            self._lead_until(0.0)
            await self._records.write(
                dict.fromkeys((LEADER_UUID, LEADER_DESC, LEADER_LEASE, LEADER_ADDR)), self.fence
            )

    def _lead_until(self, until_s: float) -> None:
        self._until_s = until_s
        # One that has expired cancels its block already, and asyncio refuses to move it.
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(self._deadline())

    def _deadline(self) -> float:
        """The end of the lease, on the event loop's clock."""
        return asyncio.get_running_loop().time() + max(0.0, self._until_s - self._monotonic_s())


class CoordinatorClock:
    """The coordinator's clock between two readings of it:
    its last answer plus what has passed since.

    Milliseconds since the Unix epoch, never ahead of the coordinator by more than clocks drift.
    """

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self.monotonic_s = monotonic_s
        self._read_at_s = 0.0
        self._reading_ms = 0

    def set(self, marked_s: float, now_ms: int) -> None:
        """Take over the coordinator's answer `now_ms`;
        `marked_s` is the monotonic clock from before it was asked.
        """
        self._read_at_s, self._reading_ms = marked_s, now_ms

    def now_ms(self) -> int:
        """The time of now."""
        return self._reading_ms + int((self.monotonic_s() - self._read_at_s) * 1000)
