"""A watch over a server that breaks off where it hurts: every change is shown once,
in whole revisions.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from etcdpb import kv_pb2, rpc_pb2
from hypothesis import given
from hypothesis import strategies as st

from storage.meta import client
from storage.meta.client import EtcdMeta
from storage.meta.errors import CompactedError, MetaUnavailableError, PermissionDeniedError
from storage.meta.store.state import State
from storage.meta.store.watchers import Watchers


class BreakingEtcd:
    """Watches of a state that break off after so many responses each; the last one does not."""

    def __init__(self, state: State, lengths: Sequence[int]) -> None:
        self.starts: list[int] = []
        self._state = state
        self._lengths = list(lengths)

    async def watch(
        self, asked: rpc_pb2.WatchCreateRequest
    ) -> AsyncGenerator[rpc_pb2.WatchResponse, None]:
        self.starts.append(asked.start_revision)
        watchers = Watchers(self._state)
        watchers.handle(rpc_pb2.WatchRequest(create_request=asked), self._state.revision)
        left = self._lengths.pop(0) if self._lengths else None
        for response in watchers.responses(lambda: self._state.revision):
            if left == 0:
                raise MetaUnavailableError("gone")
            left = None if left is None else left - 1
            yield response
        if left is not None:
            raise MetaUnavailableError("gone")


class ScriptedEtcd:
    """Watches that say what they are told to, one list after the other."""

    def __init__(self, *scripts: Sequence[rpc_pb2.WatchResponse]) -> None:
        self.starts: list[int] = []
        self._scripts = list(scripts)

    async def watch(
        self, asked: rpc_pb2.WatchCreateRequest
    ) -> AsyncGenerator[rpc_pb2.WatchResponse, None]:
        self.starts.append(asked.start_revision)
        if not self._scripts:
            await asyncio.Event().wait()
        for response in self._scripts.pop(0):
            yield response


def response(revision: int, **fields: Any) -> rpc_pb2.WatchResponse:
    return rpc_pb2.WatchResponse(header=rpc_pb2.ResponseHeader(revision=revision), **fields)


def changed(revision: int, key: bytes = b"k/a") -> kv_pb2.Event:
    return kv_pb2.Event(kv=kv_pb2.KeyValue(key=key, mod_revision=revision))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_BACKOFF_SECONDS", (0.0, 0.0))


async def shown(api: Any, count: int, start: int = 0) -> list[list[int]]:
    found: list[list[int]] = []
    async for events in EtcdMeta(api).watch(b"k/", start):
        found.append([event.pair.mod_revision for event in events])
        if sum(map(len, found)) >= count:
            break
    return found


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=12), st.lists(st.integers(0, 5), max_size=8)
)
def test_every_change_is_shown_once_and_in_order(sizes: list[int], lengths: list[int]) -> None:
    state = State()
    for size in sizes:
        ops = [
            rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"k/%d" % number))
            for number in range(size)
        ]
        state.txn(rpc_pb2.TxnRequest(success=ops))
    seen = asyncio.run(shown(BreakingEtcd(state, lengths), sum(sizes), start=2))
    flat = [revision for events in seen for revision in events]
    assert flat == [revision for revision, size in enumerate(sizes, 2) for _ in range(size)]


async def test_a_watch_from_now_goes_on_from_where_it_was_created() -> None:
    api = ScriptedEtcd(
        [response(10, created=True)],
        [response(12, created=True), response(12, events=[changed(11)])],
    )
    assert await shown(api, 1) == [[11]]
    assert api.starts == [0, 11]


async def test_told_progress_moves_the_start_of_the_next_watch() -> None:
    api = ScriptedEtcd(
        [response(10, created=True), response(20)],
        [response(30, created=True), response(30, events=[changed(25)])],
    )
    assert await shown(api, 1) == [[25]]
    assert api.starts == [0, 21]


async def test_pieces_of_a_revision_are_shown_together_or_asked_for_again() -> None:
    first = response(5, events=[changed(5, b"k/a")], fragment=True)
    last = response(5, events=[changed(5, b"k/b")])
    api = ScriptedEtcd([response(4, created=True), first], [response(5, created=True), first, last])
    assert await shown(api, 2) == [[5, 5]]
    assert api.starts == [0, 5]


async def test_a_compacted_watch_says_where_history_begins() -> None:
    api = ScriptedEtcd([response(9, created=True), response(9, canceled=True, compact_revision=7)])
    with pytest.raises(CompactedError) as compacted:
        await shown(api, 1, start=3)
    assert compacted.value.compact_revision == 7


async def test_a_refused_watch_is_an_error_and_one_the_server_gives_up_is_watched_anew() -> None:
    refused = response(
        9, created=True, canceled=True, cancel_reason="etcdserver: permission denied"
    )
    with pytest.raises(PermissionDeniedError):
        await shown(ScriptedEtcd([refused]), 1)
    given_up = response(9, canceled=True, cancel_reason="etcdserver: no leader")
    api = ScriptedEtcd([response(9, created=True), given_up], [response(9, events=[changed(10)])])
    assert await shown(api, 1) == [[10]]
