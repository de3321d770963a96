"""The embedded metadata server's state: etcd's revisions, ranges and transactions as a pure state machine.

Invariants, as in etcd:
1. `revision` starts at 1 and grows by one with every request that changed something; all its changes share it.
2. A pair's `version` counts its puts since it was created; `create_revision <= mod_revision <= revision`.
3. A request is checked before anything changes: it is applied whole, or raises and changes nothing.
4. `events(r)` for `compact_revision <= r <= revision` are all changes of revision r in order, each with the pair
   before it, so any kept past state can be had back by undoing.
5. A key is attached to exactly the lease its pair names, and that lease exists.
"""

import bisect
from collections.abc import Iterable, Iterator

from etcdpb import kv_pb2, rpc_pb2

from storage.meta import compare, request
from storage.meta.errors import CompactedError, FutureRevisionError, LeaseExistsError, LeaseNotFoundError
from storage.meta.ranges import in_range, select

Event = kv_pb2.Event
KeyValue = kv_pb2.KeyValue


class State:
    """All pairs of now, the leases' keys, and the changes since `compact_revision`."""

    def __init__(self) -> None:
        self.revision = 1
        self.compact_revision = 0
        self.leases: dict[int, set[bytes]] = {}
        self._pairs: dict[bytes, KeyValue] = {}
        self._keys: list[bytes] = []
        self._log: dict[int, list[Event]] = {}
        self._open: list[Event] = []

    def restore(self, revision: int, compact_revision: int, leases: Iterable[int], pairs: Iterable[KeyValue]) -> None:
        """Take over a saved state; the log follows through `restore_events`."""
        self.revision, self.compact_revision = revision, compact_revision
        self.leases = {lease: set() for lease in leases}
        for pair in pairs:
            self._set(pair)
        self._keys = sorted(self._pairs)

    def restore_events(self, revision: int, events: list[Event]) -> None:
        """Take over the saved changes of one revision."""
        self._log[revision] = events

    def events(self, revision: int) -> list[Event]:
        """The changes of one kept revision, in order; see invariant 4."""
        return self._log.get(revision, [])

    def read(self, asked: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        """Answer a read.

        Raises:
            MetaRequestError: malformed.
            CompactedError, FutureRevisionError: `asked.revision` is not kept, or not there yet.
        """
        request.check_range(asked)
        self._check_revision(asked.revision)
        return self._range(asked)

    def txn(self, asked: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        """Compare, then apply one of the branches; all its changes get one revision.

        Raises:
            MetaRequestError, LeaseNotFoundError, CompactedError, FutureRevisionError: nothing was changed.
        """
        request.check_txn(asked, self._check_put, self._check_revision)
        response = self._txn(asked)
        self._commit()
        response.header.revision = self.revision
        return response

    def put(self, asked: rpc_pb2.PutRequest) -> rpc_pb2.PutResponse:
        """Set one key; raises as `txn`."""
        done = self.txn(rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_put=asked)]))
        return done.responses[0].response_put

    def delete_range(self, asked: rpc_pb2.DeleteRangeRequest) -> rpc_pb2.DeleteRangeResponse:
        """Delete a key or range; raises as `txn`."""
        done = self.txn(rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_delete_range=asked)]))
        return done.responses[0].response_delete_range

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
        for key in sorted(self.leases[lease]):
            self._delete(key)
        del self.leases[lease]
        self._commit()

    def compact(self, revision: int) -> range:
        """Forget the changes before `revision`; returns the revisions that were forgotten.

        Raises:
            CompactedError, FutureRevisionError: it was compacted already, or is not there yet.
        """
        if revision <= self.compact_revision:
            raise CompactedError(self.compact_revision)
        if revision > self.revision:
            raise FutureRevisionError
        forgotten = range(max(self.compact_revision, min(self._log, default=revision)), revision)
        for old in forgotten:
            self._log.pop(old, None)
        self.compact_revision = revision
        return forgotten

    def _txn(self, asked: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        succeeded = all(compare.holds(test, self._matching(test.key, test.range_end)) for test in asked.compare)
        response = rpc_pb2.TxnResponse(succeeded=succeeded)
        for op in asked.success if succeeded else asked.failure:
            response.responses.append(self._apply(op))
        return response

    def _apply(self, op: rpc_pb2.RequestOp) -> rpc_pb2.ResponseOp:
        kind = op.WhichOneof("request")
        if kind == "request_put":
            return rpc_pb2.ResponseOp(response_put=self._put(op.request_put))
        if kind == "request_delete_range":
            return rpc_pb2.ResponseOp(response_delete_range=self._delete_range(op.request_delete_range))
        if kind == "request_txn":
            return rpc_pb2.ResponseOp(response_txn=self._txn(op.request_txn))
        return rpc_pb2.ResponseOp(response_range=self._range(op.request_range))

    def _range(self, asked: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        past = asked.revision if 0 < asked.revision < self.revision else 0
        pairs = self._past(asked, past) if past else self._matching(asked.key, asked.range_end)
        response = select(asked, pairs)
        response.header.revision = self.revision + bool(self._open)
        return response

    def _put(self, asked: rpc_pb2.PutRequest) -> rpc_pb2.PutResponse:
        before = self._pairs.get(asked.key)
        revision = self.revision + 1
        pair = KeyValue(
            key=asked.key,
            value=before.value if before and asked.ignore_value else asked.value,
            lease=before.lease if before and asked.ignore_lease else asked.lease,
            create_revision=before.create_revision if before else revision,
            mod_revision=revision,
            version=before.version + 1 if before else 1,
        )
        if before is None:
            bisect.insort(self._keys, asked.key)
        self._detach(before)
        self._set(pair)
        self._open.append(Event(type=Event.PUT, kv=pair, prev_kv=before))
        response = rpc_pb2.PutResponse(prev_kv=before if asked.prev_kv else None)
        response.header.revision = revision
        return response

    def _delete_range(self, asked: rpc_pb2.DeleteRangeRequest) -> rpc_pb2.DeleteRangeResponse:
        doomed = self._matching(asked.key, asked.range_end)
        for pair in doomed:
            self._delete(pair.key)
        response = rpc_pb2.DeleteRangeResponse(deleted=len(doomed), prev_kvs=doomed if asked.prev_kv else ())
        response.header.revision = self.revision + bool(self._open)
        return response

    def _delete(self, key: bytes) -> None:
        before = self._pairs.pop(key)
        self._keys.pop(bisect.bisect_left(self._keys, key))
        self._detach(before)
        gone = KeyValue(key=key, mod_revision=self.revision + 1)
        self._open.append(Event(type=Event.DELETE, kv=gone, prev_kv=before))

    def _commit(self) -> None:
        if self._open:
            self.revision += 1
            self._log[self.revision] = self._open
            self._open = []

    def _set(self, pair: KeyValue) -> None:
        self._pairs[pair.key] = pair
        if pair.lease:
            self.leases[pair.lease].add(pair.key)

    def _detach(self, pair: KeyValue | None) -> None:
        if pair is not None and pair.lease:
            self.leases[pair.lease].discard(pair.key)

    def _matching(self, key: bytes, range_end: bytes) -> list[KeyValue]:
        if not range_end:
            return [self._pairs[key]] if key in self._pairs else []
        start = bisect.bisect_left(self._keys, key)
        stop = len(self._keys) if range_end == b"\0" else bisect.bisect_left(self._keys, range_end)
        return [self._pairs[found] for found in self._keys[start:stop]]

    def _past(self, asked: rpc_pb2.RangeRequest, revision: int) -> list[KeyValue]:
        pairs = {pair.key: pair for pair in self._matching(asked.key, asked.range_end)}
        for event in self._newest_first(revision):
            if not in_range(event.kv.key, asked.key, asked.range_end):
                continue
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

    def _check_put(self, asked: rpc_pb2.PutRequest) -> None:
        request.check_put(asked, exists=asked.key in self._pairs)
        if asked.lease and asked.lease not in self.leases:
            raise LeaseNotFoundError
