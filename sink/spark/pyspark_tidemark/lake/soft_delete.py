"""Mode `soft-delete`: a row that is deleted stays, and its column `is_deleted` says so.

For a target it is `upsert` with one more column: a delete is an update to the row as it was before,
with `is_deleted` set. `MarkedTables` describes tables with that column, and `marked` changes
deletes as they are read.
"""

import dataclasses
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import ChangefeedMeta, Known, TableMeta
from pyspark_tidemark.names import renaming

IS_DELETED: Final = "is_deleted"
_DELETE, _UPDATE = "delete", "update"
_FIELD: Final = pa.field(IS_DELETED, pa.bool_(), metadata={b"tidemark.own": b"1"})
"""The mark tells our column from one of the upstream's that has its name."""


class _Describes(Protocol):
    def describe(self, ts: int | None = None, *, known: Known | None = None) -> ChangefeedMeta:
        """See `Changefeed`."""
        ...


class MarkedTables:
    """Describes a changefeed's tables with the column `is_deleted`."""

    def __init__(self, changefeed: _Describes) -> None:
        self._changefeed = changefeed

    def describe(self, ts: int | None = None, *, known: Known | None = None) -> ChangefeedMeta:
        """See `Changefeed.describe`.

        Raises:
            SourceError: ErrNameUnsupported, a table has such a column of its own.
        """
        described = self._changefeed.describe(ts, known=known)
        tables = {name: with_mark(table) for name, table in described.tables.items()}
        return dataclasses.replace(described, tables=tables)


def with_mark(table: TableMeta) -> TableMeta:
    """The table with the column; one that has it stays as it is.

    Raises:
        SourceError: ErrNameUnsupported.
    """
    schema = table.schema
    # A merged table has it among the columns of its first shard.
    if any(field.equals(_FIELD, check_metadata=True) for field in schema):
        return table
    clashing = [column for column in schema.names if column.lower() == IS_DELETED]
    if clashing:
        database, _, name = table.name.partition(".")
        raise SourceError(
            "ErrNameUnsupported",
            f"mode soft-delete adds the column {IS_DELETED}, and {table.name} has "
            f"{clashing[0]}. {renaming((database, name), clashing, schema.names)}",
        )
    return dataclasses.replace(table, schema=schema.append(_FIELD))


def marked(rows: Any) -> Any:
    """Changes (pyarrow.Table) as they are written: deletes are updates that mark their rows."""
    gone = pc.equal(rows["_op"], _DELETE)
    place = rows.schema.get_field_index("_op")
    op = pc.if_else(gone, _UPDATE, rows["_op"])
    return rows.set_column(place, rows.schema.field(place), op).append_column(_FIELD, gone)


def as_sent(rows: Any) -> Any:
    """The opposite of `marked`."""
    place = rows.schema.get_field_index("_op")
    op = pc.if_else(rows[IS_DELETED], _DELETE, rows["_op"])
    return rows.set_column(place, rows.schema.field(place), op).drop_columns([IS_DELETED])


def marked_frame(changes: DataFrame) -> DataFrame:
    """As `marked`, of a frame."""
    gone = F.col("_op") == _DELETE
    return changes.withColumns(
        {"_op": F.when(gone, F.lit(_UPDATE)).otherwise(F.col("_op")), IS_DELETED: gone}
    )


def as_sent_frame(changes: DataFrame) -> DataFrame:
    """As `as_sent`, of a frame."""
    op = F.when(F.col(IS_DELETED), F.lit(_DELETE)).otherwise(F.col("_op"))
    return changes.withColumn("_op", op).drop(IS_DELETED)


def all_gone(rows: DataFrame, ts: int, chosen: Column | None = None) -> DataFrame:
    """The rows of a table that was truncated at `ts`, or of which only the `chosen` ones went."""
    going = F.expr("true") if chosen is None else chosen
    when = F.when(going & ~F.col(IS_DELETED), F.lit(ts)).otherwise(F.col("_commit_ts"))
    return rows.withColumns({"_commit_ts": when, IS_DELETED: F.col(IS_DELETED) | going})


def mark_all(table: str, ts: int) -> str:
    """The statement that marks all rows of a quoted table that are not marked."""
    return (
        f"UPDATE {table} SET {IS_DELETED} = true, _commit_ts = {ts} "  # noqa: S608 - quoted
        f"WHERE NOT {IS_DELETED}"
    )
