"""A table that has nothing in memory is a few bytes, from which everything comes back."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sorter.backlog import Backlog
from sorter.buffer import Rows
from sorter.checksum_log import ChecksumLog
from sorter.stats import Counters
from sorter.store import open_shards
from storage.model.event import INSERT, raw_batch

spills = st.lists(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=5), max_size=6)


@settings(max_examples=15, deadline=None)
@given(batches=spills, data=st.data())
def test_what_was_frozen_is_thawed_as_it_was(
    batches: list[list[int]], data: st.DataObject, tmp_path_factory
) -> None:
    directory: Path = tmp_path_factory.mktemp("sorter")
    (store,) = open_shards(
        directory, 1, segment_bytes=1 << 20, block_bytes=1 << 20, counters=Counters()
    )
    backlog = Backlog(store, 1, ChecksumLog(7, 0), 7, 0)
    for ts in batches:
        count = len(ts)
        backlog.add(
            Rows.of(
                raw_batch(
                    ts,
                    [0] * count,
                    [INSERT] * count,
                    [b"k"] * count,
                    [b"v"] * count,
                    [None] * count,
                )
            )
        )
        resolved_ts = data.draw(st.sampled_from([0, 1 << 41]))
        while backlog.spill(1, resolved_ts):
            pass
    frozen = backlog.freeze()
    assert frozen is None or len(frozen) < 257
    if frozen is not None:
        again = Backlog.thaw(store, 1, 7, 0, frozen)
        assert (again.index.blocks, again.index.widest_range) == (
            backlog.index.blocks,
            backlog.index.widest_range,
        )
        assert (again.runs_on_disk, again.checksums.shift) == (
            backlog.runs_on_disk,
            backlog.checksums.shift,
        )
        assert again.checksums.freeze() == backlog.checksums.freeze()
        assert again.freeze() == frozen
        lower = data.draw(st.integers(0, 1 << 40))
        assert list(again.index.scan(lower, 1 << 41)) == list(backlog.index.scan(lower, 1 << 41))
    store.close()
