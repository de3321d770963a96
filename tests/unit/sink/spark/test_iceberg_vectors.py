"""Deletion vectors of Iceberg tables: the bytes of their files, what readers see through them, and
where masked rows are after files were joined.
"""

import json
import struct
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.iceberg import files
from pyspark_tidemark.lake.iceberg import masking as masking_module
from pyspark_tidemark.lake.iceberg.files import Share, live_rows
from pyspark_tidemark.lake.iceberg.masking import Masking
from pyspark_tidemark.lake.iceberg.rewriting import OldFile, moved, packed
from pyspark_tidemark.lake.iceberg.storage import Storage
from pyspark_tidemark.lake.iceberg.types import with_field_ids
from pyspark_tidemark.lake.iceberg.vectors import Masked, written

POSITIONS = st.sets(st.integers(0, 200_000), min_size=1).map(sorted).map(np.array)
FIELDS = pa.schema([pa.field("id", pa.int64(), metadata={b"PARQUET:field_id": b"1"})])


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), POSITIONS, min_size=1))
def test_each_vector_of_a_file_is_read_where_metadata_says(masked):
    with tempfile.TemporaryDirectory() as root:
        masks = written(Storage(), root, {name: Masked(at, name) for name, at in masked.items()})
        assert len({mask.vector.location for mask in masks}) == 1
        for mask in masks:
            assert (mask.vector.positions(Storage()) == masked[mask.data_file]).all()
            assert (mask.rows, mask.replaced) == (len(masked[mask.data_file]), mask.data_file)


def test_a_puffin_file_is_as_its_specification_says(tmp_path):
    data_file = "file:/lake/t/data/1.parquet"
    [mask] = written(Storage(), str(tmp_path), {data_file: Masked(np.array([1, 65_543]))})
    data = Path(mask.vector.location).read_bytes()
    assert len(data) == mask.file_size
    assert data[:4] == data[-4:] == b"PFA1"
    size, flags = struct.unpack("<iI", data[-12:-4])
    assert flags == 0
    assert data[-16 - size : -12 - size] == b"PFA1"
    [blob] = json.loads(data[-12 - size : -12])["blobs"]
    assert blob == {
        "type": "deletion-vector-v1",
        "fields": [2147483645],
        "snapshot-id": -1,
        "sequence-number": -1,
        "offset": 4,
        "length": mask.vector.size,
        "properties": {"referenced-data-file": data_file, "cardinality": "2"},
    }
    # Length, magic, one 64-bit bitmap of two containers with a position each, CRC.
    assert data[4 : 4 + mask.vector.size].hex() == (
        "0000002c" "d1d33964" "0100000000000000" "00000000" "3a30000002000000"
        "00000000" "01000000" "18000000" "1a000000" "0100" "0700" "53e512a2"
    )  # fmt: skip


def test_nothing_masked_is_no_file(tmp_path):
    assert written(Storage(), str(tmp_path), {}) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", [4, 8, 20])
def test_a_damaged_vector_is_never_read_as_another_one(tmp_path, at):
    [mask] = written(Storage(), str(tmp_path), {"f": Masked(np.array([3, 5]))})
    path = Path(mask.vector.location)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"ErrLakeDamaged.*-deletes\.puffin is damaged"):
        mask.vector.positions(Storage())
    path.write_bytes(data[:10])
    with pytest.raises(SourceError, match="ErrLakeDamaged"):
        mask.vector.positions(Storage())


