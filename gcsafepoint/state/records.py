"""The records of GC states in etcd: PD's keys and texts, so that PD's tools read them and PD itself
can take over.

`GcKeys` and `ScopeKeys` are the paths, PD's and TiDB's own; the `parse_…` functions read records,
`write_operations` makes them of changes. A record that cannot be read raises SafePointRecordError:
guessing could let GC pass a live service.

Expiries are put off by the time nobody led (`Outage`), so that the clock of TTLs never takes away
what a service has left (docs/design/0008-gc-state.md):

1. While a leader leads, its clock runs with the monotonic clock: no jump of the wall clock expires
   or revives anybody.
2. Each of its writes, and a beat, leaves the clock's reading in metadata. The next leader takes the
   wall clock as it finds it, and gives each service what was left of its TTL at the last reading:
   time in which nobody could renew does not count, and neither does a jump of the wall clock,
   forward or backward, between two leaders.
3. So an expiry is only ever put off, by at most the outage and a beat. What was written later than
   the last reading (by an operator, or by a PD that led in between) is taken as it stands.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gcsafepoint.state.rules import NEVER_S, GcState, ServiceSafePoint
from gcsafepoint.state.states import NULL_KEYSPACE, StateChanges
from storage.meta.meta import Delete, KeyValue, Op, Put
from storage.model.errors import CorruptError
from storage.model.ts import MAX_TS

KEYSPACES_OF_TIDB = b"/keyspaces/tidb/"
TXN_SAFE_POINT_TAIL = b"tidb/store/gcworker/saved_safe_point"
_IN_JSON = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"})


@dataclass(frozen=True, slots=True)
class ScopeKeys:
    """The paths of one keyspace's state."""

    keyspace_id: int
    gc_safe_point: bytes
    """Hexadecimal text; of a real keyspace JSON: keyspace_id, safe_point."""
    services: bytes
    """The prefix of all services' keys."""
    txn_safe_point: bytes
    """Decimal text; TiDB's own key."""
    min_start_ts: bytes
    """The prefix of the keys under which TiDB servers write their oldest start_ts, decimal."""

    def service(self, service_id: str) -> bytes:
        """JSON: service_id, expired_at (Unix seconds), safe_point;
        of a real keyspace also keyspace_id.
        """
        return self.services + key_bytes(service_id)


@dataclass(frozen=True, slots=True)
class GcKeys:
    """All paths of a cluster; `prefix` is `/pd/<cluster>/gc/`."""

    prefix: bytes

    @property
    def revision(self) -> bytes:
        """Decimal text, raised by every write: the guard between writers."""
        return self.prefix + b"gc_state_revision"

    @property
    def global_barriers(self) -> bytes:
        """The prefix of global barriers' keys; JSON: barrier_id, barrier_ts, expiration_time (Unix
        s, 0: never).
        """
        return self.prefix + b"global_gc_barriers/"

    @property
    def clock(self) -> bytes:
        """Ours, decimal Unix seconds: the last reading of a leader's clock (`Outage`)."""
        return b"/tidemark" + self.prefix + b"clock"

    @property
    def keyspaces(self) -> bytes:
        """The prefix of keys about keyspaces."""
        return self.prefix.removesuffix(b"gc/") + b"keyspaces/"

    @property
    def keyspace_metas(self) -> bytes:
        """The prefix of the keys of keyspaces' own records (keyspacepb.KeyspaceMeta)."""
        return self.keyspaces + b"meta/"

    @property
    def null(self) -> ScopeKeys:
        """The paths of unified GC."""
        return self.scope(NULL_KEYSPACE)

    def scope(self, keyspace_id: int) -> ScopeKeys:
        """The paths of one keyspace."""
        gc_safe_point, services, tidb = (
            self.prefix + b"safe_point",
            self.prefix + b"safe_point/service/",
            b"/",
        )
        if keyspace_id != NULL_KEYSPACE:
            gc_safe_point = self.keyspaces + b"gc_safe_point/%08d" % keyspace_id
            services = self.keyspaces + b"service_safe_point/%08d/" % keyspace_id
            tidb = KEYSPACES_OF_TIDB + b"%d/" % keyspace_id
        txn_safe_point, min_start_ts = tidb + TXN_SAFE_POINT_TAIL, tidb + b"tidb/server/minstartts/"
        return ScopeKeys(keyspace_id, gc_safe_point, services, txn_safe_point, min_start_ts)


@dataclass(frozen=True, slots=True)
class Outage:
    """The time without a leader: `seconds` from the last reading of the clock, at metadata revision
    `revision`, to now.
    """

    revision: int = 0
    seconds: int = 0

    @classmethod
    def since(cls, reading: KeyValue | None, now_s: float) -> "Outage":
        """The time since the reading, rounded up; none where there never was one.

        Raises: ValueError: unreadable.
        """
        if reading is None:
            return cls()
        return cls(reading.mod_revision, math.ceil(now_s) - int(reading.value))

    def put_off(self, expired_at: int, written_at: int) -> int:
        """The expiry, put off, of a record of revision `written_at`;
        0 or less is stored for never.
        """
        if not 0 < expired_at < NEVER_S:
            return NEVER_S
        # Written after the last reading: by somebody who knew the time of then.
        if written_at > self.revision:
            return expired_at
        # Never 0 or NEVER_S, which would be stored as an expiry that does not come.
        return min(max(1, expired_at + self.seconds), NEVER_S - 1)


