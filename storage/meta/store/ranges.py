"""Key ranges and what of them a `RangeRequest` selects: filter, sort, limit, count (pure)."""

from collections.abc import Callable
from itertools import islice
from typing import Any

from etcdpb import kv_pb2, rpc_pb2

_BY: dict[Any, Callable[[kv_pb2.KeyValue], Any]] = {
    rpc_pb2.RangeRequest.KEY: lambda pair: pair.key,
    rpc_pb2.RangeRequest.VERSION: lambda pair: pair.version,
    rpc_pb2.RangeRequest.CREATE: lambda pair: pair.create_revision,
    rpc_pb2.RangeRequest.MOD: lambda pair: pair.mod_revision,
    rpc_pb2.RangeRequest.VALUE: lambda pair: pair.value,
}


def in_range(key: bytes, start: bytes, range_end: bytes) -> bool:
    r"""Whether `key` is meant: `b""` ends a range of one key, `b"\0"` one without end."""
    if not range_end:
        return key == start
    return key >= start and (range_end == b"\0" or key < range_end)


def select(asked: rpc_pb2.RangeRequest, pairs: list[kv_pb2.KeyValue]) -> rpc_pb2.RangeResponse:
    """The answer to `asked`, given all pairs of its range in key order; `count` is before filter and limit.

    As in etcd, a limit without an order is applied to the keys' order first, whatever is then sorted by.
    """
    response = rpc_pb2.RangeResponse(count=len(pairs))
    if asked.count_only:
        return response
    filtered = bool(
        asked.min_mod_revision or asked.max_mod_revision or asked.min_create_revision or asked.max_create_revision
    )
    if asked.limit > 0 and not filtered and asked.sort_order == rpc_pb2.RangeRequest.NONE:
        pairs = list(islice(pairs, asked.limit + 1))
    chosen = _sorted(asked, [pair for pair in pairs if _passes(asked, pair)] if filtered else pairs)
    response.more = 0 < asked.limit < len(chosen)
    response.kvs.extend(chosen[: asked.limit] if asked.limit > 0 else chosen)
    if asked.keys_only:
        for pair in response.kvs:
            pair.value = b""
    return response


def _passes(asked: rpc_pb2.RangeRequest, pair: kv_pb2.KeyValue) -> bool:
    return (
        (not asked.min_mod_revision or pair.mod_revision >= asked.min_mod_revision)
        and (not asked.max_mod_revision or pair.mod_revision <= asked.max_mod_revision)
        and (not asked.min_create_revision or pair.create_revision >= asked.min_create_revision)
        and (not asked.max_create_revision or pair.create_revision <= asked.max_create_revision)
    )


def _sorted(asked: rpc_pb2.RangeRequest, pairs: list[kv_pb2.KeyValue]) -> list[kv_pb2.KeyValue]:
    if asked.sort_order == rpc_pb2.RangeRequest.NONE and asked.sort_target == rpc_pb2.RangeRequest.KEY:
        return pairs
    return sorted(pairs, key=_BY[asked.sort_target], reverse=asked.sort_order == rpc_pb2.RangeRequest.DESCEND)