def test_a_data_file_that_is_cut_off_or_gone_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": [1, 2]}, FIELDS), path)
    share = Share(str(path), 0, 0, 1)
    assert len(list(live_rows(Storage(), share, FIELDS))) == 1
    whole = path.read_bytes()
    for content in (b"", whole[:3], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(
            SourceError, match=r"ErrLakeDamaged.*rows\.parquet is no whole"
        ) as caught:
            list(live_rows(Storage(), share, FIELDS))
        assert not caught.value.retryable
    path.unlink()
    with pytest.raises(SourceError, match=r"ErrLakeDamaged.*rows\.parquet is not there") as caught:
        list(live_rows(Storage(), share, FIELDS))
    assert caught.value.retryable, "somebody may have rewritten the table meanwhile"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 20),
    st.sets(st.integers(0, 59)),
    st.integers(1, 5),
    st.data(),
)
def test_readers_see_the_rows_that_are_not_masked_where_they_are(rows, group, masked, of, data):
    masked = sorted(place for place in masked if place < rows)
    with tempfile.TemporaryDirectory() as root:
        path = f"{root}/f.parquet"
        ids = data.draw(st.permutations(range(rows)))
        pq.write_table(pa.table([pa.array(ids)], schema=FIELDS), path, row_group_size=group)
        vector = None
        if masked:
            [mask] = written(Storage(), root, {path: Masked(np.array(masked))})
            vector = mask.vector
        found = [
            (place, row["id"])
            for number in range(of)
            for batch, places in live_rows(Storage(), Share(path, 1, number, of, vector), FIELDS)
            for place, row in zip(places.tolist(), batch.to_pylist(), strict=True)
        ]
        assert found == [(place, ids[place]) for place in range(rows) if place not in masked]


def test_a_table_that_is_dear_to_search_is_told_once(caplog):
    masking = Masking(None, None)
    for rows in (masking_module.MOST_ROWS, 41_000_000, 42_000_000):
        masking._note_cost("shop.t", rows)
    [warning] = caplog.records
    assert "shop.t: a cut looked for its keys among 41 million rows" in warning.getMessage()


FILE = st.tuples(st.integers(0, 30), st.sets(st.integers(0, 29)), st.sets(st.integers(0, 29)))


@given(st.lists(FILE, max_size=5))
def test_what_was_masked_while_files_were_joined_is_masked_in_the_new_one(old):
    """The oracle joins the rows themselves."""
    joined, gone, parts = [], set(), []
    for number, (rows, first, since) in enumerate(old):
        before = {place for place in first if place < rows}
        now = before | {place for place in since if place < rows}
        joined += [(number, place) for place in range(rows) if place not in before]
        gone |= {(number, place) for place in now - before}
        parts.append((rows, *(np.array(sorted(part), np.int64) for part in (before, now))))
    assert [joined[place] for place in moved(parts).tolist()] == sorted(gone)


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 10)), max_size=20))
def test_files_are_joined_in_groups_that_are_not_too_large(sizes):
    old = [
        OldFile(None, Share(str(number), 1, 0, 1), size, 10, masked)
        for number, (size, masked) in enumerate(sizes)
    ]
    groups = packed(old, 120)
    names = [file.location for group in groups for file in group]
    assert len(set(names)) == len(names)
    assert all(sum(file.live_bytes for file in group) <= 120 for group in groups)
    assert all(len(group) > 1 or group[0].masked for group in groups), "to join nothing is no work"
    assert {file.location for file in old if file.masked} <= set(names)


def test_row_groups_are_not_as_small_as_what_tasks_are_given(tmp_path):
    layout = files.Layout(str(tmp_path), FIELDS.serialize().to_pybytes(), ())
    batches = (pa.record_batch([pa.array([number])], schema=FIELDS) for number in range(100))
    [file] = files.write_rows(layout, batches)
    with pq.ParquetFile(file.path) as opened:
        assert (opened.metadata.num_row_groups, opened.metadata.num_rows) == (1, 100)


def test_keys_of_a_narrower_type_are_compared_with_bounds_that_it_has_not(tmp_path):
    """A column may have been narrowed: tasks of a large cut failed at a bound of before."""
    fields = with_field_ids(pa.schema([("id", pa.int32())]), {"id": 1})
    bounds = ({"id": (1, 100_000)},)
    layout = files.Layout(str(tmp_path), fields.serialize().to_pybytes(), ("id",), bounds)
    rows = pa.table({"id": pa.array([-1, 1, 7], pa.int8())})
    assert layout.there(rows) == rows.slice(1)
