"""The embedded metadata server: the pure state behind one queue, LevelDB below it.

Every request, reads too, takes its turn in one queue. What has gathered is applied in memory, written with one synced
batch, and only then answered and shown to watchers: nobody ever sees what a crash could take back. When the disk fails,
memory is ahead of it, so the server ends instead of going on.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from etcdpb import rpc_pb2

from storage.kv import KV, WriteBatch
from storage.leveldb import LevelDB
from storage.meta import record
from storage.meta.errors import MetaUnavailableError
from storage.meta.leases import Leases
from storage.meta.watchers import Watchers
from storage.model.errors import TidemarkError

R = TypeVar("R")
Change = Callable[[WriteBatch], Any]
MAX_WAITING = 16_384
KEPT_REVISIONS = 10_000
_GROUP = 1024
_EXPIRY_SECONDS = 0.25


class EmbeddedEtcd:
    """One directory's metadata server; made by `open`. Its calls are those of `storage.meta.api.EtcdApi`, and more."""

    def __init__(self, kv: KV, clock: Callable[[], float] = time.monotonic) -> None:
        self._kv = kv
        self._clock = clock
        self._state, ttls = record.load(kv)
        self._leases = Leases(ttls.items(), clock())
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="metadata-disk")
        self._waiting: deque[tuple[Change, asyncio.Future[Any]]] = deque()
        self._wake = asyncio.Event()
        self._watching: set[asyncio.Event] = set()
        self.revision = self._state.revision
        """The last durable revision."""

    @classmethod
    @asynccontextmanager
    async def open(cls, directory: Path) -> AsyncIterator["EmbeddedEtcd"]:
        """Open or create the directory and serve for the block.

        Raises:
            DirectoryLockedError, DirectoryUnusableError, CorruptError: as `storage.leveldb.LevelDB`.
        """
        kv = LevelDB(directory)
        try:
            server = cls(kv)
            async with asyncio.TaskGroup() as tasks:
                loops = [tasks.create_task(loop(), name=loop.__name__) for loop in (server.run, server.run_expiry)]
                try:
                    yield server
                finally:
                    for task in loops:
                        task.cancel()
                    server.close()
        finally:
            kv.close()

    def close(self) -> None:
        """Wait for a write under way, and refuse what is still queued."""
        self._disk.shutdown(wait=True)
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(MetaUnavailableError("the metadata server is stopping; try again"))

    async def run(self) -> None:
        """Apply and answer what is queued, group by group, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._commit([self._waiting.popleft() for _ in range(min(_GROUP, len(self._waiting)))])

    async def run_expiry(self) -> None:
        """Revoke leases that are over, until cancelled."""
        while True:
            await asyncio.sleep(_EXPIRY_SECONDS)
            for lease in self._leases.over(self._clock()):
                await self._submit(partial(self._revoke, lease))

    async def read(self, asked: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        """See `State.read`."""
        return await self._submit(lambda _: self._state.read(asked))

    async def put(self, asked: rpc_pb2.PutRequest) -> rpc_pb2.PutResponse:
        """See `State.put`."""
        return await self._submit(lambda _: self._state.put(asked))

    async def delete_range(self, asked: rpc_pb2.DeleteRangeRequest) -> rpc_pb2.DeleteRangeResponse:
        """See `State.delete_range`."""
        return await self._submit(lambda _: self._state.delete_range(asked))

    async def txn(self, asked: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        """See `State.txn`."""
        return await self._submit(lambda _: self._state.txn(asked))

    async def compact(self, asked: rpc_pb2.CompactionRequest) -> rpc_pb2.CompactionResponse:
        """See `State.compact`."""
        await self._submit(partial(self._compact, asked.revision))
        return rpc_pb2.CompactionResponse(header=self._header())

    async def lease_grant(self, asked: rpc_pb2.LeaseGrantRequest) -> rpc_pb2.LeaseGrantResponse:
        """Create a lease; id 0 asks for a free one. Raises as `Leases.check_grant`."""
        return await self._submit(partial(self._grant, asked.ID, asked.TTL))

    async def lease_revoke(self, asked: rpc_pb2.LeaseRevokeRequest) -> rpc_pb2.LeaseRevokeResponse:
        """End a lease and delete its keys; raises LeaseNotFoundError."""
        await self._submit(partial(self._revoke, asked.ID))
        return rpc_pb2.LeaseRevokeResponse(header=self._header())

    async def lease_time_to_live(self, asked: rpc_pb2.LeaseTimeToLiveRequest) -> rpc_pb2.LeaseTimeToLiveResponse:
        """What is left of a lease; TTL -1 if there is none."""
        left, granted = self._leases.left(asked.ID, self._clock())
        keys = sorted(self._state.leases.get(asked.ID, ())) if asked.keys else ()
        return rpc_pb2.LeaseTimeToLiveResponse(
            header=self._header(), ID=asked.ID, TTL=left, grantedTTL=granted, keys=keys
        )

    async def keep_alive(self, lease: int) -> int:
        """Renew a lease in memory; returns its TTL in seconds, 0 if it is over."""
        return self._leases.renew(lease, self._clock())

    async def watch(self, asked: rpc_pb2.WatchCreateRequest) -> AsyncIterator[rpc_pb2.WatchResponse]:
        """One watch inside this process."""
        watchers = self.watchers()
        with self.woken() as woken:
            responses = watchers.handle(rpc_pb2.WatchRequest(create_request=asked), self.revision)
            while True:
                for response in responses:
                    yield response
                responses = watchers.advance(self.revision)
                if not responses:
                    await woken.wait()
                    woken.clear()

    def watchers(self) -> Watchers:
        """The watches of a new client stream."""
        return Watchers(self._state)

    @contextmanager
    def woken(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever `revision` has grown."""
        event = asyncio.Event()
        self._watching.add(event)
        try:
            yield event
        finally:
            self._watching.discard(event)

    async def _submit(self, change: Callable[[WriteBatch], R]) -> R:
        if len(self._waiting) >= MAX_WAITING:
            raise MetaUnavailableError("etcdserver: too many requests")
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, future))
        self._wake.set()
        return await future

    async def _commit(self, group: list[tuple[Change, asyncio.Future[Any]]]) -> None:
        batch = WriteBatch()
        outcomes = [(future, _attempt(change, batch)) for change, future in group]
        if self._state.revision > self.revision:
            self._save(batch)
        try:
            if len(batch):
                write = partial(self._kv.write, batch, sync=True)
                await asyncio.get_running_loop().run_in_executor(self._disk, write)
        except TidemarkError as err:
            _refuse(group, err)
            raise
        self.revision = self._state.revision
        for future, outcome in outcomes:
            if future.done():
                continue
            if isinstance(outcome, TidemarkError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        for event in self._watching:
            event.set()

    def _save(self, batch: WriteBatch) -> None:
        record.save_revisions(batch, self._state, range(self.revision + 1, self._state.revision + 1))
        oldest = self._state.revision - KEPT_REVISIONS
        if oldest > self._state.compact_revision + KEPT_REVISIONS // 10:
            self._compact(oldest, batch)

    def _compact(self, revision: int, batch: WriteBatch) -> None:
        record.forget_events(batch, self._state.compact(revision))
        record.save_head(batch, self._state)

    def _grant(self, lease: int, ttl_s: int, batch: WriteBatch) -> rpc_pb2.LeaseGrantResponse:
        lease = lease or secrets.randbits(62) + 1
        ttl_s = self._leases.check_grant(lease, ttl_s)
        self._state.grant(lease)
        self._leases.grant(lease, ttl_s, self._clock())
        record.save_lease(batch, lease, ttl_s)
        return rpc_pb2.LeaseGrantResponse(header=self._header(), ID=lease, TTL=ttl_s)

    def _revoke(self, lease: int, batch: WriteBatch) -> None:
        self._state.revoke(lease)
        self._leases.remove(lease)
        record.forget_lease(batch, lease)

    def _header(self) -> rpc_pb2.ResponseHeader:
        return rpc_pb2.ResponseHeader(revision=self._state.revision)


def _attempt(change: Change, batch: WriteBatch) -> Any:
    try:
        return change(batch)
    except TidemarkError as err:
        return err


def _refuse(group: list[tuple[Change, asyncio.Future[Any]]], err: TidemarkError) -> None:
    for _, future in group:
        if not future.done():
            future.set_exception(MetaUnavailableError(err.message))
