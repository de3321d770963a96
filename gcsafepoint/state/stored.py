"""The GC states of a leading coordinator, in memory and in etcd, which is authoritative.

`GcStateManager` (`gcsafepoint.state.service`) reads and changes the states through `StoredStates`:

1. A call is applied in memory, and answered when its changes are durable; calls that change nothing
   write nothing.
2. Every transaction is guarded by `<gc>/gc_state_revision`, which every writer increments. When
   another writer was first, or it is unknown whether a write happened, the states are read again
   before the next answer.
3. Writes of others (an operator with etcdctl, TiDB itself) are followed by a watch. TiDB's
   min_start_ts are read before each advance, as in PD. A record that cannot be parsed fails
   `load`; if it is written later, calls about GC fail until it is corrected.

One object serves one term of leadership. Its first `load` extends the expiry of services by the
time without a leader (`gcsafepoint.state.records.Outage`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeVar

import structlog

from gcsafepoint.state import metrics
from gcsafepoint.state.records import (
    KEYSPACES_OF_TIDB,
    TXN_SAFE_POINT_TAIL,
    GcKeys,
    Outage,
    SafePointRecordError,
    parse_global_barriers,
    parse_guard,
    parse_min_start_ts,
    parse_outage,
    parse_scope,
    write_operations,
)
from gcsafepoint.state.rules import GcState
from gcsafepoint.state.states import GcStates, Keyspace
from storage.meta.errors import CompactedError, MetaUnavailableError
from storage.meta.meta import Compare, KeyValue, Op, Put, TxnResult, WatchEvent
from storage.model.errors import ConflictError

R = TypeVar("R")
MAX_CHANGES = 90  # of one transaction; etcd allows 128 operations
# how often a leader that writes nothing else saves its clock
_CLOCK_EVERY_S = 10
_RETRY_S = 0.2
_ATTEMPTS = 10
_OWN_REVISIONS = 4096

_log = structlog.get_logger(__name__)


class SafePointConflictError(ConflictError):
    """Other writers of the safepoints were always first."""

    code = "ErrSafePointConflict"


class MetadataStore(Protocol):
    """The part of the metadata client that the states need; the coordinator's one fences the
    writes.
    """

    async def txn(
        self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()
    ) -> TxnResult:
        """See `Meta.txn`."""
        ...

    async def get_prefix(self, prefix: bytes) -> list[KeyValue]:
        """See `Meta.get_prefix`."""
        ...

    def watch(self, prefix: bytes, start_revision: int = 0) -> AsyncIterator[list[WatchEvent]]:
        """See `Meta.watch`."""
        ...


class StoredStates:
    """The states of a cluster; calls may overlap."""

    def __init__(
        self,
        store: MetadataStore,
        keys: GcKeys,
        clock: Callable[[], float],
        keyspace_of: Callable[[bytes], Keyspace] | None,
    ) -> None:
        """`keyspace_of` reads a stored keyspacepb.KeyspaceMeta;
        without it only the null keyspace is known.
        """
        self._store = store
        self._keys = keys
        self._clock = clock
        self._keyspace_of = keyspace_of
        self._lock = asyncio.Lock()
        self._states: GcStates | None = None
        self._guard = (0, 0)
        self._own = Revisions()
        self._first_foreign_revision = 0
        self._published: GcStates | None = None
        self._led = False
        self._read_at_s = 0
        self.gc_safe_point = 0
        """The null keyspace's; durable. Reading it costs nothing; `load` once before."""

    async def load(self) -> GcStates:
        """Read the states from the metadata; the first time, extend expiries by the outage,
        durably.

        Raises:
            SafePointRecordError: a record cannot be read.
            MetaUnavailableError, SafePointConflictError.
        """
        # Only the first time: later readings follow this leader's own clock, and there is no outage
        # to give back.
        if self._led:
            return await self._read(Outage())
        states = await self._read(await self._outage())
        self._first_foreign_revision = self._guard[1] + 1
        if not await self._write(states, write_operations(states.take_changes(), self._keys)):
            raise SafePointConflictError(
                "somebody else writes safepoints while this coordinator begins to lead"
            )
        self._led = True
        return states

    async def run(self) -> None:
        """Follow what others write, and save the clock now and then, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for prefix in (
                    self._keys.prefix,
                    self._keys.null.txn_safe_point,
                    self._keys.keyspaces,
                ):
                    tasks.create_task(self._follow(prefix), name=f"safepoints-{prefix.decode()}")
                following = self._follow(KEYSPACES_OF_TIDB, TXN_SAFE_POINT_TAIL)
                tasks.create_task(following, name="safepoints-of-keyspaces")
                tasks.create_task(self._save_clock(), name="safepoints-clock")
        finally:
            metrics.SAFE_POINTS.remove(self._published)

    async def read(self, read: Callable[[GcStates], R], advances: int | None = None) -> R:
        """Apply `read` to the current states; `advances`: the keyspace whose min_start_ts are read
        from etcd first.
        """
        async with self._lock:
            return read(await self._current(advances))

    async def change(self, change: Callable[[GcStates], R], advances: int | None = None) -> R:
        """Apply `change`; durable when it returns its answer. It may be applied again to newer
        states.

        `advances`: the keyspace whose txn safe point it may advance; see `read`.

        Raises:
            SafePointConflictError, MetaUnavailableError: the answer is not certain; try again.
        """
        # The lock is held until the change is durable: the next call is decided on what is stored,
        # never on what may still fail.
        async with self._lock:
            for _ in range(_ATTEMPTS):
                states = await self._current(advances)
                answer = change(states)
                if await self._write(states, write_operations(states.take_changes(), self._keys)):
                    return answer
        raise SafePointConflictError(
            f"other writers of the safepoints were first {_ATTEMPTS} times; try again later"
        )

    async def _current(self, advances: int | None) -> GcStates:
        states = self._states or await self.load()
        if advances is not None:
            scope = states.scope_of_user(advances)
            keys = self._keys.scope(scope)
            # Read at each advance rather than watched: a watch may be behind, and t must not pass a
            # transaction that runs.
            running = parse_min_start_ts(await self._store.get_prefix(keys.min_start_ts), keys)
            states.of_user(scope).min_start_ts = running
        return states

    async def _read(self, outage: Outage) -> GcStates:
        self._states = None
        # The guard is read first, and the other records after it: a write in between changes the
        # guard, and so makes our next write fail.
        pairs = await self._store.get_prefix(self._keys.prefix)
        self._guard = parse_guard(pairs, self._keys)
        global_barriers = parse_global_barriers(pairs, self._keys, outage)
        pairs += await self._store.get_prefix(self._keys.null.txn_safe_point)
        keyspaces = await self._keyspaces()
        states = GcStates(
            parse_scope(pairs, self._keys.null, outage),
            global_barriers,
            keyspaces,
            {
                keyspace.id: await self._read_scope(keyspace.id, outage)
                for keyspace in keyspaces
                if keyspace.level_gc
            },
        )
        if outage.seconds:
            _log.info("what was left of each TTL is given back", outage_s=outage.seconds)
            states.mark_all()
        self._publish(states)
        return states

    async def _read_scope(self, keyspace_id: int, outage: Outage) -> GcState:
        keys = self._keys.scope(keyspace_id)
        pairs: list[KeyValue] = []
        for prefix in (keys.gc_safe_point, keys.txn_safe_point, keys.services):
            pairs += await self._store.get_prefix(prefix)
        return parse_scope(pairs, keys, outage)

    async def _keyspaces(self) -> list[Keyspace]:
        if self._keyspace_of is None:
            return []
        keyspaces: list[Keyspace] = []
        for pair in await self._store.get_prefix(self._keys.keyspace_metas):
            try:
                keyspaces.append(self._keyspace_of(pair.value))
            except ValueError as err:
                raise SafePointRecordError(pair, err) from err
        return keyspaces

    async def _outage(self) -> Outage:
        readings = await self._store.get_prefix(self._keys.clock)
        return parse_outage(readings[0] if readings else None, self._clock())

    async def _write(self, states: GcStates, ops: list[Op]) -> bool:
        """Write `ops` in as few transactions as they fit into; False: another writer was first."""
        if not ops:
            return True
        # If the write is interrupted, its outcome is unknown: the next call reads the states again.
        self._states = None
        parts = list(_parts(ops))
        for part in parts:
            number, mod_revision = self._guard
            own: list[Op] = [Put(self._keys.revision, b"%d" % (number + 1))]
            # With the last part: expiries that are written after the reading are not extended by an
            # outage, and those of earlier parts must be.
            if part is parts[-1]:
                own.append(self._reading())
            guard = Compare.unchanged(self._keys.revision, mod_revision)
            result = await self._store.txn([guard], [*part, *own])
            if not result.succeeded:
                # Another writer was first: what is in memory was decided on outdated state, and
                # the caller decides anew.
                return False
            self._guard = (number + 1, result.revision)
            # The watch shows our own writes, too, which need no reading.
            self._own.add(result.revision)
            metrics.TRANSACTIONS_TOTAL.inc()
        self._publish(states)
        return True

    def _reading(self) -> Put:
        self._read_at_s = int(self._clock())
        return Put(self._keys.clock, b"%d" % self._read_at_s)

    def _publish(self, states: GcStates) -> None:
        self._states = states
        self.gc_safe_point = states.null.gc_safe_point
        metrics.SAFE_POINTS.states = self._published = states

    async def _save_clock(self) -> None:
        while True:
            await asyncio.sleep(_CLOCK_EVERY_S)
            states = self._states
            # No TTL may run out, or another write has just saved the clock.
            if (
                states is None
                or not states.has_barriers()
                or self._clock() < self._read_at_s + _CLOCK_EVERY_S
            ):
                continue
            try:
                await self._store.txn([], [self._reading()])
            except MetaUnavailableError as err:
                _log.warning("the clock of safepoints cannot be kept", reason=err.message)

    async def _follow(self, prefix: bytes, tail: bytes = b"") -> None:
        revision, is_missed = self._first_foreign_revision, False
        while True:
            try:
                if is_missed:
                    await self._reread()
                    is_missed = False
                async for events in self._store.watch(prefix, revision):
                    await self._reread_if_foreign(
                        {
                            event.pair.mod_revision
                            for event in events
                            if event.pair.key.endswith(tail)
                        }
                    )
                    revision = events[-1].pair.mod_revision + 1
            except CompactedError as err:
                # What happened up to there cannot be watched any more: the state is read instead.
                revision, is_missed = err.compact_revision, True
            except MetaUnavailableError as err:
                _log.warning("safepoints cannot be read", reason=err.message)
                # The watch begins again at the same revision, so a change whose states could not
                # be read comes again. After a pause, as the metadata may fail at once.
                await asyncio.sleep(_RETRY_S)

    async def _reread_if_foreign(self, revisions: set[int]) -> None:
        # The lock waits for a write of ours that is under way, whose revision is not in `_own` yet.
        async with self._lock:
            ours = all(revision in self._own for revision in revisions)
        if not ours:
            _log.info("safepoints were written by somebody else", revision=max(revisions))
            await self._reread()

    async def _reread(self) -> None:
        async with self._lock:
            # Calls about GC are refused with this error until the record is corrected.
            try:
                await self.load()
            except SafePointRecordError as err:
                _log.error("safepoints cannot be understood", reason=err.message)


class Revisions:
    """The latest revisions of our own writes; one that was dropped costs reading the states once
    more.
    """

    def __init__(self) -> None:
        self._revisions: set[int] = set()

    def __contains__(self, revision: int) -> bool:
        return revision in self._revisions

    def add(self, revision: int) -> None:
        """Remember `revision`, which is above all before."""
        self._revisions.add(revision)
        if len(self._revisions) > 2 * _OWN_REVISIONS:
            self._revisions = {
                recent for recent in self._revisions if recent > revision - _OWN_REVISIONS
            }


def _parts(ops: Sequence[Op]) -> Iterator[list[Op]]:
    rest = iter(ops)
    while part := list(islice(rest, MAX_CHANGES)):
        yield part
