import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.model.errors import CorruptError
from storage.tidb.cell import Value, encode_cell
from storage.tidb.datum import decode_datum, encode_key_datum
from storage.tidb.field_type import TEXTS, Type
from storage.tidb.number import decode_uvarint, decode_varint, encode_uvarint, encode_varint
from storage.tidb.row import as_v2, decode_pairs, encode_row
from storage.tidb.schema import Column
from tests.tidb_encoding import encode_datum
from tests.unit.storage.tidb.values import COLUMNS, typed_values


@given(typed_values(), st.binary(max_size=3))
def test_a_datum_gives_back_its_cell(typed: tuple[Column, Value], tail: bytes) -> None:
    column, value = typed
    cell = encode_cell(column, value)
    for datum in (encode_datum(column, cell), encode_key_datum(column, cell)):
        assert decode_datum(b"!" + datum + tail, 1) == (cell, 1 + len(datum))


@given(
    st.sampled_from([c for c in COLUMNS if c[0].type not in {Type.JSON, Type.ENUM, Type.SET}]),
    st.data(),
)
def test_key_datums_sort_as_their_values(
    typed: tuple[Column, st.SearchStrategy[Value]], data: st.DataObject
) -> None:
    column, values = typed
    one, other = data.draw(values), data.draw(values)
    if column.type in TEXTS and isinstance(one, str) and isinstance(other, str):
        one, other = one.encode(), other.encode()
    keys = [encode_key_datum(column, encode_cell(column, value)) for value in (one, other)]
    assert (one < other) == (keys[0] < keys[1])  # type: ignore[operator]  # both are of the column's type


def test_null_is_one_byte_before_all_else() -> None:
    assert (
        encode_datum(Column.bigint("n"), None)
        == encode_key_datum(Column.bigint("n"), None)
        == b"\0"
    )
    assert decode_datum(b"\0") == (None, 1)


@given(st.binary(max_size=20))
def test_any_bytes_are_a_datum_or_corrupt(data: bytes) -> None:
    try:
        _, end = decode_datum(data)
    except CorruptError:
        return
    assert 0 < end <= len(data)


@given(st.integers(0, (1 << 64) - 1), st.integers(-(1 << 63), (1 << 63) - 1))
def test_varints_give_back_their_numbers(unsigned: int, signed: int) -> None:
    assert decode_uvarint(encode_uvarint(unsigned)) == (unsigned, len(encode_uvarint(unsigned)))
    assert decode_varint(encode_varint(signed)) == (signed, len(encode_varint(signed)))


def test_a_row_of_format_v1_reads_as_the_same_row_of_v2() -> None:
    name, number = Column.varchar("v", 5), Column.bigint("n")
    pairs = [(1, name, b"ab"), (2, number, b"\xfe"), (3, number, None)]
    old = b"".join(
        encode_datum(number, bytes((at,))) + encode_datum(column, cell)
        for at, column, cell in pairs
    )
    assert decode_pairs(old) == {1: b"ab", 2: b"\xfe", 3: None}
    assert as_v2(old) == encode_row({1: b"ab", 2: b"\xfe", 3: None})
    assert as_v2(b"\0") == encode_row({})
    assert as_v2(encode_row({1: b"x"})) == encode_row({1: b"x"})


@pytest.mark.parametrize("row", ["", "08", "0802", "0802000802" + "00", "0000"])
def test_bytes_that_are_no_row_of_format_v1_are_refused(row: str) -> None:
    with pytest.raises(CorruptError):
        as_v2(bytes.fromhex(row))
