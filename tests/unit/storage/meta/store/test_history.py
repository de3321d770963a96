"""What is kept of the past: bounded by number, by age and by bytes."""

from etcdpb import rpc_pb2

from storage.meta.store.state import History, Retention, State


def written(count: int, value: bytes = b"") -> State:
    state = State()
    for _ in range(count):
        state.put(rpc_pb2.PutRequest(key=b"a", value=value))
    return state


def test_the_newest_revisions_are_kept_with_a_tenth_of_slack() -> None:
    history = History(Retention(revisions=100, age_s=0))
    assert history.due(written(105), 0.0) == 0
    state = written(110)
    assert history.due(state, 0.0) == state.revision - 100
    state.compact(state.revision - 100)
    assert history.due(state, 0.0) == 0


def test_changes_older_than_the_age_are_forgotten() -> None:
    history = History(Retention(revisions=0, age_s=60))
    state = written(5)
    assert history.due(state, 0.0) == 0
    old = state.revision
    state.put(rpc_pb2.PutRequest(key=b"b"))
    assert history.due(state, 59.0) == 0
    assert history.due(state, 61.0) == old
    state.compact(old)
    assert history.due(state, 61.5) == 0


def test_bytes_bound_the_history_whatever_else_is_kept() -> None:
    history = History(Retention(revisions=0, age_s=0, log_bytes=10_000))
    state = written(30, bytes(1000))
    floor = history.due(state, 0.0)
    state.compact(floor)
    assert 0 < state.log_bytes <= 10_000
    assert history.due(state, 0.0) == 0


def test_one_revision_larger_than_the_bound_is_kept_alone() -> None:
    history = History(Retention(revisions=0, age_s=0, log_bytes=100))
    state = written(3, bytes(1000))
    assert history.due(state, 0.0) == state.revision


def test_sizes_are_those_of_what_is_there() -> None:
    state = written(10, bytes(100))
    state.delete_range(rpc_pb2.DeleteRangeRequest(key=b"a"))
    assert state.live_bytes == 0
    state.compact(state.revision)
    (event,) = state.events(state.revision)
    assert state.log_bytes == event.ByteSize()
