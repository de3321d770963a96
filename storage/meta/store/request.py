"""etcd's requests: malformed ones, the result of comparisons, and the pairs that a range selects
(pure).

The checks have etcd's order and etcd's texts, which its clients compare.
"""

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from etcdpb import kv_pb2, rpc_pb2

from storage.meta.errors import MetaRequestError, RequestTooLargeError, TooManyOpsError

MAX_TXN_OPS = 128
MAX_REQUEST_BYTES = 1536 << 10

_Branch = Sequence[rpc_pb2.RequestOp]
_Written = tuple[set[bytes], list[rpc_pb2.DeleteRangeRequest]]

_OPERATORS: dict[Any, Callable[[Any, Any], bool]] = {
    rpc_pb2.Compare.EQUAL: operator.eq,
    rpc_pb2.Compare.NOT_EQUAL: operator.ne,
    rpc_pb2.Compare.GREATER: operator.gt,
    rpc_pb2.Compare.LESS: operator.lt,
}
_SIDES: dict[Any, tuple[Callable[[kv_pb2.KeyValue], Any], Callable[[rpc_pb2.Compare], Any]]] = {
    rpc_pb2.Compare.VERSION: (lambda pair: pair.version, lambda test: test.version),
    rpc_pb2.Compare.CREATE: (lambda pair: pair.create_revision, lambda test: test.create_revision),
    rpc_pb2.Compare.MOD: (lambda pair: pair.mod_revision, lambda test: test.mod_revision),
    rpc_pb2.Compare.VALUE: (lambda pair: pair.value, lambda test: test.value),
    rpc_pb2.Compare.LEASE: (lambda pair: pair.lease, lambda test: test.lease),
}
_ABSENT = kv_pb2.KeyValue()
_SORT_KEYS: dict[Any, Callable[[kv_pb2.KeyValue], Any]] = {
    rpc_pb2.RangeRequest.KEY: lambda pair: pair.key,
    rpc_pb2.RangeRequest.VERSION: lambda pair: pair.version,
    rpc_pb2.RangeRequest.CREATE: lambda pair: pair.create_revision,
    rpc_pb2.RangeRequest.MOD: lambda pair: pair.mod_revision,
    rpc_pb2.RangeRequest.VALUE: lambda pair: pair.value,
}


def check_range(request: rpc_pb2.RangeRequest) -> None:
    """Raises: MetaRequestError: no key, or an unknown sort order."""
    check_key(request.key)
    order_known = request.sort_order in rpc_pb2.RangeRequest.SortOrder.values()
    if not order_known or request.sort_target not in rpc_pb2.RangeRequest.SortTarget.values():
        raise MetaRequestError("etcdserver: invalid sort option")


def check_put(request: rpc_pb2.PutRequest) -> None:
    """Raises: MetaRequestError: no key, or `ignore_value`/`ignore_lease` with a value or lease."""
    check_key(request.key)
    if request.ignore_value and request.value:
        raise MetaRequestError("etcdserver: value is provided")
    if request.ignore_lease and request.lease:
        raise MetaRequestError("etcdserver: lease is provided")


def check_key(key: bytes) -> None:
    """Raises: MetaRequestError: the key is empty."""
    if not key:
        raise MetaRequestError("etcdserver: key is not provided")


def check_txn(request: rpc_pb2.TxnRequest) -> None:
    """Check all of a transaction that does not depend on the state.

    Raises:
        MetaRequestError: too many operations, a key put twice, or a malformed part.
    """
    _check_shape(request, MAX_TXN_OPS)
    for branch in (request.success, request.failure):
        _check_overlaps(branch)
    if request.ByteSize() > MAX_REQUEST_BYTES:
        raise RequestTooLargeError


def _puts(branch: Iterable[rpc_pb2.RequestOp]) -> bool:
    """Whether any operation is a put, which a full database refuses."""
    return any(
        op.HasField("request_put") or (op.HasField("request_txn") and txn_writes(op.request_txn))
        for op in branch
    )


def txn_writes(request: rpc_pb2.TxnRequest) -> bool:
    """Whether any branch of a transaction puts something."""
    return _puts(request.success) or _puts(request.failure)


