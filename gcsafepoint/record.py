"""How safepoints lie in etcd: PD's keys and texts, so that PD's tools can read them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from gcsafepoint.rules import Changes, SafePoints, ServiceSafePoint
from storage.meta.meta import Delete, KeyValue, Op, Put
from storage.model.errors import CorruptError


class SafePointRecordError(CorruptError):
    """A stored safepoint cannot be read; guessing could let GC pass a live service."""

    code = "ErrSafePointRecord"


@dataclass(frozen=True, slots=True)
class GcKeys:
    """Paths under `/pd/<cluster>/gc/`, and TiDB's own for the txn safe point."""

    prefix: bytes
    txn_safe_point: bytes = b"/tidb/store/gcworker/saved_safe_point"

    @property
    def gc_safe_point(self) -> bytes:
        """Hexadecimal text."""
        return self.prefix + b"safe_point"

    @property
    def services(self) -> bytes:
        """What all services' keys start with."""
        return self.prefix + b"safe_point/service/"

    @property
    def revision(self) -> bytes:
        """Decimal text, raised by every write: the guard between writers."""
        return self.prefix + b"gc_state_revision"

    def service(self, service_id: str) -> bytes:
        """JSON: service_id, expired_at (Unix seconds), safe_point."""
        return self.services + service_id.encode()


def parse(pairs: Sequence[KeyValue], keys: GcKeys) -> SafePoints:
    """The state the pairs hold.

    Raises:
        SafePointRecordError: one of them cannot be read.
    """
    services: list[ServiceSafePoint] = []
    numbers = {keys.gc_safe_point: 0, keys.txn_safe_point: 0}
    bases = {keys.gc_safe_point: 16, keys.txn_safe_point: 10}
    for pair in pairs:
        try:
            if pair.key.startswith(keys.services):
                services.append(_service(pair.value))
            elif pair.key in numbers:
                numbers[pair.key] = int(pair.value or b"0", bases[pair.key])
        except (ValueError, KeyError, TypeError) as err:
            raise SafePointRecordError(f"{pair.key!r} holds {pair.value!r}: {err}; correct it with etcdctl") from err
    return SafePoints(services, numbers[keys.txn_safe_point], numbers[keys.gc_safe_point])


def parse_guard(pairs: Sequence[KeyValue], keys: GcKeys) -> tuple[int, int]:
    """The guard's number and its mod revision; (0, 0) when nobody wrote yet."""
    for pair in pairs:
        if pair.key == keys.revision:
            return (int(pair.value) if pair.value.isdigit() else 0, pair.mod_revision)
    return 0, 0


def operations(changes: Changes, keys: GcKeys) -> list[Op]:
    """What makes `changes` durable."""
    ops: list[Op] = [
        Put(keys.service(service_id), _text(service)) if service else Delete(keys.service(service_id))
        for service_id, service in changes.services.items()
    ]
    if changes.txn_safe_point is not None:
        ops.append(Put(keys.txn_safe_point, b"%d" % changes.txn_safe_point))
    if changes.gc_safe_point is not None:
        ops.append(Put(keys.gc_safe_point, b"%x" % changes.gc_safe_point))
    return ops


def _service(value: bytes) -> ServiceSafePoint:
    fields = json.loads(value)
    return ServiceSafePoint(str(fields["service_id"]), int(fields["expired_at"]), int(fields["safe_point"]))


def _text(service: ServiceSafePoint) -> bytes:
    fields = {
        "service_id": service.service_id,
        "expired_at": service.expired_at,
        "safe_point": service.safe_point,
    }
    return json.dumps(fields, separators=(",", ":")).encode()
