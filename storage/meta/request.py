"""What makes a request malformed, in etcd's words (pure)."""

from collections.abc import Callable, Iterable

from etcdpb import rpc_pb2

from storage.meta.errors import MetaRequestError
from storage.meta.ranges import in_range

MAX_TXN_OPS = 128
MAX_REQUEST_BYTES = 1536 << 10


def check_range(asked: rpc_pb2.RangeRequest) -> None:
    """Raises: MetaRequestError: no key, or an unknown sort order."""
    if not asked.key:
        raise MetaRequestError("etcdserver: key is not provided")
    known_order = asked.sort_order in rpc_pb2.RangeRequest.SortOrder.values()
    if not known_order or asked.sort_target not in rpc_pb2.RangeRequest.SortTarget.values():
        raise MetaRequestError("etcdserver: invalid sort option")


def check_put(asked: rpc_pb2.PutRequest, *, exists: bool) -> None:
    """Raises: MetaRequestError: no key, or `ignore_value`/`ignore_lease` that contradict the request or the state."""
    if not asked.key:
        raise MetaRequestError("etcdserver: key is not provided")
    if asked.ignore_value and asked.value:
        raise MetaRequestError("etcdserver: value is provided")
    if asked.ignore_lease and asked.lease:
        raise MetaRequestError("etcdserver: lease is provided")
    if (asked.ignore_value or asked.ignore_lease) and not exists:
        raise MetaRequestError("etcdserver: key not found")


def check_txn(
    asked: rpc_pb2.TxnRequest,
    check_one_put: Callable[[rpc_pb2.PutRequest], None],
    check_revision: Callable[[int], None],
) -> None:
    """Check a transaction and all inside it.

    Raises:
        MetaRequestError: too many operations, a key put twice, or a malformed part.
    """
    if max(len(asked.compare), len(asked.success), len(asked.failure)) > MAX_TXN_OPS:
        raise MetaRequestError("etcdserver: too many operations in txn request")
    if asked.ByteSize() > MAX_REQUEST_BYTES:
        raise MetaRequestError("etcdserver: request is too large")
    if not all(test.key for test in asked.compare):
        raise MetaRequestError("etcdserver: key is not provided")
    for branch in (asked.success, asked.failure):
        for op in branch:
            _check_op(op, check_one_put, check_revision)
        _check_overlaps(branch)


def _check_op(
    op: rpc_pb2.RequestOp, check_one_put: Callable[[rpc_pb2.PutRequest], None], check_revision: Callable[[int], None]
) -> None:
    kind = op.WhichOneof("request")
    if kind == "request_put":
        check_one_put(op.request_put)
    elif kind == "request_txn":
        check_txn(op.request_txn, check_one_put, check_revision)
    elif kind == "request_delete_range":
        if not op.request_delete_range.key:
            raise MetaRequestError("etcdserver: key is not provided")
    elif kind == "request_range":
        check_range(op.request_range)
        check_revision(op.request_range.revision)
    else:
        raise MetaRequestError("etcdserver: key not found")


def _check_overlaps(branch: Iterable[rpc_pb2.RequestOp]) -> tuple[set[bytes], list[rpc_pb2.DeleteRangeRequest]]:
    """Refuse a key that is written twice; the two branches of a nested transaction may write the same."""
    puts: set[bytes] = set()
    deletes: list[rpc_pb2.DeleteRangeRequest] = []
    for op in branch:
        fresh, doomed = _writes(op)
        if fresh & puts:
            raise MetaRequestError("etcdserver: duplicate key given in txn request")
        puts |= fresh
        deletes += doomed
    if any(in_range(key, doomed.key, doomed.range_end) for key in puts for doomed in deletes):
        raise MetaRequestError("etcdserver: duplicate key given in txn request")
    return puts, deletes


def _writes(op: rpc_pb2.RequestOp) -> tuple[set[bytes], list[rpc_pb2.DeleteRangeRequest]]:
    kind = op.WhichOneof("request")
    if kind == "request_put":
        return {op.request_put.key}, []
    if kind == "request_delete_range":
        return set(), [op.request_delete_range]
    if kind == "request_txn":
        then, then_doomed = _check_overlaps(op.request_txn.success)
        otherwise, otherwise_doomed = _check_overlaps(op.request_txn.failure)
        return then | otherwise, then_doomed + otherwise_doomed
    return set(), []
