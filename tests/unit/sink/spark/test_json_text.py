"""JSON text made by columns is what Python's json reads back, value by value."""

import base64
import json
import math
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark_tidemark.json_text import END_US, FIRST_US, objects, time_texts, values

TEXTS = st.lists(st.none() | st.text(st.characters(codec="utf-8")), max_size=20)
BLOBS = st.lists(st.none() | st.binary(max_size=20), max_size=20)


def read(column):
    return [None if text is None else json.loads(text) for text in values(column).to_pylist()]


@given(TEXTS)
def test_texts_come_back_with_quotes_controls_and_all(texts):
    assert read(pa.array(texts, pa.string())) == texts


@given(BLOBS, st.integers(0, 5))
def test_bytes_are_base64_also_in_a_slice(blobs, skip):
    expected = [None if blob is None else base64.b64encode(blob).decode() for blob in blobs[skip:]]
    assert read(pa.array(blobs, pa.binary()).slice(skip)) == expected


@given(
    st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)),
    st.lists(st.none() | st.floats(width=64)),
)
def test_numbers_keep_their_digits(integers, floats):
    assert read(pa.array(integers, pa.int64())) == integers
    expected = [
        None if number is None or not math.isfinite(number) else number for number in floats
    ]
    assert read(pa.array(floats, pa.float64())) == expected


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (Decimal(2**64 - 1), pa.decimal128(20, 0), "18446744073709551615"),
        (Decimal("-1.50"), pa.decimal128(12, 2), "-1.50"),
        (
            datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
            pa.timestamp("us", tz="UTC"),
            '"2026-01-02T03:04:05.678901Z"',
        ),
        (datetime(2026, 1, 2, 3, 4, 5), pa.timestamp("us"), '"2026-01-02T03:04:05.000000"'),  # noqa: DTZ001 - DATETIME
        (20455, pa.date32(), '"2026-01-02"'),
        (None, pa.date32(), None),
        (-5, pa.int8(), "-5"),
    ],
)
def test_each_type_has_its_text(value, kind, text):
    assert values(
        pa.array([value], pa.int32() if kind == pa.date32() else kind).cast(kind)
    ).to_pylist() == [text]


def test_an_object_names_every_column_and_has_null_for_nothing():
    rows = objects(['a"b', "c"], [pa.array([1, None]), pa.array([None, "x"])])
    assert [json.loads(text) for text in rows.to_pylist()] == [
        {'a"b': 1, "c": None},
        {'a"b': None, "c": "x"},
    ]


INSTANTS_US = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(FIRST_US, END_US)


@given(st.lists(st.none() | INSTANTS_US, max_size=5))
@example([FIRST_US, END_US - 1])
@example([FIRST_US - 1])
@example([END_US])
def test_an_instant_has_the_text_that_arrow_gives_it(instants):
    column = pa.array(instants, pa.timestamp("us", "UTC"))
    assert time_texts(column).equals(column.cast(pa.string()))
    assert time_texts(pa.chunked_array([column])).combine_chunks().equals(column.cast(pa.string()))
