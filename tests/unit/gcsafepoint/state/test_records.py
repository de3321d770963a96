"""Records as a real PD wrote them (tests/golden/gc_state.json), and what is done with others."""

import json
from pathlib import Path

import pytest

from gcsafepoint.state.records import (
    GcKeys,
    Outage,
    SafePointRecordError,
    parse_global_barriers,
    parse_guard,
    parse_min_start_ts,
    parse_outage,
    parse_scope,
    write_operations,
)
from gcsafepoint.state.rules import NEVER_S, Changes, ServiceSafePoint
from gcsafepoint.state.states import NULL_KEYSPACE, StateChanges
from storage.meta.meta import Delete, KeyValue, Put

KEYS = GcKeys(b"/pd/7/gc/")
GOLDEN = Path(__file__).parents[3] / "golden" / "gc_state.json"
SERVICES = {
    "a": ServiceSafePoint("a", 1795265094, 100),
    "gc_worker": ServiceSafePoint("gc_worker", NEVER_S, 50),
    "max": ServiceSafePoint("max", NEVER_S, (1 << 64) - 1),
    'é/"q\n': ServiceSafePoint('é/"q\n', 1795264194, 70),
    "<&>": ServiceSafePoint("<&>", 1795264194, 70),
}
EVERYWHERE = {
    "native_br": ServiceSafePoint("native_br", 1795264103, 70),
    "never": ServiceSafePoint("never", NEVER_S, 70),
}


def pair(key: bytes, value: bytes) -> KeyValue:
    return KeyValue(key, value, 1, 1, 1)


def test_what_is_written_is_what_pd_writes() -> None:
    null = Changes(dict(SERVICES), txn_safe_point=50, gc_safe_point=0x2E)
    seven = Changes({"a": SERVICES["a"]}, txn_safe_point=40, gc_safe_point=30)
    ops = write_operations(StateChanges({NULL_KEYSPACE: null, 7: seven}, EVERYWHERE), KEYS)
    written = {op.key.decode(): op.value.decode() for op in ops if isinstance(op, Put)}
    assert written == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_what_pd_writes_is_read() -> None:
    stored = json.loads(GOLDEN.read_text(encoding="utf-8"))
    pairs = [pair(key.encode(), value.encode()) for key, value in stored.items()]
    null, seven = (parse_scope(pairs, KEYS.scope(scope), Outage()) for scope in (NULL_KEYSPACE, 7))
    assert (null.txn_safe_point, null.gc_safe_point, null.gc_worker.safe_point) == (50, 0x2E, 50)
    assert {*null.barriers, null.gc_worker} == set(SERVICES.values())
    assert (seven.txn_safe_point, seven.gc_safe_point, set(seven.barriers)) == (
        40,
        30,
        {SERVICES["a"]},
    )
    assert parse_global_barriers(pairs, KEYS, Outage()) == list(EVERYWHERE.values())


def test_what_is_no_longer_needed_goes_first_and_what_it_allows_comes_last() -> None:
    changes = Changes({"a": SERVICES["a"], "b": None}, txn_safe_point=50, gc_safe_point=40)
    ops = write_operations(StateChanges({NULL_KEYSPACE: changes}, {"native_br": None}), KEYS)
    assert [type(op) for op in ops] == [Delete, Delete, Put, Put, Put]
    assert [op.key for op in ops[-2:]] == [KEYS.null.txn_safe_point, KEYS.null.gc_safe_point]


def test_a_key_that_is_no_text_is_replaced_and_removed_by_its_own_bytes() -> None:
    """A PD takes any bytes for a service id, and writes U+FFFD into the record."""
    key = KEYS.null.services + b"\xff\xfe"
    stored = pair(key, b'{"service_id":"\\ufffd\\ufffd","expired_at":1795264194,"safe_point":70}')
    (found,) = parse_scope([stored], KEYS.null, Outage()).barriers
    (removed, again) = write_operations(
        StateChanges({NULL_KEYSPACE: Changes({found.service_id: None})}, {}), KEYS
    ) + write_operations(
        StateChanges({NULL_KEYSPACE: Changes({found.service_id: found})}, {}), KEYS
    )
    assert removed == Delete(key)
    assert isinstance(again, Put)
    assert (again.key, json.loads(again.value)["service_id"]) == (key, "\ufffd\ufffd")


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b"null", b'{"service_id":"a"}', b"\xff"])
@pytest.mark.parametrize(
    "fields", [b'{"expired_at":1,"safe_point":"7"}', b'{"expired_at":1.5,"safe_point":7}']
)
def test_a_service_that_cannot_be_read_stops_the_start(value: bytes, fields: bytes) -> None:
    for text in (value, fields):
        with pytest.raises(SafePointRecordError, match="correct it with etcdctl"):
            parse_scope([pair(KEYS.null.service("a"), text)], KEYS.null, Outage())
        with pytest.raises(SafePointRecordError, match="correct it with etcdctl"):
            parse_global_barriers([pair(KEYS.global_barriers + b"a", text)], KEYS, Outage())


@pytest.mark.parametrize("value", [b"-1", b"1_0", b" 1", b"1" * 40, b"g", b"\xc2\xb2"])
def test_a_number_that_cannot_be_read_stops_the_start(value: bytes) -> None:
    for key in (KEYS.null.txn_safe_point, KEYS.null.gc_safe_point):
        with pytest.raises(SafePointRecordError):
            parse_scope([pair(key, value)], KEYS.null, Outage())
    with pytest.raises(SafePointRecordError):
        parse_min_start_ts([pair(KEYS.null.min_start_ts + b"tidb-1", value)], KEYS.null)


def test_an_unreadable_clock_stops_the_start() -> None:
    with pytest.raises(SafePointRecordError):
        parse_outage(pair(KEYS.clock, b"noon"), 1000.0)


def test_the_guard_counts_on_from_whatever_is_there() -> None:
    assert parse_guard([], KEYS) == (0, 0)
    assert parse_guard([KeyValue(KEYS.revision, b"35", 1, 9, 1)], KEYS) == (35, 9)
    assert parse_guard([KeyValue(KEYS.revision, b"?", 1, 9, 1)], KEYS) == (0, 9)
