"""Rows of format v1 and of binlogs, many at once: pairs of datums, column id then value, as matrices (row, place).

A row without any is one nil byte. The rows of a table mostly have the same columns, so a place holds the same column in
all of them; nothing depends on it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from storage.model.errors import CorruptError
from storage.tidb.binary import BinaryColumn, Mask, Offsets
from storage.tidb.datum import NIL
from storage.tidb.datum_batch import Datums, decode_datums
from storage.tidb.row import COLUMN_ID_MAX

_Numbers = npt.NDArray[np.int64]
_MATRICES: Final = ("used", "ids", "null", "number", "is_number", "is_signed", "begin", "size")
_NO_ID: Final = 1 << 50


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of many rows; `used` says at which places a row has one."""

    column: BinaryColumn
    used: Mask
    ids: _Numbers
    null: Mask
    number: _Numbers
    is_number: Mask
    is_signed: Mask
    begin: Offsets
    size: Offsets

    @classmethod
    def scan(
        cls, column: BinaryColumn, begin: Offsets | None = None, leading: Mapping[int, Datums] | None = None
    ) -> "Pairs":
        """Take rows apart, from `begin` (else from their first byte) to their end.

        `leading` are values that stand before the rows, by column id; a row's own value of the column goes before.

        Raises:
            UncommonDatumError: there is something else than the datums that rows have.
            CorruptError: a row ends within a pair, or a number is too large.
        """
        at = column.begin if begin is None else begin
        if bool(np.any(at >= column.end)):
            raise CorruptError("a row without pairs, and without the byte that says so")
        at = np.where((at + 1 == column.end) & (column.u8(at) == NIL), column.end, at)
        places: list[tuple[Mask, Datums, Datums]] = []
        while bool((used := at < column.end).any()):
            ids = decode_datums(column, at, used)
            if not bool(np.all(ids.is_number | ~used)):
                raise CorruptError("a row has a value where a column id belongs")
            values = decode_datums(column, ids.end, used & (ids.end < column.end))
            at = np.where(used, values.end, at)
            if bool(np.any(used & ((at > column.end) | (ids.end >= column.end)))):
                raise CorruptError("a row ends within a pair of column id and value")
            places.append((used, ids, values))
        pairs = cls(column, *_matrices(len(column), places))
        for column_id, values in reversed(list((leading or {}).items())):
            pairs = pairs._led_by(column_id, values)
        return pairs

    def halves(self) -> "tuple[Pairs, Pairs]":
        """The old and the new row of updates: the new one begins where the first column's id comes again.

        Raises:
            CorruptError: it does not come again.
        """
        again = self.used[:, 1:] & (self.ids[:, 1:] == self.ids[:, :1])
        if not bool(again.any(axis=1).all()):
            raise CorruptError("an update without its new row")
        cut = again.argmax(axis=1) + 1
        places = np.arange(self.ids.shape[1])
        is_old = places < cut[:, None]
        return self._using(self.used & is_old), self._using(self.used & ~is_old)

    def numbers(self, column_id: int) -> tuple[_Numbers, Mask]:
        """The column's integers, and which rows have one."""
        hits = self.used & self.is_number & (self.ids == column_id)
        found = hits.any(axis=1)
        if not len(found) or not hits.shape[1]:
            return np.zeros(len(found), np.int64), found
        return np.take_along_axis(self.number, hits.argmax(axis=1)[:, None], axis=1)[:, 0], found

    def without(self, column_ids: Collection[int]) -> "Pairs":
        """The pairs of other columns."""
        return self._using(self.used & ~np.isin(self.ids, list(column_ids)))

    def sorted(self) -> "Pairs":
        """Each row's pairs as format v2 has them: values by column id, then NULLs by column id, then nothing.

        Raises:
            CorruptError: a row has a column twice, or one that cannot be.
        """
        self._check_ids()
        ranks = self.ids + (self.null.astype(np.int64) << 40) + ((~self.used).astype(np.int64) << 41)
        if bool(np.all(ranks[:, 1:] >= ranks[:, :-1])):
            return self
        order = np.argsort(ranks, axis=1, kind="stable")
        return self._each(lambda matrix: np.take_along_axis(matrix, order, axis=1))

    def _led_by(self, column_id: int, values: Datums) -> "Pairs":
        """With one more place before the others, where they do not have the column."""
        ids = Datums.of_number(column_id, len(self.column))
        used = ~(self.used & (self.ids == column_id)).any(axis=1)
        first = _matrices(len(self.column), [(used, ids, values)])
        own = (getattr(self, name) for name in _MATRICES)
        return Pairs(self.column, *(np.hstack(both) for both in zip(first, own, strict=True)))

    def _check_ids(self) -> None:
        if bool(np.any(((self.ids <= 0) | (self.ids > COLUMN_ID_MAX)) & self.used)):
            raise CorruptError("a row has a column id that no column has")
        if bool(np.all((self.ids[:, 1:] > self.ids[:, :-1]) | ~self.used[:, 1:])):
            return
        ids = np.sort(np.where(self.used, self.ids, _NO_ID + np.arange(self.ids.shape[1])), axis=1)
        if bool(np.any(ids[:, 1:] == ids[:, :-1])):
            raise CorruptError("a row has a column twice")

    def _using(self, used: Mask) -> "Pairs":
        """Only those pairs; places that no row uses are left out."""
        kept = used.any(axis=0)
        pairs = self if bool(kept.all()) else self._each(lambda matrix: matrix[:, kept])
        return replace(pairs, used=used[:, kept])

    def _each(self, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> "Pairs":
        return Pairs(self.column, *(change(getattr(self, name)) for name in _MATRICES))


def _matrices(rows: int, places: list[tuple[Mask, Datums, Datums]]) -> list[npt.NDArray[Any]]:
    """`_MATRICES`, with a column for each place."""
    parts = [
        (used, ids.number, it.is_null, it.number, it.is_number, it.is_signed, it.begin, it.size)
        for used, ids, it in places
    ]
    kinds = (np.bool_, np.int64, np.bool_, np.int64, np.bool_, np.bool_, np.int64, np.int64)
    if not parts:
        return [np.zeros((rows, 0), kind) for kind in kinds]
    return [np.stack(column, axis=1) for column in zip(*parts, strict=True)]
