from datetime import UTC, datetime
from itertools import pairwise

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.flight import SliceEndpoint
from pyspark_tidemark.reader import Part, packed, timed


@given(st.lists(st.integers(0, 100)), st.integers(1, 150))
def test_packing_keeps_the_order_and_the_limit(sizes, limit):
    parts = [Part(SliceEndpoint(str(at), (), b"", 1, size), ()) for at, size in enumerate(sizes)]
    found = list(packed(parts, limit))
    assert [part for some in found for part in some] == parts
    for some in found:
        assert len(some) == 1 or sum(part.slice.size_bytes for part in some) <= limit
    for some, following in pairwise(found):
        assert sum(part.slice.size_bytes for part in some) + following[0].slice.size_bytes > limit


def test_the_time_of_a_commit_is_its_tso_s_milliseconds_in_utc():
    at = datetime(2026, 11, 26, 12, 30, 1, 250_000, UTC)
    ts = int(at.timestamp() * 1000) << 18 | 77
    batch = pa.RecordBatch.from_pydict({"_op": ["insert"], "_commit_ts": [ts], "v": [1]})
    assert timed(batch).to_pylist() == [
        {"_op": "insert", "_commit_ts": ts, "_commit_time": at, "v": 1}
    ]
    assert timed(batch.slice(0, 0)).num_rows == 0
