"""The embedded metadata state against a naive model that keeps every past state whole."""

from dataclasses import dataclass

import pytest
from etcdpb import kv_pb2, rpc_pb2
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from storage.kv import WriteBatch
from storage.meta.errors import (
    CompactedError,
    FutureRevisionError,
    LeaseNotFoundError,
    MetaRequestError,
)
from storage.meta.store import record
from storage.meta.store.state import State
from tests.memory_kv import MemoryKV

KEYS = st.sampled_from([b"a", b"a/1", b"a/2", b"b", b"b\xff", b"c"])
ENDS = st.sampled_from([b"", b"\0", b"a0", b"b", b"c"])
VALUES = st.binary(max_size=3)
LEASES = st.sampled_from([0, 7, 9])


@dataclass(frozen=True)
class Row:
    value: bytes
    create: int
    mod: int
    version: int
    lease: int


class StateMachine(RuleBasedStateMachine):
    """Every request is made of both; the state is also written to a store after each,
    and can be had back from it.
    """

    @initialize()
    def start(self) -> None:
        self.state = State()
        self.kv = MemoryKV()
        self.rows: dict[bytes, Row] = {}
        self.past: dict[int, dict[bytes, Row]] = {1: {}}
        self.compacted = 0
        self.leases: set[int] = set()

    @property
    def revision(self) -> int:
        return max(self.past)

    def meant(self, key: bytes, end: bytes, rows: dict[bytes, Row]) -> list[bytes]:
        if not end:
            return [key] if key in rows else []
        return sorted(found for found in rows if found >= key and (end == b"\0" or found < end))

    def saved(self, first: int) -> None:
        batch = WriteBatch()
        record.save_revisions(batch, self.state, range(first + 1, self.state.revision + 1))
        self.kv.write(batch, sync=True)

    def model_put(self, key: bytes, value: bytes, lease: int, revision: int) -> None:
        old = self.rows.get(key)
        create, version = (old.create, old.version + 1) if old else (revision, 1)
        self.rows[key] = Row(value, create, revision, version, lease)

    @rule(lease=st.sampled_from([7, 9]))
    def grant(self, lease: int) -> None:
        if lease not in self.leases:
            self.state.grant(lease)
            self.leases.add(lease)
            batch = WriteBatch()
            record.save_lease(batch, lease, 5)
            self.kv.write(batch, sync=True)

    @rule(lease=st.sampled_from([7, 9]))
    def revoke(self, lease: int) -> None:
        if lease not in self.leases:
            with pytest.raises(LeaseNotFoundError):
                self.state.revoke(lease)
            return
        first = self.state.revision
        self.state.revoke(lease)
        self.leases.discard(lease)
        doomed = [key for key, row in self.rows.items() if row.lease == lease]
        if doomed:
            self.rows = {key: row for key, row in self.rows.items() if key not in doomed}
            self.past[self.revision + 1] = dict(self.rows)
        self.saved(first)
        batch = WriteBatch()
        record.delete_lease(batch, lease)
        self.kv.write(batch, sync=True)

    @rule(key=KEYS, value=VALUES, lease=LEASES)
    def put(self, key: bytes, value: bytes, lease: int) -> None:
        asked = rpc_pb2.PutRequest(key=key, value=value, lease=lease, prev_kv=True)
        if lease and lease not in self.leases:
            with pytest.raises(LeaseNotFoundError):
                self.state.put(asked)
            return
        first, old = self.state.revision, self.rows.get(key)
        answer = self.state.put(asked)
        assert answer.prev_kv.value == (old.value if old else b"")
        self.model_put(key, value, lease, self.revision + 1)
        self.past[self.revision + 1] = dict(self.rows)
        self.saved(first)

    @rule(key=KEYS, end=ENDS)
    def delete(self, key: bytes, end: bytes) -> None:
        first = self.state.revision
        answer = self.state.delete_range(rpc_pb2.DeleteRangeRequest(key=key, range_end=end))
        doomed = self.meant(key, end, self.rows)
        assert answer.deleted == len(doomed)
        if doomed:
            self.rows = {kept: row for kept, row in self.rows.items() if kept not in doomed}
            self.past[self.revision + 1] = dict(self.rows)
        self.saved(first)

    @rule(key=KEYS, wanted=st.integers(0, 4), puts=st.lists(KEYS, max_size=3), value=VALUES)
    def txn(self, key: bytes, wanted: int, puts: list[bytes], value: bytes) -> None:
        test = rpc_pb2.Compare(
            key=key, target=rpc_pb2.Compare.VERSION, result=rpc_pb2.Compare.EQUAL, version=wanted
        )
        ops = [
            rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=put, value=value)) for put in puts
        ]
        asked = rpc_pb2.TxnRequest(compare=[test], success=ops)
        if len(set(puts)) < len(puts):
            with pytest.raises(MetaRequestError, match="duplicate key"):
                self.state.txn(asked)
            return
        first = self.state.revision
        holds = (self.rows[key].version if key in self.rows else 0) == wanted
        assert self.state.txn(asked).succeeded == holds
        if holds and puts:
            revision = self.revision + 1
            for put in puts:
                self.model_put(put, value, 0, revision)
            self.past[revision] = dict(self.rows)
        self.saved(first)

    @rule(key=KEYS, value=VALUES, keep_value=st.booleans())
    def put_that_keeps(self, key: bytes, value: bytes, *, keep_value: bool) -> None:
        asked = rpc_pb2.PutRequest(key=key, ignore_value=keep_value, ignore_lease=not keep_value)
        if not keep_value:
            asked.value = value
        first, old = self.state.revision, self.rows.get(key)
        if old is None:
            with pytest.raises(MetaRequestError, match="key not found"):
                self.state.put(asked)
            return
        self.state.put(asked)
        kept = (old.value, 0) if keep_value else (value, old.lease)
        self.model_put(key, *kept, self.revision + 1)
        self.past[self.revision + 1] = dict(self.rows)
        self.saved(first)

    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        revision = data.draw(st.integers(1, self.revision + 1))
        if revision > self.revision:
            with pytest.raises(FutureRevisionError):
                self.state.compact(revision)
            return
        if revision <= self.compacted:
            with pytest.raises(CompactedError):
                self.state.compact(revision)
            return
        batch = WriteBatch()
        self.state.compact(revision)
        record.save_head(batch, self.state)
        self.kv.write(batch, sync=True)
        self.kv.delete_range(*record.events_before(revision))
        self.compacted = revision

    @rule(data=st.data(), key=KEYS, end=ENDS, limit=st.integers(0, 3) | st.just(2**63 - 1))
    def read(self, data: st.DataObject, key: bytes, end: bytes, limit: int) -> None:
        revision = data.draw(st.integers(0, self.revision + 1))
        asked = rpc_pb2.RangeRequest(key=key, range_end=end, revision=revision, limit=limit)
        if revision > self.revision or 0 < revision < self.compacted:
            with pytest.raises((FutureRevisionError, CompactedError)):
                self.state.read(asked)
            return
        rows = self.past[revision or self.revision]
        wanted = self.meant(key, end, rows)
        answer = self.state.read(asked)
        assert answer.count == len(wanted)
        assert answer.more == (0 < limit < len(wanted))
        assert [as_row(pair) for pair in answer.kvs] == [
            rows[found] for found in wanted[: limit or None]
        ]

    @invariant()
    def same_after_restart(self) -> None:
        assert self.state.revision == self.revision
        again, ttls = record.load(self.kv)
        if self.revision > 1 or self.compacted:
            everything = rpc_pb2.RangeRequest(key=b"\0", range_end=b"\0")
            assert again.read(everything) == self.state.read(everything)
            assert (again.revision, again.compact_revision) == (
                self.state.revision,
                self.state.compact_revision,
            )
            assert set(ttls) == self.leases
            assert all(
                again.events(old) == self.state.events(old) for old in range(1, self.revision + 1)
            )
            assert (again.live_bytes, again.log_bytes) == (
                self.state.live_bytes,
                self.state.log_bytes,
            )
            assert again.hash_kv(0).hash == self.state.hash_kv(0).hash
            assert {lease: again.leases[lease] for lease in ttls} == self.state.leases