def compare_holds(test: rpc_pb2.Compare, pairs: Sequence[kv_pb2.KeyValue]) -> bool:
    """Whether `test` holds for all `pairs`; an absent key has revision, version and lease 0,
    and no value at all.
    """
    if not pairs:
        if test.target == rpc_pb2.Compare.VALUE:
            return False
        pairs = (_ABSENT,)
    actual, expected = _SIDES[test.target]
    return all(_OPERATORS[test.result](actual(pair), expected(test)) for pair in pairs)


def in_range(key: bytes, start: bytes, range_end: bytes) -> bool:
    r"""Whether `key` is in a range: a `range_end` of `b""` means one key,
    `b"\0"` a range without end.
    """
    if not range_end:
        return key == start
    return key >= start and (range_end == b"\0" or key < range_end)


def select(request: rpc_pb2.RangeRequest, pairs: list[kv_pb2.KeyValue]) -> rpc_pb2.RangeResponse:
    """The answer to `request`, given all pairs of its range in key order;
    `count` counts before filter and limit.
    """
    response = rpc_pb2.RangeResponse(count=len(pairs))
    if request.count_only:
        return response
    filtered = bool(
        request.min_mod_revision
        or request.max_mod_revision
        or request.min_create_revision
        or request.max_create_revision
    )
    # As in etcd, a limit without a sort order is applied in key order first, whatever the sort
    # target is. One pair more is kept, by which `more` is known.
    if request.limit > 0 and not filtered and request.sort_order == rpc_pb2.RangeRequest.NONE:
        pairs = list(islice(pairs, min(request.limit, sys.maxsize - 1) + 1))
    chosen = _sorted(
        request, [pair for pair in pairs if _passes(request, pair)] if filtered else pairs
    )
    response.more = 0 < request.limit < len(chosen)
    response.kvs.extend(chosen[: request.limit] if request.limit > 0 else chosen)
    if request.keys_only:
        for pair in response.kvs:
            pair.value = b""
    return response


def _check_shape(request: rpc_pb2.TxnRequest, most: int) -> None:
    """Refuse more than `most` operations, inner transactions included, and malformed ones."""
    # An inner transaction may have as many operations as the outer ones leave: that also bounds the
    # nesting, and with it the recursion.
    size = max(len(request.compare), len(request.success), len(request.failure))
    if size > most:
        raise TooManyOpsError
    for test in request.compare:
        _check_compare(test)
    for branch in (request.success, request.failure):
        for op in branch:
            _check_op(op, most - size)


def _check_compare(test: rpc_pb2.Compare) -> None:
    check_key(test.key)
    target_known = test.target in rpc_pb2.Compare.CompareTarget.values()
    if not target_known or test.result not in rpc_pb2.Compare.CompareResult.values():
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
    """Refuse a key that is written twice; the two branches of one inner transaction may write the
    same key.
    """
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


def _check_fresh(
    keys: set[bytes], puts: set[bytes], deletes: Sequence[rpc_pb2.DeleteRangeRequest]
) -> None:
    if keys & puts or any(_deletes(delete, key) for key in keys for delete in deletes):
        raise MetaRequestError("etcdserver: duplicate key given in txn request")


def _deletes(delete: rpc_pb2.DeleteRangeRequest, key: bytes) -> bool:
    """Whether `delete` forbids a put of `key` beside it."""
    # One without end does not, as in etcd: they run in order.
    return delete.range_end != b"\0" and in_range(key, delete.key, delete.range_end)


def _passes(request: rpc_pb2.RangeRequest, pair: kv_pb2.KeyValue) -> bool:
    return (
        (not request.min_mod_revision or pair.mod_revision >= request.min_mod_revision)
        and (not request.max_mod_revision or pair.mod_revision <= request.max_mod_revision)
        and (not request.min_create_revision or pair.create_revision >= request.min_create_revision)
        and (not request.max_create_revision or pair.create_revision <= request.max_create_revision)
    )


def _sorted(request: rpc_pb2.RangeRequest, pairs: list[kv_pb2.KeyValue]) -> list[kv_pb2.KeyValue]:
    if (
        request.sort_order == rpc_pb2.RangeRequest.NONE
        and request.sort_target == rpc_pb2.RangeRequest.KEY
    ):
        return pairs
    return sorted(
        pairs,
        key=_SORT_KEYS[request.sort_target],
        reverse=request.sort_order == rpc_pb2.RangeRequest.DESCEND,
    )
