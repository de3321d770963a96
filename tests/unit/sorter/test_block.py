"""Blocks: what is written is read, what is damaged is named;
the format is fixed by a golden file.
"""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorter import block
from sorter.block import BlockMeta, Share
from sorter.errors import BlockCorruptError
from sorter.index import Entry, decode_entry, encode_entry
from sorter.segment import Pointer
from storage.model.errors import CorruptError
from storage.model.event import DELETE, INSERT, UPDATE, raw_batch

GOLDEN = Path(__file__).parents[2] / "golden" / "sorter"
ROWS = raw_batch(
    [450_000_000_000_000_001, 450_000_000_000_000_002, 450_000_000_000_000_002],
    [450_000_000_000_000_000] * 3,
    [INSERT, DELETE, UPDATE],
    [b"a", b"", b"ab"],
    [b"1", None, b"2"],
    [None, b"0", b"1"],
)
INSERTS = raw_batch(
    [1 << 40, (1 << 40) + 1], [7, 8], [INSERT] * 2, [b"a", b"b"], [b"1", b""], [None] * 2
)
SHARES = [Share(7, 101, [ROWS]), Share(9, -1, [INSERTS.slice(1), INSERTS.slice(0, 1)])]
META = BlockMeta(7, 101, 42, 3, 450_000_000_000_000_001, 450_000_000_000_000_002)
ENTRY = Entry(META, Pointer(3, 640, 1000), 41, 900)

u64 = st.integers(0, (1 << 64) - 1)
metas = st.builds(BlockMeta, u64, st.integers(-(1 << 63), (1 << 63) - 1), u64, st.just(3), u64, u64)


def encoded(meta: BlockMeta = META, batch: pa.RecordBatch = ROWS) -> bytes:
    header, payload = block.encode(meta, batch)
    return header + payload.to_pybytes()


@given(metas)
def test_a_block_is_read_as_it_was_written(meta: BlockMeta) -> None:
    assert block.decode(meta, pa.py_buffer(encoded(meta))).equals(ROWS)


timestamps = st.one_of(st.integers(0, 9), st.integers(1 << 32, (1 << 32) + 9), u64)
changes = st.tuples(
    timestamps,
    timestamps,
    st.integers(1, 3),
    *[st.binary(max_size=3)] * 2,
    st.none() | st.just(b""),
)


@given(st.lists(changes, min_size=1, max_size=4), st.integers(0, 3))
def test_rows_are_packed_without_loss(rows: list[tuple], first: int) -> None:
    batch = raw_batch(*zip(*rows, strict=True)).slice(min(first, len(rows) - 1))
    flags, op, stored = block.pack(batch)
    assert stored.schema.equals(block.stored_schema(flags))
    assert block.unpack(flags, op, stored).equals(batch)


def test_what_says_nothing_takes_no_space() -> None:
    count = 10_000
    ts = [450_000_000_000_000_000 + 10 * number for number in range(count)]
    batch = raw_batch(
        ts,
        [it - 5 for it in ts],
        [INSERT] * count,
        [bytes(19)] * count,
        [bytes(200)] * count,
        [None] * count,
    )
    _, payload = block.encode(META, batch)
    assert payload.size < 1.1 * count * 219


def test_a_slice_is_written_without_the_rest() -> None:
    header, payload = block.encode(BlockMeta(1, 1, 1, 1, 1, 1), ROWS.slice(1, 1))
    read = block.decode(BlockMeta(1, 1, 1, 1, 1, 1), pa.py_buffer(header + payload.to_pybytes()))
    assert read.equals(ROWS.slice(1, 1))
    assert payload.size < block.encode(META, ROWS)[1].size


@given(st.data())
def test_any_flipped_bit_is_found(data: st.DataObject) -> None:
    damaged = bytearray(encoded())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BlockCorruptError):
        block.decode(META, pa.py_buffer(bytes(damaged)))


@given(st.data())
def test_a_torn_block_is_found(data: st.DataObject) -> None:
    whole = encoded()
    torn = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(BlockCorruptError, match="table 101"):
        block.decode(META, pa.py_buffer(torn))


def test_another_block_in_its_place_is_found() -> None:
    other = BlockMeta(7, 101, 43, 3, META.min_commit_ts, META.max_commit_ts)
    with pytest.raises(BlockCorruptError, match="the index points to block 43"):
        block.decode(META, pa.py_buffer(encoded(other)))


