"""The order of rows within the data files of an Iceberg table, by the table's sort order, computed
with Arrow, as tasks have no Java. Pure.

Invariant: the order is the same whenever it is computed of the same rows, and equal rows stay as
they were: who knows where rows were before knows where they are after.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.iceberg.partitions import IDENTITY, is_known, transformed
from pyspark_tidemark.lake.iceberg.types import field_ids


@dataclass(frozen=True)
class OrderField:
    """One field of a sort order."""

    source: int
    """The field id of its column."""
    transform: str
    """As Iceberg writes it, `bucket[16]`."""
    is_descending: bool
    nulls_first: bool


@dataclass(frozen=True)
class RowOrder:
    """A sort order; pickled into tasks."""

    number: int = 0
    """Its id, which files name that are sorted by it; 0: they are not sorted."""
    fields: tuple[OrderField, ...] = ()

    @classmethod
    def parse(cls, text: str, schema: Any) -> "RowOrder":
        """Read Iceberg's JSON of the sort order of a table with a pyarrow.Schema.

        One by what cannot be computed here, as another engine may have given it, is none: files
        need not be sorted, and say that they are not.
        """
        described = json.loads(text)
        fields = tuple(
            OrderField(
                int(each["source-id"]),
                str(each["transform"]),
                each["direction"] == "desc",
                each["null-order"] == "nulls-first",
            )
            for each in described["fields"]
            if "source-id" in each
        )
        types = {number: schema.field(name).type for name, number in field_ids(schema).items()}
        if len(fields) < len(described["fields"]) or not all(_fits(each, types) for each in fields):
            return cls()
        return cls(int(described["order-id"]), fields) if fields else cls()

    def places(self, rows: Any, columns: Mapping[int, str]) -> Any:
        """Where the rows (pyarrow.Table) are of which the order is made, first to last (NumPy);
        `columns` are the names of the columns by field id.
        """
        keys: dict[str, Any] = {}
        directions: list[tuple[str, str]] = []
        for number, field in enumerate(self.fields):
            column = rows[columns[field.source]]
            values = (
                _sortable(column)
                if field.transform == IDENTITY
                else transformed(field.transform, column)
            )
            if values.null_count:
                # Arrow has one place for the nulls of all columns.
                keys[f"null{number}"] = pc.is_null(values)
                directions.append((f"null{number}", _direction(field.nulls_first)))
            keys[f"{number}"] = values
            directions.append((f"{number}", _direction(field.is_descending)))
        places = pc.sort_indices(pa.table(keys), sort_keys=directions)
        return places.to_numpy(zero_copy_only=False).astype(np.int64)


class Runs:
    """Several runs of rows, one after the other, that are to be in one order."""

    def __init__(self, places: Any, lengths: Sequence[int]) -> None:
        """`places` are those of all rows, as `RowOrder.places` has them; `lengths` are the
        runs'.
        """
        self._places = places
        self._run_of = np.searchsorted(np.cumsum(lengths), places, side="right")
        self._count = len(lengths)

    @property
    def are_sorted(self) -> bool:
        """Whether each run has the order already."""
        by_run = self._places[np.argsort(self._run_of, kind="stable")]
        return bool((by_run == np.arange(len(by_run))).all())

    def merged(self, runs: Sequence[Iterator[Any]], at_once: int) -> Iterator[Any]:
        """The rows of runs that are sorted (each an iterator of pyarrow.Tables), in order, so many
        at once; no more of a run is in memory than what it has yielded last, and these.
        """
        readers = [_Reader(run) for run in runs]
        for begin in range(0, len(self._places), at_once):
            run_of = self._run_of[begin : begin + at_once]
            counts = np.bincount(run_of, minlength=self._count)
            parts = [reader.next(int(count)) for reader, count in zip(readers, counts, strict=True)]
            grouped = np.empty(len(run_of), np.int64)
            grouped[np.argsort(run_of, kind="stable")] = np.arange(len(run_of))
            rows = pa.concat_tables([part for each in parts for part in each])
            yield rows.take(pa.array(grouped))


class _Reader:
    """Takes rows from a run."""

    def __init__(self, run: Iterator[Any]) -> None:
        self._run = run
        self._rest: Any = None

    def next(self, count: int) -> list[Any]:
        """The next rows, in tables."""
        parts = []
        while count:
            if self._rest is None or not len(self._rest):
                self._rest = next(self._run)
            parts.append(self._rest.slice(0, count))
            self._rest = self._rest.slice(len(parts[-1]))
            count -= len(parts[-1])
        return parts


def _sortable(column: Any) -> Any:
    """A column as Arrow sorts it in Iceberg's order: floating point numbers as integers, from -NaN
    and -0.0 before 0.0 to NaN, which Arrow would put beside the nulls.
    """
    if not pa.types.is_floating(column.type):
        return column
    bits = pc.fill_null(column.cast(pa.float64()), 0.0).to_numpy().view(np.int64)
    # Of two negative numbers the one with more bits is the smaller one.
    keys = np.where(bits < 0, bits ^ np.iinfo(np.int64).max, bits)
    return pa.array(keys, mask=pc.is_null(column).to_numpy())


def _direction(is_descending: bool) -> str:  # noqa: FBT001 - the one thing that it says
    return "descending" if is_descending else "ascending"


def _fits(field: OrderField, types: Mapping[int, Any]) -> bool:
    if field.source not in types or not is_known(field.transform):
        return False
    if field.transform == IDENTITY and pa.types.is_floating(types[field.source]):
        return True
    try:
        transformed(field.transform, pa.array([], types[field.source]))
    except SourceError:
        return False
    return True
