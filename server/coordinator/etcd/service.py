"""etcd's services on the coordinator's port, answered by the embedded metadata server.

`EtcdService` registers them all: KV and Lease straight from the server, Watch (`WatchService`: one
stream, many watches; the rules are in `storage.meta.store.watchers`), Cluster, Maintenance and Auth
as far as one embedded member has them (`MaintenanceService`). Everything else of etcd is refused
with what to do instead (`Unsupported`). What the server holds is exposed as gauges, read when they
are scraped.

Elections and locks (`ElectionService`) follow the recipe of etcd's `concurrency` package. Who wants
a name puts `<name>/<lease in hex>` under its lease and waits until no older key is left under
`<name>/`. So a candidate of a client library and one of these calls stand in one line.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import grpc
from etcdpb import election_pb2, kv_pb2, lock_pb2, rpc_pb2
from prometheus_client import Counter, Gauge

from server.coordinator.header import by_name
from server.coordinator.keys import check_request
from server.coordinator.leadership.members import Members
from server.rpc.errors import StatusError
from server.rpc.server import RpcServer
from storage.codec import prefix_end
from storage.defect import request_error
from storage.meta.embedded import EmbeddedEtcd
from storage.meta.errors import AuthNotEnabledError, EtcdError
from storage.meta.store.watchers import Watchers
from storage.model.errors import TidemarkError

PROGRESS_S = 60.0
_INBOX = 16
_SESSION_S = 60
_Requests = AsyncIterator[rpc_pb2.WatchRequest]
_Inbox = asyncio.Queue[rpc_pb2.WatchRequest | None]
VERSION = "3.4.0"
_ALARMS = frozenset({int(rpc_pb2.NOSPACE), int(rpc_pb2.CORRUPT)})

_REVISION = Gauge("tidemark_coordinator_metadata_revision", "The last durable revision")
_COMPACT_REVISION = Gauge(
    "tidemark_coordinator_metadata_compact_revision", "The first revision whose past is kept"
)
_BYTES = Gauge(
    "tidemark_coordinator_metadata_bytes", "Bytes in memory: pairs of now, kept changes", ["kind"]
)
_LEASES = Gauge("tidemark_coordinator_metadata_leases", "Leases held")
_WATCHERS = Gauge(
    "tidemark_coordinator_metadata_watchers", "Streams and loops that wait for changes"
)
_WAITING = Gauge("tidemark_coordinator_metadata_waiting_requests", "Requests in the queue")
_SLOW_WATCHES_TOTAL = Counter(
    "tidemark_coordinator_metadata_slow_watches_total",
    "Watches cancelled because what they had not seen was forgotten",
)
_OLDEST = rpc_pb2.RangeRequest.SortOrder.ASCEND
_NEWEST = rpc_pb2.RangeRequest.SortOrder.DESCEND


class EtcdService:
    """All of etcd's services put together; `tasks` owns the readers of client streams."""

    def __init__(
        self, etcd: EmbeddedEtcd, cluster_id: int, members: Members, tasks: asyncio.TaskGroup
    ) -> None:
        self._etcd = etcd
        self._cluster_id = cluster_id
        self._election = ElectionService(etcd)
        self._maintenance = MaintenanceService(etcd, cluster_id, members, self._header)
        self._watch = WatchService(etcd, tasks, self._complete)

    def add_to(self, server: RpcServer) -> None:
        """Register the handlers; methods of etcd that are not implemented are refused with an
        alternative.
        """
        _expose(self._etcd)
        maintenance, election = self._maintenance, self._election
        unary = self._kv_calls() | by_name(
            maintenance.MemberList,
            maintenance.Status,
            maintenance.Alarm,
            maintenance.Defragment,
            maintenance.Hash,
            maintenance.HashKV,
            maintenance.AuthStatus,
            maintenance.Authenticate,
            election.Campaign,
            election.Proclaim,
            election.Leader,
            election.Resign,
            election.Lock,
            election.Unlock,
        )
        calls: dict[str, Any] = {name: self._call(function) for name, function in unary.items()}
        calls |= by_name(self.LeaseKeepAlive, self._watch.Watch, self.Observe)
        for stubs in (rpc_pb2, election_pb2, lock_pb2):
            for service in stubs.DESCRIPTOR.services_by_name.values():
                server.add_service(service, SimpleNamespace(**calls))
        server.add_generic_handler(Unsupported())

    async def LeaseKeepAlive(
        self, requests: AsyncIterator[rpc_pb2.LeaseKeepAliveRequest], _context: Any
    ) -> AsyncIterator[rpc_pb2.LeaseKeepAliveResponse]:
        """Renew a lease for each request; TTL 0 says it is over."""
        async for request in requests:
            ttl_s = await self._etcd.keep_alive(request.ID)
            yield rpc_pb2.LeaseKeepAliveResponse(header=self._header(), ID=request.ID, TTL=ttl_s)

    async def Observe(
        self, request: election_pb2.LeaderRequest, _context: Any
    ) -> AsyncIterator[election_pb2.LeaderResponse]:
        """See `ElectionService.Observe`."""
        async for response in self._election.Observe(request):
            self._complete(response.header)
            yield response

    def _kv_calls(self) -> dict[str, Callable[[Any], Awaitable[Any]]]:
        etcd = self._etcd
        return {
            "Range": etcd.read,
            "Put": etcd.put,
            "DeleteRange": etcd.delete_range,
            "Txn": etcd.txn,
            "Compact": etcd.compact,
            "LeaseGrant": etcd.lease_grant,
            "LeaseRevoke": etcd.lease_revoke,
            "LeaseTimeToLive": etcd.lease_time_to_live,
            "LeaseLeases": etcd.lease_leases,
        }

    def _call(
        self, function: Callable[[Any], Awaitable[Any]]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, _context: Any) -> Any:
            try:
                check_request(request)
                answer = await function(request)
            except TidemarkError as err:
                raise status_of(err) from err
            self._complete(answer.header)
            return answer

        return call

    def _header(self) -> rpc_pb2.ResponseHeader:
        header = rpc_pb2.ResponseHeader(revision=self._etcd.revision)
        self._complete(header)
        return header

    def _complete(self, header: rpc_pb2.ResponseHeader) -> None:
        header.cluster_id = header.member_id = self._cluster_id
        header.raft_term = 1


