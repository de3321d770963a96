import json
import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from storage.model.errors import CorruptError
from storage.tidb.json import (
    ARRAY,
    DATE,
    DATETIME,
    DURATION,
    OBJECT,
    OPAQUE,
    STRING,
    decode_json,
    encode_json,
    json_size,
)
from storage.tidb.number import encode_uvarint
from tests.unit.storage.tidb.values import JSON_DOCS


@given(JSON_DOCS)
@example({"bb": 1, "a": [True, None, {}], "": []})
def test_a_document_gives_back_itself(doc: Any) -> None:
    text = json.dumps(doc)
    # Floats print as in TiDB: without exponent up to 1e21, so a large one reads back as an integer.
    assert json.loads(decode_json(encode_json(text)), parse_int=float) == json.loads(
        text, parse_int=float
    )


@given(JSON_DOCS, st.binary(max_size=3))
def test_a_documents_size_is_known_from_its_begin(doc: Any, tail: bytes) -> None:
    encoded = encode_json(json.dumps(doc))
    assert json_size(b"!" + encoded + tail, 1) == len(encoded)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e10, "10000000000"),
        (2.5, "2.5"),
        (-0.0, "-0"),
        (1e21, "1e+21"),
        (123456789012345680000.0, "123456789012345680000"),
        (1e-6, "0.000001"),
        (1.5e-7, "1.5e-7"),
    ],
)
def test_floats_print_as_go_prints_them(value: float, text: str) -> None:
    assert decode_json(encode_json(json.dumps(value))) == text


def test_dates_durations_and_opaque_bytes_print_as_strings() -> None:
    bits = 2023 << 50 | 3 << 46 | 4 << 41 | 5 << 36 | 6 << 30 | 7 << 24 | 8 << 4
    assert decode_json(bytes((DATE,)) + struct.pack("<Q", bits)) == '"2023-03-04"'
    assert (
        decode_json(bytes((DATETIME,)) + struct.pack("<Q", bits)) == '"2023-03-04 05:06:07.000008"'
    )
    assert decode_json(bytes((DURATION,)) + struct.pack("<qI", 10**9, 6)) == '"00:00:01.000000"'
    assert decode_json(bytes((OPAQUE, 15, 2)) + b"\0\xff") == '"base64:type15:AP8="'


@given(st.binary(max_size=40))
@example(bytes.fromhex("03ffffffffffffffff"))
def test_any_bytes_are_json_or_corrupt(data: bytes) -> None:
    try:
        text = decode_json(data)
    except CorruptError:
        return
    json.loads(text)


def test_a_container_that_contains_itself_is_corrupt() -> None:
    with pytest.raises(CorruptError):
        decode_json(bytes.fromhex("03010000000d0000000300000000"))


@pytest.mark.parametrize(
    ("kind", "at"), [(ARRAY, 0), (STRING, 8 + 5 * 50_000), (OBJECT, 0), (OPAQUE, 8)]
)
def test_values_that_overlap_are_refused_before_they_cost_more_than_their_size(kind, at):
    count = 50_000
    entries = struct.pack("<BI", kind, at) * count
    text = encode_uvarint(100_000) + b"x" * 100_000
    with pytest.raises(CorruptError, match=r"overlap|ends"):
        decode_json(bytes((ARRAY,)) + struct.pack("<II", count, 0) + entries + text)
