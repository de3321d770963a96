"""Our values to etcd's messages and back."""

from collections.abc import Iterable, Iterator
from typing import Any

from etcdpb import kv_pb2, rpc_pb2

from storage.meta.meta import Compare, Delete, KeyValue, Op, Put, WatchEvent
from storage.meta.store.request import MAX_REQUEST_BYTES, MAX_TXN_OPS

_PART_BYTES = MAX_REQUEST_BYTES * 2 // 3

_RESULT: dict[str, Any] = {
    "==": rpc_pb2.Compare.EQUAL,
    "!=": rpc_pb2.Compare.NOT_EQUAL,
    ">": rpc_pb2.Compare.GREATER,
    "<": rpc_pb2.Compare.LESS,
}
_TARGET: dict[str, Any] = {
    "version": rpc_pb2.Compare.VERSION,
    "create_revision": rpc_pb2.Compare.CREATE,
    "mod_revision": rpc_pb2.Compare.MOD,
    "value": rpc_pb2.Compare.VALUE,
    "lease": rpc_pb2.Compare.LEASE,
}


def pair_of(pair: kv_pb2.KeyValue) -> KeyValue:
    """A stored pair as our value."""
    return KeyValue(pair.key, pair.value, pair.create_revision, pair.mod_revision, pair.version, pair.lease)


def event_of(event: kv_pb2.Event) -> WatchEvent:
    """A change as our value."""
    return WatchEvent(event.type == kv_pb2.Event.DELETE, pair_of(event.kv))


def compare_message(compare: Compare) -> rpc_pb2.Compare:
    """A condition as etcd's message."""
    operand: dict[str, Any] = {compare.target: compare.operand}
    return rpc_pb2.Compare(key=compare.key, result=_RESULT[compare.result], target=_TARGET[compare.target], **operand)


def op_message(op: Op) -> rpc_pb2.RequestOp:
    """An operation as etcd's message."""
    if isinstance(op, Put):
        return rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=op.key, value=op.value, lease=op.lease))
    if isinstance(op, Delete):
        return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=op.key, range_end=op.range_end))
    return rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=op.key, range_end=op.range_end))


def parts(ops: Iterable[rpc_pb2.RequestOp]) -> Iterator[list[rpc_pb2.RequestOp]]:
    """The operations in order, in parts that fit a transaction each: by number, and by bytes as far as can be."""
    part: list[rpc_pb2.RequestOp] = []
    size = 0
    for op in ops:
        if part and (len(part) == MAX_TXN_OPS or size + op.ByteSize() > _PART_BYTES):
            yield part
            part, size = [], 0
        part.append(op)
        size += op.ByteSize()
    if part:
        yield part
