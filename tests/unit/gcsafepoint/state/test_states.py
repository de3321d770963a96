"""Keyspaces: who shares whose state, and what holds in all of them (gcsafepoint/state/states.py),
in PD's words.
"""

import pytest

from gcsafepoint.state.errors import KeyspaceNotFoundError, SafePointRequestError
from gcsafepoint.state.rules import GcState
from gcsafepoint.state.states import (
    NULL_KEYSPACE,
    GcStates,
    Keyspace,
    KeyspaceState,
    all_keyspace_states,
)


@pytest.fixture
def states() -> GcStates:
    keyspaces = [
        Keyspace(7, "seven", level_gc=True),
        Keyspace(8, "eight"),
        Keyspace(9, "nine", True, enabled=False),
    ]
    own = {7: GcState(txn_safe_point=50), 9: GcState(txn_safe_point=90)}
    return GcStates(GcState(txn_safe_point=20), keyspaces=keyspaces, of_keyspaces=own)


def test_users_of_a_keyspace_without_gc_of_its_own_share_the_null_keyspaces(
    states: GcStates,
) -> None:
    shared = [
        states.scope_of_user(keyspace_id) for keyspace_id in (0, 7, 8, NULL_KEYSPACE, 0x1000000)
    ]
    assert shared == [NULL_KEYSPACE, 7, NULL_KEYSPACE, NULL_KEYSPACE, NULL_KEYSPACE]


def test_gc_of_a_keyspace_without_its_own_is_refused(states: GcStates) -> None:
    text = r"\[PD:gc:ErrGCOnInvalidKeyspace\]trying to manage GC in keyspace DEFAULT \(id: 0\) where keyspace level GC"
    with pytest.raises(SafePointRequestError, match=text):
        states.of_manager(0)
    assert states.of_manager(NULL_KEYSPACE) is states.null
    assert states.of_manager(0x1000000) is states.null


def test_an_unknown_keyspace_is_refused(states: GcStates) -> None:
    for ask in (states.of_user, states.of_manager):
        with pytest.raises(KeyspaceNotFoundError, match="keyspace does not exist"):
            ask(10)


def test_a_global_barrier_must_not_lie_below_any_enabled_keyspace(states: GcStates) -> None:
    with pytest.raises(
        SafePointRequestError,
        match=r'behind the txn safe point 50 of keyspace { name: "seven", id: 7 }',
    ):
        states.set_global_barrier("br", 49, 60, 1000)
    states.null.advance_txn_safe_point(60, 1000)
    with pytest.raises(
        SafePointRequestError, match="behind the txn safe point 60 of keyspace <null_keyspace>"
    ):
        states.set_global_barrier("br", 59, 60, 1000)
    states.set_global_barrier("br", 60, 60, 1000)
    assert states.of_user(7).advance_txn_safe_point(100, 1000).new == 60


def test_disabled_keyspaces_tell_nothing(states: GcStates) -> None:
    told = all_keyspace_states(states, with_barriers=True)
    assert told[0] == KeyspaceState(NULL_KEYSPACE, level_gc=False, txn_safe_point=20)
    assert told[1] == KeyspaceState(0, level_gc=False)
    assert [(state.keyspace_id, state.level_gc) for state in told[2:]] == [(7, True), (8, False)]
