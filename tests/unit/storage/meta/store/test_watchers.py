"""Watches see every change once, in order, and never what is not durable yet."""

from typing import Any

from etcdpb import kv_pb2, rpc_pb2
from hypothesis import given
from hypothesis import strategies as st

from storage.meta.store import watchers as limits
from storage.meta.store.state import State
from storage.meta.store.watchers import Watchers


def put(state: State, *keys: bytes, value: bytes = b"") -> None:
    ops = [rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=value)) for key in keys]
    state.txn(rpc_pb2.TxnRequest(success=ops))


def create(**fields: Any) -> rpc_pb2.WatchRequest:
    return rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(**fields))


def answers(watchers: Watchers, revision: int) -> list[rpc_pb2.WatchResponse]:
    return list(watchers.responses(lambda: revision))


def created(watchers: Watchers, revision: int, **fields: Any) -> None:
    watchers.handle(create(**fields), revision)
    assert next(watchers.responses(lambda: 0)).created


@given(
    st.lists(st.sampled_from([b"a/1", b"a/2", b"b"]), max_size=30), st.integers(0, 30), st.data()
)
def test_a_watch_sees_each_change_from_its_start_once(
    keys: list[bytes], start: int, data: st.DataObject
) -> None:
    state = State()
    watchers = Watchers(state)
    created(watchers, state.revision, key=b"a/", range_end=b"a0", start_revision=start)
    seen: list[int] = []
    for key in keys:
        put(state, key)
        shown = data.draw(st.integers(2, state.revision))
        fresh = [
            event.kv.mod_revision
            for response in answers(watchers, shown)
            for event in response.events
        ]
        assert all(revision <= shown for revision in fresh)
        seen += fresh
    seen += [
        event.kv.mod_revision
        for response in answers(watchers, state.revision)
        for event in response.events
    ]
    assert not answers(watchers, state.revision)
    wanted = [number + 2 for number, key in enumerate(keys) if key != b"b"]
    assert seen == [revision for revision in wanted if revision >= max(start, 2)]


def test_a_watch_that_fell_behind_the_compaction_is_cancelled_with_its_revision() -> None:
    state = State()
    watchers = Watchers(state)
    created(watchers, state.revision, key=b"a", start_revision=1)
    for _ in range(3):
        put(state, b"a")
    state.compact(3)
    (response,) = answers(watchers, state.revision)
    assert (response.canceled, response.compact_revision) == (True, 3)
    assert "compacted" in response.cancel_reason
    assert not answers(watchers, state.revision)


def test_filters_and_previous_pairs_are_honoured() -> None:
    state = State()
    watchers = Watchers(state)
    nodelete = rpc_pb2.WatchCreateRequest.NODELETE
    created(watchers, state.revision, key=b"a", start_revision=1, filters=[nodelete], prev_kv=True)
    put(state, b"a")
    state.delete_range(rpc_pb2.DeleteRangeRequest(key=b"a"))
    put(state, b"a")
    put(state, b"a")
    (response,) = answers(watchers, state.revision)
    assert [event.type for event in response.events] == [kv_pb2.Event.PUT] * 3
    assert response.events[2].prev_kv.mod_revision == 4


def test_a_cancelled_watch_says_so_and_shows_nothing_more() -> None:
    state = State()
    watchers = Watchers(state)
    created(watchers, 1, key=b"a")
    watchers.handle(rpc_pb2.WatchRequest(cancel_request=rpc_pb2.WatchCancelRequest(watch_id=0)), 1)
    (cancelled,) = answers(watchers, 1)
    assert cancelled.canceled
    put(state, b"a")
    assert not answers(watchers, state.revision)


def test_asked_for_progress_is_told_after_all_that_it_covers() -> None:
    state = State()
    watchers = Watchers(state)
    created(watchers, 1, key=b"a", start_revision=1)
    for _ in range(3 * limits.MAX_EVENTS):
        put(state, b"a")
    watchers.handle(
        rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest()), state.revision
    )
    told = answers(watchers, state.revision)
    assert [response.watch_id for response in told] == [0, 0, 0, -1]
    assert told[-1].header.revision == told[-2].events[-1].kv.mod_revision == state.revision


def test_an_idle_watch_is_told_progress_at_each_tick_and_a_busy_one_is_not() -> None:
    state = State()
    watchers = Watchers(state)
    for key, notify in ((b"idle", True), (b"busy", True), (b"silent", False)):
        created(watchers, 1, key=key, progress_notify=notify)
    watchers.tick(1)
    assert not answers(watchers, 1)
    put(state, b"busy")
    assert len(answers(watchers, 2)) == 1
    watchers.tick(2)
    (told,) = answers(watchers, 2)
    assert (told.watch_id, told.header.revision, len(told.events)) == (0, 2, 0)
    watchers.tick(2)
    assert {response.watch_id for response in answers(watchers, 2)} == {0, 1}


def test_a_large_revision_comes_in_pieces_only_to_whom_it_may() -> None:
    state = State()
    watchers = Watchers(state)
    for fragment in (True, False):
        created(watchers, 1, key=b"\0", range_end=b"\0", fragment=fragment)
    put(state, *(b"%d" % number for number in range(5)), value=bytes(limits.MAX_BYTES // 4))
    *pieces, last, whole = answers(watchers, 2)
    assert all(piece.fragment for piece in pieces)
    assert not last.fragment
    assert sum(len(piece.events) for piece in (*pieces, last)) == len(whole.events) == 5
    assert all(piece.ByteSize() <= limits.MAX_BYTES + 1024 for piece in (*pieces, last))


def test_watches_that_cannot_be_are_refused_with_a_reason() -> None:
    watchers = Watchers(State())
    created(watchers, 1, key=b"a", watch_id=7)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"key": b"b", "watch_id": 7}, "duplicate"),
        ({"key": b"b", "range_end": b"a"}, "empty"),
    ]
    for fields, reason in cases:
        watchers.handle(create(**fields), 1)
        (refused,) = answers(watchers, 1)
        assert refused.created
        assert refused.canceled
        assert reason in refused.cancel_reason


def test_a_stream_has_a_bounded_number_of_watches() -> None:
    watchers = Watchers(State())
    for _ in range(limits.MAX_WATCHES + 1):
        watchers.handle(create(key=b"a"), 1)
    assert [response.canceled for response in answers(watchers, 1)] == [
        False
    ] * limits.MAX_WATCHES + [True]