def status_of(err: TidemarkError) -> TidemarkError:
    """An error of the metadata with the status and the text etcd gives it."""
    if isinstance(err, EtcdError):
        return StatusError(grpc.StatusCode[err.status], err.text)
    return err


class WatchService:
    """`tasks` owns the readers of client streams; `complete` fills headers."""

    def __init__(
        self,
        etcd: EmbeddedEtcd,
        tasks: asyncio.TaskGroup,
        complete: Callable[[rpc_pb2.ResponseHeader], None],
    ) -> None:
        self._etcd = etcd
        self._tasks = tasks
        self._complete = complete

    async def Watch(
        self, requests: _Requests, _context: object
    ) -> AsyncIterator[rpc_pb2.WatchResponse]:
        """Serve all watches of one client; events that it has not received stay in the store's
        history, not in memory of its own.
        """
        # Bounded: a client that sends requests faster than they are handled waits in its own
        # stream.
        inbox: _Inbox = asyncio.Queue(_INBOX)
        with self._etcd.watching() as (watchers, woken):
            # A task of the daemon, not of the handler: the stream is read while the handler waits
            # for changes.
            reader = self._tasks.create_task(
                _read(requests, inbox, woken), name="etcd-watch-reader"
            )
            try:
                async for response in self._responses(inbox, watchers, woken):
                    self._complete(response.header)
                    if response.compact_revision:
                        _SLOW_WATCHES_TOTAL.inc()
                    yield response
            finally:
                reader.cancel()

    async def _responses(
        self, inbox: _Inbox, watchers: Watchers, woken: asyncio.Event
    ) -> AsyncIterator[rpc_pb2.WatchResponse]:
        loop = asyncio.get_running_loop()
        next_tick = loop.time() + PROGRESS_S
        while True:
            # Cleared before looking: what comes between the look and the wait wakes it again.
            woken.clear()
            if self._take(inbox, watchers):
                return
            for response in watchers.responses(lambda: self._etcd.revision):
                yield response
            if loop.time() >= next_tick:
                watchers.tick(self._etcd.revision)
                next_tick = loop.time() + PROGRESS_S
                continue
            try:
                async with asyncio.timeout_at(next_tick):
                    await woken.wait()
            except TimeoutError:
                continue

    def _take(self, inbox: _Inbox, watchers: Watchers) -> bool:
        """Hand the waiting requests over; returns whether the client has ended the stream."""
        while not inbox.empty():
            request = inbox.get_nowait()
            if request is None:
                return True
            watchers.handle(request, self._etcd.revision)
        return False


