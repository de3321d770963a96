"""The GC states of all keyspaces, and the barriers that hold in each of them (pure).

A keyspace has GC of its own (keyspace-level) or shares the null keyspace's (unified). What its users do is redirected
there; who manages GC must not name it. Ids of more than 24 bits are the null keyspace. A global barrier is stored iff
its timestamp is >= t of every keyspace. Source: PD pkg/gc/gc_state_manager.go `redirectKeyspace`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gcsafepoint import refusal
from gcsafepoint.barrier import Barriers, ServiceSafePoint, expiry
from gcsafepoint.go_text import quoted
from gcsafepoint.rules import Changes, SafePoints

NULL_KEYSPACE = 0xFFFF_FFFF
_LAST_ID = 0xFF_FFFF


@dataclass(frozen=True, slots=True)
class Keyspace:
    """What the rules need to know of a keyspace."""

    id: int
    name: str
    level_gc: bool = False
    enabled: bool = True


DEFAULT = Keyspace(0, "DEFAULT")
"""Exists in every cluster, recorded or not."""


@dataclass(frozen=True, slots=True)
class StateChanges:
    """What changed: by keyspace, and of the global barriers (None: removed)."""

    scopes: Mapping[int, Changes]
    global_barriers: Mapping[str, ServiceSafePoint | None]


class GcStates:
    """All of it; `null` is the state of the null keyspace."""

    def __init__(
        self,
        null: SafePoints | None = None,
        global_barriers: Iterable[ServiceSafePoint] = (),
        keyspaces: Iterable[Keyspace] = (),
        of_keyspaces: Mapping[int, SafePoints] | None = None,
    ) -> None:
        """Take over a stored state; `of_keyspaces` has those with GC of their own."""
        self.keyspaces = {DEFAULT.id: DEFAULT} | {keyspace.id: keyspace for keyspace in keyspaces}
        self.global_barriers = Barriers(global_barriers)
        self.null = null or SafePoints()
        self._scopes = {NULL_KEYSPACE: self.null, **(of_keyspaces or {})}
        for state in self._scopes.values():
            state.global_barriers = self.global_barriers

    def scope_of_user(self, keyspace_id: int) -> int:
        """The keyspace whose state users of the keyspace share. Raises: KeyspaceNotFoundError."""
        if keyspace_id > _LAST_ID:
            return NULL_KEYSPACE
        if keyspace_id not in self.keyspaces:
            raise refusal.KeyspaceNotFoundError
        return keyspace_id if keyspace_id in self._scopes else NULL_KEYSPACE

    def of_user(self, keyspace_id: int) -> SafePoints:
        """The state that users of the keyspace share. Raises: KeyspaceNotFoundError."""
        return self._scopes[self.scope_of_user(keyspace_id)]

    def of_manager(self, keyspace_id: int) -> SafePoints:
        """The state that GC of the keyspace moves.

        Raises:
            KeyspaceNotFoundError: no keyspace has that id.
            SafePointRequestError: the keyspace has no GC of its own.
        """
        scope = self.scope_of_user(keyspace_id)
        if scope == NULL_KEYSPACE and keyspace_id <= _LAST_ID:
            raise refusal.no_gc_of_its_own(self.keyspaces[keyspace_id].name, keyspace_id)
        return self._scopes[scope]

    def scopes(self) -> Iterator[tuple[int, SafePoints]]:
        """Every state with the id of its keyspace, the null keyspace's first."""
        return iter(self._scopes.items())

    def set_global_barrier(self, barrier_id: str, barrier_ts: int, ttl_s: int, now_s: float) -> ServiceSafePoint:
        """Set a barrier for every keyspace; `ttl_s` > 0.

        Raises:
            BehindTxnSafePointError: the timestamp lies below the txn safe point of some keyspace.
            SafePointRequestError: no id.
        """
        _check_id(barrier_id)
        highest, scope = self.highest_txn_safe_point()
        if barrier_ts < highest:
            raise refusal.global_barrier_behind(barrier_ts, highest, self._shown(scope))
        barrier = ServiceSafePoint(barrier_id, expiry(now_s, ttl_s), barrier_ts)
        self.global_barriers.put(barrier)
        return barrier

    def delete_global_barrier(self, barrier_id: str) -> ServiceSafePoint | None:
        """Remove a global barrier; returns what it was. Raises: SafePointRequestError: no id."""
        _check_id(barrier_id)
        return self.global_barriers.remove(barrier_id)

    def highest_txn_safe_point(self) -> tuple[int, int]:
        """The highest t of all enabled keyspaces, and whose it is."""
        live = [(state.txn_safe_point, scope) for scope, state in self.scopes() if self._enabled(scope)]
        return max(live, key=lambda item: item[0])

    def take_changes(self) -> StateChanges:
        """What changed since the last call."""
        changed = {scope: state.take_changes() for scope, state in self.scopes() if state.pending}
        return StateChanges(changed, self.global_barriers.take_changes())

    def mark_all(self) -> None:
        """Make `take_changes` return every barrier that has an end."""
        for _, state in self.scopes():
            state.barriers.mark_all()
        self.global_barriers.mark_all()

    def has_barriers(self) -> bool:
        """Whether anything is there that may expire."""
        return bool(len(self.global_barriers)) or any(len(state.barriers) for _, state in self.scopes())

    def _enabled(self, scope: int) -> bool:
        return scope == NULL_KEYSPACE or self.keyspaces[scope].enabled

    def _shown(self, scope: int) -> str:
        if scope == NULL_KEYSPACE:
            return "<null_keyspace>"
        return f"{{ name: {quoted(self.keyspaces[scope].name)}, id: {scope} }}"


def _check_id(barrier_id: str) -> None:
    if not barrier_id:
        raise refusal.bad_argument("barrierID", "")
