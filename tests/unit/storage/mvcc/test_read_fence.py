"""No read misses a commit at a computed timestamp, whatever the interleaving;
and none waits without need.
"""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.model.ts import MAX_TS
from storage.mvcc.errors import StoreStoppedError
from storage.mvcc.read_fence import ReadFence, Touch

KEYS = st.sampled_from([b"a", b"b", b"c"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(1, 40), st.sets(KEYS, min_size=1)),
        st.tuples(st.just("reserve"), st.integers(1, 40), st.sets(KEYS, min_size=1)),
        st.tuples(st.just("release"), st.just(0), st.just(set[bytes]())),
    ),
    max_size=30,
)


@given(STEPS)
def test_a_read_has_either_seen_the_write_or_lies_below_its_commit_ts(
    steps: list[tuple[str, int, set[bytes]]],
) -> None:
    fence = ReadFence()
    written: dict[bytes, list[int]] = {}
    in_flight: list[tuple[set[bytes], int]] = []
    unseen: list[tuple[bytes, int, int]] = []  # key, ts of a read, number of versions it could see
    for action, ts, keys in steps:
        if action == "release":
            for reserved, commit_ts in in_flight:
                for key in reserved:
                    written.setdefault(key, []).append(commit_ts)
            in_flight = []
            fence.release()
        elif action == "reserve":
            if not any(
                keys & reserved for reserved, _ in in_flight
            ):  # a key has one writer in a group
                in_flight.append((keys, fence.reserve(keys, ts)))
        elif not any(keys & reserved and commit_ts <= ts for reserved, commit_ts in in_flight):
            fence.enter([Touch(ts, tuple(keys))])  # it would wait otherwise, and this is one thread
            unseen += [(key, ts, len(written.get(key, []))) for key in keys]
    fence.release()
    for reserved, commit_ts in in_flight:
        for key in reserved:
            written.setdefault(key, []).append(commit_ts)
    for key, ts, seen in unseen:
        assert all(commit_ts > ts for commit_ts in written.get(key, [])[seen:])


@pytest.mark.parametrize(
    ("touch", "waits"),
    [
        (Touch(9, [b"k"]), False),
        (Touch(10, [b"k"]), True),
        (Touch(10, [b"j"]), False),
        (Touch(10, span=(b"a", b"z")), True),
        (Touch(10, span=(b"a", b"")), True),
        (Touch(10, span=(b"a", b"k")), False),
        (Touch(9, span=(b"a", b"z")), False),
        (Touch(MAX_TS, [b"k"], (b"", b"")), False),
    ],
)
def test_only_a_read_that_might_miss_something_waits_for_the_group(
    touch: Touch, waits: bool
) -> None:
    fence = ReadFence()
    fence.reserve([b"k"], 10)
    entered = threading.Event()

    def read() -> None:
        fence.enter([touch])
        entered.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert entered.wait(0.02 if waits else 60) != waits
    fence.release()
    reader.join(60)
    assert entered.is_set()


def test_a_group_that_failed_lets_no_reader_through() -> None:
    fence = ReadFence()
    fence.reserve([b"k"], 10)
    fence.close()
    with pytest.raises(StoreStoppedError):
        fence.enter([Touch(10, [b"k"])])
    fence.enter([Touch(9, [b"k"])])


def test_what_is_settled_stays_below_later_and_flying_commits() -> None:
    fence = ReadFence(5)
    assert fence.reserve([b"k"], 3) == 6
    assert fence.settle(100) == 5
    assert fence.reserve([b"l"], 3) == 101
    fence.release()
    assert fence.settle(100) == 100
    assert fence.reserve([b"k"], 3) == 101


def test_a_read_of_the_newest_binds_nobody() -> None:
    fence = ReadFence(5)
    fence.enter([Touch(MAX_TS, [b"k"])])
    assert fence.max_ts == 5