class SafePointRecordError(CorruptError):
    """A stored safepoint cannot be read; guessing could let GC pass a live service."""

    code = "ErrSafePointRecord"

    def __init__(self, pair: KeyValue, reason: object) -> None:
        super().__init__(
            f"{pair.key!r} holds {pair.value[:200]!r}: {reason}; correct it with etcdctl"
        )


def parse_scope(pairs: Iterable[KeyValue], keys: ScopeKeys, outage: Outage) -> GcState:
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
    return GcState(services, txn_safe_point, gc_safe_point)


def parse_service_safe_points(pairs: Iterable[KeyValue], keys: ScopeKeys) -> dict[str, int]:
    """The safe points of services by their ids, lapsed ones too.

    Raises: SafePointRecordError: one cannot be read.
    """
    safe_points: dict[str, int] = {}
    for pair in pairs:
        try:
            service = _barrier(pair, keys.services, Outage(), "safe_point", "expired_at")
        except (ValueError, KeyError, TypeError) as err:
            raise SafePointRecordError(pair, err) from err
        safe_points[service.service_id] = service.safe_point
    return safe_points


def parse_global_barriers(
    pairs: Iterable[KeyValue], keys: GcKeys, outage: Outage
) -> list[ServiceSafePoint]:
    """The global barriers among the pairs. Raises: SafePointRecordError: one cannot be read."""
    barriers: list[ServiceSafePoint] = []
    for pair in pairs:
        if pair.key.startswith(keys.global_barriers):
            try:
                barriers.append(
                    _barrier(pair, keys.global_barriers, outage, "barrier_ts", "expiration_time")
                )
            except (ValueError, KeyError, TypeError) as err:
                raise SafePointRecordError(pair, err) from err
    return barriers


def parse_min_start_ts(pairs: Iterable[KeyValue], keys: ScopeKeys) -> dict[str, int]:
    """TiDB server to start_ts. Raises: SafePointRecordError: one cannot be read."""
    start_ts_of: dict[str, int] = {}
    for pair in pairs:
        try:
            start_ts_of[key_text(pair.key.removeprefix(keys.min_start_ts))] = _number(pair.value)
        except ValueError as err:
            raise SafePointRecordError(pair, err) from err
    return start_ts_of


def parse_outage(reading: KeyValue | None, now_s: float) -> Outage:
    """The time without a leader. Raises: SafePointRecordError: the reading cannot be read."""
    try:
        return Outage.since(reading, now_s)
    except ValueError as err:
        assert reading is not None
        raise SafePointRecordError(reading, err) from err


def parse_guard(pairs: Sequence[KeyValue], keys: GcKeys) -> tuple[int, int]:
    """Return the guard's number and its mod revision; (0, 0) if it was never written."""
    for pair in pairs:
        if pair.key == keys.revision:
            return (int(pair.value) if pair.value.isdigit() else 0, pair.mod_revision)
    return 0, 0


def write_operations(changes: StateChanges, keys: GcKeys) -> list[Op]:
    """The operations that make `changes` durable, in an order in which every prefix is a state that
    keeps the rules.

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
            points.append(
                Put(paths.gc_safe_point, _gc_safe_point_text(changed.gc_safe_point, scope))
            )
    for barrier_id, barrier in changes.global_barriers.items():
        key = keys.global_barriers + key_bytes(barrier_id)
        if barrier is None:
            deletes.append(Delete(key))
        else:
            barriers.append(Put(key, _global_text(barrier)))
    # More than fits into one transaction is written in several: a crash between them must not leave
    # a safe point above a barrier that is still to come.
    return [*deletes, *barriers, *points]


def _barrier(
    pair: KeyValue, prefix: bytes, outage: Outage, ts: str, expires: str
) -> ServiceSafePoint:
    """A barrier's id is what its key says: by it, it is replaced and removed."""
    fields: Mapping[str, Any] = json.loads(pair.value)
    barrier_ts, expired_at = fields[ts], fields[expires]
    # `type`, since JSON's true is an int in Python.
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
    return json_text(
        {"barrier_id": barrier_id, "barrier_ts": barrier.safe_point, "expiration_time": ends}
    )


def _gc_safe_point(value: bytes, scope: int) -> int:
    return _number(value, 16) if scope == NULL_KEYSPACE else int(json.loads(value)["safe_point"])


def _gc_safe_point_text(safe_point: int, scope: int) -> bytes:
    if scope == NULL_KEYSPACE:
        return b"%x" % safe_point
    return json_text({"keyspace_id": scope, "safe_point": safe_point})


def _number(value: bytes, base: int = 10) -> int:
    # `int` also takes blanks, signs and underscores, which PD would not.
    if value and not value.isalnum():
        raise ValueError("not a number")
    number = int(value or b"0", base)
    if number > MAX_TS:
        raise ValueError("more than 64 bits")
    return number


def json_text(fields: Mapping[str, str | int]) -> bytes:
    """JSON as Go's `json.Marshal` writes it: no blanks, UTF-8 as it is, and HTML's special
    characters escaped.
    """
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).translate(_IN_JSON)
    return valid_text(text).encode()


def key_text(raw: bytes) -> str:
    """A part of a key as text that `key_bytes` turns back, whatever it holds."""
    return raw.decode(errors="surrogateescape")


def key_bytes(text: str) -> bytes:
    """The inverse of `key_text`."""
    return text.encode(errors="surrogateescape")


def valid_text(text: str) -> str:
    """`text` with U+FFFD for what is no Unicode, as a message or a JSON text needs it."""
    return key_bytes(text).decode(errors="replace")
