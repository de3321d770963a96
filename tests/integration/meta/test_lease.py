"""Leases: the embedded server, a real etcd and the passed-on ones keep and end them alike."""

import asyncio
from typing import Any

import grpc
import pytest
from etcdpb import rpc_pb2, rpc_pb2_grpc

from storage.meta.client import EtcdMeta
from storage.meta.errors import LeaseNotFoundError
from storage.meta.remote import RemoteEtcd
from storage.tasks import gather


async def test_a_revoked_lease_takes_its_keys_along(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
    leases = rpc_pb2_grpc.LeaseStub(channel)
    lease = (await leases.LeaseGrant(rpc_pb2.LeaseGrantRequest(TTL=600))).ID
    await meta.put(prefix + b"b", b"", lease)
    await meta.put(prefix + b"a", b"", lease)
    await meta.put(prefix + b"kept", b"", lease)
    await meta.put(prefix + b"kept", b"")
    left = await leases.LeaseTimeToLive(rpc_pb2.LeaseTimeToLiveRequest(ID=lease, keys=True))
    assert sorted(left.keys) == [prefix + b"a", prefix + b"b"]
    assert left.grantedTTL == 600
    assert 500 <= left.TTL <= 600
    await leases.LeaseRevoke(rpc_pb2.LeaseRevokeRequest(ID=lease))
    assert [pair.key for pair in await meta.get_prefix(prefix)] == [prefix + b"kept"]
    gone = await leases.LeaseTimeToLive(rpc_pb2.LeaseTimeToLiveRequest(ID=lease))
    assert gone.TTL == -1
    with pytest.raises(LeaseNotFoundError):
        await meta.put(prefix, b"", lease)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await leases.LeaseRevoke(rpc_pb2.LeaseRevokeRequest(ID=lease))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


async def test_an_unrenewed_lease_expires_and_kept_ones_outlive_their_ttl(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
    forgotten = await meta.grant_lease(1)
    revision = await meta.put(prefix + b"forgotten", b"", forgotten.id)
    async with await meta.grant_lease(6) as kept, await meta.grant_lease(6) as lost:
        first_end = kept.deadline
        for lease in (kept, lost):
            await meta.put(prefix + b"kept/%d" % lease.id, b"", lease.id)
        async for events in meta.watch(prefix + b"forgotten", revision + 1):
            assert events[0].deleted
            break
        async with asyncio.timeout(60):
            await rpc_pb2_grpc.LeaseStub(channel).LeaseRevoke(
                rpc_pb2.LeaseRevokeRequest(ID=lost.id)
            )
            await lost.lost.wait()
        await asyncio.sleep(first_end + 1 - asyncio.get_running_loop().time())
        assert kept.deadline > asyncio.get_running_loop().time()
        assert not kept.lost.is_set()
        assert [pair.lease for pair in await meta.get_prefix(prefix)] == [kept.id]
    async with asyncio.timeout(60):
        while await meta.get_prefix(prefix):  # noqa: ASYNC110 - who was too slow to revoke it lets it expire
            await asyncio.sleep(0.1)


async def test_many_leases_are_renewed_at_once_each_with_its_own_answer(etcd_api: Any) -> None:
    async with RemoteEtcd.open(etcd_api.addresses, etcd_api.channel) as api:
        ttls = range(60, 160)
        grants = [api.lease_grant(rpc_pb2.LeaseGrantRequest(TTL=ttl_s)) for ttl_s in ttls]
        leases = [granted.ID for granted in await gather(grants)]
        assert await gather([api.keep_alive(lease, 5) for lease in leases]) == list(ttls)
        await api.lease_revoke(rpc_pb2.LeaseRevokeRequest(ID=leases[0]))
        assert await gather([api.keep_alive(lease, 5) for lease in leases[:2]]) == [0, 61]


async def test_leases_are_listed(channel: grpc.aio.Channel) -> None:
    leases = rpc_pb2_grpc.LeaseStub(channel)
    granted = (await leases.LeaseGrant(rpc_pb2.LeaseGrantRequest(TTL=60))).ID
    listed = (await leases.LeaseLeases(rpc_pb2.LeaseLeasesRequest())).leases
    assert granted in {lease.ID for lease in listed}


async def test_a_lease_id_cannot_be_taken_twice(channel: grpc.aio.Channel) -> None:
    leases = rpc_pb2_grpc.LeaseStub(channel)
    lease = (await leases.LeaseGrant(rpc_pb2.LeaseGrantRequest(TTL=60))).ID
    for request, status in [
        (rpc_pb2.LeaseGrantRequest(TTL=60, ID=lease), grpc.StatusCode.FAILED_PRECONDITION),
        (rpc_pb2.LeaseGrantRequest(TTL=10**10), grpc.StatusCode.OUT_OF_RANGE),
    ]:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await leases.LeaseGrant(request)
        assert refused.value.code() == status
