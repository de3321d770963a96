"""Open locks follow the changes and the region borders."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from storage.codec import encode_bytes
from storage.mvcc.change_feed import OpenLocks, stored_locks
from storage.mvcc.engine import COMMIT, PREWRITE, ROLLBACK, Change
from storage.mvcc.record import PUT
from tests.memory_kv import MemoryKV
from tests.unit.storage.mvcc.histories import TXNS, History, played

STEPS = st.lists(
    st.tuples(st.sampled_from([PREWRITE, COMMIT, ROLLBACK]), st.integers(0, 9), st.integers(1, 5))
)
BORDERS = st.sets(st.integers(1, 9), max_size=4)


@given(STEPS, BORDERS, BORDERS)
def test_the_minimum_of_a_region_is_that_of_its_open_locks(
    steps: list[tuple[int, int, int]], before: set[int], after: set[int]
) -> None:
    def starts(borders: set[int]) -> list[bytes]:
        return [b"", *(bytes([border]) for border in sorted(borders))]

    locks, model = OpenLocks(starts(before)), dict[int, int]()
    for event, key, start_ts in steps:
        locks.apply(Change(event, b"", bytes([key]), PUT, start_ts))
        if event == PREWRITE:
            model[key] = start_ts
        else:
            model.pop(key, None)
    for borders in (before, after):
        locks.rebuild(starts(borders))
        bounds = [0, *sorted(borders), 256]
        for low, high in itertools.pairwise(bounds):
            inside = [start_ts for key, start_ts in model.items() if low <= key < high]
            assert locks.min_start_ts(bytes([low]) if low else b"") == min(inside, default=None)
    assert len(locks) == len(model)


@given(TXNS.map(played))
def test_a_restarted_store_knows_its_open_locks(history: History) -> None:
    assert dict(stored_locks(history.engine.kv)) == {
        encode_bytes(key): start_ts for key, (start_ts, _) in history.open.items()
    }


def test_destroyed_ranges_hold_nothing_back() -> None:
    locks = OpenLocks([b""], [(b"a", 1), (b"c", 2)])
    locks.remove_range(b"a", b"b")
    assert locks.min_start_ts(b"") == 2
    locks.remove_range(b"", b"")
    assert locks.min_start_ts(b"") is None
    assert not list(stored_locks(MemoryKV()))