async def _read(requests: _Requests, inbox: _Inbox, woken: asyncio.Event) -> None:
    try:
        async for request in requests:
            await inbox.put(request)
            woken.set()
    except (grpc.RpcError, grpc.aio.UsageError):
        return  # the client broke the stream; gRPC cancels the answering half
    except Exception as err:  # noqa: BLE001 - the stream ends; the coordinator, which owns this task, does not
        request_error(err, "etcdserverpb.Watch")
    await inbox.put(None)
    woken.set()


class MaintenanceService:
    """One member that always leads; `header` makes a filled header."""

    def __init__(
        self,
        etcd: EmbeddedEtcd,
        member_id: int,
        members: Members,
        header: Callable[[], rpc_pb2.ResponseHeader],
    ) -> None:
        self._etcd = etcd
        self._member_id = member_id
        self._members = members
        self._header = header

    async def MemberList(self, _request: rpc_pb2.MemberListRequest) -> rpc_pb2.MemberListResponse:
        """One member: this coordinator."""
        urls = [self._members.url]
        member = rpc_pb2.Member(ID=self._member_id, name="embedded", peerURLs=urls, clientURLs=urls)
        return rpc_pb2.MemberListResponse(header=self._header(), members=[member])

    async def Status(self, _request: rpc_pb2.StatusRequest) -> rpc_pb2.StatusResponse:
        """Which etcd this is like, how far it is and how large."""
        revision = self._etcd.revision
        live = self._etcd.statistics().live_bytes
        return rpc_pb2.StatusResponse(
            header=self._header(),
            version=VERSION,
            dbSize=max(self._etcd.disk_bytes(), live),
            dbSizeInUse=live,
            leader=self._member_id,
            raftIndex=revision,
            raftAppliedIndex=revision,
            raftTerm=1,
            errors=[
                f"memberID:{member.memberID} alarm:{_name(member.alarm)}"
                for member in self._alarm_members(self._etcd.alarms)
            ],
        )

    async def Alarm(self, request: rpc_pb2.AlarmRequest) -> rpc_pb2.AlarmResponse:
        """List, raise or clear alarms; the answer has the changed ones, as in etcd."""
        alarms = {int(request.alarm)} - {int(rpc_pb2.NONE)}
        if request.action == rpc_pb2.AlarmRequest.ACTIVATE:
            # Kept as one byte each, and shown by name: a number that is no alarm raises none.
            alarms &= _ALARMS
            await self._etcd.set_alarms(self._etcd.alarms | alarms)
        elif request.action == rpc_pb2.AlarmRequest.DEACTIVATE:
            alarms &= self._etcd.alarms
            await self._etcd.set_alarms(self._etcd.alarms - alarms)
        else:
            alarms = self._etcd.alarms & (alarms or self._etcd.alarms)
        return rpc_pb2.AlarmResponse(header=self._header(), alarms=self._alarm_members(alarms))

    async def Defragment(self, _request: rpc_pb2.DefragmentRequest) -> rpc_pb2.DefragmentResponse:
        """Give space back to the disk."""
        await self._etcd.defragment()
        return rpc_pb2.DefragmentResponse(header=self._header())

    async def HashKV(self, request: rpc_pb2.HashKVRequest) -> rpc_pb2.HashKVResponse:
        """A checksum of the pairs at a revision; comparable between embedded servers only."""
        return await self._etcd.hash_kv(request.revision)

    async def Hash(self, _request: rpc_pb2.HashRequest) -> rpc_pb2.HashResponse:
        """A checksum of the pairs of now."""
        hashed = await self._etcd.hash_kv(0)
        return rpc_pb2.HashResponse(header=hashed.header, hash=hashed.hash)

    async def AuthStatus(self, _request: rpc_pb2.AuthStatusRequest) -> rpc_pb2.AuthStatusResponse:
        """Answer that there are no users; mTLS decides who may connect."""
        return rpc_pb2.AuthStatusResponse(header=self._header())

    async def Authenticate(
        self, _request: rpc_pb2.AuthenticateRequest
    ) -> rpc_pb2.AuthenticateResponse:
        """Raises: AuthNotEnabledError: always; etcd's clients then go on without a token."""
        raise AuthNotEnabledError

    def _alarm_members(self, alarms: set[int]) -> list[rpc_pb2.AlarmMember]:
        numbers: list[Any] = sorted(alarms)
        return [rpc_pb2.AlarmMember(memberID=self._member_id, alarm=number) for number in numbers]


