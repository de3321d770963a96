"""The embedded metadata server's state: etcd's revisions, ranges and transactions as a pure state
machine; when its leases end, and how much of its history is kept.

Invariants, as in etcd:
1. `revision` starts at 1 and grows by one with every request that changed something; all its
   changes share it.
2. A pair's `version` counts its puts since it was created; `create_revision <= mod_revision <=
   revision`.
3. A request is checked before anything changes: it is applied whole, or raises and changes nothing.
4. `events(r)` for `compact_revision <= r <= revision` are all changes of revision r in order, each
   with the pair before it, so any past state that is kept can be computed by undoing.
5. A key is attached to exactly the lease its pair names, and that lease exists.
6. The conditions of a transaction, and of transactions inside it, are evaluated on the state before
   it.
7. `live_bytes` and `log_bytes` are the sizes of the present pairs and of the kept changes.

Time is an argument, in monotonic seconds. `Leases` has the deadlines: a lease lives at least its
TTL after its last renewal; one that has expired is never renewed again; deadlines are not kept on
disk, so every lease gets its whole TTL again after a restart, as in etcd.

Reads of the past and watches that fell behind need the kept changes. `History` bounds them by
count, by age and, always, by bytes; a client that needs older ones gets etcd's "compacted" error
and reads the present state.
"""

import bisect
import heapq
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from etcdpb import kv_pb2, rpc_pb2

from storage.meta.errors import (
    CompactedError,
    FutureRevisionError,
    LeaseExistsError,
    LeaseNotFoundError,
    LeaseTtlError,
    MetaRequestError,
)
from storage.meta.store.request import (
    check_put,
    check_range,
    check_txn,
    compare_holds,
    in_range,
    select,
)

MIN_TTL_S = 2
MAX_TTL_S = 9_000_000_000
Event = kv_pb2.Event
KeyValue = kv_pb2.KeyValue
_Outcomes = Iterator[bool]
_SAMPLES = 60


