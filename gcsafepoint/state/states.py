"""The GC states of all keyspaces, the barriers that hold in each of them,
and frozen views of them (pure).

A keyspace has GC of its own (keyspace-level) or shares the null keyspace's (unified). What its
users do is redirected there; who manages GC must not name it. Ids of more than 24 bits are the null
keyspace. A global barrier is stored iff its timestamp is >= t of every keyspace. Source: PD
pkg/gc/gc_state_manager.go `redirectKeyspace`.

`GcStates` is the live state, whose rules are in `gcsafepoint.state.rules`. `gc_view` freezes what
holds GC back, to be explained or shown; `keyspace_state` and `all_keyspace_states` are what
GetGCState and GetAllKeyspacesGCStates answer.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gcsafepoint.state import errors
from gcsafepoint.state.rules import (
    Barriers,
    Changes,
    GcState,
    ServiceSafePoint,
    expiry,
    quoted,
)

NULL_KEYSPACE = 0xFFFF_FFFF
_LAST_ID = 0xFF_FFFF


@dataclass(frozen=True, slots=True)
class Keyspace:
    """The facts of a keyspace's record that the rules need."""

    id: int
    name: str
    level_gc: bool = False
    enabled: bool = True


DEFAULT = Keyspace(0, "DEFAULT")
"""Exists in every cluster, recorded or not."""


@dataclass(frozen=True, slots=True)
class StateChanges:
    """Changes by keyspace, and of the global barriers (None: removed)."""

    scopes: Mapping[int, Changes]
    global_barriers: Mapping[str, ServiceSafePoint | None]


class GcStates:
    """The states of a cluster; `null` is that of the null keyspace."""

    def __init__(
        self,
        null: GcState | None = None,
        global_barriers: Iterable[ServiceSafePoint] = (),
        keyspaces: Iterable[Keyspace] = (),
        of_keyspaces: Mapping[int, GcState] | None = None,
    ) -> None:
        """Take over a stored state; `of_keyspaces` has those with GC of their own."""
        self.keyspaces = {DEFAULT.id: DEFAULT} | {keyspace.id: keyspace for keyspace in keyspaces}
        self.global_barriers = Barriers(global_barriers)
        self.null = null or GcState()
        self._scopes = {NULL_KEYSPACE: self.null, **(of_keyspaces or {})}
        for state in self._scopes.values():
            state.global_barriers = self.global_barriers

    def scope_of_user(self, keyspace_id: int) -> int:
        """The keyspace whose state users of the keyspace share. Raises: KeyspaceNotFoundError."""
        if keyspace_id > _LAST_ID:
            return NULL_KEYSPACE
        if keyspace_id not in self.keyspaces:
            raise errors.KeyspaceNotFoundError
        return keyspace_id if keyspace_id in self._scopes else NULL_KEYSPACE

    def of_user(self, keyspace_id: int) -> GcState:
        """The state that users of the keyspace share. Raises: KeyspaceNotFoundError."""
        return self._scopes[self.scope_of_user(keyspace_id)]

    def of_manager(self, keyspace_id: int) -> GcState:
        """The state that GC of the keyspace moves.

        Raises:
            KeyspaceNotFoundError: no keyspace has that id.
            SafePointRequestError: the keyspace has no GC of its own.
        """
        scope = self.scope_of_user(keyspace_id)
        if scope == NULL_KEYSPACE and keyspace_id <= _LAST_ID:
            raise errors.no_gc_of_its_own(self.keyspaces[keyspace_id].name, keyspace_id)
        return self._scopes[scope]

    def scopes(self) -> Iterator[tuple[int, GcState]]:
        """Every state with the id of its keyspace, the null keyspace's first."""
        return iter(self._scopes.items())

    def set_global_barrier(
        self, barrier_id: str, barrier_ts: int, ttl_s: int, now_s: float
    ) -> ServiceSafePoint:
        """Set a barrier for every keyspace; `ttl_s` > 0.

        Raises:
            BehindTxnSafePointError: the timestamp lies below the txn safe point of some keyspace.
            SafePointRequestError: no id.
        """
        _check_id(barrier_id)
        highest, scope = self.highest_txn_safe_point()
        if barrier_ts < highest:
            raise errors.global_barrier_behind(barrier_ts, highest, self._shown(scope))
        barrier = ServiceSafePoint(barrier_id, expiry(now_s, ttl_s), barrier_ts)
        self.global_barriers.put(barrier)
        return barrier

    def delete_global_barrier(self, barrier_id: str) -> ServiceSafePoint | None:
        """Remove a global barrier; returns what it was. Raises: SafePointRequestError: no id."""
        _check_id(barrier_id)
        return self.global_barriers.remove(barrier_id)

    def highest_txn_safe_point(self) -> tuple[int, int]:
        """The highest t of all enabled keyspaces, and whose it is."""
        live = [
            (state.txn_safe_point, scope) for scope, state in self.scopes() if self._enabled(scope)
        ]
        return max(live, key=lambda item: item[0])

    def take_changes(self) -> StateChanges:
        """The changes since the last call."""
        changed = {scope: state.take_changes() for scope, state in self.scopes() if state.pending}
        return StateChanges(changed, self.global_barriers.take_changes())

    def mark_all(self) -> None:
        """Make `take_changes` return every barrier that has an end."""
        for _, state in self.scopes():
            state.barriers.mark_all()
        self.global_barriers.mark_all()

    def has_barriers(self) -> bool:
        """Whether there are barriers, which may expire."""
        return bool(len(self.global_barriers)) or any(
            len(state.barriers) for _, state in self.scopes()
        )

    def _enabled(self, scope: int) -> bool:
        return scope == NULL_KEYSPACE or self.keyspaces[scope].enabled

    def _shown(self, scope: int) -> str:
        if scope == NULL_KEYSPACE:
            return "<null_keyspace>"
        return f"{{ name: {quoted(self.keyspaces[scope].name)}, id: {scope} }}"


