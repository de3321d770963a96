"""Rows found by their keys, whatever the key's columns are called; and values of files that stay in
memory, as many as there is room for.
"""

import threading

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.lake.fold import endings, fold, versions
from pyspark_tidemark.lake.iceberg.table_keys import living
from pyspark_tidemark.lake.keys import ColumnCache, places_of, those_in
from pyspark_tidemark.lake.schema import VALID_TO

NAMES = (".x", "[0]", "[1]", "x.y", "key 0", "row", "a b", "$.x", "'", "")
"""A dot or a bracket at the begin is a path to Arrow: `[0]` would be the first column, whichever
that is.
"""
ROWS = st.lists(st.tuples(st.integers(0, 5), st.text("ab", max_size=1)), max_size=12)
NAMED = st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)).filter(
    lambda two: len({*two}) > 1
)


def keys_of(rows, names):
    columns = [pa.array([row[0] for row in rows], pa.int64())]
    return pa.table([*columns, pa.array([row[1] for row in rows], pa.string())], names=list(names))


@given(ROWS, ROWS, NAMED)
def test_all_places_of_keys_are_found(rows, keys, names):
    there, wanted = keys_of(rows, names), keys_of(keys, names)
    places = [place for place, row in enumerate(rows) if row in keys]
    assert places_of(there, wanted).tolist() == places
    numbered = there.append_column("number", pa.array(range(len(rows)), pa.int64()))
    assert those_in(numbered, wanted)["number"].to_pylist() == places


@given(ROWS, ROWS, ROWS, NAMED)
def test_a_key_lives_unless_a_younger_delete_names_it(keys, data, deletes, names):
    wanted = keys_of(sorted({*keys}), names)
    found = living(wanted, [(1, keys_of(data, names))], [(2, keys_of(deletes, names))])
    assert found.schema == wanted.schema
    assert [tuple(row.values()) for row in sorted(found.to_pylist(), key=str)] == sorted(
        ({*keys} & {*data}) - {*deletes}, key=lambda row: str(dict(zip(names, row, strict=True)))
    )


@pytest.mark.parametrize("name", NAMES)
def test_changes_are_folded_and_ended_by_keys_of_any_name(name):
    envelope = [("_op", pa.string()), ("_commit_ts", pa.int64()), ("_seq", pa.int64())]
    schema = pa.schema([*envelope, ("other", pa.int64()), (name, pa.int64())])
    told = [
        ("insert", 1, 7),
        ("insert", 2, 3),
        ("update", 3, 7),
        ("delete", 4, 3),
        ("update", 5, 9),
    ]
    rows = [(op, ts, 0, -ts, key) for op, ts, key in told]
    columns = [
        pa.array(column, field.type)
        for column, field in zip(zip(*rows, strict=True), schema, strict=True)
    ]
    changes = pa.table(columns, schema=schema)
    assert fold(changes, (name,)).live[name].to_pylist() == [7, 9]
    ended, inserted = endings(changes, (name,))
    assert dict(zip(ended[name].to_pylist(), ended[VALID_TO].to_pylist(), strict=True)) == {9: 5}
    assert dict(zip(inserted[name].to_pylist(), inserted[VALID_TO].to_pylist(), strict=True)) == {
        7: 1,
        3: 2,
    }
    begun = versions(changes, (name,))
    shown = list(zip(begun[name].to_pylist(), begun[VALID_TO].to_pylist(), strict=True))
    assert sorted(shown, key=str) == [(3, 4), (7, 3), (7, None), (9, None)]


def test_values_are_read_once_while_there_is_room():
    read, kept = [], ColumnCache(2 * 80)
    column = pa.table({"k": pa.array(range(10), pa.int64())})
    for name in ("a", "a", "b", "a", "c", "a", "b"):
        assert kept.of(name, lambda name=name: read.append(name) or column) is column
    assert read == ["a", "b", "c", "b"], "the one that was used last stays"
    big = pa.table({"k": pa.array(range(100), pa.int64())})
    for _ in range(2):
        assert kept.of("big", lambda: read.append("big") or big) is big
    assert read[-2:] == ["big", "big"]


def test_what_was_written_need_not_be_read_and_what_is_there_stays():
    kept = ColumnCache(100)
    kept.put("new", np.zeros(4))
    assert (kept.of("new", lambda: np.ones(4)) == 0).all()
    kept.put("new", np.ones(4))
    assert (kept.of("new", lambda: np.ones(4)) == 0).all(), "files never change"
    kept.put("nothing", np.zeros(0))
    assert len(kept.of("nothing", lambda: np.ones(1))) == 0


def test_threads_that_read_the_same_at_once_count_it_once():
    kept, together = ColumnCache(100), threading.Barrier(4)

    def read():
        together.wait(10)
        return np.zeros(10)

    threads = [threading.Thread(target=kept.of, args=("a", read)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept.put("b", np.zeros(2))
    assert kept.of("a", lambda: np.ones(10)).sum() == 0, "both fit into 100 bytes"
