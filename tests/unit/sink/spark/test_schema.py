"""Differences of schemas lead from one to the other, for any two of them."""

from contextlib import nullcontext

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.column_metadata import column_ids, with_column_ids
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.schema import check_same_columns, difference, fitted, widens

TYPES = st.sampled_from(
    [pa.int32(), pa.int64(), pa.string(), pa.decimal128(10, 2), pa.decimal128(12, 2), pa.float64()]
)
COLUMNS = st.dictionaries(
    st.sampled_from("abcdef"), st.tuples(st.integers(1, 9), TYPES), min_size=1
)


def identified(columns):
    """A schema of columns by name; of two with one identity the first keeps it."""
    ids = {}
    for name, (number, _) in columns.items():
        if number not in ids.values():
            ids[name] = number
    return with_column_ids(pa.schema([(name, found) for name, (_, found) in columns.items()]), ids)


def after(schema, change):
    """The columns that the steps lead to: names with type,
    and what they were called before (None: they are new).
    """
    names = dict(change.renamed)
    fields = {
        names.get(field.name, field.name): (field.type, field.name)
        for field in schema
        if field.name not in change.dropped
    }
    for field in change.widened:
        fields[field.name] = (field.type, fields[field.name][1])
    for _, field in change.incompatible:
        fields[field.name] = (field.type, fields[field.name][1])
    for field in change.added:
        assert field.name not in fields
        fields[field.name] = (field.type, None)
    return fields


@given(COLUMNS, COLUMNS)
def test_the_steps_lead_from_the_old_schema_to_the_new_one_and_keep_each_columns_identity(
    before, now
):
    old, new = identified(before), identified(now)
    change = difference(old, new)
    result = after(old, change)
    assert {name: found for name, (found, _) in result.items()} == {
        field.name: field.type for field in new
    }
    old_ids, new_ids = column_ids(old), column_ids(new)
    for name, (_, source) in result.items():
        if name in new_ids and new_ids[name] in old_ids.values():
            assert old_ids.get(source) == new_ids[name]
        else:
            assert name not in new_ids or source not in old_ids, (
                "it took the values of another column"
            )
    assert not difference(new, new)
    assert all(widens(was.type, now.type) is False for was, now in change.incompatible)


SHIFTS = {
    "a swap": ({"a": 1, "b": 2}, {"a": 2, "b": 1}, {("a", "b"), ("b", "a")}, (), ()),
    "a shift": ({"a": 1, "b": 2}, {"b": 1, "c": 2}, {("a", "b"), ("b", "c")}, (), ()),
    "a rename, and a new column of the old name": (
        {"v": 1},
        {"w": 1, "v": 2},
        {("v", "w")},
        (),
        ("v",),
    ),
    "dropped and added again": ({"v": 1}, {"v": 2}, set(), ("v",), ("v",)),
    "another case": ({"v": 1}, {"V": 1}, {("v", "V")}, (), ()),
    "a drop, and a rename to its name": ({"a": 1, "b": 2}, {"b": 1}, {("a", "b")}, ("b",), ()),
}


@pytest.mark.parametrize(
    ("before", "now", "renamed", "dropped", "added"), SHIFTS.values(), ids=SHIFTS
)
def test_columns_are_told_apart_by_identity_and_not_by_name(before, now, renamed, dropped, added):
    old, new = (
        with_column_ids(pa.schema([(name, pa.int32()) for name in ids]), ids)
        for ids in (before, now)
    )
    change = difference(old, new)
    assert set(change.renamed) == renamed
    assert (change.dropped, tuple(field.name for field in change.added)) == (dropped, added)
    assert not change.incompatible
    assert change.ids == now


def test_without_identities_a_column_is_the_one_of_the_same_name():
    old, new = (
        pa.schema([("a", pa.int32()), ("b", pa.string())]),
        pa.schema([("a", pa.int64()), ("c", pa.string())]),
    )
    for one, other in (
        (old, new),
        (with_column_ids(old, {"a": 1, "b": 2}), new),
        (old, with_column_ids(new, {"a": 7, "c": 8})),
    ):
        change = difference(one, other)
        assert not change.renamed
        assert (
            change.dropped,
            [field.name for field in change.added],
            [field.name for field in change.widened],
        ) == (
            ("b",),
            ["c"],
            ["a"],
        )


def test_a_type_that_nothing_widens_is_an_error_that_says_what_to_do():
    change = difference(pa.schema([("a", pa.string())]), pa.schema([("a", pa.int64())]))
    with pytest.raises(
        SourceError,
        match=r"ErrSchemaIncompatible.*a string becomes int64.*--schema-evolution ignore",
    ):
        change.require_possible("d.t")


def test_rows_are_fitted_to_columns_they_do_not_have_and_values_that_do_not_fit_are_told():
    rows = pa.table({"a": [1, 2], "gone": ["x", "y"]})
    wanted = pa.schema([("new", pa.string()), ("a", pa.int8())])
    assert fitted(rows, wanted).to_pylist() == [{"new": None, "a": 1}, {"new": None, "a": 2}]
    with pytest.raises(SourceError, match="ErrSchemaIncompatible"):
        fitted(pa.table({"a": [300], "new": ["z"]}), wanted)


def test_another_table_of_the_name_gets_its_own_columns_where_no_widening_leads():
    old = pa.schema([("id", pa.int32()), ("z", pa.string()), ("n", pa.int32())])
    new = pa.schema([("id", pa.decimal128(20, 0)), ("n", pa.int64()), ("j", pa.string())])
    change = difference(old, new).replacing
    change.require_possible("s.t")
    assert (change.dropped, change.widened) == (("z", "id"), (pa.field("n", pa.int64()),))
    assert [field.name for field in change.added] == ["j", "id"]


@pytest.mark.parametrize(
    ("there", "refused"), [({}, False), ({"id": 1, "v": 2}, False), ({"id": 1}, True)]
)
def test_a_column_without_identity_beside_others_is_somebody_elses(there, refused):
    columns = pa.schema([("id", pa.int64()), ("v", pa.string()), ("_commit_ts", pa.int64())])
    table = TableMeta("s.t", ("id",), columns, column_ids={"id": 1, "v": 2})
    expected = pytest.raises(SourceError, match=r"ErrTargetSchema.*its own names \(v\)")
    with expected if refused else nullcontext():
        check_same_columns(table, with_column_ids(columns, there))
