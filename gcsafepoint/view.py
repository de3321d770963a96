"""What holds GC back at one moment, frozen, for whoever explains or shows it; the rules are in `gcsafepoint.rules`."""

from dataclasses import dataclass

from gcsafepoint.barrier import ServiceSafePoint
from gcsafepoint.rules import SafePoints
from gcsafepoint.states import NULL_KEYSPACE, GcStates


@dataclass(frozen=True, slots=True)
class MinStartTs:
    """The oldest transaction of one TiDB server, as it writes it to `/tidb/server/minstartts/<owner>`."""

    owner: str
    start_ts: int


@dataclass(frozen=True, slots=True)
class GcView:
    """The state of the null keyspace; all tuples have the lowest timestamp first.

    Services and global barriers whose TTL is over are listed until the update that drops them: ask `expired(now_s)`.
    """

    now_s: int
    """The clock TTLs are measured by, Unix seconds."""
    gc_safe_point: int
    txn_safe_point: int
    minimum: ServiceSafePoint
    """The one that holds GC back most, `gc_worker` and global barriers included."""
    gc_worker: ServiceSafePoint
    services: tuple[ServiceSafePoint, ...]
    """All but `gc_worker`; GC barriers are the same thing."""
    global_barriers: tuple[ServiceSafePoint, ...] = ()
    min_start_ts: tuple[MinStartTs, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyspaceState:
    """What GetGCState tells of one keyspace; barriers by id, expired ones included."""

    keyspace_id: int
    level_gc: bool
    txn_safe_point: int = 0
    gc_safe_point: int = 0
    barriers: tuple[ServiceSafePoint, ...] = ()


def gc_view(states: GcStates, now_s: int) -> GcView:
    """A view of the null keyspace."""
    null = states.null
    running = sorted((start_ts, owner) for owner, start_ts in null.min_start_ts.items())
    return GcView(
        now_s=now_s,
        gc_safe_point=null.gc_safe_point,
        txn_safe_point=null.txn_safe_point,
        minimum=null.minimum(),
        gc_worker=null.gc_worker,
        services=_lowest_first(null.barriers.copied()),
        global_barriers=_lowest_first(states.global_barriers.copied()),
        min_start_ts=tuple(MinStartTs(owner, start_ts) for start_ts, owner in running),
    )


def state_of(states: GcStates, keyspace_id: int, *, with_barriers: bool) -> KeyspaceState:
    """The state the users of a keyspace share. Raises: KeyspaceNotFoundError."""
    scope = states.scope_of_user(keyspace_id)
    return _keyspace_state(scope, states.of_user(scope), with_barriers=with_barriers)


def all_states(states: GcStates, *, with_barriers: bool) -> list[KeyspaceState]:
    """Every enabled keyspace's state, the null keyspace's first; those without GC of their own tell nothing."""
    own = dict(states.scopes())
    told = [_keyspace_state(NULL_KEYSPACE, own[NULL_KEYSPACE], with_barriers=with_barriers)]
    for keyspace in sorted(states.keyspaces.values(), key=lambda keyspace: keyspace.id):
        if keyspace.enabled and keyspace.id in own:
            told.append(_keyspace_state(keyspace.id, own[keyspace.id], with_barriers=with_barriers))
        elif keyspace.enabled:
            told.append(KeyspaceState(keyspace.id, level_gc=False))
    return told


def global_barriers(states: GcStates) -> tuple[ServiceSafePoint, ...]:
    """All of them by id, expired ones included."""
    return _by_id(states.global_barriers.copied())


def _keyspace_state(scope: int, state: SafePoints, *, with_barriers: bool) -> KeyspaceState:
    barriers = _by_id(state.barriers.copied()) if with_barriers else ()
    return KeyspaceState(scope, scope != NULL_KEYSPACE, state.txn_safe_point, state.gc_safe_point, barriers)


def _lowest_first(services: list[ServiceSafePoint]) -> tuple[ServiceSafePoint, ...]:
    return tuple(sorted(services, key=lambda service: (service.safe_point, service.service_id)))


def _by_id(services: list[ServiceSafePoint]) -> tuple[ServiceSafePoint, ...]:
    return tuple(sorted(services, key=lambda service: service.service_id))
