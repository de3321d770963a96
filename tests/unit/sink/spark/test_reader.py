from datetime import UTC, datetime
from itertools import pairwise
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import ChangefeedMeta, SliceEndpoint
from pyspark_tidemark.options import parse
from pyspark_tidemark.reader import Part, packed_slices, with_commit_time
from pyspark_tidemark.stream import CutStreamReader


@given(st.lists(st.integers(0, 100)), st.integers(1, 150))
def test_packing_keeps_the_order_and_the_limit(sizes, limit):
    parts = [Part(SliceEndpoint(str(at), (), b"", 1, size), ()) for at, size in enumerate(sizes)]
    found = list(packed_slices(parts, limit))
    assert [part for some in found for part in some] == parts
    for some in found:
        assert len(some) == 1 or sum(part.slice.size_bytes for part in some) <= limit
    for some, following in pairwise(found):
        assert sum(part.slice.size_bytes for part in some) + following[0].slice.size_bytes > limit


def test_the_time_of_a_commit_is_its_tso_s_milliseconds_in_utc():
    at = datetime(2026, 11, 26, 12, 30, 1, 250_000, UTC)
    ts = int(at.timestamp() * 1000) << 18 | 77
    batch = pa.RecordBatch.from_pydict({"_op": ["insert"], "_commit_ts": [ts], "v": [1]})
    assert with_commit_time(batch).to_pylist() == [
        {"_op": "insert", "_commit_ts": ts, "_commit_time": at, "v": 1}
    ]
    assert with_commit_time(batch.slice(0, 0)).num_rows == 0


@pytest.mark.parametrize("code", ["ErrRangeCleaned", "ErrNoCapture"])
def test_cuts_are_looked_for_from_the_checkpoint_where_the_query_is_behind_it(code):
    """As Spark's log is behind the lake job, which goes on beyond the cuts that it is given."""
    asked = []

    def latest(start_ts, **limits):
        asked.append(start_ts)
        if start_ts < 70:
            raise SourceError(code, "what is below 70 is acknowledged and gone")
        return 90

    reader = CutStreamReader(parse({"endpoint": "grpc://a:1", "changefeed": "f", "cuts": "true"}))
    reader._changefeed = SimpleNamespace(
        latest=latest, ack=lambda ts, table: ts, describe=lambda: ChangefeedMeta(70, 90, {})
    )
    position = {"ts": 50, "changefeed": "f"}
    if code == "ErrRangeCleaned":
        assert reader.latestOffset(position) == {"ts": 90, "changefeed": "f"}
        assert asked == [50, 70]
    else:
        with pytest.raises(SourceError, match=code):
            reader.latestOffset(position)
        assert asked == [50]


def test_a_first_cut_that_is_given_again_below_the_start_has_nothing_left():
    """Found by the kill matrix: a job had gone on in Spark's first batch and died, and no later one
    could start. Its query begins where the lake is.
    """
    options = {"endpoint": "grpc://a:1", "changefeed": "f", "cuts": "true", "startTs": "90"}
    reader = CutStreamReader(parse(options))
    start, end = ({"ts": ts, "changefeed": "f"} for ts in (90, 50))
    [cut] = reader.partitions(start, end)
    assert (cut.start_ts, cut.end_ts) == (50, 50)
    [cut] = reader.partitions(end, start)
    assert (cut.start_ts, cut.end_ts) == (50, 90)
    with pytest.raises(SourceError, match="ErrOffsetBehind"):
        reader.partitions({"ts": 91, "changefeed": "f"}, end)
