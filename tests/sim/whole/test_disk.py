"""The simulated disk: what is synced outlives a crash, and what is not is lost from its end."""

from random import Random

import pytest

from storage.kv import WriteBatch
from storage.leveldb import DirectoryUnusableError
from tests.sim.whole.disk import DiskKV


def written(kv: DiskKV, key: bytes, value: bytes, *, sync: bool) -> None:
    batch = WriteBatch()
    batch.put(key, value)
    kv.write(batch, sync=sync)


@pytest.mark.parametrize("seed", range(20))
def test_a_crash_leaves_what_was_synced_and_the_first_of_what_was_not(seed: int) -> None:
    kv = DiskKV()
    written(kv, b"a", b"1", sync=False)
    written(kv, b"b", b"1", sync=True)
    for number in range(2, 6):
        written(kv, b"a", b"%d" % number, sync=False)
    before = kv.snapshot()
    after = kv.crashed(Random(seed))
    assert after.get(b"b") == b"1"
    assert after.get(b"a") in {b"1", b"2", b"3", b"4", b"5"}
    assert before.get(b"a") == kv.get(b"a") == b"5"


def test_a_snapshot_stays_as_it_was() -> None:
    kv = DiskKV()
    written(kv, b"a", b"1", sync=True)
    frozen = kv.snapshot()
    written(kv, b"b", b"2", sync=True)
    assert list(frozen.scan(b"")) == [(b"a", b"1")]
    assert list(kv.scan(b"", reverse=True)) == [(b"b", b"2"), (b"a", b"1")]
    assert kv.delete_some(b"a", b"b", 9).next_key == b"a\0"
    assert list(kv.scan(b"")) == [(b"b", b"2")]


def test_a_full_disk_takes_nothing() -> None:
    kv = DiskKV()
    kv.is_full = True
    with pytest.raises(DirectoryUnusableError):
        written(kv, b"a", b"1", sync=True)
    assert kv.get(b"a") is None
