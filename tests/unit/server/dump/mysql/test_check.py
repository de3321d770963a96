"""Checks of chunks against a model: what the log explains is no fault,
what it does not is always found.
"""

import random
import zlib
from functools import reduce

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.dump.mysql.check import (
    FACTOR,
    ChunkMismatch,
    Digests,
    DumpChunkDiffersError,
    Repairs,
    canonical,
    crc32s,
    unexplained,
)
from server.dump.mysql.window import HIGH, LOW, Chunk, Windows
from server.dump.progress import Cell, ChunkRead, Range
from storage.mysql.schema import Column, Type

TABLE = 7
Rows = dict[bytes, int]
ROWS = st.dictionaries(st.binary(max_size=2), st.integers(0, 3), max_size=9)


def digests(rows: Rows) -> Digests:
    sums = [zlib.crc32(b"%d" % value) * FACTOR for value in rows.values()]
    return Digests(pa.array(rows.keys(), pa.binary()), np.array(sums, np.uint64))


@given(ROWS, ROWS)
def test_the_keys_that_differ_are_those_of_an_oracle(one: Rows, other: Rows) -> None:
    found = digests(one).differing(digests(other)).to_pylist()
    assert sorted(found) == sorted(
        key for key in one.keys() | other.keys() if one.get(key) != other.get(key)
    )


@given(st.lists(st.binary(max_size=300) | st.none()))
def test_checksums_of_many_texts_are_zlibs(texts: list[bytes | None]) -> None:
    array = pa.concat_arrays([pa.array([b"before"]), pa.array(texts, pa.binary())])[1:]
    assert crc32s(array).tolist() == [zlib.crc32(text or b"") for text in texts]


@pytest.mark.parametrize("seed", range(20))
def test_two_rows_that_swap_a_value_change_the_total_and_not_that_of_plain_checksums(
    seed: int,
) -> None:
    """CRC-32 is linear: for texts of equal length its exclusive-or is that of the texts."""
    chance = random.Random(seed)
    rows = [[b"%07d" % chance.randrange(10**7) for _ in range(4)] for _ in range(50)]
    swapped = [list(row) for row in rows]
    swapped[3][2], swapped[4][2] = rows[4][2], rows[3][2]
    sums = [[zlib.crc32(b",".join(row)) for row in each] for each in (rows, swapped)]
    assert reduce(int.__xor__, sums[0]) == reduce(int.__xor__, sums[1])
    totals = [
        Digests(pa.array(range(50)), np.array(each, np.uint64) * np.uint64(FACTOR)).total
        for each in sums
    ]
    assert totals[0] != totals[1]


class Window:
    """A table between two watermarks: written, read as a chunk (wrongly, of some keys),
    summed, asked row by row.
    """

    def __init__(self, chance: random.Random, wrong: set[bytes]) -> None:
        self.chance = chance
        self.rows: Rows = {
            b"%d" % key: chance.randrange(1 << 62) for key in range(12) if chance.random() < 0.7
        }
        self.changed: list[bytes] = []
        self.wrong = wrong
        self.windows = Windows()
        self.windows.begin("low", "high", [TABLE])

    def write(self) -> None:
        """Some changes; some of them give a row back what it had."""
        for _ in range(self.chance.choice((0, 0, 1, 3))):
            key = b"%d" % self.chance.randrange(12)
            self.changed.append(key)
            if self.chance.random() < 0.3:
                self.rows.pop(key, None)
            else:
                self.rows[key] = self.chance.choice((5, self.chance.randrange(1 << 62)))

    def run(self) -> tuple[Chunk, pa.Array | None, bool]:
        """The chunk, the keys that nothing explains, and whether its rows are given."""
        self.write()
        ours = digests({key: value + (key in self.wrong) for key, value in self.rows.items()})
        self.write()
        total = digests(self.rows).total
        self.write()
        differing = ours.differing(digests(self.rows))
        mismatch = (
            ChunkMismatch(Range(), differing, ours.total, total)
            if total != ours.total and len(differing)
            else None
        )
        self.write()
        read = ChunkRead(0, 0, None, True, len(ours.keys), 0, True)
        chunk = Chunk(
            TABLE, 0, read, ours.keys, pa.array([b""] * len(ours.keys), pa.binary()), mismatch
        )
        self.windows.watermark("low", LOW, 1)
        self.windows.fill("high", [chunk])
        if self.changed:
            self.windows.changed(TABLE, pa.array(self.changed, pa.binary()))
        (closed,) = self.windows.watermark("high", HIGH, 2)
        return chunk, closed.differing, closed.rows is not None


@pytest.mark.parametrize("seed", range(200))
def test_a_wrong_row_is_found_unless_the_log_brings_it_and_a_right_one_never_is(seed: int) -> None:
    chance = random.Random(seed)
    wrong = {b"%d" % chance.randrange(12) for _ in range(chance.choice((0, 0, 1, 2)))}
    window = Window(chance, wrong)
    chunk, differing, given_out = window.run()
    faults = wrong & set(chunk.keys.to_pylist()) - set(window.changed)
    assert set(differing.to_pylist() if differing is not None else []) == faults
    assert given_out is not bool(faults)


def test_a_chunk_may_differ_once_at_each_key() -> None:
    repairs = Repairs()
    assert repairs.again(pa.array([b"a", b"b"]))
    assert repairs.again(pa.array([b"c"])), "another row: read wrongly for the first time"
    assert not repairs.again(pa.array([b"d", b"b"]))


def test_the_error_names_the_table_the_range_and_both_sums() -> None:
    part = Range((Cell(0x8008, (5).to_bytes(8, "little")), Cell(252, b"\x01x")), None)
    mismatch = ChunkMismatch(
        part, pa.array([b"k"]), digests({b"k": 1}).total, digests({b"k": 2}).total
    )
    keys = unexplained(mismatch, [pa.array([b"z"])])
    assert keys is not None
    text = str(DumpChunkDiffersError.of("shop.t", mismatch, keys))
    for part_of_it in (
        "ErrDumpChunkDiffers",
        "shop.t",
        "(5, x'0178', ]",
        str(mismatch.ours),
        str(mismatch.theirs),
        "6b",
    ):
        assert part_of_it in text, text


def test_what_both_sides_write_differently_is_not_compared() -> None:
    compared = Column(name="a", type=Type.VARCHAR, meta=20, collation=8)
    assert canonical(compared, "`a`") is not None
    for column in (
        Column(name="a", type=Type.VARCHAR, meta=20, collation=19),  # euckr
        Column(name="a", type=Type.VECTOR, meta=4),
    ):
        assert canonical(column, "`a`") is None
