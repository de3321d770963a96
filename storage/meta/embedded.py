"""The embedded metadata server: etcd's API for one node, as the pure state of `storage.meta.store`
behind one queue, over LevelDB.

`GroupCommit` applies the queued requests to the state in memory, writes their changes in one synced
batch, and then answers them. Reads wait in the same queue, so no answer shows what a crash could
undo. When the disk fails, memory is ahead of it, so `run` raises instead of going on.

History is compacted automatically (`store.state.History`), and its space on disk is freed in the
background.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from etcdpb import kv_pb2, rpc_pb2
from google.protobuf.message import Message

from storage.defect import request_error
from storage.kv import KV, WriteBatch
from storage.leveldb import LevelDB
from storage.meta.errors import (
    LeaseNotFoundError,
    MetaUnavailableError,
    NoSpaceError,
    TooManyRequestsError,
)
from storage.meta.store import record
from storage.meta.store.request import txn_writes
from storage.meta.store.state import History, Leases, Retention
from storage.meta.store.watchers import Subscriptions, Watchers
from storage.model.errors import TidemarkError
from storage.queue import GroupQueue

R = TypeVar("R")
Change = Callable[[WriteBatch], Any]
MAX_WAITING = 16_384
MAX_WAITING_BYTES = 64 << 20
_GROUP = 1024
_GROUP_BYTES = 4 << 20
_EXPIRY_SECONDS = 0.25
_STALL_SECONDS = 1.0
_STOPPING = "the metadata server is stopping; try again"


@dataclass(frozen=True, slots=True)
class _Request:
    change: Change
    answer: asyncio.Future[Any]


class GroupCommit:
    """One queue in front of one store.

    `applied` completes a group's batch; `durable` is called once the batch is on disk.
    """

    def __init__(
        self, kv: KV, applied: Callable[[WriteBatch], None], durable: Callable[[], None]
    ) -> None:
        self._kv = kv
        self._applied = applied
        self._durable = durable
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="metadata-disk")
        self._queue: GroupQueue[_Request] = GroupQueue(_GROUP, _GROUP_BYTES)
        self._is_closed = False

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    async def submit(self, change: Callable[[WriteBatch], R], size: int = 0) -> R:
        """Run `change` in its turn; returns its result once the batch of its group is durable.

        `change` may add to that batch; one that raises must have changed nothing. `size` is that of
        the request in bytes.

        Raises:
            TooManyRequestsError: the queue is full.
            MetaUnavailableError: the disk failed, or the server is stopping.
        """
        # After `close` nothing takes requests from the queue: they would wait for ever.
        if self._is_closed:
            raise MetaUnavailableError(_STOPPING)
        if len(self._queue) >= MAX_WAITING or self._queue.waiting_bytes >= MAX_WAITING_BYTES:
            raise TooManyRequestsError
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._queue.put(_Request(change, answer), size)
        return await answer

    async def run(self) -> None:
        """Apply and answer queued requests, group by group, until cancelled."""
        while True:
            await self._queue.wait()
            while group := self._queue.take():
                await self._commit(group)

    def close(self) -> None:
        """Wait for the write under way, and refuse queued and later requests."""
        self._is_closed = True
        self._disk.shutdown(wait=True)
        _refuse(self._queue.take_all(), _STOPPING)

    async def _commit(self, group: list[_Request]) -> None:
        batch = WriteBatch()
        try:
            outcomes = [(request.answer, _attempt(request.change, batch)) for request in group]
            self._applied(batch)
            # Answers come after the sync, also those of reads: what they show must survive a crash.
            if len(batch):
                write = partial(self._kv.write, batch, sync=True)
                await asyncio.get_running_loop().run_in_executor(self._disk, write)
        except TidemarkError as err:
            _refuse(group, err.message)
            raise
        except BaseException:
            # Cancelled, or a defect: in memory, and perhaps on disk, are changes without an answer.
            _refuse(
                group,
                "the metadata server stopped while this was written; read what holds, then decide",
            )
            raise
        self._durable()
        for answer, outcome in outcomes:
            if answer.done():
                continue
            if isinstance(outcome, TidemarkError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)


def _attempt(change: Change, batch: WriteBatch) -> Any:
    size = len(batch)
    try:
        return change(batch)
    except TidemarkError as err:
        return err
    except Exception as err:
        if len(batch) != size:
            # Half of the change is in memory: only reading everything again from disk is safe.
            raise
        return request_error(err, "metadata request")


def _refuse(group: Iterable[_Request], reason: str) -> None:
    for request in group:
        if not request.answer.done():
            request.answer.set_exception(MetaUnavailableError(reason))


@dataclass(frozen=True, slots=True)
class Statistics:
    """The sizes of an embedded server; bytes are those of the messages."""

    revision: int
    compact_revision: int
    live_bytes: int
    log_bytes: int
    leases: int
    watchers: int
    waiting: int


class EmbeddedEtcd:
    """The metadata server of one directory; made by `open`.

    Implements `storage.meta.client.EtcdApi` and more.
    """

    def __init__(
        self,
        kv: KV,
        clock: Callable[[], float] = time.monotonic,
        retention: Retention | None = None,
    ) -> None:
        self._kv = kv
        self._clock = clock
        self._retention = retention or Retention()
        self._history = History(self._retention)
        self._state, ttls = record.load(kv)
        self._leases = Leases(ttls.items(), clock())
        self._commit = GroupCommit(kv, self._save, self._publish)
        self._sweeper = ThreadPoolExecutor(1, thread_name_prefix="metadata-sweep")
        self._sweep = asyncio.Event()
        self._swept = -1  # the first sweep removes what an earlier run left
        self._saved = self._state.revision
        self._subscriptions = Subscriptions()
        self._unpublished: list[tuple[int, list[kv_pb2.Event]]] = []
        self._watching = 0
        self.alarms = record.load_alarms(kv)
        """The raised alarms, by etcd's numbers."""
        self.revision = 0
        """The last durable revision."""
        self._publish()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, directory: Path, retention: Retention | None = None
    ) -> AsyncIterator["EmbeddedEtcd"]:
        """Open or create the directory and serve for the block.

        Raises:
            DirectoryLockedError, DirectoryUnusableError, CorruptError: as
                `storage.leveldb.LevelDB`.
        """
        kv = LevelDB(directory)
        try:
            server = cls(kv, retention=retention)
            async with asyncio.TaskGroup() as tasks:
                running = (server.run, server.run_expiry, server.run_sweep)
                loops = [tasks.create_task(loop(), name=loop.__name__) for loop in running]
                try:
                    yield server
                finally:
                    for task in loops:
                        task.cancel()
                    server.close()
        finally:
            kv.close()

    def close(self) -> None:
        """Wait for the write under way, and refuse queued requests."""
        self._commit.close()
        self._sweeper.shutdown(wait=True)

    async def run(self) -> None:
        """Answer requests until cancelled."""
        await self._commit.run()

    async def run_expiry(self) -> None:
        """Revoke expired leases until cancelled."""
        checked_at = self._clock()
        while True:
            await asyncio.sleep(_EXPIRY_SECONDS)
            stalled_s = self._clock() - checked_at - _EXPIRY_SECONDS
            # The process was stopped or starved: renewals may wait to be read. Owners lose nothing:
            # they count their deadlines from before they asked.
            if stalled_s > _STALL_SECONDS:
                self._leases.postpone(stalled_s)
            if expired := self._leases.expired(self._clock()):
                # they are returned again the next time
                with suppress(TooManyRequestsError):
                    await self._commit.submit(partial(self._expire, expired))
            checked_at = self._clock()

    async def run_sweep(self) -> None:
        """Remove compacted history from the disk until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._sweep.wait()
            self._sweep.clear()
            await loop.run_in_executor(
                self._sweeper, self._kv.delete_range, *record.events_before(self._swept)
            )

    async def read(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        """See `State.read`."""
        return await self._commit.submit(lambda _: self._state.read(request))

    async def put(self, request: rpc_pb2.PutRequest) -> rpc_pb2.PutResponse:
        """See `State.put`; raises NoSpaceError beyond the quota."""
        return await self._write(request, partial(self._state.put, request))

    async def delete_range(
        self, request: rpc_pb2.DeleteRangeRequest
    ) -> rpc_pb2.DeleteRangeResponse:
        """See `State.delete_range`."""
        return await self._commit.submit(lambda _: self._state.delete_range(request))

    async def txn(self, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        """See `State.txn`; one that puts raises NoSpaceError beyond the quota."""
        if txn_writes(request):
            return await self._write(request, partial(self._state.txn, request))
        return await self._commit.submit(lambda _: self._state.txn(request))

    async def compact(self, request: rpc_pb2.CompactionRequest) -> rpc_pb2.CompactionResponse:
        """See `State.compact`."""
        await self._commit.submit(partial(self._compact, request.revision))
        return rpc_pb2.CompactionResponse(header=self._header())

    async def lease_grant(self, request: rpc_pb2.LeaseGrantRequest) -> rpc_pb2.LeaseGrantResponse:
        """Create a lease; id 0 asks for a free one. Raises as `Leases.check_grant`."""
        return await self._commit.submit(partial(self._grant, request.ID, request.TTL))

    async def lease_revoke(
        self, request: rpc_pb2.LeaseRevokeRequest
    ) -> rpc_pb2.LeaseRevokeResponse:
        """End a lease and delete its keys; raises LeaseNotFoundError."""
        await self._commit.submit(partial(self._revoke, request.ID))
        return rpc_pb2.LeaseRevokeResponse(header=self._header())

    async def lease_time_to_live(
        self, request: rpc_pb2.LeaseTimeToLiveRequest
    ) -> rpc_pb2.LeaseTimeToLiveResponse:
        """The time left of a lease; TTL -1 if there is none."""
        left, granted = self._leases.time_left(request.ID, self._clock())
        keys = sorted(self._state.leases.get(request.ID, ())) if request.keys else ()
        return rpc_pb2.LeaseTimeToLiveResponse(
            header=self._header(), ID=request.ID, TTL=left, grantedTTL=granted, keys=keys
        )

    async def lease_leases(
        self, _request: rpc_pb2.LeaseLeasesRequest
    ) -> rpc_pb2.LeaseLeasesResponse:
        """All leases."""
        leases = [rpc_pb2.LeaseStatus(ID=lease) for lease in self._leases.all()]
        return rpc_pb2.LeaseLeasesResponse(header=self._header(), leases=leases)

    async def keep_alive(self, lease: int, within_s: float = 0.0) -> int:  # noqa: ARG002 - memory is never silent
        """Renew a lease in memory; returns its TTL in seconds, 0 if it has expired."""
        return self._leases.renew(lease, self._clock())

    async def watch(
        self, request: rpc_pb2.WatchCreateRequest
    ) -> AsyncGenerator[rpc_pb2.WatchResponse, None]:
        """One watch inside this process."""
        with self.watching() as (watchers, woken):
            watchers.handle(rpc_pb2.WatchRequest(create_request=request), self.revision)
            while True:
                woken.clear()
                for response in watchers.responses(lambda: self.revision):
                    yield response
                await woken.wait()

    @contextmanager
    def watching(self) -> Iterator[tuple[Watchers, asyncio.Event]]:
        """The watches of a new client stream, and an event that is set when there may be something
        to send.
        """
        woken = asyncio.Event()
        watchers = Watchers(self._state, self._subscriptions, woken.set)
        self._watching += 1
        try:
            yield watchers, woken
        finally:
            self._watching -= 1
            watchers.close()

    async def set_alarms(self, alarms: set[int]) -> None:
        """Set which alarms are raised, durably."""

        def change(batch: WriteBatch) -> None:
            self.alarms = alarms
            record.save_alarms(batch, alarms)

        await self._commit.submit(change)

    async def hash_kv(self, revision: int) -> rpc_pb2.HashKVResponse:
        """A checksum of the pairs at `revision` (0: now); equal states give equal sums,
        other programs other ones.
        """
        return await self._commit.submit(lambda _: self._state.hash_kv(revision))

    async def defragment(self) -> None:
        """Free the space of overwritten and deleted records on disk."""
        await asyncio.get_running_loop().run_in_executor(self._sweeper, self._kv.compact, b"", b"")

    def disk_bytes(self) -> int:
        """Bytes on disk, about; the last writes are not in it."""
        return self._kv.approximate_bytes(b"", b"\xff")

    def statistics(self) -> Statistics:
        """The present sizes."""
        state = self._state
        return Statistics(
            self.revision,
            state.compact_revision,
            state.live_bytes,
            state.log_bytes,
            len(state.leases),
            self._watching,
            self._commit.waiting,
        )

    async def _write(self, request: Message, apply: Callable[[], R]) -> R:
        size = request.ByteSize()

        def change(batch: WriteBatch) -> R:
            # Durable, as in etcd: after a restart the operator must make room, too.
            if self._state.live_bytes + size > self._retention.quota_bytes:
                self.alarms.add(rpc_pb2.NOSPACE)
                record.save_alarms(batch, self.alarms)
            if rpc_pb2.NOSPACE in self.alarms:
                raise NoSpaceError
            return apply()

        return await self._commit.submit(change, size)

    def _save(self, batch: WriteBatch) -> None:
        """Write the revisions that are new, before any of them can be compacted."""
        if self._state.revision > self._saved:
            revisions = range(self._saved + 1, self._state.revision + 1)
            record.save_revisions(batch, self._state, revisions)
            self._unpublished += [
                (revision, self._state.events(revision)) for revision in revisions
            ]
            self._saved = self._state.revision
            if floor := self._history.due(self._state, self._clock()):
                self._compact(floor, batch)

    def _publish(self) -> None:
        self.revision = self._state.revision
        if self._state.compact_revision > self._swept:
            self._swept = self._state.compact_revision
            self._sweep.set()
        for revision, events in self._unpublished:
            self._subscriptions.notify(revision, events)
        self._unpublished.clear()

    def _compact(self, revision: int, batch: WriteBatch) -> None:
        # Changes of this group that are not in the batch yet could no longer be read afterwards.
        self._save(batch)
        self._state.compact(revision)
        record.save_head(batch, self._state)

    def _grant(self, lease: int, ttl_s: int, batch: WriteBatch) -> rpc_pb2.LeaseGrantResponse:
        if rpc_pb2.NOSPACE in self.alarms:
            raise NoSpaceError
        lease = lease or secrets.randbits(62) + 1
        ttl_s = self._leases.check_grant(lease, ttl_s)
        self._state.grant(lease)
        self._leases.grant(lease, ttl_s, self._clock())
        record.save_lease(batch, lease, ttl_s)
        return rpc_pb2.LeaseGrantResponse(header=self._header(), ID=lease, TTL=ttl_s)

    def _revoke(self, lease: int, batch: WriteBatch) -> None:
        self._state.revoke(lease)
        self._leases.remove(lease)
        record.delete_lease(batch, lease)

    def _expire(self, leases: list[int], batch: WriteBatch) -> None:
        for lease in leases:
            try:
                self._revoke(lease, batch)
            except LeaseNotFoundError:
                continue  # its owner revoked it in the meantime

    def _header(self) -> rpc_pb2.ResponseHeader:
        return rpc_pb2.ResponseHeader(revision=self._state.revision)
