"""Files are left alone only when they cannot hold a key."""

from decimal import Decimal

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.lake.ranges import coarser, extent, met, possible

KEYS = st.lists(
    st.tuples(st.integers(-9, 9), st.sampled_from("abcXÿ\U0001f30a")), min_size=1, max_size=8
)
FILES = st.lists(KEYS, max_size=6)


def table(keys):
    return pa.table(
        {"a": pa.array([a for a, _ in keys], pa.int64()), "b": pa.array([b for _, b in keys])}
    )


@given(KEYS, FILES, st.integers(0, 8))
def test_no_key_that_a_file_holds_is_called_impossible(keys, files, most):
    told = [extent(table(file), ("a", "b")) for file in files]
    may = possible(table(keys), told, most).to_pylist()
    coarse = possible(table(keys), coarser(told), most).to_pylist() if told else may
    for key, found, found_coarsely in zip(keys, may, coarse, strict=True):
        assert found >= any(key in file for file in files)
        assert found_coarsely >= any(key in file for file in files)
    for file, meets in zip(files, met(table(keys), told), strict=True):
        assert meets >= bool(set(keys) & set(file))


def test_a_chunk_behind_all_others_meets_none_of_them():
    chunks = [table([(1, "a"), (1, "m")]), table([(1, "n"), (1, "z")]), table([(2, "a"), (2, "c")])]
    told = [extent(chunk, ("a", "b")) for chunk in chunks]
    for number, chunk in enumerate(chunks):
        assert not any(possible(chunk, told[:number], 9).to_pylist())
        assert all(possible(chunk, told[: number + 1], 9).to_pylist())


def test_bounds_that_are_not_known_bound_nothing():
    keys = table([(1, "a")])
    assert met(keys, [{}, {"other": (5, 6)}]) == [True, True]
    assert possible(keys, [{"a": (5, 6)}, {"b": ("a", "b")}], 9).to_pylist() == [True]
    assert coarser([{"a": (1, 2)}, {}]) == [{}]


def test_decimals_and_integers_of_statistics_are_compared_exactly():
    keys = pa.table({"u": pa.array([Decimal(2**64 - 1)], pa.decimal128(20, 0))})
    bounds = [{"u": (0, 2**64 - 1)}, {"u": (Decimal(0), Decimal(2**64 - 2))}]
    assert met(keys, bounds) == [True, False]
