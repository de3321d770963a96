"""The embedded server's state answers any sequence of requests as a real etcd does.

An etcd shared by all examples counts on from the last one: its revisions are compared relative to
the example's first, and keys have a prefix that no other example has. What etcd itself leaves open
(the order of equals when sorting) is not compared.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from etcdpb import rpc_pb2, rpc_pb2_grpc
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.meta.errors import EtcdError
from storage.meta.store.state import State
from storage.meta.store.watchers import Watchers

Range, Compare, Op = rpc_pb2.RangeRequest, rpc_pb2.Compare, rpc_pb2.RequestOp
LEASES = (11, 12)
LEASE_STEP = 100
EXAMPLES = itertools.count(1)

keys = st.sampled_from([b"a", b"aa", b"ab", b"b", b"c"])
ends = st.sampled_from([b"", b"", b"ab", b"b", b"d", b"a"])
revisions = st.integers(0, 8)
values = st.sampled_from([b"", b"1", b"2", b"22"])
numbers = st.integers(0, 4)

puts = st.builds(
    rpc_pb2.PutRequest,
    key=keys,
    value=values,
    lease=st.sampled_from([0, 0, *LEASES]),
    prev_kv=st.booleans(),
    ignore_value=st.sampled_from([False, False, True]),
    ignore_lease=st.sampled_from([False, False, True]),
)
deletes = st.builds(rpc_pb2.DeleteRangeRequest, key=keys, range_end=ends, prev_kv=st.booleans())
ranges = st.builds(
    Range,
    key=keys,
    range_end=ends,
    limit=numbers,
    revision=st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5, 6]),
    sort_order=st.sampled_from([0, 0, 1, 2]),
    sort_target=st.sampled_from([0, 0, 2, 3]),
    serializable=st.booleans(),
    keys_only=st.booleans(),
    count_only=st.sampled_from([False, False, True]),
    min_mod_revision=st.sampled_from([0, 0, 3]),
    max_mod_revision=st.sampled_from([0, 0, 5]),
    min_create_revision=st.sampled_from([0, 0, 3]),
    max_create_revision=st.sampled_from([0, 0, 5]),
)
compares = st.builds(
    lambda key, end, result, target: Compare(
        key=key, range_end=end, result=result, target=target[0], **target[1]
    ),
    keys,
    ends,
    st.sampled_from(Compare.CompareResult.values()),
    st.one_of(
        st.tuples(st.just(Compare.VERSION), st.fixed_dictionaries({"version": numbers})),
        st.tuples(st.just(Compare.CREATE), st.fixed_dictionaries({"create_revision": revisions})),
        st.tuples(st.just(Compare.MOD), st.fixed_dictionaries({"mod_revision": revisions})),
        st.tuples(st.just(Compare.VALUE), st.fixed_dictionaries({"value": values})),
        st.tuples(
            st.just(Compare.LEASE), st.fixed_dictionaries({"lease": st.sampled_from([0, *LEASES])})
        ),
    ),
)


def transactions(depth: int) -> st.SearchStrategy[rpc_pb2.TxnRequest]:
    kinds = [
        st.builds(Op, request_put=puts),
        st.builds(Op, request_delete_range=deletes),
        st.builds(Op, request_range=ranges),
    ]
    if depth:
        kinds.append(st.builds(Op, request_txn=transactions(depth - 1)))
    branch = st.lists(st.one_of(kinds), max_size=3)
    return st.builds(
        rpc_pb2.TxnRequest, compare=st.lists(compares, max_size=2), success=branch, failure=branch
    )


requests = st.one_of(
    puts,
    puts,
    deletes,
    ranges,
    transactions(2),
    st.builds(rpc_pb2.CompactionRequest, revision=st.integers(2, 9)),
    st.builds(rpc_pb2.LeaseGrantRequest, ID=st.sampled_from(LEASES), TTL=st.just(600)),
    st.builds(rpc_pb2.LeaseRevokeRequest, ID=st.sampled_from(LEASES)),
)


class Embedded:
    """The pure state, as the server uses it."""

    def __init__(self) -> None:
        self.state = State()

    def call(self, request: Any) -> Any:
        state = self.state
        if isinstance(request, rpc_pb2.PutRequest):
            return state.put(request)
        if isinstance(request, rpc_pb2.DeleteRangeRequest):
            return state.delete_range(request)
        if isinstance(request, Range):
            return state.read(request)
        if isinstance(request, rpc_pb2.TxnRequest):
            return state.txn(request)
        if isinstance(request, rpc_pb2.CompactionRequest):
            state.compact(request.revision)
        elif isinstance(request, rpc_pb2.LeaseGrantRequest):
            state.grant(request.ID)
        else:
            state.revoke(request.ID)
        return None

    def events(self, start: int) -> list[Any]:
        watchers = Watchers(self.state)
        asked = rpc_pb2.WatchCreateRequest(
            key=b"a", range_end=b"z", start_revision=start, prev_kv=True
        )
        watchers.handle(rpc_pb2.WatchRequest(create_request=asked), self.state.revision)
        answers = list(watchers.responses(lambda: self.state.revision))[1:]
        if answers and answers[-1].canceled:
            return [answers[-1].compact_revision]
        events = [event for answer in answers for event in answer.events]
        for event in events:
            if event.kv.mod_revision <= self.state.compact_revision:
                event.ClearField("prev_kv")  # etcd forgets it with the compaction, we need not
        return events


class Real:
    """One example's part of a real etcd: its keys under a prefix, its revisions from 1."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.kv = rpc_pb2_grpc.KVStub(channel)
        self.leases = rpc_pb2_grpc.LeaseStub(channel)
        self.watch = rpc_pb2_grpc.WatchStub(channel)
        self.number = next(EXAMPLES)
        self.prefix = b"%08d/" % self.number
        self.offset = self.kv.Range(Range(key=b"x")).header.revision - 1

    def call(self, request: Any) -> Any:
        sent = type(request)()
        sent.CopyFrom(request)
        self._translate(sent, outwards=True)
        methods: dict[type[Any], Any] = {
            rpc_pb2.PutRequest: self.kv.Put,
            rpc_pb2.DeleteRangeRequest: self.kv.DeleteRange,
            Range: self.kv.Range,
            rpc_pb2.TxnRequest: self.kv.Txn,
            rpc_pb2.CompactionRequest: self.kv.Compact,
            rpc_pb2.LeaseGrantRequest: self.leases.LeaseGrant,
            rpc_pb2.LeaseRevokeRequest: self.leases.LeaseRevoke,
        }
        answer = methods[type(request)](sent)
        if isinstance(
            request,
            rpc_pb2.CompactionRequest | rpc_pb2.LeaseGrantRequest | rpc_pb2.LeaseRevokeRequest,
        ):
            return None
        self._translate(answer, outwards=False)
        return answer

    def events(self, start: int, wanted: int) -> list[Any]:
        asked = rpc_pb2.WatchCreateRequest(
            key=self.prefix + b"a",
            range_end=self.prefix + b"z",
            start_revision=start + self.offset,
            prev_kv=True,
        )
        found: list[Any] = []
        call = self.watch.Watch(iter([rpc_pb2.WatchRequest(create_request=asked)]))
        for answer in call:
            if answer.canceled:
                return [answer.compact_revision - self.offset]
            self._translate(answer, outwards=False)
            found += answer.events
            if len(found) >= wanted:
                break
        call.cancel()
        return found

    def end(self) -> None:
        for lease in LEASES:
            try:
                self.leases.LeaseRevoke(
                    rpc_pb2.LeaseRevokeRequest(ID=lease + LEASE_STEP * self.number)
                )
            except grpc.RpcError:
                continue

    def _translate(self, message: Any, *, outwards: bool) -> None:
        """Every key, lease and revision in the message, from or to the example's own;
        0 stays "none".
        """
        sign = 1 if outwards else -1
        for field, value in message.ListFields():
            name = field.name
            if isinstance(value, Message):
                self._translate(value, outwards=outwards)
            elif name in ("key", "range_end"):
                setattr(
                    message,
                    name,
                    self.prefix + value if outwards else value.removeprefix(self.prefix),
                )
            elif name in ("lease", "ID") and value:
                setattr(message, name, value + sign * LEASE_STEP * self.number)
            elif name.endswith("revision") and value:
                setattr(message, name, value + sign * self.offset)
            elif field.message_type is not None:
                for part in value:
                    self._translate(part, outwards=outwards)


