"""Watches see every change once, in order, and never what is not durable yet."""

from etcdpb import kv_pb2, rpc_pb2
from hypothesis import given
from hypothesis import strategies as st

from storage.meta.state import State
from storage.meta.watchers import Watchers


def put(state: State, key: bytes) -> None:
    state.put(rpc_pb2.PutRequest(key=key))


def create(**fields: object) -> rpc_pb2.WatchRequest:
    return rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(**fields))


@given(st.lists(st.sampled_from([b"a/1", b"a/2", b"b"]), max_size=30), st.integers(0, 30), st.data())
def test_a_watch_sees_each_change_from_its_start_once(keys: list[bytes], start: int, data: st.DataObject) -> None:
    state = State()
    watchers = Watchers(state)
    watchers.handle(create(key=b"a/", range_end=b"a0", start_revision=start), state.revision)
    seen: list[int] = []
    for key in keys:
        put(state, key)
        shown = data.draw(st.integers(2, state.revision))
        responses = watchers.advance(shown)
        seen += [event.kv.mod_revision for response in responses for event in response.events]
        assert all(revision <= max(shown, max(seen, default=0)) for revision in seen)
    while responses := watchers.advance(state.revision):
        seen += [event.kv.mod_revision for response in responses for event in response.events]
    wanted = [number + 2 for number, key in enumerate(keys) if key != b"b"]
    assert seen == [revision for revision in wanted if revision >= max(start, 2)]


def test_a_watch_that_fell_behind_the_compaction_is_cancelled_with_its_revision() -> None:
    state = State()
    watchers = Watchers(state)
    watchers.handle(create(key=b"a", start_revision=1), state.revision)
    for _ in range(3):
        put(state, b"a")
    state.compact(3)
    (response,) = watchers.advance(state.revision)
    assert (response.canceled, response.compact_revision) == (True, 3)
    assert not watchers.advance(state.revision)


def test_filters_and_previous_pairs_are_honoured() -> None:
    state = State()
    watchers = Watchers(state)
    nodelete = rpc_pb2.WatchCreateRequest.NODELETE
    watchers.handle(create(key=b"a", start_revision=1, filters=[nodelete], prev_kv=True), state.revision)
    put(state, b"a")
    state.delete_range(rpc_pb2.DeleteRangeRequest(key=b"a"))
    put(state, b"a")
    put(state, b"a")
    (response,) = watchers.advance(state.revision)
    assert [event.type for event in response.events] == [kv_pb2.Event.PUT] * 3
    assert response.events[2].prev_kv.mod_revision == 4


def test_cancel_and_progress_are_answered() -> None:
    watchers = Watchers(State())
    (created,) = watchers.handle(create(key=b"a"), 1)
    assert created.created
    assert created.watch_id == 0
    (cancelled,) = watchers.handle(rpc_pb2.WatchRequest(cancel_request=rpc_pb2.WatchCancelRequest(watch_id=0)), 1)
    assert cancelled.canceled
    progress = rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest())
    assert watchers.handle(progress, 1)[0].watch_id == -1
