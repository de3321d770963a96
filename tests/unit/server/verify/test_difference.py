import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.digest import COARSE_BITS, RangeChecksums, Ranges, digests, key_texts

from server.verify.difference import (
    DIFFERS,
    ONLY_LAKE,
    ONLY_UPSTREAM,
    TWICE,
    Budget,
    Difference,
    affordable,
    differences,
    differing,
    divided,
)

RANGES = Ranges(6)
TABLES = st.dictionaries(st.integers(0, 50), st.integers(0, 3))


def rows(table):
    schema = pa.schema([("id", pa.int64()), ("n", pa.int64())])
    return pa.RecordBatch.from_pydict({"id": list(table), "n": list(table.values())}, schema=schema)


def range_checksums(table, ranges=RANGES):
    found = RangeChecksums(ranges)
    found.add(rows(table), ["id"])
    return found


def texts(table):
    return [(json.dumps({"id": key}), json.dumps({"id": key, "n": n})) for key, n in table.items()]


@given(TABLES, TABLES)
def test_the_ranges_that_differ_hold_every_difference_and_the_rows_tell_it(upstream, lake):
    wrong = {key for key in upstream.keys() | lake.keys() if upstream.get(key) != lake.get(key)}
    found = differing(range_checksums(upstream), range_checksums(lake))
    keys = dict.fromkeys(wrong, 0)
    homes = RANGES.of(digests(key_texts(rows(keys), ["id"]))).tolist() if keys else []
    assert found == sorted(set(homes))
    told = {
        each.key["id"]: each
        for each in map(Difference.of, differences(texts(upstream), texts(lake)))
    }
    assert told.keys() == wrong
    for key, difference in told.items():
        kind = ONLY_LAKE if key not in upstream else ONLY_UPSTREAM if key not in lake else DIFFERS
        assert (difference.kind, difference.columns) == (kind, ("n",) if kind == DIFFERS else ())


@given(TABLES, TABLES)
def test_ranges_divided_once_more_hold_every_difference_too(upstream, lake):
    found = differing(range_checksums(upstream, Ranges()), range_checksums(lake, Ranges()))
    if not found:
        assert upstream == lake
        return
    fine = divided(found)
    wrong = {key: 0 for key in upstream.keys() | lake.keys() if upstream.get(key) != lake.get(key)}
    homes = fine.of(digests(key_texts(rows(wrong), ["id"]))).tolist()
    assert differing(range_checksums(upstream, fine), range_checksums(lake, fine)) == sorted(
        set(homes)
    )


@pytest.mark.parametrize("count", [1, 2, 3, 1000, 1 << COARSE_BITS])
def test_sums_of_divided_ranges_fit_into_memory_and_are_as_fine_as_that_allows(count):
    ranges = divided(range(count))
    assert 1 << 19 < len(ranges) <= 1 << 20


def test_a_row_that_the_lake_has_twice_is_told():
    [found] = differences(texts({1: 1}), texts({1: 1}) * 2)
    assert (found.key, found.kind) == ('{"id": 1}', TWICE)


@given(TABLES, TABLES, st.integers(0, 50), st.integers(0, 1000))
def test_no_more_is_looked_at_than_the_budget_and_all_of_what_fits(
    upstream, lake, most_rows, most_bytes
):
    ours, theirs = range_checksums(upstream), range_checksums(lake)
    found = differing(ours, theirs)
    chosen = affordable(found, ours, theirs, Budget(most_rows, most_bytes))
    assert set(chosen) <= set(found)
    for side in (ours, theirs):
        assert side.counts[chosen].sum() <= most_rows
        assert side.sizes[chosen].sum() <= most_bytes
    assert affordable(found, ours, theirs, Budget()) == found