@given(st.builds(Entry, metas, st.builds(Pointer, u64, u64, u64), u64, u64))
def test_an_index_entry_is_read_as_it_was_written(entry: Entry) -> None:
    assert decode_entry(*encode_entry(entry)) == entry


@given(
    u64,
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=2, max_size=2),
    st.lists(u64, min_size=4, max_size=4),
)
def test_index_keys_sort_by_table_min_commit_ts_and_number(unique_id, tables, numbers) -> None:
    fields = [(unique_id, tables[i], numbers[i], numbers[2 + i]) for i in range(2)]
    keys = [
        encode_entry(Entry(BlockMeta(uid, table, number, 1, low, low), Pointer(0, 0, 0), 0, 0))[0]
        for uid, table, low, number in fields
    ]
    assert (keys[0] < keys[1]) == (fields[0] < fields[1])


def test_an_index_entry_of_another_version_is_refused() -> None:
    key, value = encode_entry(ENTRY)
    with pytest.raises(CorruptError, match="version"):
        decode_entry(key, b"\x01" + value[1:])


def test_the_formats_are_those_of_the_golden_files() -> None:
    assert (
        encoded() + encoded(batch=INSERTS) + shared(SHARES)[1]
        == (GOLDEN / "block-v3.bin").read_bytes()
    )
    assert b"".join(encode_entry(ENTRY)) == (GOLDEN / "index-v2.bin").read_bytes()


def shared(shares: list[Share]) -> tuple[list[BlockMeta], bytes]:
    metas, header, payload = block.encode_shared(42, shares)
    return metas, header + payload.to_pybytes()


tables = st.lists(
    st.lists(st.lists(changes, min_size=1, max_size=4), min_size=1, max_size=3),
    min_size=1,
    max_size=5,
)


@given(tables, st.booleans())
def test_tables_that_share_a_block_find_their_rows_in_it_sorted(
    tables: list[list[list[tuple]]], same_ts: bool
) -> None:
    if same_ts:
        tables = [[[(7, 5, *row[2:]) for row in rows] for rows in batches] for batches in tables]
    shares = [
        Share(10 + number, -number, [raw_batch(*zip(*rows, strict=True)) for rows in batches])
        for number, batches in enumerate(tables)
    ]
    metas, written = shared(shares)
    assert block.is_shared(pa.py_buffer(written))
    read = block.decode_shared(metas[0], pa.py_buffer(written))
    for meta, batches in zip(metas, tables, strict=True):
        rows = [tuple(row.values()) for row in read.rows_of(meta).to_pylist()]
        assert rows == sorted((row for batch in batches for row in batch), key=lambda row: row[:4])


@given(st.data())
def test_any_flipped_bit_of_a_shared_block_is_found(data: st.DataObject) -> None:
    metas, written = shared(SHARES)
    damaged = bytearray(written)
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BlockCorruptError):
        block.decode_shared(metas[0], pa.py_buffer(bytes(damaged)))


@given(st.data())
def test_a_torn_shared_block_is_found(data: st.DataObject) -> None:
    metas, written = shared(SHARES)
    torn = written[: data.draw(st.integers(0, len(written) - 1))]
    with pytest.raises(BlockCorruptError):
        block.decode_shared(metas[0], pa.py_buffer(torn))


@pytest.mark.parametrize(
    "field", ["unique_id", "table_id", "number", "rows", "min_commit_ts", "max_commit_ts"]
)
def test_rows_of_another_table_or_block_are_not_taken_from_a_shared_block(field: str) -> None:
    metas, written = shared(SHARES)
    read = block.decode_shared(metas[0], pa.py_buffer(written))
    with pytest.raises(BlockCorruptError, match="which has no such rows of this table"):
        read.rows_of(replace(metas[0], **{field: getattr(metas[0], field) + 1}))


def test_a_tables_own_block_is_not_taken_for_a_shared_one_nor_the_other_way_round() -> None:
    metas, written = shared(SHARES)
    with pytest.raises(BlockCorruptError, match="no directory"):
        block.decode_shared(META, pa.py_buffer(encoded()))
    with pytest.raises(BlockCorruptError, match="the index points to block 42 of table 2"):
        block.decode(metas[0], pa.py_buffer(written))
