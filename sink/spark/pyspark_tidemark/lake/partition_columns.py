"""Whether the columns of a table allow the partitions that `partition-by` asks for, and the rows of
each partition. Pure.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.partitioning import (
    DAYS,
    HOURS,
    IDENTITY,
    MONTHS,
    TRUNCATE,
    YEARS,
    PartitionField,
)


def check_fields(table: str, fields: Sequence[PartitionField], schema: pa.Schema) -> None:
    """Check that a table has the columns that it is to be partitioned by.

    Raises:
        SourceError: ErrPartitionUnsupported.
    """
    if faults := [fault for field in fields if (fault := field_fault(field, schema))]:
        raise SourceError(
            "ErrPartitionUnsupported",
            f"{table} cannot be partitioned as partition-by asks: {'; '.join(faults)}",
        )


def field_fault(field: PartitionField, schema: pa.Schema) -> str:
    """Why a table with these columns cannot be partitioned by a field; empty: it can."""
    if field.column not in schema.names:
        return f"there is no column {field.column}"
    kind = schema.field(field.column).type
    if not _fits(field.transform, kind):
        return f"{field} is not possible for a column of type {kind}"
    return ""


def _fits(transform: str, kind: pa.DataType) -> bool:
    types = pa.types
    if transform == HOURS:
        return bool(types.is_timestamp(kind))
    if transform in (YEARS, MONTHS, DAYS):
        return bool(types.is_timestamp(kind) or types.is_date(kind))
    of_bytes = types.is_string(kind) or types.is_binary(kind)
    numeric = types.is_integer(kind) or types.is_decimal(kind)
    if transform == TRUNCATE:
        return bool(of_bytes or numeric)
    # Two engines may differ in whether 0.0 is -0.0, and NaN itself.
    is_flag = transform == IDENTITY and types.is_boolean(kind)
    return bool(of_bytes or numeric or types.is_timestamp(kind) or types.is_date(kind) or is_flag)


def grouped(rows: Any, values: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """The rows (pyarrow.Table) for which each column of `values` (pyarrow.Array) has one value, in
    their order; and the place of the first one.
    """
    if not len(rows):
        return
    groups = _numbered(values)
    order = np.argsort(groups, kind="stable")
    begins = np.flatnonzero(np.diff(groups[order], prepend=-1))
    for begin, end in zip(begins, [*begins[1:], len(order)], strict=True):
        places = order[begin:end]
        part = rows if len(places) == len(rows) else rows.take(pa.array(places))
        yield int(places[0]), part


def _numbered(columns: Sequence[Any]) -> Any:
    """A number for each row, equal where all values are."""
    groups = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        codes = pc.dictionary_encode(column, null_encoding="encode")
        numbers = codes.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        # Numbered anew for each column: a product of many columns' counts may not fit.
        _, groups = np.unique(groups * len(codes.dictionary) + numbers, return_inverse=True)
    return groups
