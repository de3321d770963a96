"""Whether a chunk is what its table holds: sums by the server over the chunk's keys,
and by us over what was decoded.

    digest of a row  = CRC32(texts of its columns, joined by commas) * 2654435761, as u64
    total of a range = COUNT(*), BIT_XOR(digest)

The factor is there as CRC-32 alone is linear: its exclusive-or stays the same when two rows swap
values of one column. A chunk is read, then its range is summed, both between the two watermarks of
its window. Equal totals: it is right. Else digests are asked for row by row, which gives the keys
that differ, and what the log changed in the window tells which of them may: any other key had one
and the same row all the time (`window.py`). Nothing waits for quiet. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from server.dump.mysql.check_value import Canonical, canonical, crc32s
from server.dump.mysql.chunk import UNSIGNED, ChunkQuery, selected, stored
from server.dump.progress import Cell, Cursor, Range
from storage.model.errors import CorruptError
from storage.mysql.arrow import arrow_columns
from storage.mysql.binary_row import BinaryShape, binary_keys
from storage.mysql.buffer import PAD_BYTES, Bytes
from storage.mysql.key import key_columns
from storage.mysql.schema import Column, Table
from storage.mysql.types import INTEGERS, Type

FACTOR: Final = 2_654_435_761
_DIGEST: Final = Column(name="digest", type=Type.LONGLONG, unsigned=True, nullable=False)
_PAIR: Final = (_DIGEST, _DIGEST)


@dataclass(frozen=True, slots=True)
class Total:
    """Of the rows of a range."""

    rows: int
    digest: int

    def __str__(self) -> str:
        """As messages show it."""
        return f"{self.rows} rows, {self.digest:016x}"


@dataclass(frozen=True, slots=True)
class Digests:
    """Of rows by their canonical keys."""

    keys: pa.Array
    digests: npt.NDArray[np.uint64]

    @property
    def total(self) -> Total:
        """Of all of them."""
        return Total(
            len(self.keys), int(np.bitwise_xor.reduce(self.digests)) if len(self.digests) else 0
        )

    def differing(self, other: "Digests") -> pa.Array:
        """The keys that not both have, or with another digest."""
        place = pc.index_in(other.keys, value_set=self.keys)
        present = np.asarray(place.is_valid())
        mine = np.zeros(len(other.keys), np.uint64)
        mine[present] = self.digests[np.asarray(place.drop_null())]
        theirs = other.keys.filter(pa.array(~present | (mine != other.digests)))
        return pa.concat_arrays(
            [theirs, self.keys.filter(pc.invert(pc.is_in(self.keys, value_set=other.keys)))]
        )


@dataclass(frozen=True, slots=True)
class Doubt:
    """The keys of a range whose rows are not the server's; those that changed meanwhile may be."""

    part: Range
    keys: pa.Array
    ours: Total
    theirs: Total


