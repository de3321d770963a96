"""Which requests of etcd's API would write the coordinator's own keys."""

from typing import Any

import pytest
from etcdpb import election_pb2, lock_pb2, rpc_pb2

from server.coordinator.keys import WRITES, OwnKeysError, check_bytes, check_request

TIMESTAMP = b"/pd/7/timestamp"
COPY = b"/tidemark/pd/7/timestamp"


def put(key: bytes, lease: int = 0) -> rpc_pb2.PutRequest:
    return rpc_pb2.PutRequest(key=key, value=b"v", lease=lease)


def delete(key: bytes, range_end: bytes = b"") -> rpc_pb2.DeleteRangeRequest:
    return rpc_pb2.DeleteRangeRequest(key=key, range_end=range_end)


def op(request: Any) -> rpc_pb2.RequestOp:
    kind = {
        rpc_pb2.PutRequest: "put",
        rpc_pb2.DeleteRangeRequest: "delete_range",
        rpc_pb2.TxnRequest: "txn",
    }
    return rpc_pb2.RequestOp(**{f"request_{kind[type(request)]}": request})


def nested(request: Any, depth: int, *, in_failure: bool) -> rpc_pb2.TxnRequest:
    for _ in range(depth):
        branch = {"failure" if in_failure else "success": [op(put(b"harmless")), op(request)]}
        request = rpc_pb2.TxnRequest(**branch)
    return request


REFUSED = {
    "a put": put(TIMESTAMP),
    "a put of the copy": put(COPY),
    "a put of another cluster's": put(b"/pd/8/leader"),
    "a put under a lease": put(b"/pd/7/leader", lease=9),
    "the cluster's id": delete(b"/pd/cluster_id"),
    "a delete": delete(b"/pd/7/gc/safe_point/service/ticdc"),
    "a prefix": delete(b"/pd/7/", b"/pd/70"),
    "a prefix that is longer than ours": delete(b"/pd/7/raft/s/", b"/pd/7/raft/s0"),
    "a prefix that is shorter than ours": delete(b"/", b"0"),
    "everything": delete(b"\0", b"\0"),
    "from a key before ours to the end": delete(b"/a", b"\0"),
    "from one of ours to the end": delete(b"/pd/7/x", b"\0"),
    "a range that ends within ours": delete(b"/a", b"/pd/7/b"),
    "a range that begins within ours": delete(b"/pd/7/b", b"/q"),
    "a range around the copies": delete(b"/tidemark/a", b"/tidemark/z"),
    "a transaction": nested(put(TIMESTAMP), 1, in_failure=False),
    "the other branch": nested(delete(TIMESTAMP), 1, in_failure=True),
    "a transaction in a transaction": nested(delete(b"\0", b"\0"), 6, in_failure=True),
    "a candidate": election_pb2.CampaignRequest(name=b"/pd/7/leader"),
    "a candidate for the root": election_pb2.CampaignRequest(name=b"/pd"),
    "a proclamation": election_pb2.ProclaimRequest(leader=election_pb2.LeaderKey(key=TIMESTAMP)),
    "a resignation": election_pb2.ResignRequest(leader=election_pb2.LeaderKey(key=TIMESTAMP)),
    "a lock": lock_pb2.LockRequest(name=b"/pd/7"),
    "an unlock": lock_pb2.UnlockRequest(key=TIMESTAMP),
}

TAKEN = {
    "TiDB's safe point": put(b"/tidb/store/gcworker/saved_safe_point"),
    "TiDB's oldest transaction": put(b"/tidb/server/minstartts/a", lease=9),
    "TiDB's owner": nested(put(b"/tidb/ddl/fg/owner/1"), 2, in_failure=False),
    "TiDB's topology": put(b"/topology/tidb/10.0.0.1:4000/info"),
    "a keyspace's": put(b"/keyspaces/tidb/1/tidb/store/gcworker/saved_safe_point"),
    "TiCDC's": delete(b"/tidb/cdc/", b"/tidb/cdc0"),
    "BR's": put(b"/tidb/br-stream/info/a"),
    "a pump's": put(b"/tidb-binlog/v1/pumps/a"),
    "our capture's": delete(b"/tidemark/default/changefeed/", b"/tidemark/default/changefeed0"),
    "shared settings": put(b"/global/config/a"),
    "what only looks like ours": put(b"/pd"),
    "what begins like ours": put(b"/pdx/7/timestamp"),
    "a range right before ours": delete(b"/a", b"/pd/"),
    "a range right behind ours": delete(b"/pd0", b"/tidemark/pd/"),
    "an empty range": delete(b"/q", b"/a"),
    "a read": rpc_pb2.RangeRequest(key=b"\0", range_end=b"\0"),
    "a lock of somebody": lock_pb2.LockRequest(name=b"/my/lock"),
    "a candidate of somebody": election_pb2.CampaignRequest(name=b"/pdx"),
}


@pytest.mark.parametrize("request_", REFUSED.values(), ids=list(REFUSED))
def test_what_would_write_our_keys_is_refused_by_name(request_: Any) -> None:
    with pytest.raises(
        OwnKeysError, match=r"etcdserver: permission denied: \[TM:ErrMetaOwnKeys\] the keys below /"
    ):
        check_request(request_)


@pytest.mark.parametrize("request_", TAKEN.values(), ids=list(TAKEN))
def test_what_clients_of_pd_write_is_taken(request_: Any) -> None:
    check_request(request_)


def test_bytes_are_looked_into_and_garbage_is_left_to_etcd() -> None:
    for request in REFUSED.values():
        (method,) = [method for method, kind in WRITES.items() if isinstance(request, kind)]
        with pytest.raises(OwnKeysError):
            check_bytes(method, request.SerializeToString())
    check_bytes("/etcdserverpb.KV/Put", b"\xff\xff\xff")
    check_bytes("/etcdserverpb.KV/Range", put(TIMESTAMP).SerializeToString())


def test_a_transaction_that_is_nested_without_end_is_no_recursion_of_ours() -> None:
    request = nested(put(TIMESTAMP), 40, in_failure=False)
    with pytest.raises(OwnKeysError):
        check_bytes("/etcdserverpb.KV/Txn", request.SerializeToString())
