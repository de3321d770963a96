"""Whether the columns of a table allow the partitions that `partition-by` asks for. Pure."""

from collections.abc import Sequence

import pyarrow as pa

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
    """See that a table has the columns that it is to be partitioned by.

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
