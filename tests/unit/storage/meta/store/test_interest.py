"""Watches that are woken for their own changes only show what watches that look at every change
show.
"""

from typing import Any

from etcdpb import rpc_pb2
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from storage.meta.store.state import State
from storage.meta.store.watchers import Subscriptions, Watchers

KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])
ENDS = st.sampled_from([b"", b"", b"c", b"\0"])


def test_a_watch_from_before_it_was_asked_for_skips_nothing() -> None:
    """Its start is just behind what the stream was shown last, but it did not listen then."""
    state, subscriptions = State(), Subscriptions()
    watchers = Watchers(state, subscriptions)
    assert not list(watchers.responses(lambda: state.revision))
    state.put(rpc_pb2.PutRequest(key=b"a"))
    subscriptions.notify(2, state.events(2))
    watchers.handle(rpc_pb2.WatchRequest(create_request={"key": b"a", "start_revision": 2}), 2)
    created, shown = watchers.responses(lambda: state.revision)
    assert created.created
    assert [event.kv.mod_revision for event in shown.events] == [2]


class Streams(RuleBasedStateMachine):
    """Two equal client streams: one with an subscriptions,
    which is asked only when it was woken, and one without.
    """

    @initialize()
    def start(self) -> None:
        self.state, self.subscriptions = State(), Subscriptions()
        self.durable = self.told = self.state.revision
        self.woken = True
        self.quick = Watchers(self.state, self.subscriptions, self.wake)
        self.plain = Watchers(self.state)

    def wake(self) -> None:
        self.woken = True

    @rule(key=KEYS, end=ENDS, back=st.integers(-2, 4), prev_kv=st.booleans())
    def create(self, key: bytes, end: bytes, back: int, *, prev_kv: bool) -> None:
        start = max(1, self.durable + 1 - back)
        self.ask(
            create_request={
                "key": key,
                "range_end": end,
                "start_revision": start,
                "prev_kv": prev_kv,
            }
        )

    @rule(watch_id=st.integers(0, 5))
    def cancel(self, watch_id: int) -> None:
        self.ask(cancel_request={"watch_id": watch_id})

    def ask(self, **fields: Any) -> None:
        for watchers in (self.quick, self.plain):
            watchers.handle(rpc_pb2.WatchRequest(**fields), self.durable)
        self.woken = True

    @rule(keys=st.sets(KEYS, min_size=1, max_size=2))
    def put(self, keys: set[bytes]) -> None:
        ops = [rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key)) for key in sorted(keys)]
        self.state.txn(rpc_pb2.TxnRequest(success=ops))

    @rule()
    def become_durable(self) -> None:
        self.durable = self.state.revision
        for revision in range(self.told + 1, self.durable + 1):
            self.subscriptions.notify(revision, self.state.events(revision))
        self.told = self.durable

    @rule(back=st.integers(0, 3))
    def compact(self, back: int) -> None:
        self.become_durable()
        if self.durable - back > self.state.compact_revision:
            self.state.compact(self.durable - back)

    @rule()
    def drain(self) -> None:
        """A compaction that cuts off a watch whose changes were none of its own is no news to the
        quick one.
        """
        quick = list(self.quick.responses(lambda: self.durable)) if self.woken else []
        self.woken = False
        plain = list(self.plain.responses(lambda: self.durable))
        cut_off = {told.watch_id for told in plain if told.compact_revision} - {
            told.watch_id for told in quick if told.compact_revision
        }
        assert [told for told in plain if told.watch_id not in cut_off] == [
            told for told in quick if told.watch_id not in cut_off
        ]
        for watch_id in cut_off:
            self.quick.handle(
                rpc_pb2.WatchRequest(cancel_request={"watch_id": watch_id}), self.durable
            )
        list(self.quick.responses(lambda: self.durable))

    @invariant()
    def nobody_listens_for_watches_that_are_gone(self) -> None:
        if not self.quick._watches:
            assert not self.subscriptions._keys
            assert not self.subscriptions._ranges


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
