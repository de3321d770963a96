"""The on-disk form of the embedded metadata (docs/format/metadata.md)."""

import json
from pathlib import Path

import pytest
from etcdpb import kv_pb2, rpc_pb2

from storage.kv import WriteBatch
from storage.meta.store import record
from storage.meta.store.state import State
from storage.model.errors import CorruptError
from tests.memory_kv import MemoryKV

GOLDEN = Path(__file__).parents[4] / "golden" / "metadata_leveldb.json"


def written() -> MemoryKV:
    state, kv, batch = State(), MemoryKV(), WriteBatch()
    state.grant(7)
    record.save_lease(batch, 7, 60)
    state.put(rpc_pb2.PutRequest(key=b"a", value=b"1", lease=7))
    state.put(rpc_pb2.PutRequest(key=b"a", value=b"2"))
    state.delete_range(rpc_pb2.DeleteRangeRequest(key=b"a"))
    state.put(rpc_pb2.PutRequest(key=b"b", value=b"3", lease=7))
    record.save_revisions(batch, state, range(2, 6))
    state.compact(3)
    record.save_head(batch, state)
    kv.write(batch, sync=True)
    kv.delete_range(*record.events_before(3))
    return kv


def test_the_bytes_on_disk_are_the_golden_ones() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert {key.hex(): value.hex() for key, value in written().scan(b"")} == golden


def test_the_golden_bytes_are_read_back() -> None:
    golden = json.loads(GOLDEN.read_text())
    kv = MemoryKV({bytes.fromhex(key): bytes.fromhex(value) for key, value in golden.items()})
    state, ttls = record.load(kv)
    assert (state.revision, state.compact_revision, ttls) == (5, 3, {7: 60})
    answer = state.read(rpc_pb2.RangeRequest(key=b"a", revision=3))
    assert answer.kvs[0].value == b"2"
    state.revoke(7)
    assert not state.read(rpc_pb2.RangeRequest(key=b"\0", range_end=b"\0")).kvs


def test_forgotten_changes_that_are_still_there_are_not_read() -> None:
    kv = written()
    batch = WriteBatch()
    stale = rpc_pb2.WatchResponse(
        events=[kv_pb2.Event(kv=kv_pb2.KeyValue(key=b"a", mod_revision=2))]
    )
    batch.put(b"e" + (2).to_bytes(8), stale.SerializeToString())
    kv.write(batch, sync=True)
    state, _ = record.load(kv)
    assert not state.events(2)


def test_alarms_are_read_back() -> None:
    kv, batch = MemoryKV(), WriteBatch()
    assert record.load_alarms(kv) == set()
    record.save_alarms(batch, {rpc_pb2.NOSPACE})
    kv.write(batch, sync=True)
    assert record.load_alarms(kv) == {rpc_pb2.NOSPACE}


@pytest.mark.parametrize(
    ("key", "value"), [(b"h", b""), (b"kx", b"\xff"), (b"lshort", b""), (b"e1", b"\xff")]
)
def test_a_record_that_cannot_be_read_is_corrupt(key: bytes, value: bytes) -> None:
    kv, batch = written(), WriteBatch()
    batch.put(key, value)
    kv.write(batch, sync=True)
    with pytest.raises(CorruptError, match="backup"):
        record.load(kv)
