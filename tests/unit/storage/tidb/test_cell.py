import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from storage.model.errors import CorruptError, InvalidError
from storage.tidb.cell import (
    Value,
    decode_cell,
    decode_float,
    encode_cell,
    encode_float,
    parse_default,
)
from storage.tidb.field_type import Flag, Type
from storage.tidb.schema import Column
from storage.tidb.time import CoreTime
from tests.unit.storage.tidb.values import COLUMNS, FLOATS, typed_values


@given(typed_values())
def test_a_cell_gives_back_its_value(typed: tuple[Column, Value]) -> None:
    column, value = typed
    decoded = decode_cell(column, encode_cell(column, value))
    if column.type is Type.JSON:
        documents = (json.loads(str(text), parse_int=float) for text in (decoded, value))
        assert next(documents) == next(documents)
    else:
        assert decoded == value
        assert type(decoded) is type(value)


@given(FLOATS, FLOATS)
@example(-0.0, 0.0)
def test_floats_sort_as_their_bytes(one: float, other: float) -> None:
    assert decode_float(encode_float(one)) == one
    if one < other:
        assert encode_float(one) < encode_float(other)


@given(st.sampled_from([column for column, _ in COLUMNS]), st.binary(max_size=20))
def test_any_bytes_are_a_value_or_corrupt(column: Column, data: bytes) -> None:
    try:
        value = decode_cell(column, data)
    except CorruptError:
        return
    assert value is not None


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (Column.bigint("n"), 1 << 63),
        (Column.bigint("n"), "7"),
        (Column(name="u", type=Type.LONG, flags=Flag.UNSIGNED), -1),
        (Column(name="e", type=Type.ENUM, elems=("a",)), "b"),
        (Column(name="s", type=Type.SET, elems=("a",)), "a,b"),
        (Column(name="d", type=Type.NEWDECIMAL, flen=3, decimal=1), 100),
        (Column.varchar("v", 5), 5),
    ],
)
def test_a_value_of_another_type_is_refused(column: Column, value: Any) -> None:
    with pytest.raises(InvalidError):
        encode_cell(column, value)


def test_characters_that_are_not_utf8_are_read_as_near_as_can_be() -> None:
    assert decode_cell(Column.varchar("v", 5), b"a\xffb") == "a\N{REPLACEMENT CHARACTER}b"
    assert decode_cell(Column(name="l", type=Type.VARCHAR, charset="latin1"), b"\xe9") == "é"


@pytest.mark.parametrize(
    ("column", "default", "value"),
    [
        (Column.bigint("n"), "-5", -5),
        (Column.varchar("v", 5), "dv", "dv"),
        (Column(name="b", type=Type.BLOB), "dv", b"dv"),
        (Column(name="d", type=Type.DOUBLE), "1.5", 1.5),
        (
            Column(name="t", type=Type.TIMESTAMP),
            "2023-01-02 03:04:05",
            CoreTime(2023, 1, 2, 3, 4, 5),
        ),
        (Column(name="c", type=Type.TIME), "-01:00:00", -3600 * 10**9),
        (Column(name="e", type=Type.ENUM, elems=("red",)), "red", "red"),
        (Column(name="x", type=Type.BIT, flen=9), b"\x01\x02", b"\x01\x02"),
        (Column(name="x", type=Type.BIT, flen=16), b"\x01", b"\x00\x01"),
        (Column(name="x", type=Type.BIT, flen=8), b"", b"\x00"),
        (Column(name="y", type=Type.YEAR), "2024", 2024),
        (Column(name="y", type=Type.YEAR), "70", 1970),
        (Column(name="y", type=Type.YEAR), "69", 2069),
        (Column(name="y", type=Type.YEAR), "0", 2000),
        (Column(name="y", type=Type.YEAR), "0000", 0),
        (Column.bigint("n"), "2.5", 3),
        (Column.bigint("n"), "18446744073709551615", (1 << 64) - 1),
        (Column(name="d", type=Type.NEWDECIMAL, flen=10, decimal=2), "1.005", Decimal("1.01")),
        (Column(name="d", type=Type.NEWDECIMAL, flen=65, decimal=30), "1e-30", Decimal("1e-30")),
        (Column.bigint("n"), None, None),
    ],
)
def test_a_default_in_the_schema_is_a_value(
    column: Column, default: str | bytes | None, value: Value
) -> None:
    assert parse_default(replace(column, origin_default=default)) == value


def test_a_default_that_is_no_value_is_refused() -> None:
    with pytest.raises(InvalidError, match="bad default 'x'"):
        parse_default(Column(name="n", type=Type.LONG, origin_default="x"))
