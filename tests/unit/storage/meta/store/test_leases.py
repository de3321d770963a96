"""Leases against the clock of a test."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.meta.errors import LeaseExistsError, LeaseNotFoundError, LeaseTtlError
from storage.meta.store.state import MAX_TTL_S, Leases


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 8)), max_size=40))
def test_a_lease_is_over_exactly_when_its_ttl_passed_since_the_last_renewal(
    steps: list[tuple[int, int]],
) -> None:
    leases, deadlines, now = Leases(), dict[int, int](), 0
    for lease, wait in steps:
        now += wait
        over = set(leases.expired(now))
        assert over == {known for known, deadline in deadlines.items() if deadline <= now}
        for gone in over:
            leases.remove(gone)
            del deadlines[gone]
        if lease not in leases:
            leases.grant(lease, lease + 1, now)
        else:
            assert leases.renew(lease, now) == lease + 1
        deadlines[lease] = now + lease + 1


def test_a_lease_past_its_deadline_is_not_renewed() -> None:
    leases = Leases()
    leases.grant(1, 5, 100.0)
    assert leases.renew(1, 105.0) == 0
    assert leases.time_left(1, 105.0) == (0, 5)
    assert leases.time_left(2, 105.0) == (-1, 0)


def test_a_lease_has_its_whole_ttl_after_a_restart() -> None:
    assert Leases([(1, 5)], now=1000.0).time_left(1, 1000.0) == (5, 5)


def test_impossible_leases_are_refused() -> None:
    leases = Leases()
    leases.grant(1, 5, 0.0)
    with pytest.raises(LeaseExistsError):
        leases.check_grant(1, 5)
    with pytest.raises(LeaseTtlError):
        leases.check_grant(2, MAX_TTL_S + 1)
    with pytest.raises(LeaseNotFoundError):
        leases.check_grant(0, 5)
    assert leases.check_grant(2, -1) == 2


def test_an_id_that_was_granted_anew_is_over_once() -> None:
    leases = Leases()
    leases.grant(1, 5, 0.0)
    leases.remove(1)
    leases.grant(1, 3, 1.0)
    assert leases.expired(10.0) == [1]


def test_a_postponed_deadline_is_later() -> None:
    leases = Leases([(1, 5)], now=0.0)
    leases.postpone(10.0)
    assert leases.expired(14.0) == []
    assert leases.expired(15.0) == [1]
