"""Many rows of old encodings read at once give what one after the other gives."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.model.errors import CorruptError
from storage.tidb.binary import BinaryColumn
from storage.tidb.cell import encode_cell
from storage.tidb.number import decode_uvarints, encode_uvarint, encode_varint, zigzag
from storage.tidb.row import Pairs, as_v2, binary_column, decode_row, encode_rows
from storage.tidb.row_layout import RowBlock
from tests.tidb_encoding import encode_datum
from tests.unit.storage.tidb.values import COLUMNS

U64 = st.integers(0, (1 << 64) - 1) | st.integers(0, 70).map(
    lambda bits: min(1 << bits, (1 << 64)) - 1
)


@given(st.lists(U64, min_size=1, max_size=40))
def test_varints_are_read_together_as_one_by_one(numbers: list[int]) -> None:
    column = binary_column([encode_uvarint(number) for number in numbers])
    found, end = decode_uvarints(column, column.begin, np.ones(len(numbers), np.bool_))
    assert found.tolist() == numbers
    assert (end == column.end).all()


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=40))
def test_signed_varints_are_read_together_as_one_by_one(numbers: list[int]) -> None:
    column = binary_column([encode_varint(number) for number in numbers])
    assert (
        zigzag(decode_uvarints(column, column.begin, np.ones(len(numbers), np.bool_))[0]).tolist()
        == numbers
    )


def test_a_varint_of_more_than_64_bits_is_refused() -> None:
    column = binary_column([b"\xff" * 9 + b"\x02"])
    with pytest.raises(CorruptError, match="64 bits"):
        decode_uvarints(column, column.begin, np.ones(1, np.bool_))


@st.composite
def rows_v1(draw: st.DrawFn) -> bytes:
    """A row of format v1 of some typed columns, in any order, with small and large column ids."""
    chosen = draw(st.lists(st.sampled_from(COLUMNS), max_size=5))
    ids = draw(
        st.lists(st.integers(1, 300), min_size=len(chosen), max_size=len(chosen), unique=True)
    )
    out = b""
    for column_id, (column, values) in zip(ids, chosen, strict=True):
        value = draw(st.none() | values)
        cell = None if value is None else encode_cell(column, value)
        out += b"\x08" + encode_varint(column_id) + encode_datum(column, cell)
    return out or b"\x00"


@given(st.lists(rows_v1(), min_size=1, max_size=12))
def test_rows_are_translated_together_as_one_by_one(rows: list[bytes]) -> None:
    assert encode_rows(Pairs.scan(binary_column(rows))).to_pylist() == [as_v2(row) for row in rows]


@given(st.lists(rows_v1() | st.none() | rows_v1().map(as_v2), min_size=1, max_size=12))
def test_a_batch_may_mix_both_formats_and_rows_that_are_missing(rows: list[bytes | None]) -> None:
    ids = sorted({column_id for row in rows if row for column_id in decode_row(as_v2(row))})
    block = RowBlock(pa.array(rows, pa.binary()))
    for column_id in ids:
        found = block.cells(column_id).binary().to_pylist()
        assert found == [decode_row(as_v2(row)).get(column_id) if row else None for row in rows]


@given(st.lists(rows_v1(), min_size=1, max_size=4), st.data())
def test_damaged_rows_are_refused_together_as_one_by_one(
    rows: list[bytes], data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, len(rows) - 1))
    at = data.draw(st.integers(0, len(rows[number]) - 1))
    row = rows[number]
    rows[number] = data.draw(
        st.sampled_from([row[:at], row[:at] + bytes([row[at] ^ 0x41]) + row[at + 1 :], row[at:]])
    )
    try:
        expected = [as_v2(row) for row in rows]
    except CorruptError:
        expected = None
    try:
        found = encode_rows(Pairs.scan(binary_column(rows))).to_pylist()
    except CorruptError:
        found = None
    assert found == expected or (expected is not None and found is None and _is_uncommon(rows))


def _is_uncommon(rows: list[bytes]) -> bool:
    """Whether a row holds a datum that only keys have, or is of format v2 by its first byte:
    not for this reader.
    """
    return any(row[:1] == b"\x80" or b"\x01" in row for row in rows)


@pytest.mark.parametrize("pad", [0xFFF0, 0x10010])
def test_large_and_small_rows_keep_their_order(pad: int) -> None:
    small, wide = b"\x08\x02\x08\x02", b"\x08\x02\x02" + encode_varint(pad) + bytes(pad)
    rows = [small, wide, small, wide, small]
    assert encode_rows(Pairs.scan(binary_column(rows))).to_pylist() == [as_v2(row) for row in rows]


def test_a_long_batch_is_written_in_runs() -> None:
    row = b"\x08\x02\x02" + encode_varint(60_000) + bytes(60_000)
    assert set(encode_rows(Pairs.scan(binary_column([row] * 200))).to_pylist()) == {as_v2(row)}


def test_no_rows_are_no_rows() -> None:
    assert encode_rows(Pairs.scan(BinaryColumn(pa.array([], pa.binary())))).to_pylist() == []


def test_columns_can_be_left_out() -> None:
    row = b"".join(b"\x08" + encode_varint(column_id) + b"\x08\x0a" for column_id in (-1, 1, 2))
    assert decode_row(encode_rows(Pairs.scan(binary_column([row])), (-1, 2))[0].as_py()) == {
        1: b"\x05"
    }


@pytest.mark.parametrize("ids", [(1, 1), (2, 1, 2)])
def test_a_column_that_stands_twice_is_refused(ids: tuple[int, ...]) -> None:
    row = b"".join(b"\x08" + encode_varint(column_id) + b"\x08\x0a" for column_id in ids)
    with pytest.raises(CorruptError, match="twice"):
        encode_rows(Pairs.scan(binary_column([row])))
