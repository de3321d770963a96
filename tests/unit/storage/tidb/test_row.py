import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.model.errors import CorruptError
from storage.tidb.row import LARGE, decode_row, encode_row
from storage.tidb.row_layout import RowBlock

CELLS = st.dictionaries(st.integers(1, 300), st.none() | st.binary(max_size=30), max_size=12)


def test_a_row_is_what_tidb_writes() -> None:
    row = bytes.fromhex("8000030000000203040100070008007808028000096365")
    assert encode_row({2: b"x", 3: bytes.fromhex("080280000963"), 4: b"e"}) == row


@given(CELLS)
def test_a_row_gives_back_its_cells(cells: dict[int, bytes | None]) -> None:
    assert decode_row(encode_row(cells)) == cells


@pytest.mark.parametrize(
    ("cells", "large"),
    [
        ({255: b"x"}, 0),
        ({256: b"x"}, LARGE),
        ({256: None}, LARGE),
        ({1: bytes(65_535)}, 0),
        ({1: bytes(65_536)}, LARGE),
    ],
)
def test_a_row_is_large_only_if_it_must_be(cells: dict[int, bytes | None], large: int) -> None:
    row = encode_row(cells)
    assert row[1] == large
    assert decode_row(row) == cells


def test_a_checksum_behind_the_cells_is_not_read() -> None:
    row = bytearray(encode_row({1: b"x"}) + b"\x01\x02\x03\x04\x05")
    row[1] |= 2
    assert decode_row(bytes(row)) == {1: b"x"}


@given(CELLS, st.data())
def test_a_row_that_ends_early_is_refused(
    cells: dict[int, bytes | None], data: st.DataObject
) -> None:
    row = encode_row(cells)
    with pytest.raises(CorruptError):
        decode_row(row[: data.draw(st.integers(0, len(row) - 1))])


@given(st.lists(st.none() | CELLS, max_size=12), st.integers(0, 2))
def test_a_block_finds_the_cells_of_every_row(
    rows: list[dict[int, bytes | None] | None], skipped: int
) -> None:
    encoded = pa.array(
        [None if cells is None else encode_row(cells) for cells in rows], pa.binary()
    ).slice(skipped)
    rows = rows[skipped:]
    block = RowBlock(encoded)
    for column_id in {1, *(column_id for cells in rows for column_id in cells or {})}:
        cells = block.cells(column_id)
        assert cells.missing.tolist() == [row is not None and column_id not in row for row in rows]
        assert cells.binary().to_pylist() == [(row or {}).get(column_id) for row in rows]


@given(st.lists(CELLS, min_size=1, max_size=4), st.data())
def test_a_block_refuses_a_row_that_ends_early(
    rows: list[dict[int, bytes | None]], data: st.DataObject
) -> None:
    encoded = [encode_row(cells) for cells in rows]
    broken = data.draw(st.integers(0, len(rows) - 1))
    encoded[broken] = encoded[broken][: data.draw(st.integers(1, len(encoded[broken]) - 1))]
    with pytest.raises(CorruptError):
        RowBlock(pa.array(encoded, pa.binary()))
