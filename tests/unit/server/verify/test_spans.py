"""Ranges of keys: together they are all keys, both sides mean the same by them,
and a seed names a sample.
"""

from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.digest import Ranges

from server.verify.lake.question import EXTENT, Question, whole_extent
from server.verify.spans import SLOTS_MAX, Extent, KeySpans, Sample, span_column

KEYS = st.integers(-(2**63), 2**64 - 1)


@st.composite
def extents(draw):
    ends = sorted(draw(st.lists(KEYS, min_size=2, max_size=2)))
    return Extent(draw(st.integers(1, 10**9)), *ends)


@given(extents(), st.lists(KEYS, min_size=1, max_size=20))
def test_the_slots_hold_every_key_once_also_beyond_the_ends(extent, keys):
    slots = extent.slots()
    assert 1 <= len(slots) <= SLOTS_MAX
    assert (slots[0][0], slots[-1][1]) == (None, None)
    assert [high for _, high in slots[:-1]] == [low for low, _ in slots[1:]]
    column = pa.array([Decimal(key) for key in keys], pa.decimal128(20, 0))
    rows = pa.RecordBatch.from_arrays([column], ["id"])
    for key in keys:
        assert KeySpans("id", tuple(slots)).of(key) is not None
    counts = [
        sum(KeySpans("id", (slot,)).inside(rows).to_pylist())
        for slot in slots[:50] + slots[50:][-50:]
    ]
    if len(slots) <= 100:
        assert sum(counts) == len(keys)
    assert KeySpans("id", tuple(slots)).inside(rows).to_pylist() == [True] * len(keys)


def test_an_empty_table_is_one_slot():
    assert Extent(0).slots() == [(None, None)]
    assert Extent(5, 7, 7).slots() == [(None, None)]


@given(extents(), st.integers(0, 2**31), st.integers(1, 50), st.floats(0.01, 1))
def test_a_sample_is_the_same_for_its_seed_and_of_the_size_asked_for(extent, seed, ranges, part):
    slots = extent.slots()
    chosen = Sample(seed, ranges).of("shop.t", slots)
    assert chosen == Sample(seed, ranges).of("shop.t", slots)
    assert len(chosen) == min(ranges, len(slots))
    assert set(chosen) <= set(slots)
    assert len(Sample(seed, part=part).of("shop.t", slots)) >= part * len(slots)


def test_conditions_and_their_documents():
    spans = KeySpans("a b", ((None, -3), (5, 9), (20, None)))
    quoted = "`a b`"
    assert (
        spans.condition(lambda name: f"`{name}`")
        == f"({quoted} < -3) OR ({quoted} >= 5 AND {quoted} < 9) OR ({quoted} >= 20)"
    )
    assert KeySpans("a", ((None, None),)).condition(str) == "(1 = 1)"
    assert KeySpans("a", ()).condition(str) == "1 = 0"
    assert KeySpans.parse(spans.document()) == spans
    rows = pa.RecordBatch.from_pydict({"a b": [-4, -3, 5, 8, 9, 20, None]})
    assert spans.inside(rows).to_pylist() == [True, False, True, True, False, True, False]


@pytest.mark.parametrize(
    ("kind", "has"),
    [
        (pa.int8(), True),
        (pa.int64(), True),
        (pa.decimal128(20, 0), True),
        (pa.decimal128(20, 2), False),
        (pa.string(), False),
        (pa.binary(), False),
        (pa.timestamp("us"), False),
    ],
)
def test_only_integers_have_ranges(kind, has):
    schema = pa.schema([("k", kind), ("n", pa.int64())])
    assert span_column(("k", "n"), schema) == ("k" if has else None)
    assert span_column((), schema) is None


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=4))
def test_the_extent_of_parts_is_that_of_the_whole(parts):
    schema = pa.schema([("id", pa.int64())])
    question = Question("t", 1, 0, ("id",), schema, Ranges())
    found = []
    for part in parts:
        batches = [pa.RecordBatch.from_pydict({"id": part}, schema)] if part else []
        [told] = question.extent(batches)
        assert told.schema.equals(EXTENT)
        found += [tuple(row.values()) for row in told.to_pylist()]
    everything = [key for part in parts for key in part]
    expected = Extent(len(everything), min(everything, default=None), max(everything, default=None))
    assert whole_extent(found) == expected
