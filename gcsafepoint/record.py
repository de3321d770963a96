"""How GC states lie in etcd: PD's keys and texts, so that PD's tools can read them, and PD itself can take over."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gcsafepoint.barrier import NEVER_S, ServiceSafePoint
from gcsafepoint.clock import Outage
from gcsafepoint.go_text import json_text, key_bytes, key_text, valid_text
from gcsafepoint.keys import GcKeys, ScopeKeys
from gcsafepoint.rules import SafePoints
from gcsafepoint.states import NULL_KEYSPACE, StateChanges
from storage.meta.meta import Delete, KeyValue, Op, Put
from storage.model.errors import CorruptError
from storage.model.ts import MAX_TS


class SafePointRecordError(CorruptError):
    """A stored safepoint cannot be read; guessing could let GC pass a live service."""

    code = "ErrSafePointRecord"

    def __init__(self, pair: KeyValue, reason: object) -> None:
        super().__init__(f"{pair.key!r} holds {pair.value[:200]!r}: {reason}; correct it with etcdctl")


def parse_scope(pairs: Iterable[KeyValue], keys: ScopeKeys, outage: Outage) -> SafePoints:
    """The state of one keyspace; other pairs may be among them.

    Raises:
        SafePointRecordError: a pair cannot be read.
    """
    services: list[ServiceSafePoint] = []
    txn_safe_point = gc_safe_point = 0
    for pair in pairs:
        try:
            if pair.key.startswith(keys.services):
                services.append(_barrier(pair, keys.services, outage, "safe_point", "expired_at"))
            elif pair.key == keys.txn_safe_point:
                txn_safe_point = _number(pair.value)
            elif pair.key == keys.gc_safe_point:
                gc_safe_point = _gc_safe_point(pair.value, keys.keyspace_id)
        except (ValueError, KeyError, TypeError) as err:
            raise SafePointRecordError(pair, err) from err
    return SafePoints(services, txn_safe_point, gc_safe_point)


def parse_global_barriers(pairs: Iterable[KeyValue], keys: GcKeys, outage: Outage) -> list[ServiceSafePoint]:
    """The global barriers among the pairs. Raises: SafePointRecordError: one cannot be read."""
    barriers: list[ServiceSafePoint] = []
    for pair in pairs:
        if pair.key.startswith(keys.global_barriers):
            try:
                barriers.append(_barrier(pair, keys.global_barriers, outage, "barrier_ts", "expiration_time"))
            except (ValueError, KeyError, TypeError) as err:
                raise SafePointRecordError(pair, err) from err
    return barriers


def parse_min_start_ts(pairs: Iterable[KeyValue], keys: ScopeKeys) -> dict[str, int]:
    """TiDB server to start_ts. Raises: SafePointRecordError: one cannot be read."""
    found: dict[str, int] = {}
    for pair in pairs:
        try:
            found[key_text(pair.key.removeprefix(keys.min_start_ts))] = _number(pair.value)
        except ValueError as err:
            raise SafePointRecordError(pair, err) from err
    return found


def parse_outage(reading: KeyValue | None, now_s: float) -> Outage:
    """How long nobody led. Raises: SafePointRecordError: the reading cannot be read."""
    try:
        return Outage.since(reading, now_s)
    except ValueError as err:
        assert reading is not None
        raise SafePointRecordError(reading, err) from err


def parse_guard(pairs: Sequence[KeyValue], keys: GcKeys) -> tuple[int, int]:
    """The guard's number and its mod revision; (0, 0) when nobody wrote yet."""
    for pair in pairs:
        if pair.key == keys.revision:
            return (int(pair.value) if pair.value.isdigit() else 0, pair.mod_revision)
    return 0, 0


def operations(changes: StateChanges, keys: GcKeys) -> list[Op]:
    """What makes `changes` durable, in an order in which every prefix is a state the rules hold of.

    What is no longer needed goes first, what is needed comes next, and what it allows comes last.
    """
    deletes: list[Op] = []
    barriers: list[Op] = []
    points: list[Op] = []
    for scope, changed in changes.scopes.items():
        paths = keys.scope(scope)
        for service_id, service in changed.services.items():
            key = paths.service(service_id)
            if service is None:
                deletes.append(Delete(key))
            else:
                barriers.append(Put(key, _service_text(service, scope)))
        if changed.txn_safe_point is not None:
            points.append(Put(paths.txn_safe_point, b"%d" % changed.txn_safe_point))
        if changed.gc_safe_point is not None:
            points.append(Put(paths.gc_safe_point, _gc_safe_point_text(changed.gc_safe_point, scope)))
    for barrier_id, barrier in changes.global_barriers.items():
        key = keys.global_barriers + key_bytes(barrier_id)
        if barrier is None:
            deletes.append(Delete(key))
        else:
            barriers.append(Put(key, _global_text(barrier)))
    return [*deletes, *barriers, *points]


def _barrier(pair: KeyValue, prefix: bytes, outage: Outage, ts: str, expires: str) -> ServiceSafePoint:
    """A barrier's id is what its key says: by it, it is replaced and removed."""
    fields: Mapping[str, Any] = json.loads(pair.value)
    barrier_ts, expired_at = fields[ts], fields[expires]
    if type(barrier_ts) is not int or type(expired_at) is not int or not 0 <= barrier_ts <= MAX_TS:
        raise ValueError(f"{ts} and {expires} must be whole numbers")
    expired_at = outage.put_off(expired_at, pair.mod_revision)
    return ServiceSafePoint(key_text(pair.key.removeprefix(prefix)), expired_at, barrier_ts)


def _service_text(service: ServiceSafePoint, scope: int) -> bytes:
    fields: dict[str, str | int] = {
        "service_id": valid_text(service.service_id),
        "expired_at": service.expired_at,
        "safe_point": service.safe_point,
    }
    return json_text(fields if scope == NULL_KEYSPACE else {**fields, "keyspace_id": scope})


def _global_text(barrier: ServiceSafePoint) -> bytes:
    ends = 0 if barrier.expired_at == NEVER_S else barrier.expired_at
    barrier_id = valid_text(barrier.service_id)
    return json_text({"barrier_id": barrier_id, "barrier_ts": barrier.safe_point, "expiration_time": ends})


def _gc_safe_point(value: bytes, scope: int) -> int:
    return _number(value, 16) if scope == NULL_KEYSPACE else int(json.loads(value)["safe_point"])


def _gc_safe_point_text(safe_point: int, scope: int) -> bytes:
    if scope == NULL_KEYSPACE:
        return b"%x" % safe_point
    return json_text({"keyspace_id": scope, "safe_point": safe_point})


def _number(value: bytes, base: int = 10) -> int:
    if value and not value.isalnum():
        raise ValueError("not a number")
    number = int(value or b"0", base)
    if number > MAX_TS:
        raise ValueError("more than 64 bits")
    return number
