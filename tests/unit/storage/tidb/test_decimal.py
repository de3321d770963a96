from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.model.errors import CorruptError, InvalidError
from storage.tidb.cell import arrow_array, decode_decimals
from storage.tidb.field_type import Type
from storage.tidb.number import decimal_size, decode_decimal, encode_decimal
from storage.tidb.row_layout import Cells
from storage.tidb.schema import Column

SHAPES = st.integers(1, 65).flatmap(lambda p: st.tuples(st.just(p), st.integers(0, min(p, 30))))


@st.composite
def decimals(
    draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, int]] = SHAPES
) -> tuple[int, int, list[Decimal]]:
    precision, scale = draw(shapes)
    limit = 10**precision - 1
    digits = draw(st.lists(st.integers(-limit, limit), min_size=1, max_size=8))
    return precision, scale, [Decimal(f"{number}e-{scale}") for number in digits]


@pytest.mark.parametrize(
    ("text", "precision", "scale", "encoded"),
    [
        ("1234567890", 10, 0, "0a00810dfb38d2"),
        ("1.25", 8, 2, "08028000011" + "9"),
        ("-0.01", 5, 2, "05027ffffe"),
    ],
)
def test_a_decimal_is_what_tidb_writes(text: str, precision: int, scale: int, encoded: str) -> None:
    assert encode_decimal(Decimal(text), precision, scale).hex() == encoded


@given(decimals())
def test_a_decimal_gives_back_its_value(shaped: tuple[int, int, list[Decimal]]) -> None:
    precision, scale, values = shaped
    for value in values:
        encoded = encode_decimal(value, precision, scale)
        assert decode_decimal(encoded) == (value, len(encoded))
        assert decode_decimal(b"!" + encoded + b"!", 1) == (value, len(encoded) + 1)
        assert decimal_size(encoded) == len(encoded)


@given(decimals())
def test_decimals_of_one_shape_sort_as_their_bytes(shaped: tuple[int, int, list[Decimal]]) -> None:
    precision, scale, values = shaped
    assert sorted(values) == sorted(
        values, key=lambda value: encode_decimal(value, precision, scale)
    )


@given(
    decimals(st.integers(1, 18).flatmap(lambda p: st.tuples(st.just(p), st.integers(0, p)))),
    st.booleans(),
)
def test_a_batch_decodes_like_one_by_one(
    shaped: tuple[int, int, list[Decimal]], with_null: bool
) -> None:
    precision, scale, values = shaped
    column = Column(name="d", type=Type.NEWDECIMAL, flen=precision, decimal=scale)
    cells = [encode_decimal(value, precision, scale) for value in values]
    nulls = [None] * with_null
    batch = decode_decimals(column, Cells.of([*nulls, *cells]))
    assert batch.to_pylist() == [*nulls, *values]


def test_a_batch_of_another_shape_is_decoded_one_by_one() -> None:
    column = Column(name="d", type=Type.NEWDECIMAL, flen=12, decimal=2)
    cells = Cells.of(
        [encode_decimal(Decimal("1.25"), 8, 2), encode_decimal(Decimal("-7.00"), 12, 2)]
    )
    assert decode_decimals(column, cells) is None
    assert arrow_array(column, cells).to_pylist() == [Decimal("1.25"), Decimal("-7.00")]


def test_halves_are_rounded_away_from_zero_as_mysql_does() -> None:
    assert decode_decimal(encode_decimal(Decimal("-0.125"), 5, 2))[0] == Decimal("-0.13")


def test_too_many_digits_are_refused() -> None:
    with pytest.raises(InvalidError):
        encode_decimal(Decimal(1000), 5, 2)


@given(st.binary(max_size=12))
def test_any_bytes_are_a_decimal_or_corrupt(data: bytes) -> None:
    try:
        _, end = decode_decimal(data)
    except CorruptError:
        return
    assert end == decimal_size(data)
