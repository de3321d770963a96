"""What makes a request malformed, in etcd's words and in etcd's order (pure)."""

from collections.abc import Iterable, Sequence

from etcdpb import rpc_pb2

from storage.meta.errors import MetaRequestError, RequestTooLargeError, TooManyOpsError
from storage.meta.store.ranges import in_range

MAX_TXN_OPS = 128
MAX_REQUEST_BYTES = 1536 << 10

_Branch = Sequence[rpc_pb2.RequestOp]
_Written = tuple[set[bytes], list[rpc_pb2.DeleteRangeRequest]]


def check_range(asked: rpc_pb2.RangeRequest) -> None:
    """Raises: MetaRequestError: no key, or an unknown sort order."""
    check_key(asked.key)
    known_order = asked.sort_order in rpc_pb2.RangeRequest.SortOrder.values()
    if not known_order or asked.sort_target not in rpc_pb2.RangeRequest.SortTarget.values():
        raise MetaRequestError("etcdserver: invalid sort option")


def check_put(asked: rpc_pb2.PutRequest) -> None:
    """Raises: MetaRequestError: no key, or `ignore_value`/`ignore_lease` with a value or lease."""
    check_key(asked.key)
    if asked.ignore_value and asked.value:
        raise MetaRequestError("etcdserver: value is provided")
    if asked.ignore_lease and asked.lease:
        raise MetaRequestError("etcdserver: lease is provided")


def check_key(key: bytes) -> None:
    """Raises: MetaRequestError: the key is empty."""
    if not key:
        raise MetaRequestError("etcdserver: key is not provided")


def check_txn(asked: rpc_pb2.TxnRequest) -> None:
    """Check all of a transaction that does not depend on the state.

    Raises:
        MetaRequestError: too many operations, a key put twice, or a malformed part.
    """
    _check_shape(asked, MAX_TXN_OPS)
    for branch in (asked.success, asked.failure):
        _check_overlaps(branch)
    if asked.ByteSize() > MAX_REQUEST_BYTES:
        raise RequestTooLargeError


def writes(branch: Iterable[rpc_pb2.RequestOp]) -> bool:
    """Whether any operation puts something: what a full database refuses."""
    return any(
        op.HasField("request_put") or (op.HasField("request_txn") and txn_writes(op.request_txn)) for op in branch
    )


def txn_writes(asked: rpc_pb2.TxnRequest) -> bool:
    """Whether any branch of a transaction puts something."""
    return writes(asked.success) or writes(asked.failure)


def _check_shape(asked: rpc_pb2.TxnRequest, most: int) -> None:
    """An inner transaction may have as many operations as the outer ones leave: that also bounds the nesting."""
    size = max(len(asked.compare), len(asked.success), len(asked.failure))
    if size > most:
        raise TooManyOpsError
    for test in asked.compare:
        _check_compare(test)
    for branch in (asked.success, asked.failure):
        for op in branch:
            _check_op(op, most - size)


def _check_compare(test: rpc_pb2.Compare) -> None:
    check_key(test.key)
    known_target = test.target in rpc_pb2.Compare.CompareTarget.values()
    if not known_target or test.result not in rpc_pb2.Compare.CompareResult.values():
        raise MetaRequestError("etcdserver: invalid comparison")


def _check_op(op: rpc_pb2.RequestOp, most: int) -> None:
    kind = op.WhichOneof("request")
    if kind == "request_put":
        check_put(op.request_put)
    elif kind == "request_txn":
        _check_shape(op.request_txn, most)
    elif kind == "request_delete_range":
        check_key(op.request_delete_range.key)
    elif kind == "request_range":
        check_range(op.request_range)
    else:
        raise MetaRequestError("etcdserver: key not found")


def _check_overlaps(branch: _Branch) -> _Written:
    """Refuse a key that is written twice; the two branches of one inner transaction may write the same."""
    deletes = [op.request_delete_range for op in branch if op.HasField("request_delete_range")]
    puts: set[bytes] = set()
    for op in branch:
        if op.HasField("request_txn"):
            then, then_deletes = _check_overlaps(op.request_txn.success)
            otherwise, otherwise_deletes = _check_overlaps(op.request_txn.failure)
            _check_fresh(then | otherwise, puts, deletes)
            puts |= then | otherwise
            deletes += then_deletes + otherwise_deletes
    for op in branch:
        if op.HasField("request_put"):
            _check_fresh({op.request_put.key}, puts, deletes)
            puts.add(op.request_put.key)
    return puts, deletes


def _check_fresh(keys: set[bytes], puts: set[bytes], deletes: Sequence[rpc_pb2.DeleteRangeRequest]) -> None:
    if keys & puts or any(_deleted(key, doomed) for key in keys for doomed in deletes):
        raise MetaRequestError("etcdserver: duplicate key given in txn request")


def _deleted(key: bytes, doomed: rpc_pb2.DeleteRangeRequest) -> bool:
    """As etcd sees it: a delete without end is not held against the puts beside it; they happen in their order."""
    return doomed.range_end != b"\0" and in_range(key, doomed.key, doomed.range_end)
