"""Members, status, alarms, checksums, elections and locks, by their stubs;
and what Debian's etcdctl makes of it.
"""

import json
from typing import Any

import grpc
import pytest
from etcdpb import election_pb2, election_pb2_grpc, lock_pb2, lock_pb2_grpc, rpc_pb2, rpc_pb2_grpc

from storage.codec import prefix_end
from storage.meta.client import EtcdMeta
from storage.meta.errors import NoSpaceError


def maintenance(channel: grpc.aio.Channel) -> Any:
    return rpc_pb2_grpc.MaintenanceStub(channel)


async def lease(channel: grpc.aio.Channel) -> int:
    return int(
        (await rpc_pb2_grpc.LeaseStub(channel).LeaseGrant(rpc_pb2.LeaseGrantRequest(TTL=60))).ID
    )


async def test_members_and_status_are_told(channel: grpc.aio.Channel) -> None:
    members = await rpc_pb2_grpc.ClusterStub(channel).MemberList(rpc_pb2.MemberListRequest())
    assert members.members[0].clientURLs[0].startswith(("http://127.0.0.1:", "https://127.0.0.1:"))
    status = await maintenance(channel).Status(rpc_pb2.StatusRequest())
    assert status.version.startswith("3.")
    assert status.leader in {member.ID for member in members.members}
    assert 0 < status.dbSizeInUse <= status.dbSize


async def test_equal_states_have_equal_checksums(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
    first, second = await meta.put(prefix, b"1"), await meta.put(prefix, b"2")

    async def checksum(revision: int) -> int:
        return int(
            (await maintenance(channel).HashKV(rpc_pb2.HashKVRequest(revision=revision))).hash
        )

    before = await checksum(first), await checksum(second)
    assert before[0] != before[1]
    await meta.delete(prefix)
    await maintenance(channel).Defragment(rpc_pb2.DefragmentRequest())
    assert (await checksum(first), await checksum(second)) == before


async def test_without_space_puts_are_refused_until_the_alarm_is_taken_back(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
    await meta.put(prefix, b"1")
    member = (
        (await rpc_pb2_grpc.ClusterStub(channel).MemberList(rpc_pb2.MemberListRequest()))
        .members[0]
        .ID
    )
    alarm = {"memberID": member, "alarm": rpc_pb2.NOSPACE}
    await maintenance(channel).Alarm(rpc_pb2.AlarmRequest(action="ACTIVATE", **alarm))
    try:
        with pytest.raises(NoSpaceError, match="alarm disarm"):
            await meta.put(prefix, b"2")
        with pytest.raises(NoSpaceError):
            await meta.grant_lease(60)
        pair = await meta.get(prefix)
        assert pair is not None
        await meta.delete(prefix)
        listed = await maintenance(channel).Alarm(rpc_pb2.AlarmRequest())
        assert [(told.memberID, told.alarm) for told in listed.alarms] == [
            (member, rpc_pb2.NOSPACE)
        ]
    finally:
        await maintenance(channel).Alarm(rpc_pb2.AlarmRequest(action="DEACTIVATE", **alarm))
    await meta.put(prefix, b"3")


async def test_the_election_service_lets_one_lead_and_then_the_next(
    channel: grpc.aio.Channel, prefix: bytes
) -> None:
    elections = election_pb2_grpc.ElectionStub(channel)
    first, second = await lease(channel), await lease(channel)
    won = await elections.Campaign(
        election_pb2.CampaignRequest(name=prefix, lease=first, value=b"1")
    )
    assert won.leader.key == prefix + b"/%x" % first
    next_one = elections.Campaign(
        election_pb2.CampaignRequest(name=prefix, lease=second, value=b"2")
    )
    observed = elections.Observe(election_pb2.LeaderRequest(name=prefix))
    assert (await observed.read()).kv.value == b"1"
    await elections.Proclaim(election_pb2.ProclaimRequest(leader=won.leader, value=b"uno"))
    assert (await observed.read()).kv.value == b"uno"
    await elections.Resign(election_pb2.ResignRequest(leader=won.leader))
    assert (await next_one).leader.lease == second
    assert (await observed.read()).kv.value == b"2"
    observed.cancel()
    assert (await elections.Leader(election_pb2.LeaderRequest(name=prefix))).kv.value == b"2"
    with pytest.raises(grpc.aio.AioRpcError, match="not leader"):
        await elections.Proclaim(election_pb2.ProclaimRequest(leader=won.leader, value=b"3"))


async def test_the_lock_service_hands_the_lock_on(channel: grpc.aio.Channel, prefix: bytes) -> None:
    locks = lock_pb2_grpc.LockStub(channel)
    held = await locks.Lock(lock_pb2.LockRequest(name=prefix, lease=await lease(channel)))
    waiting = locks.Lock(lock_pb2.LockRequest(name=prefix, lease=await lease(channel)))
    line = rpc_pb2.RangeRequest(key=prefix, range_end=prefix_end(prefix))
    while len((await rpc_pb2_grpc.KVStub(channel).Range(line)).kvs) < 2:
        assert not waiting.done()
    assert not waiting.done()
    await locks.Unlock(lock_pb2.UnlockRequest(key=held.key))
    assert (await waiting).key != held.key


def test_etcdctl_reads_writes_and_transacts(etcd_api: Any, prefix: bytes) -> None:
    key, ctl = prefix.decode(), etcd_api.etcdctl
    assert ctl("put", key + "a", "1") == "OK\n"
    assert ctl("put", key + "a", "2", "--prev-kv") == f"OK\n{key}a\n1\n"
    ctl("put", key + "b", "3")
    assert ctl("get", "--prefix", key, "--order=DESCEND", "--print-value-only") == "3\n2\n"
    answer = ctl(
        "txn", text=f'value("{key}a") = "2"\n\nput {key}c 4\nget {key}b\n\nput {key}c 5\n\n'
    )
    assert answer.startswith("SUCCESS")
    assert ctl("del", "--prefix", key) == "3\n"


def revision(ctl: Any, key: str) -> int:
    return int(json.loads(ctl("get", key, "--write-out=json"))["kvs"][0]["mod_revision"])


def test_etcdctl_administers(etcd_api: Any, prefix: bytes) -> None:
    key, ctl = prefix.decode(), etcd_api.etcdctl
    lease_id = ctl("lease", "grant", "60").split()[1]
    ctl("put", key, "v", f"--lease={lease_id}")
    assert f"attached keys([{key}])" in ctl("lease", "timetolive", lease_id, "--keys")
    assert lease_id in ctl("lease", "list")
    assert "keepalived with TTL(60)" in ctl("lease", "keep-alive", "--once", lease_id)
    assert "revoked" in ctl("lease", "revoke", lease_id)
    assert ctl("get", key) == ""
    assert ctl("lock", key + "lock", "echo", "held") == "held\n"
    assert "started" in ctl("member", "list")
    assert "is healthy" in ctl("endpoint", "health", check=False)
    for command in (
        ("endpoint", "status"),
        ("endpoint", "hashkv"),
        ("alarm", "list"),
        ("alarm", "disarm"),
        ("defrag",),
    ):
        ctl(*command)
    ctl("put", key, "v")
    now = revision(ctl, key)
    assert ctl("compaction", str(now)) == f"compacted revision {now}\n"
    assert "required revision has been compacted" in ctl(
        "get", key, f"--rev={now - 1}", check=False
    )


async def test_what_embedded_metadata_has_not_is_refused_with_what_to_do(etcd_api: Any) -> None:
    answer = etcd_api.etcdctl("role", "list", check=False)
    assert "Error" not in answer or "start the coordinator with --metadata etcd://" in answer