def _name(alarm: int) -> str:
    kinds: Any = rpc_pb2.AlarmType
    return str(kinds.Name(alarm)) if alarm in _ALARMS else str(alarm)


class ElectionService:
    """The calls of v3electionpb and v3lockpb."""

    def __init__(self, etcd: EmbeddedEtcd) -> None:
        self._etcd = etcd

    async def Campaign(
        self, request: election_pb2.CampaignRequest
    ) -> election_pb2.CampaignResponse:
        """Wait until the candidate leads; it does as long as its lease lives and it does not
        resign.
        """
        key, revision = await self._join_queue(request.name, request.lease, request.value)
        leader = election_pb2.LeaderKey(
            name=request.name, key=key, rev=revision, lease=int(key.rpartition(b"/")[2], 16)
        )
        return election_pb2.CampaignResponse(header=self._header(), leader=leader)

    async def Proclaim(
        self, request: election_pb2.ProclaimRequest
    ) -> election_pb2.ProclaimResponse:
        """Change the leader's value."""
        leader = request.leader
        put = rpc_pb2.PutRequest(key=leader.key, value=request.value, lease=leader.lease)
        done = await self._if_created(leader, rpc_pb2.RequestOp(request_put=put))
        if not done.succeeded:
            raise StatusError(grpc.StatusCode.UNKNOWN, "election: not leader")
        return election_pb2.ProclaimResponse(header=done.header)

    async def Leader(self, request: election_pb2.LeaderRequest) -> election_pb2.LeaderResponse:
        """The leader's pair."""
        response = await self._first(request.name + b"/", _OLDEST)
        if not response.kvs:
            raise StatusError(grpc.StatusCode.UNKNOWN, "election: no leader")
        return election_pb2.LeaderResponse(header=response.header, kv=response.kvs[0])

    async def Observe(
        self, request: election_pb2.LeaderRequest
    ) -> AsyncIterator[election_pb2.LeaderResponse]:
        """Every leader and every value it proclaims, from now on."""
        prefix, announced = request.name + b"/", kv_pb2.KeyValue()
        whole = rpc_pb2.WatchCreateRequest(key=prefix, range_end=prefix_end(prefix))
        async with aclosing(self._etcd.watch(whole)) as changes:
            async for _ in changes:
                response = await self._first(prefix, _OLDEST)
                if response.kvs and response.kvs[0] != announced:
                    announced = response.kvs[0]
                    yield election_pb2.LeaderResponse(header=response.header, kv=announced)

    async def Resign(self, request: election_pb2.ResignRequest) -> election_pb2.ResignResponse:
        """Let the next one lead; nothing happens if this one does not stand any more."""
        delete = rpc_pb2.DeleteRangeRequest(key=request.leader.key)
        done = await self._if_created(
            request.leader, rpc_pb2.RequestOp(request_delete_range=delete)
        )
        return election_pb2.ResignResponse(header=done.header)

    async def Lock(self, request: lock_pb2.LockRequest) -> lock_pb2.LockResponse:
        """Wait for the lock; it is held until `Unlock` or the end of the lease."""
        key, _ = await self._join_queue(request.name, request.lease, b"")
        return lock_pb2.LockResponse(header=self._header(), key=key)

    async def Unlock(self, request: lock_pb2.UnlockRequest) -> lock_pb2.UnlockResponse:
        """Give the lock to the next one."""
        done = await self._etcd.delete_range(rpc_pb2.DeleteRangeRequest(key=request.key))
        return lock_pb2.UnlockResponse(header=done.header)

    async def _join_queue(self, name: bytes, lease: int, value: bytes) -> tuple[bytes, int]:
        """Join the line and wait to be its head; returns the key and its create revision."""
        if not lease:
            lease = (await self._etcd.lease_grant(rpc_pb2.LeaseGrantRequest(TTL=_SESSION_S))).ID
        prefix = name + b"/"
        # etcd's concurrency package names its keys so, and waits for older create revisions: both
        # kinds of candidates stand in one line.
        key = prefix + b"%x" % lease
        put = rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=value, lease=lease))
        get = rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=key))
        absent = rpc_pb2.Compare(key=key, target=rpc_pb2.Compare.CREATE, create_revision=0)
        done = await self._etcd.txn(
            rpc_pb2.TxnRequest(compare=[absent], success=[put], failure=[get])
        )
        revision = done.header.revision
        if not done.succeeded:
            # The key exists: the same lease campaigns again, after a broken connection, and keeps
            # its place.
            joined = done.responses[0].response_range.kvs[0]
            revision = joined.create_revision
            if joined.value != value:
                await self._etcd.put(put.request_put)
        while (ahead := await self._first(prefix, _NEWEST, revision - 1)).kvs:
            await self._wait_deleted(ahead.kvs[0].key, ahead.header.revision + 1)
        return key, revision

    async def _first(
        self, prefix: bytes, order: Any, max_create_revision: int = 0
    ) -> rpc_pb2.RangeResponse:
        return await self._etcd.read(
            rpc_pb2.RangeRequest(
                key=prefix,
                range_end=prefix_end(prefix),
                limit=1,
                sort_order=order,
                sort_target=rpc_pb2.RangeRequest.CREATE,
                max_create_revision=max_create_revision,
            )
        )

    async def _if_created(
        self, leader: election_pb2.LeaderKey, op: rpc_pb2.RequestOp
    ) -> rpc_pb2.TxnResponse:
        if not leader.key:
            raise StatusError(grpc.StatusCode.UNKNOWN, '"leader" field must be provided')
        # By the create revision: a leader that lost its key and came back is another one.
        ours = rpc_pb2.Compare(
            key=leader.key, target=rpc_pb2.Compare.CREATE, create_revision=leader.rev
        )
        return await self._etcd.txn(rpc_pb2.TxnRequest(compare=[ours], success=[op]))

    async def _wait_deleted(self, key: bytes, start_revision: int) -> None:
        watch_request = rpc_pb2.WatchCreateRequest(key=key, start_revision=start_revision)
        async with aclosing(self._etcd.watch(watch_request)) as changes:
            async for response in changes:
                if response.canceled or any(
                    event.type == kv_pb2.Event.DELETE for event in response.events
                ):
                    return

    def _header(self) -> rpc_pb2.ResponseHeader:
        return rpc_pb2.ResponseHeader(revision=self._etcd.revision)


