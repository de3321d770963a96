"""Versions of rows, made of any cuts and kept in Delta's files without Spark,
equal those of the whole history.
"""

import json
import tempfile

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark_tidemark.lake.delta.files import DeletionVectors, Layout, by_partition, joined, pieces
from pyspark_tidemark.lake.delta.log import Listing
from pyspark_tidemark.lake.delta.masking import replaced, searched
from pyspark_tidemark.lake.fold import endings, versions

from tests.unit.sink.spark.test_fold import HISTORIES, KEY, SCHEMA, changes_of

OWN = ["a", "b", "v"]
TIMES = [("valid_from_ts", pa.int64()), ("valid_to_ts", pa.int64()), ("is_current", pa.bool_())]
LAKE = pa.schema([*(SCHEMA.field(name) for name in OWN), *TIMES])


def expected(rows):
    """By the definition: from each change that is no delete to the next one of its key."""
    found = []
    for at, row in enumerate(rows):
        later = [other["_commit_ts"] for other in rows[at + 1 :] if other["a"] == row["a"]]
        if row["_op"] != "delete":
            found.append(
                (
                    *(row[name] for name in OWN),
                    row["_commit_ts"],
                    next(iter(later), None),
                    not later,
                )
            )
    return sorted(found, key=repr)


def empty_table(root, partitions=()):
    names = {name: name for name in LAKE.names}
    return Listing(0, Layout(str(root), LAKE, names, {}, partitions=partitions), {}, 0.0)


def cut(listing, rows):
    changes = pa.Table.from_pylist(rows, schema=SCHEMA)
    actions = replaced(listing, versions(changes, KEY), endings(changes, KEY)[0])
    return listing.after(json.loads(json.dumps(actions)))


def shown(listing):
    found = []
    for file in listing.files.values():
        gone = DeletionVectors(listing.layout.root).read(file.add.get("deletionVector"))
        rows = pa.concat_tables(list(pieces(listing.layout, file.add, gone)))
        assert file.ended == (rows["valid_to_ts"].null_count == 0), (
            "ended versions have files of their own"
        )
        found += [tuple(row.values()) for row in rows.to_pylist()]
    return sorted(found, key=repr)


@settings(deadline=None, max_examples=60)
@given(
    HISTORIES,
    st.sets(st.integers(1, 12), max_size=5),
    st.sets(st.integers(0, 5)),
    st.sampled_from([(), ("is_current",), ("v",), ("b", "is_current")]),
    st.data(),
)
def test_any_history_in_any_cuts_and_then_rows_of_a_dump_have_the_versions_of_the_whole(
    history, ends, told, partitions, data
):
    rows = changes_of(history)
    with tempfile.TemporaryDirectory() as root:
        listing, start = empty_table(root, partitions), 0
        for end in (*sorted(ends), 99):
            listing = cut(listing, [row for row in rows if start < row["_commit_ts"] <= end])
            start = end
            assert shown(listing) == expected([row for row in rows if row["_commit_ts"] <= end])
            ended = data.draw(st.booleans())
            files = [file for file in listing.files.values() if file.ended is ended]
            for group in by_partition(files):
                listing = listing.after(joined(listing.layout, group))
        envelope = {"_op": "update", "_commit_ts": 100, "_start_ts": 99, "_seq": 0}
        chunk = [{**envelope, "a": key, "b": f"k{key}", "v": -key} for key in sorted(told)]
        assert shown(cut(listing, chunk)) == expected(rows + chunk)


def test_files_of_ended_versions_are_not_looked_into(tmp_path):
    listing = empty_table(tmp_path)
    for ts in range(1, 5):
        row = {
            "_op": "update",
            "_commit_ts": ts,
            "_start_ts": ts - 1,
            "_seq": 0,
            "a": 1,
            "b": "k",
            "v": ts,
        }
        listing = cut(listing, [row])
        ends = endings(pa.Table.from_pylist([row], schema=SCHEMA), KEY)[0]
        assert len(listing.files) == ts
        assert len(searched(listing.files.values(), ends)) == 1


@pytest.mark.parametrize("count", [0, 1])
def test_no_change_and_one_change(count):
    row = {"_op": "delete", "_commit_ts": 7, "_start_ts": 6, "_seq": 0, "a": 1, "b": "k", "v": 1}
    changes = pa.Table.from_pylist([row] * count, schema=SCHEMA)
    assert len(versions(changes, KEY)) == 0
    assert endings(changes, KEY)[0].to_pylist() == [{"a": 1, "b": "k", "valid_to_ts": 7}] * count
