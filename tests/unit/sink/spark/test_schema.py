"""Differences of schemas lead from one to the other, for any two of them."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.schema import difference, fitted, renamed_in, widens

TYPES = st.sampled_from([pa.int32(), pa.int64(), pa.string(), pa.decimal128(10, 2), pa.decimal128(12, 2), pa.float64()])
SCHEMAS = st.dictionaries(st.sampled_from("abcdef"), TYPES, min_size=1).map(
    lambda found: pa.schema(list(found.items()))
)


def after(schema, change):
    names = dict(change.renamed)
    fields = {names.get(field.name, field.name): field.type for field in schema}
    for name in change.dropped:
        del fields[name]
    fields |= {field.name: field.type for field in (*change.widened, *change.added)}
    fields |= {new.name: new.type for _, new in change.incompatible}
    return fields


@given(SCHEMAS, SCHEMAS, st.sampled_from("abcdef"), st.sampled_from("abcdef"))
def test_the_steps_lead_from_the_old_schema_to_the_new_one_and_no_further(old, new, one, other):
    change = difference(old, new, (f"ALTER TABLE t RENAME COLUMN {one} TO {other}",))
    assert after(old, change) == {field.name: field.type for field in new}
    assert not difference(new, new)
    assert all(widens(was.type, now.type) is False for was, now in change.incompatible)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("ALTER TABLE t RENAME COLUMN a TO b", [("a", "b")]),
        ("alter table `t` change column `a b` `c``d` bigint, add e int", [("a b", "c`d")]),
        ("ALTER TABLE t CHANGE a a BIGINT", []),
        ("ALTER TABLE t RENAME TO u", []),
        ("CREATE TABLE t (a INT COMMENT 'RENAME COLUMN a TO b')", []),
    ],
)
def test_renamed_columns_are_read_from_the_ddl(query, found):
    assert renamed_in(query) == found


def test_a_type_that_nothing_widens_is_an_error_that_says_what_to_do():
    change = difference(pa.schema([("a", pa.string())]), pa.schema([("a", pa.int64())]))
    with pytest.raises(SourceError, match=r"ErrSchemaIncompatible.*a string becomes int64.*--schema-evolution ignore"):
        change.require_possible("d.t")


def test_rows_are_fitted_to_columns_they_do_not_have_and_values_that_do_not_fit_are_told():
    rows = pa.table({"a": [1, 2], "gone": ["x", "y"]})
    wanted = pa.schema([("new", pa.string()), ("a", pa.int8())])
    assert fitted(rows, wanted).to_pylist() == [{"new": None, "a": 1}, {"new": None, "a": 2}]
    with pytest.raises(SourceError, match="ErrSchemaIncompatible"):
        fitted(pa.table({"a": [300], "new": ["z"]}), wanted)