class Check:
    """How the chunks of one table are checked."""

    def __init__(self, query: ChunkQuery) -> None:
        self._query = query
        self._table = query.table
        self._taken = [
            each for each in enumerate(query.table.columns) if each[1].name not in query.left_out
        ]
        candidates = [(place, canonical(column, stored(column))) for place, column in self._taken]
        self._columns: list[tuple[int, Canonical]] = [
            (place, each) for place, each in candidates if each is not None
        ]
        texts = (
            ", ".join(["','", *(each.sql for _, each in self._columns)])
            if self._columns
            else "',', ''"
        )
        self._digest = f"CRC32(CONCAT_WS({texts})) * {FACTOR}"

    @property
    def unchecked(self) -> tuple[str, ...]:
        """The names of columns that cannot be compared,
        as the server and we write them differently.
        """
        places = {place for place, _ in self._columns}
        return tuple(column.name for place, column in self._taken if place not in places)

    def total_sql(self, part: Range) -> str:
        """Asks for the total of a range; `ChunkQuery.bounds` are its parameters."""
        return f"SELECT COUNT(*), BIT_XOR({self._digest}) {self._of(part)}"

    def rows_sql(self, part: Range) -> str:
        """Asks for the keys and digests of a range, as `total_sql`."""
        keys = ", ".join(selected(self._table.columns[place]) for place in self._table.key_places)
        return f"SELECT {keys}, {self._digest} {self._of(part)}"

    def ours(self, keys: pa.Array, rows: pa.Array) -> Digests:
        """Of rows behind their format byte, as their readers decode them.

        Raises:
            CorruptError: they are not of this table.
        """
        columns = arrow_columns(self._table, rows)
        texts = [each.text(columns[place]) for place, each in self._columns]
        joined = (
            pc.binary_join_element_wise(*texts, b",")
            if texts
            else pa.array([b""] * len(rows), pa.binary())
        )
        return Digests(keys, crc32s(joined).astype(np.uint64) * np.uint64(FACTOR))

    def total(self, rows: pa.Array) -> Total:
        """The answer to `total_sql`."""
        data, at = _content(rows)
        cells = BinaryShape.of(_PAIR).find(data, at, (0, 1))
        count, digest = (int(data.number(cells[place].begin, 8)[0]) for place in (0, 1))
        return Total(count, digest)

    def theirs(self, rows: pa.Array) -> Digests:
        """The answer to `rows_sql`."""
        if not len(rows):
            return Digests(pa.array([], pa.binary()), np.zeros(0, np.uint64))
        data, at = _content(rows)
        columns = [*(self._table.columns[place] for place in self._table.key_places), _DIGEST]
        answer = Table(self._table.id, self._table.name, tuple(columns), self._table.primary_key)
        keys = binary_keys(data, at, columns, key_columns(answer))
        last = len(columns) - 1
        digests = data.number(BinaryShape.of(columns).find(data, at, (last,))[last].begin, 8)
        return Digests(keys, digests.astype(np.uint64))

    def _of(self, part: Range) -> str:
        return self._query.of(after=part.after is not None, until=part.until is not None)


class DumpChunkDiffersError(CorruptError):
    """What was decoded of a chunk is not what the server has, twice."""

    code = "ErrDumpChunkDiffers"

    @classmethod
    def of(cls, table: str, doubt: Doubt, keys: pa.Array) -> "DumpChunkDiffersError":
        """The chunk of a doubt, with the keys that nothing explains."""
        shown = ", ".join(key.hex() for key in keys.slice(0, 3).to_pylist())
        after, until = (shown_cursor(each) for each in (doubt.part.after, doubt.part.until))
        return cls(
            f"rows of {table} with keys in ({after}, {until}] are not as the server has them, "
            f"also when read again: read {doubt.ours}; the server has {doubt.theirs}; {len(keys)} "
            f"keys differ: {shown}, … (stored bytes). Nothing of it was delivered. If a condition "
            "depends on more than the row, correct it; else report this, and dump the table "
            "without --verify, or leave it out"
        )


class Repairs:
    """Which keys of a table's chunks differed: such a chunk is read again once. Pure."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def again(self, keys: pa.Array) -> bool:
        """A chunk differs at these keys; returns whether reading it again may help:
        not if one of them did before.
        """
        new_keys = set(keys.to_pylist())
        helps = not new_keys & self._keys
        self._keys |= new_keys
        return helps


def _content(rows: pa.Array) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """The bytes of rows behind their format byte, and where each row begins."""
    _, offsets, content = rows.buffers()
    begin = np.frombuffer(offsets, np.int32)[rows.offset : rows.offset + len(rows)].astype(np.int64)
    return Bytes(
        np.concatenate([np.frombuffer(content, np.uint8), np.zeros(PAD_BYTES, np.uint8)])
    ), begin + 1


def shown_cursor(cursor: Cursor | None) -> str:
    """The values of a key as messages show them."""
    return "" if cursor is None else ", ".join(map(_shown_cell, cursor))


def _shown_cell(cell: Cell) -> str:
    kind = cell.type & ~UNSIGNED
    if kind in INTEGERS:
        return str(int.from_bytes(cell.data, "little", signed=kind == cell.type))
    return f"x'{cell.data.hex()}'"


def unexplained(doubt: Doubt | None, changed: Sequence[pa.Array]) -> pa.Array | None:
    """The keys of a doubt that the log did not change in the window; None if there are none."""
    if doubt is None or not changed:
        return None if doubt is None else doubt.keys
    keys = doubt.keys.filter(pc.invert(pc.is_in(doubt.keys, value_set=pa.concat_arrays(changed))))
    return keys if len(keys) else None
