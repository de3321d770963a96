import json

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.digest import Leaves, digests, key_texts, leaf_of

from server.verify.difference import (
    DIFFERS,
    ONLY_LAKE,
    ONLY_UPSTREAM,
    TWICE,
    affordable,
    differences,
    differing_leaves,
)

BITS = 6
TABLES = st.dictionaries(st.integers(0, 50), st.integers(0, 3))


def rows(table):
    schema = pa.schema([("id", pa.int64()), ("n", pa.int64())])
    return pa.RecordBatch.from_pydict({"id": list(table), "n": list(table.values())}, schema=schema)


def leaves(table):
    found = Leaves(BITS)
    found.add(rows(table), ["id"])
    return found


def texts(table):
    return {json.dumps({"id": key}): json.dumps({"id": key, "n": n}) for key, n in table.items()}


@given(TABLES, TABLES)
def test_the_leaves_that_differ_hold_every_difference_and_the_rows_tell_it(upstream, lake):
    wrong = {key for key in upstream.keys() | lake.keys() if upstream.get(key) != lake.get(key)}
    found = differing_leaves(leaves(upstream), leaves(lake))
    keys = dict.fromkeys(wrong, 0)
    homes = leaf_of(digests(key_texts(rows(keys), ["id"])), BITS).tolist() if keys else []
    assert found == sorted(set(homes))
    told = {
        difference.key["id"]: difference for _, difference in differences(texts(upstream), list(texts(lake).items()))
    }
    assert told.keys() == wrong
    for key, difference in told.items():
        kind = ONLY_LAKE if key not in upstream else ONLY_UPSTREAM if key not in lake else DIFFERS
        assert (difference.kind, difference.columns) == (kind, ("n",) if kind == DIFFERS else ())


def test_a_row_that_the_lake_has_twice_is_told():
    [(key, found)] = differences(texts({1: 1}), [*texts({1: 1}).items()] * 2)
    assert (key, found.kind) == ('{"id": 1}', TWICE)


@given(st.dictionaries(st.integers(0, 500), st.just(0), min_size=1), st.integers(0, 50))
def test_not_more_leaves_are_looked_at_than_asked_for_but_one(upstream, limit):
    ours, theirs = leaves(upstream), Leaves(BITS)
    found = differing_leaves(ours, theirs)
    chosen = affordable(found, ours, theirs, limit)
    assert chosen == found[: len(chosen)]
    assert len(chosen) == 1 or ours.counts[chosen].sum() <= limit
