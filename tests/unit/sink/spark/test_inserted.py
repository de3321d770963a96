"""Inserts of keys that are there already: replaced and counted, whatever the history,
the cuts and the files.
"""

import json
import tempfile
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark_tidemark.lake.delta.files import DataFile, without, written
from pyspark_tidemark.lake.delta.inserted import Inserted
from pyspark_tidemark.lake.delta.log import Listing
from pyspark_tidemark.lake.delta.masking import VersionChanges, ended_and_begun
from pyspark_tidemark.lake.fold import fold
from pyspark_tidemark.lake.iceberg.files import read_columns
from pyspark_tidemark.lake.iceberg.storage import Storage
from pyspark_tidemark.lake.iceberg.table_keys import living as living_keys
from pyspark_tidemark.lake.iceberg.types import with_field_ids
from pyspark_tidemark.lake.keys import ColumnCache, FileKeys, KeyIndex, numbers

from tests.unit.sink.spark import test_fold_versions
from tests.unit.sink.spark.test_delta_files import LAKE, compacted, layout_of, shown
from tests.unit.sink.spark.test_fold import COLUMNS, HISTORIES, KEY, SCHEMA, changes_of, replayed

SPELLED = st.lists(st.booleans(), min_size=48, max_size=48)


def spelled(history, as_inserts):
    """A valid history in which some updates come as inserts, as if the lake had missed a delete."""
    rows = changes_of(history)
    for row, as_insert in zip(rows, as_inserts, strict=False):
        if row["_op"] == "update" and as_insert:
            row["_op"] = "insert"
    return rows


def again_in(rows, start, end):
    """How many keys a cut inserts first that are there at its start."""
    before = replayed([row for row in rows if row["_commit_ts"] <= start])
    first = {}
    for row in rows:
        if start < row["_commit_ts"] <= end:
            first.setdefault((row["a"], row["b"]), row["_op"])
    return sum(op == "insert" and key in before for key, op in first.items())


def apply(inserted, listing, rows):
    folded = fold(pa.Table.from_pylist(rows, schema=SCHEMA), KEY)
    again = inserted.there("t", listing, folded.new.select(KEY))
    keys = pa.concat_tables([folded.existing.select(KEY), again])
    actions = without(listing.layout, listing.files.values(), keys, ColumnCache(1 << 20))
    return listing.after(
        json.loads(json.dumps(actions + written(listing.layout, folded.live.select(COLUMNS))))
    )


@settings(deadline=None, max_examples=60)
@given(HISTORIES, SPELLED, st.sets(st.integers(1, 12), max_size=5), st.data())
def test_any_history_with_inserts_of_living_keys_equals_the_replay_and_the_count(
    history, as_inserts, ends, data
):
    rows = spelled(history, as_inserts)
    with tempfile.TemporaryDirectory() as root:
        inserted, listing, start = Inserted(), Listing(0, layout_of(root), {}, 0.0), 0
        for end in (*sorted(ends), 99):
            listing = apply(
                inserted, listing, [row for row in rows if start < row["_commit_ts"] <= end]
            )
            held = replayed([row for row in rows if row["_commit_ts"] <= end])
            assert shown(listing) == held
            assert inserted.replaced("t") == again_in(rows, start, end)
            listing = compacted(
                listing, data.draw(st.sets(st.integers(0, len(listing.files)))) if held else set()
            )
            if data.draw(st.booleans()):
                inserted = Inserted()  # the job was started again
            start = end


@settings(deadline=None, max_examples=40)
@given(HISTORIES, SPELLED, st.sets(st.integers(1, 12), max_size=5))
def test_no_key_ever_has_two_current_versions(history, as_inserts, ends):
    rows = spelled(history, as_inserts)
    with tempfile.TemporaryDirectory() as root:
        inserted, listing, start = Inserted(), test_fold_versions.empty_table(root), 0
        for end in (*sorted(ends), 99):
            changes = pa.Table.from_pylist(
                [row for row in rows if start < row["_commit_ts"] <= end], schema=SCHEMA
            )
            cut = VersionChanges(changes, KEY)
            actions = ended_and_begun("t", listing, cut, inserted)
            listing = listing.after(json.loads(json.dumps(actions)))
            assert test_fold_versions.shown(listing) == test_fold_versions.expected(
                [row for row in rows if row["_commit_ts"] <= end]
            )
            assert inserted.replaced("t") == again_in(rows, start, end)
            start = end


def test_keys_that_ascend_open_no_file(tmp_path):
    inserted, listing = Inserted(), Listing(0, layout_of(tmp_path), {}, 0.0)
    for number in range(5):
        rows = [
            {
                "_op": "insert",
                "_commit_ts": number + 1,
                "_start_ts": 0,
                "_seq": seq,
                "a": 100 * number + seq,
                "b": "x",
            }
            for seq in range(3)
        ]
        for path in tmp_path.iterdir():
            path.rename(path.with_suffix(".away"))  # to look into one would be an error
        folded = fold(pa.Table.from_pylist(rows, schema=SCHEMA), KEY)
        assert len(inserted.there("t", listing, folded.new.select(KEY))) == 0
        for path in tmp_path.iterdir():
            path.rename(path.with_suffix(".parquet"))
        listing = apply(inserted, listing, rows)


