"""Cuts written as files and deletion vectors equal a replay, read back by nothing but pyarrow."""

import json
import tempfile
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark_tidemark.lake import roaring
from pyspark_tidemark.lake.delta import files
from pyspark_tidemark.lake.delta.files import (
    DataFile,
    DeletionVectors,
    Layout,
    joined,
    without,
    written,
)
from pyspark_tidemark.lake.delta.log import Listing
from pyspark_tidemark.lake.fold import fold
from pyspark_tidemark.lake.keys import ColumnCache

from tests.unit.sink.spark.test_fold import COLUMNS, HISTORIES, KEY, SCHEMA, changes_of, replayed

LAKE = pa.schema([SCHEMA.field(name) for name in COLUMNS])


KEPT = ColumnCache(1 << 20)


PARTITIONS = st.sampled_from([(), ("v",), ("b",), ("b", "v"), ("b", "a")])
"""Of none, of what changes, of a part of the key and beside, of the whole key."""


def layout_of(root, *, vectors=True, partitions=()):
    """As after a renaming: files call the columns otherwise."""
    return Layout(
        str(root),
        LAKE,
        {name: f"col-{name}" for name in COLUMNS},
        {name: n for n, name in enumerate(COLUMNS, 1)},
        vectors,
        partitions,
    )


def cut(listing, rows):
    folded = fold(pa.Table.from_pylist(rows, schema=SCHEMA), KEY)
    files = listing.files.values()
    actions = without(listing.layout, files, folded.existing.select(KEY), KEPT)
    return listing.after(
        json.loads(json.dumps(actions + written(listing.layout, folded.live.select(COLUMNS))))
    )


def compacted(listing, numbers):
    """With these files joined within their partitions, by their place in the listing: names are
    random, and examples must not be.
    """
    chosen = [file for number, file in enumerate(listing.files.values()) if number in numbers]
    groups = files.by_partition(chosen)
    actions = [action for group in groups for action in joined(listing.layout, group)]
    assert not any(told["dataChange"] for action in actions for told in action.values())
    return listing.after(json.loads(json.dumps(actions)))


def whole(layout, add):
    """All rows of a file, with what the log says of its partition."""
    values = add["partitionValues"]
    assert list(values) == [f"col-{name}" for name in layout.partitions]
    assert add["path"].startswith("".join(f"{name}={text}/" for name, text in values.items()))
    # Not `read_table`, which would take columns from the directory's name.
    rows = pq.ParquetFile(f"{layout.root}/{add['path']}").read()
    for name, text in values.items():
        value = text if name == "col-b" else int(text)
        rows = rows.append_column(name, pa.repeat(value, len(rows)))
    return rows.select([f"col-{name}" for name in COLUMNS]).rename_columns(COLUMNS)


def shown(listing):
    found = []
    for file in listing.files.values():
        rows = whole(listing.layout, file.add)
        gone = DeletionVectors(listing.layout.root).read(file.add.get("deletionVector"))
        assert len(gone) < len(rows) == json.loads(file.add["stats"])["numRecords"]
        assert json.loads(file.add["stats"])["tightBounds"] == (len(gone) == 0)
        found += rows.take(np.setdiff1d(np.arange(len(rows)), gone)).to_pylist()
    assert len({(row["a"], row["b"]) for row in found}) == len(found)
    return {(row["a"], row["b"]): row for row in found}


@settings(deadline=None, max_examples=100)
@given(
    HISTORIES,
    st.sets(st.integers(1, 12), max_size=5),
    st.sets(st.integers(0, 5)),
    st.tuples(st.booleans(), PARTITIONS),
    st.data(),
)
def test_any_history_in_any_cuts_any_files_joined_and_then_rows_of_a_dump_equal_the_replay(
    history, ends, told, layout, data
):
    vectors, partitions = layout
    rows = changes_of(history)
    with tempfile.TemporaryDirectory() as root:
        layout = layout_of(root, vectors=vectors, partitions=partitions)
        listing, start = Listing(0, layout, {}, 0.0), 0
        for end in (*sorted(ends), 99):
            listing = cut(listing, [row for row in rows if start < row["_commit_ts"] <= end])
            start = end
            held = replayed([row for row in rows if row["_commit_ts"] <= end])
            assert shown(listing) == held
            before, chosen = (
                listing,
                data.draw(st.sets(st.integers(0, len(listing.files) - 1))) if held else set(),
            )
            listing = compacted(listing, chosen)
            assert vectors or not any(file.masked for file in before.files.values())
            assert shown(before) == shown(listing) == held, (
                "readers of the version before still read it"
            )
            groups = {
                tuple(file.partition.values())
                for number, file in enumerate(before.files.values())
                if number in chosen
            }
            assert len(listing.files) == len(before.files) - len(chosen) + len(groups)
            assert not any(
                file.masked for path, file in listing.files.items() if path not in before.files
            )
        envelope = {"_op": "update", "_commit_ts": 100, "_start_ts": 99, "_seq": 0}
        chunk = [{**envelope, "a": key, "b": f"k{key}", "v": -key} for key in told]
        assert shown(cut(listing, chunk)) == replayed(chunk, held.values())


