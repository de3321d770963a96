"""Arrow values as SQL and CSV text, against what a person would write."""

import csv
import io
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.lake.databases.text import as_csv, as_values, hexadecimal

SCHEMA = pa.schema(
    [
        ("i", pa.int64()), ("s", pa.string()), ("b", pa.binary()), ("d", pa.decimal128(20, 2)), ("o", pa.bool_()),
        ("t", pa.timestamp("us", tz="UTC")), ("y", pa.date32()),
    ]
)  # fmt: skip
ROW = {
    "i": -1, "s": "it's \\ \"so\"", "b": b"\x00\xff", "d": Decimal("1.50"), "o": True,
    "t": datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=UTC), "y": date(1999, 12, 31),
}  # fmt: skip


def batch(*rows):
    return pa.RecordBatch.from_pylist(list(rows), schema=SCHEMA)


def test_literals_for_mysql():
    nulls = dict.fromkeys(ROW)
    said = "(-1,'it\\'s \\\\ \"so\"',x'00ff',1.50,1,'2020-01-02 03:04:05.000006','1999-12-31')"
    assert as_values(batch(ROW, nulls), 1 << 20) == [f"{said},(NULL,NULL,NULL,NULL,NULL,NULL,NULL)"]
    assert as_values(batch(), 10) == []


@given(st.lists(st.text(max_size=9), min_size=1, max_size=30), st.integers(1, 60))
def test_statements_hold_all_rows_in_order_and_are_bounded(texts, most):
    found = as_values(batch(*({**ROW, "s": text} for text in texts)), most)
    whole = as_values(batch(*({**ROW, "s": text} for text in texts)), 1 << 30)
    assert ",".join(found) == whole[0]
    longest = max(len(as_values(batch({**ROW, "s": text}), 1 << 30)[0].encode()) for text in texts)
    assert all(len(part.encode()) <= most + 2 * longest + len(texts) for part in found)


@given(
    st.lists(
        st.none()
        | st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), max_size=9)
    )
)
def test_copied_text_is_read_back_and_null_is_not_empty(texts):
    lines = as_csv(
        pa.RecordBatch.from_arrays(
            [pa.array(range(len(texts))), pa.array(texts, pa.string())], ["i", "s"]
        )
    )
    read = list(csv.reader(io.StringIO(lines.decode(), newline="")))
    assert [row[1] for row in read] == [text or "" for text in texts]


def test_null_and_empty_text_are_told_apart_in_a_copy():
    found = pa.RecordBatch.from_arrays(
        [pa.array([None, "", "x"]), pa.array([b"a", None, b""])], ["s", "b"]
    )
    assert as_csv(found) == b',"\\x61"\n"",\n"x","\\x"\n'


@given(st.lists(st.none() | st.binary(max_size=5)), st.integers(0, 3))
def test_binary_is_written_as_two_digits_a_byte_also_of_a_slice(values, at):
    column = pa.array(values, pa.binary()).slice(at)
    assert hexadecimal(column).to_pylist() == [
        None if value is None else value.hex() for value in values[at:]
    ]