class Unsupported(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Answers etcd's calls that an embedded server has no use for: members, users,
    snapshots of bbolt files.
    """

    _PREFIXES = ("/etcdserverpb.", "/v3electionpb.", "/v3lockpb.")

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The refusal of a method, or None if it is not etcd's."""
        method: str = handler_call_details.method
        if not method.startswith(self._PREFIXES):
            return None

        async def refuse(_requests: object, context: Any) -> None:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED,
                f"etcdserver: embedded metadata has no {method.lstrip('/')}; for users, members "
                "and snapshots run etcd and start the coordinator with --metadata "
                "etcd://host:port (etcdctl make-mirror copies the keys)",
            )

        return grpc.stream_stream_rpc_method_handler(refuse)


def _expose(etcd: EmbeddedEtcd) -> None:
    """Let the gauges show `etcd`."""
    _REVISION.set_function(lambda: etcd.statistics().revision)
    _COMPACT_REVISION.set_function(lambda: etcd.statistics().compact_revision)
    _BYTES.labels("pairs").set_function(lambda: etcd.statistics().live_bytes)
    _BYTES.labels("history").set_function(lambda: etcd.statistics().log_bytes)
    _LEASES.set_function(lambda: etcd.statistics().leases)
    _WATCHERS.set_function(lambda: etcd.statistics().watchers)
    _WAITING.set_function(lambda: etcd.statistics().waiting)