def test_chunks_in_key_order_touch_no_file_before_them(tmp_path):
    listing = Listing(0, layout_of(tmp_path), {}, 0.0)
    for number in range(4):
        envelope = {"_op": "update", "_commit_ts": number + 1, "_start_ts": number, "_seq": 0}
        chunk = [
            {**envelope, "a": 7, "b": f"{key:04}", "v": key}
            for key in range(10 * number, 10 * number + 10)
        ]
        folded = fold(pa.Table.from_pylist(chunk, schema=SCHEMA), KEY)
        for path in tmp_path.iterdir():
            path.rename(path.with_suffix(".away"))  # to look into one would be an error
        files = listing.files.values()
        assert (
            without(listing.layout, files, folded.existing.select(KEY), ColumnCache(1 << 20)) == []
        )
        for path in tmp_path.iterdir():
            path.rename(path.with_suffix(".parquet"))
        listing = cut(listing, chunk)
    assert len(shown(listing)) == 40


def test_a_file_without_rows_left_is_removed_and_long_texts_bound_nothing_from_above(tmp_path):
    row = {
        "_op": "insert",
        "_commit_ts": 1,
        "_start_ts": 0,
        "_seq": 0,
        "a": 1,
        "b": "b" * 33,
        "v": 1,
    }
    listing = cut(Listing(0, layout_of(tmp_path), {}, 0.0), [row])
    (file,) = listing.files.values()
    assert dict(file.bounds) == {"a": (1, 1), "v": (1, 1), "_commit_ts": (1, 1)}
    gone = cut(listing, [row | {"_op": "delete", "_commit_ts": 2}])
    assert (gone.files, gone.version) == ({}, 2)


def test_a_file_joined_in_pieces_tells_the_bounds_and_nulls_of_all_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_GROUP_BYTES", 1)
    monkeypatch.setattr(files, "_PIECE_ROWS", 3)
    listing = Listing(0, layout_of(tmp_path), {}, 0.0)
    for number, values in enumerate(([1, 2, 3, 4], [None, None], [9, None, 0])):
        rows = [
            {"a": number, "b": str(at), "v": value, "_commit_ts": 1}
            for at, value in enumerate(values)
        ]
        listing = listing.after(written(listing.layout, pa.Table.from_pylist(rows, schema=LAKE)))
    held = shown(listing)
    listing = compacted(listing, {0, 1, 2})
    (file,) = listing.files.values()
    assert shown(listing) == held
    assert dict(file.bounds) == {"a": (0, 2), "b": ("0", "3"), "v": (0, 9), "_commit_ts": (1, 1)}
    assert json.loads(file.add["stats"])["nullCount"] == {
        "col-a": 0,
        "col-b": 0,
        "col-v": 3,
        "col-_commit_ts": 0,
    }
    assert pq.ParquetFile(f"{tmp_path}/{file.add['path']}").num_row_groups > 2


def test_files_from_before_columns_changed_are_joined_as_the_table_is_now(tmp_path):
    old = {"path": "old%20one.parquet", "size": 1, "partitionValues": {}}
    gone = pa.table(
        {"col-a": pa.array([1, 2], pa.int32()), "left": ["x", "y"], "col-b": ["1", "2"]}
    )
    pq.write_table(gone, tmp_path / "old one.parquet")
    layout = layout_of(tmp_path)
    listing = Listing(0, layout, {old["path"]: DataFile.of(old, layout)}, 0.0)
    found = shown(compacted(listing, {0}))
    assert list(found.values()) == [
        {"a": n, "b": str(n), "v": None, "_commit_ts": None} for n in (1, 2)
    ]


def test_vectors_in_the_log_in_a_folder_and_by_their_path_are_read(tmp_path):
    vector, number = roaring.encoded(np.array([3, 70_000])), uuid.uuid4()
    size = {"sizeInBytes": len(vector), "cardinality": 2}
    (tmp_path / "ab").mkdir()
    path = Path(tmp_path) / "ab" / f"deletion_vector_{number}.bin"
    path.write_bytes(roaring.VERSION + roaring.framed(vector))
    padded = vector + b"\0" * (-len(vector) % 4)
    for kind, place in (
        ("i", roaring.z85(padded)),
        ("u", "ab" + roaring.z85(number.bytes)),
        ("p", str(path)),
    ):
        named = {"storageType": kind, "pathOrInlineDv": place, "offset": 1} | size
        assert DeletionVectors(str(tmp_path)).read(named).tolist() == [3, 70_000]


@pytest.mark.parametrize(
    "stats",
    [
        '{"tightBounds":true,"numRecords":3,"minValues":{"a":1.10}}',
        '{"numRecords":3,"tightBounds":false,"minValues":{"a":1.10}}',
        '{"numRecords":3,"minValues":{"a":1.10},"tightBounds":true}',
    ],
)
def test_bounds_of_a_masked_file_are_not_tight_wherever_its_writer_said_so(stats):
    assert files._loose(stats, 3) == ('{"tightBounds":false,"numRecords":3,"minValues":{"a":1.10}}')