def _check_id(barrier_id: str) -> None:
    if not barrier_id:
        raise errors.bad_argument("barrierID", "")


@dataclass(frozen=True, slots=True)
class MinStartTs:
    """The oldest transaction of one TiDB server, as it writes it to
    `/tidb/server/minstartts/<owner>`.
    """

    owner: str
    start_ts: int


@dataclass(frozen=True, slots=True)
class GcView:
    """The state of the null keyspace; all tuples have the lowest timestamp first.

    Services and global barriers whose TTL is over are listed until the update that drops them: ask
    `is_expired(now_s)`.
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
    """GetGCState's answer for one keyspace; barriers by id, expired ones included."""

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
        services=_lowest_first(null.barriers.snapshot()),
        global_barriers=_lowest_first(states.global_barriers.snapshot()),
        min_start_ts=tuple(MinStartTs(owner, start_ts) for start_ts, owner in running),
    )


def keyspace_state(states: GcStates, keyspace_id: int, *, with_barriers: bool) -> KeyspaceState:
    """The state the users of a keyspace share. Raises: KeyspaceNotFoundError."""
    scope = states.scope_of_user(keyspace_id)
    return _frozen(scope, states.of_user(scope), with_barriers=with_barriers)


def all_keyspace_states(states: GcStates, *, with_barriers: bool) -> list[KeyspaceState]:
    """Every enabled keyspace's state, the null keyspace's first;
    of those without GC of their own only the id.
    """
    own = dict(states.scopes())
    answer = [_frozen(NULL_KEYSPACE, own[NULL_KEYSPACE], with_barriers=with_barriers)]
    for keyspace in sorted(states.keyspaces.values(), key=lambda keyspace: keyspace.id):
        if keyspace.enabled and keyspace.id in own:
            answer.append(_frozen(keyspace.id, own[keyspace.id], with_barriers=with_barriers))
        elif keyspace.enabled:
            answer.append(KeyspaceState(keyspace.id, level_gc=False))
    return answer


def global_barriers(states: GcStates) -> tuple[ServiceSafePoint, ...]:
    """All of them by id, expired ones included."""
    return _by_id(states.global_barriers.snapshot())


def _frozen(scope: int, state: GcState, *, with_barriers: bool) -> KeyspaceState:
    barriers = _by_id(state.barriers.snapshot()) if with_barriers else ()
    return KeyspaceState(
        scope, scope != NULL_KEYSPACE, state.txn_safe_point, state.gc_safe_point, barriers
    )


def _lowest_first(services: list[ServiceSafePoint]) -> tuple[ServiceSafePoint, ...]:
    return tuple(sorted(services, key=lambda service: (service.safe_point, service.service_id)))


def _by_id(services: list[ServiceSafePoint]) -> tuple[ServiceSafePoint, ...]:
    return tuple(sorted(services, key=lambda service: service.service_id))