def outcome(call: Any, request: Any) -> Any:
    try:
        return call(request)
    except EtcdError as err:
        return err.status, err.text
    except grpc.RpcError as err:
        return err.code().name, err.details()


@pytest.fixture(scope="module")
def channel(real_etcd: Any) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(real_etcd.addresses[0]) as opened:
        yield opened


@given(st.lists(requests, min_size=1, max_size=12), st.integers(1, 6))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_same_requests_have_the_same_answers(
    channel: grpc.Channel, asked: list[Any], start: int
) -> None:
    real, embedded = Real(channel), Embedded()
    try:
        for request in asked:
            theirs, ours = outcome(real.call, request), outcome(embedded.call, request)
            assert comparable(ours) == comparable(theirs), request
        ours = embedded.events(start)
        assert ours == (real.events(start, len(ours)) if ours else [])
    finally:
        real.end()


def comparable(answer: Any) -> Any:
    """An answer without the headers' members; of a header only the revision counts."""
    if not isinstance(answer, Message):
        return answer
    copy = type(answer)()
    copy.CopyFrom(answer)
    _strip(copy)
    return copy


def _strip(message: Any) -> None:
    if message.DESCRIPTOR.fields_by_name.get("header"):
        revision = message.header.revision
        message.ClearField("header")
        if revision > 0:
            message.header.revision = revision
    for response in getattr(message, "responses", ()):
        for part in (
            response.response_range,
            response.response_put,
            response.response_delete_range,
        ):
            if part.ByteSize():
                _strip(part)
        if response.HasField("response_txn"):
            _strip(response.response_txn)