class State:
    """The present pairs, the leases' keys, and the changes since `compact_revision`."""

    def __init__(self) -> None:
        self.revision = 1
        self.compact_revision = 0
        self.live_bytes = 0
        self.log_bytes = 0
        self.leases: dict[int, set[bytes]] = {}
        self._pairs: dict[bytes, KeyValue] = {}
        self._keys: list[bytes] = []
        self._log: dict[int, list[Event]] = {}
        self._open: list[Event] = []

    def restore(
        self, revision: int, compact_revision: int, leases: Iterable[int], pairs: Iterable[KeyValue]
    ) -> None:
        """Load a saved state; the log follows with `restore_events`."""
        self.revision, self.compact_revision = revision, compact_revision
        self.leases = {lease: set() for lease in leases}
        for pair in pairs:
            self._set(pair)
        self._keys = sorted(self._pairs)

    def restore_events(self, revision: int, events: list[Event]) -> None:
        """Load the saved changes of one revision."""
        self._log[revision] = events
        self.log_bytes += _size(events)

    def events(self, revision: int) -> list[Event]:
        """The changes of one kept revision, in order; see invariant 4."""
        return self._log.get(revision, [])

    def read(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        """Answer a read.

        Raises:
            MetaRequestError: malformed.
            CompactedError, FutureRevisionError: `request.revision` is not kept, or does not exist
                yet.
        """
        check_range(request)
        self._check_revision(request.revision)
        return self._range(request)

    def txn(self, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        """Compare, then apply one of the branches; all its changes get one revision.

        Raises:
            MetaRequestError, LeaseNotFoundError, CompactedError, FutureRevisionError: nothing was
                changed.
        """
        check_txn(request)
        # All conditions first, then all checks, and only then a change: see invariants 3 and 6.
        outcomes = list(self._evaluate(request))
        operations = list(_operations(request, iter(outcomes)))
        for op in operations:
            if op.HasField("request_put"):
                self._check_put(op.request_put)
        for op in operations:
            if op.HasField("request_range"):
                self._check_revision(op.request_range.revision)
        response = self._txn(request, iter(outcomes))
        self._commit()
        response.header.revision = self.revision
        return response

    def put(self, request: rpc_pb2.PutRequest) -> rpc_pb2.PutResponse:
        """Set one key; raises as `txn`."""
        check_put(request)
        self._check_lease(request.lease)
        done = self.txn(rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_put=request)]))
        return done.responses[0].response_put

    def delete_range(self, request: rpc_pb2.DeleteRangeRequest) -> rpc_pb2.DeleteRangeResponse:
        """Delete a key or range; raises as `txn`."""
        done = self.txn(
            rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_delete_range=request)])
        )
        return done.responses[0].response_delete_range

    def hash_kv(self, revision: int) -> rpc_pb2.HashKVResponse:
        """A checksum of the pairs at `revision` (0: now); equal states have equal ones.

        Raises as `read`.
        """
        present = self.read(rpc_pb2.RangeRequest(key=b"\0", range_end=b"\0", revision=revision))
        checksum = 0
        for pair in present.kvs:
            checksum = zlib.crc32(pair.SerializeToString(deterministic=True), checksum)
        return rpc_pb2.HashKVResponse(
            header=present.header, hash=checksum, compact_revision=self.compact_revision
        )

    def grant(self, lease: int) -> None:
        """Add a lease without keys.

        Raises:
            LeaseExistsError: the id is taken.
        """
        if lease in self.leases:
            raise LeaseExistsError
        self.leases[lease] = set()

    def revoke(self, lease: int) -> None:
        """Remove a lease and delete its keys, in one revision.

        Raises:
            LeaseNotFoundError: there is none.
        """
        if lease not in self.leases:
            raise LeaseNotFoundError
        # Sorted into a list: `_delete` takes each key out of the lease's set.
        for key in sorted(self.leases[lease]):
            self._delete(key)
        del self.leases[lease]
        self._commit()

    def compact(self, revision: int) -> None:
        """Drop the changes before `revision`.

        Raises:
            CompactedError, FutureRevisionError: it was compacted already, or does not exist yet.
        """
        if revision <= self.compact_revision:
            raise CompactedError(self.compact_revision)
        if revision > self.revision:
            raise FutureRevisionError
        while (oldest := next(iter(self._log), revision)) < revision:
            self.log_bytes -= _size(self._log.pop(oldest))
        self.compact_revision = revision

    def revision_within(self, log_bytes: int) -> int:
        """The first revision from which on the kept changes take at most `log_bytes`."""
        excess = self.log_bytes - log_bytes
        for revision, events in self._log.items():
            if excess <= 0:
                return revision
            excess -= _size(events)
        return self.revision

    def _evaluate(self, request: rpc_pb2.TxnRequest) -> _Outcomes:
        """Evaluate the conditions of a transaction and then, depth first, those of the transactions
        in the chosen branch.
        """
        succeeded = all(
            compare_holds(test, self._matching(test.key, test.range_end))
            for test in request.compare
        )
        yield succeeded
        for op in request.success if succeeded else request.failure:
            if op.HasField("request_txn"):
                yield from self._evaluate(op.request_txn)

    def _txn(self, request: rpc_pb2.TxnRequest, outcomes: _Outcomes) -> rpc_pb2.TxnResponse:
        succeeded = next(outcomes)
        response = rpc_pb2.TxnResponse(succeeded=succeeded)
        for op in request.success if succeeded else request.failure:
            response.responses.append(self._apply(op, outcomes))
        return response

    def _apply(self, op: rpc_pb2.RequestOp, outcomes: _Outcomes) -> rpc_pb2.ResponseOp:
        kind = op.WhichOneof("request")
        if kind == "request_put":
            return rpc_pb2.ResponseOp(response_put=self._put(op.request_put))
        if kind == "request_delete_range":
            return rpc_pb2.ResponseOp(
                response_delete_range=self._delete_range(op.request_delete_range)
            )
        if kind == "request_txn":
            return rpc_pb2.ResponseOp(response_txn=self._txn(op.request_txn, outcomes))
        return rpc_pb2.ResponseOp(response_range=self._range(op.request_range))

    def _range(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        # Within a transaction that has changed something, reads see its revision already.
        now = self.revision + bool(self._open)
        if 0 < request.revision < now:
            pairs = self._past(request, request.revision)
        else:
            pairs = self._matching(request.key, request.range_end)
        response = select(request, pairs)
        response.header.revision = now
        return response

    def _put(self, request: rpc_pb2.PutRequest) -> rpc_pb2.PutResponse:
        before = self._pairs.get(request.key)
        revision = self.revision + 1
        pair = KeyValue(
            key=request.key,
            value=before.value if before and request.ignore_value else request.value,
            lease=before.lease if before and request.ignore_lease else request.lease,
            create_revision=before.create_revision if before else revision,
            mod_revision=revision,
            version=before.version + 1 if before else 1,
        )
        if before is None:
            bisect.insort(self._keys, request.key)
        else:
            self._drop(before)
        self._set(pair)
        self._open.append(Event(type=Event.PUT, kv=pair, prev_kv=before))
        response = rpc_pb2.PutResponse(prev_kv=before if request.prev_kv else None)
        response.header.revision = revision
        return response

    def _delete_range(self, request: rpc_pb2.DeleteRangeRequest) -> rpc_pb2.DeleteRangeResponse:
        pairs = self._matching(request.key, request.range_end)
        for pair in pairs:
            self._delete(pair.key)
        response = rpc_pb2.DeleteRangeResponse(
            deleted=len(pairs), prev_kvs=pairs if request.prev_kv else ()
        )
        response.header.revision = self.revision + bool(self._open)
        return response

    def _delete(self, key: bytes) -> None:
        before = self._pairs.pop(key)
        self._keys.pop(bisect.bisect_left(self._keys, key))
        self._drop(before)
        gone = KeyValue(key=key, mod_revision=self.revision + 1)
        self._open.append(Event(type=Event.DELETE, kv=gone, prev_kv=before))

    def _commit(self) -> None:
        if self._open:
            self.revision += 1
            self._log[self.revision] = self._open
            self.log_bytes += _size(self._open)
            self._open = []

    def _set(self, pair: KeyValue) -> None:
        self._pairs[pair.key] = pair
        self.live_bytes += pair.ByteSize()
        if pair.lease:
            self.leases[pair.lease].add(pair.key)

    def _drop(self, pair: KeyValue) -> None:
        self.live_bytes -= pair.ByteSize()
        if pair.lease:
            self.leases[pair.lease].discard(pair.key)

    def _matching(self, key: bytes, range_end: bytes) -> list[KeyValue]:
        if not range_end:
            return [self._pairs[key]] if key in self._pairs else []
        start = bisect.bisect_left(self._keys, key)
        stop = len(self._keys) if range_end == b"\0" else bisect.bisect_left(self._keys, range_end)
        return [self._pairs[match] for match in self._keys[start:stop]]

    def _past(self, request: rpc_pb2.RangeRequest, revision: int) -> list[KeyValue]:
        # From the present state, each newer change is undone, the newest first.
        pairs = {pair.key: pair for pair in self._matching(request.key, request.range_end)}
        for event in self._newest_first(revision):
            if not in_range(event.kv.key, request.key, request.range_end):
                continue
            # A pair that there was has a version of at least 1.
            if event.prev_kv.version:
                pairs[event.kv.key] = event.prev_kv
            else:
                pairs.pop(event.kv.key, None)
        return [pairs[key] for key in sorted(pairs)]

    def _newest_first(self, revision: int) -> Iterator[Event]:
        yield from reversed(self._open)
        for newer in range(self.revision, revision, -1):
            yield from reversed(self.events(newer))

    def _check_revision(self, revision: int) -> None:
        if revision > self.revision:
            raise FutureRevisionError
        if 0 < revision < self.compact_revision:
            raise CompactedError(self.compact_revision)

    def _check_put(self, request: rpc_pb2.PutRequest) -> None:
        if (request.ignore_value or request.ignore_lease) and request.key not in self._pairs:
            raise MetaRequestError("etcdserver: key not found")
        self._check_lease(request.lease)

    def _check_lease(self, lease: int) -> None:
        if lease and lease not in self.leases:
            raise LeaseNotFoundError


def _operations(request: rpc_pb2.TxnRequest, outcomes: _Outcomes) -> Iterator[rpc_pb2.RequestOp]:
    """The operations that will run, those of inner transactions in their places."""
    for op in request.success if next(outcomes) else request.failure:
        if op.HasField("request_txn"):
            yield from _operations(op.request_txn, outcomes)
        else:
            yield op


def _size(events: Iterable[Event]) -> int:
    return sum(event.ByteSize() for event in events)


@dataclass(slots=True)
class _Lease:
    ttl_s: int
    deadline: float


class Leases:
    """TTL and deadline of each lease, and which have expired; `State` has their keys."""

    def __init__(self, ttls: Iterable[tuple[int, int]] = (), now: float = 0.0) -> None:
        self._leases = {lease: _Lease(ttl_s, now + ttl_s) for lease, ttl_s in ttls}
        self._heap = [(entry.deadline, lease) for lease, entry in self._leases.items()]
        heapq.heapify(self._heap)

    def __contains__(self, lease: int) -> bool:
        return lease in self._leases

    def check_grant(self, lease: int, ttl_s: int) -> int:
        """The TTL a new lease would get, at least `MIN_TTL_S`.

        Raises:
            LeaseExistsError, LeaseTtlError, LeaseNotFoundError: the id is taken, the TTL too long,
                the id 0.
        """
        if not lease:
            raise LeaseNotFoundError
        if ttl_s > MAX_TTL_S:
            raise LeaseTtlError
        if lease in self._leases:
            raise LeaseExistsError
        return max(ttl_s, MIN_TTL_S)

    def grant(self, lease: int, ttl_s: int, now: float) -> None:
        """Add a lease that `check_grant` allowed."""
        self._leases[lease] = _Lease(ttl_s, now + ttl_s)
        heapq.heappush(self._heap, (now + ttl_s, lease))

    def renew(self, lease: int, now: float) -> int:
        """Restart the lease's TTL; returns it, or 0 if the lease has expired or is unknown."""
        entry = self._leases.get(lease)
        if entry is None or entry.deadline <= now:
            return 0
        # The heap keeps the old deadline: `expired` sees the new one when that comes up, so a
        # renewal costs no heap operation.
        entry.deadline = now + entry.ttl_s
        return entry.ttl_s

    def postpone(self, seconds: float) -> None:
        """Move every deadline: the time in which this process could not receive renewals does not
        count.
        """
        for entry in self._leases.values():
            entry.deadline += seconds

    def all(self) -> list[int]:
        """The ids of all leases, the oldest first."""
        return list(self._leases)

    def time_left(self, lease: int, now: float) -> tuple[int, int]:
        """Whole seconds left and the granted TTL; (-1, 0) if the lease is unknown."""
        entry = self._leases.get(lease)
        return (max(0, int(entry.deadline - now)), entry.ttl_s) if entry else (-1, 0)

    def remove(self, lease: int) -> None:
        """Remove a lease, if it exists."""
        self._leases.pop(lease, None)

    def expired(self, now: float) -> list[int]:
        """Leases past their deadline; each is returned again until it is removed."""
        # an id that was granted again is in the heap twice
        expired: set[int] = set()
        while self._heap and self._heap[0][0] <= now:
            _, lease = heapq.heappop(self._heap)
            entry = self._leases.get(lease)
            if entry is None:
                continue
            if entry.deadline <= now:
                expired.add(lease)
            else:
                heapq.heappush(self._heap, (entry.deadline, lease))
        # Revoking them may be refused under load: until it is done they must come up again.
        for lease in expired:
            heapq.heappush(self._heap, (now, lease))
        return sorted(expired)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Bounds of the kept history, and of the pairs."""

    revisions: int = 10_000
    """Revisions kept; 0: any number."""
    age_s: float = 3600.0
    """Age of the oldest kept change in seconds; 0: any."""
    log_bytes: int = 64 << 20
    """Bytes of kept changes."""
    quota_bytes: int = 256 << 20
    """Bytes of the present pairs; beyond it puts are refused,
    as etcd does at --quota-backend-bytes.
    """


class History:
    """Decides at which revision to compact."""

    def __init__(self, retention: Retention) -> None:
        self._retention = retention
        # (time, newest revision then)
        self._newest: deque[tuple[float, int]] = deque()

    def due(self, state: State, now: float) -> int:
        """The revision to compact at; 0 when there is nothing to do.

        A tenth of slack keeps compactions few.
        """
        retention = self._retention
        floor = self._floor_by_age(state, now)
        kept = state.revision - state.compact_revision
        if retention.revisions and kept > retention.revisions * 11 // 10:
            floor = max(floor, state.revision - retention.revisions)
        if state.log_bytes > retention.log_bytes:
            floor = max(floor, state.revision_within(retention.log_bytes * 9 // 10))
        return floor if floor > state.compact_revision else 0

    def _floor_by_age(self, state: State, now: float) -> int:
        age_s = self._retention.age_s
        if not age_s:
            return 0
        # One sample for each sixtieth of the age bounds what must be remembered of the times.
        if not self._newest or now - self._newest[-1][0] >= age_s / _SAMPLES:
            self._newest.append((now, state.revision))
        floor = 0
        while self._newest and now - self._newest[0][0] > age_s:
            floor = self._newest.popleft()[1]
        return floor