COLUMN = st.one_of(
    *(
        st.lists(st.none() | values, min_size=1, max_size=8).map(
            lambda found, kind=kind: pa.array(found, kind)
        )
        for kind, values in (
            (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
            (pa.uint64(), st.integers(0, 2**64 - 1)),
            (pa.string(), st.text()),
            (pa.binary(), st.binary()),
            (pa.decimal128(20, 0), st.integers(-(10**19), 10**19).map(Decimal)),
            (pa.date32(), st.dates()),
        )
    )
)


@given(COLUMN, st.randoms(use_true_random=False))
def test_a_key_has_one_number_wherever_it_stands_and_whatever_beside_it(column, chance):
    order = list(range(len(column)))
    chance.shuffle(order)
    one, other = (
        numbers(pa.table({"k": column})),
        numbers(pa.table({"k": column.take(pa.array(order))})),
    )
    assert [int(one[at]) for at in order] == [int(number) for number in other]
    alone = [int(numbers(pa.table({"k": column.slice(at, 1)}))[0]) for at in range(len(column))]
    assert alone == [int(number) for number in one]
    values = column.to_pylist()
    assert len(set(alone)) == len({(value is None, value) for value in values})


def test_swapped_columns_and_widened_integers():
    assert numbers(pa.table({"a": [1], "b": [2]}))[0] != numbers(pa.table({"a": [2], "b": [1]}))[0]
    narrow = numbers(pa.table({"a": pa.array([-1, 7], pa.int32())}))
    assert narrow.tolist() == numbers(pa.table({"a": pa.array([-1, 7], pa.int64())})).tolist()


def test_files_beyond_the_budget_are_not_searched_and_that_is_told_once(caplog):
    index, keys = KeyIndex(80), pa.table({"k": list(range(10))})
    assert index.hits("t", "one", numbers(keys), FileKeys(lambda: keys, 10)).all()
    for _ in range(2):
        assert not index.hits(
            "t", "two", numbers(keys), FileKeys(lambda: pytest.fail("read"), 10)
        ).any()
    assert index.hits(
        "t", "one", numbers(keys), FileKeys(lambda: pytest.fail("read again"), 10)
    ).all()
    assert [record.message.split(":")[0] for record in caplog.records] == ["t"]
    exact = KeyIndex(0, is_exact=True)
    assert exact.hits("t", "two", numbers(keys), FileKeys(lambda: pytest.fail("read"), 10)).all()
    index.keep_only("t", ["two"])
    assert index.hits("t", "two", numbers(keys), FileKeys(lambda: keys, 10)).all()
    index.forget("t")
    assert index.hits("u", "one", numbers(keys), FileKeys(lambda: keys, 10)).all()


def test_a_file_without_statistics_is_searched(tmp_path):
    layout = layout_of(tmp_path)
    rows = pa.table(
        {f"col-{name}": pa.array([1], LAKE.field(name).type) for name in ("a", "v", "_commit_ts")}
    )
    pq.write_table(rows.append_column("col-b", pa.array(["x"])), tmp_path / "bare.parquet")
    file = DataFile.of({"path": "bare.parquet", "size": 900}, layout)
    listing = Listing(0, layout, {"bare.parquet": file}, 0.0)
    keys = pa.table({"a": [1, 2], "b": ["x", "x"]})
    assert Inserted().there("t", listing, keys).to_pylist() == [{"a": 1, "b": "x"}]


def iceberg_file(path, keys, *, first_id):
    fields = [
        pa.field(f"old-{n}", pa.int64(), metadata={b"PARQUET:field_id": str(first_id + n)})
        for n in range(2)
    ]
    columns = [pa.array([key[n] for key in keys], pa.int64()) for n in range(2)]
    pq.write_table(pa.Table.from_arrays(columns, schema=pa.schema(fields)), path)
    return str(path)


FILES = st.lists(
    st.tuples(st.booleans(), st.sets(st.tuples(st.integers(0, 3), st.integers(0, 1)))), max_size=8
)


@settings(deadline=None, max_examples=40)
@given(FILES, st.sets(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1))
def test_iceberg_shows_a_key_unless_a_younger_delete_names_it(files, keys):
    with tempfile.TemporaryDirectory() as root:
        data, deletes, living = [], [], set()
        for sequence, (is_delete, held) in enumerate(files):
            path = iceberg_file(f"{root}/{sequence}.parquet", sorted(held), first_id=7)
            if is_delete:
                deletes.append((sequence, path))
                living -= held
            else:
                data.append((sequence, path))
                living |= held
        table = pa.table(
            {"p": [key[0] for key in sorted(keys)], "q": [key[1] for key in sorted(keys)]}
        )
        fields = with_field_ids(table.schema, {"p": 7, "q": 8})
        data, deletes = (
            [(sequence, read_columns(Storage(), path, fields)) for sequence, path in part]
            for part in (data, deletes)
        )
        found = living_keys(table, data, deletes).to_pylist()
        assert sorted((row["p"], row["q"]) for row in found) == sorted(living & keys)