def as_row(pair: kv_pb2.KeyValue) -> Row:
    return Row(pair.value, pair.create_revision, pair.mod_revision, pair.version, pair.lease)


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def put(key: bytes, value: bytes = b"") -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=value))


def test_a_request_that_is_refused_changes_nothing() -> None:
    state = State()
    bad = rpc_pb2.TxnRequest(
        success=[put(b"a"), rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"b", lease=404))]
    )
    with pytest.raises(LeaseNotFoundError):
        state.txn(bad)
    assert state.revision == 1
    assert not state.read(rpc_pb2.RangeRequest(key=b"\0", range_end=b"\0")).kvs


def test_both_branches_of_a_nested_transaction_may_write_the_same_key() -> None:
    nested = rpc_pb2.TxnRequest(success=[put(b"a", b"1")], failure=[put(b"a", b"2")])
    answer = State().txn(rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_txn=nested)]))
    assert answer.responses[0].response_txn.succeeded


def test_the_conditions_of_an_inner_transaction_are_judged_before_anything_is_written() -> None:
    absent = rpc_pb2.Compare(key=b"a", target=rpc_pb2.Compare.CREATE, create_revision=0)
    inner = rpc_pb2.RequestOp(request_txn=rpc_pb2.TxnRequest(compare=[absent]))
    answer = State().txn(rpc_pb2.TxnRequest(success=[put(b"a"), inner]))
    assert answer.responses[1].response_txn.succeeded


def test_inner_transactions_share_the_bound_of_operations_with_the_outer_ones() -> None:
    inner = rpc_pb2.RequestOp(
        request_txn=rpc_pb2.TxnRequest(success=[put(b"%d" % number) for number in range(100)])
    )
    others = [put(b"x%d" % number) for number in range(28)]
    State().txn(rpc_pb2.TxnRequest(success=[inner, *others[:27]]))
    with pytest.raises(MetaRequestError, match="too many operations"):
        State().txn(rpc_pb2.TxnRequest(success=[inner, *others]))


def test_a_put_inside_a_deleted_range_of_the_same_transaction_is_refused() -> None:
    doomed = rpc_pb2.RequestOp(
        request_delete_range=rpc_pb2.DeleteRangeRequest(key=b"a", range_end=b"c")
    )
    with pytest.raises(MetaRequestError, match="duplicate key"):
        State().txn(rpc_pb2.TxnRequest(success=[put(b"b"), doomed]))


def test_more_than_128_operations_are_refused() -> None:
    with pytest.raises(MetaRequestError, match="too many operations"):
        State().txn(rpc_pb2.TxnRequest(success=[put(b"%d" % number) for number in range(129)]))


def test_a_value_comparison_with_an_absent_key_never_holds() -> None:
    for result in (rpc_pb2.Compare.EQUAL, rpc_pb2.Compare.NOT_EQUAL):
        test = rpc_pb2.Compare(key=b"none", target=rpc_pb2.Compare.VALUE, result=result, value=b"x")
        assert not State().txn(rpc_pb2.TxnRequest(compare=[test])).succeeded


def test_a_format_from_the_future_is_refused() -> None:
    with pytest.raises(record.MetadataVersionError, match="upgrade"):
        record.load(MemoryKV({b"v": b"\x02"}))
