"""The conditions of a transaction (pure)."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from etcdpb import kv_pb2, rpc_pb2

_HOLDS: dict[Any, Callable[[Any, Any], bool]] = {
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


def holds(test: rpc_pb2.Compare, pairs: Sequence[kv_pb2.KeyValue]) -> bool:
    """Whether `test` holds for all `pairs`; an absent key has revision, version and lease 0, and no value at all."""
    if not pairs:
        if test.target == rpc_pb2.Compare.VALUE:
            return False
        pairs = (_ABSENT,)
    actual, wanted = _SIDES[test.target]
    return all(_HOLDS[test.result](actual(pair), wanted(test)) for pair in pairs)
