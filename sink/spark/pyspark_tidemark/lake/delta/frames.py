"""DataFrames as Delta writes them: with the identities of their columns, and without texts that its
log would take for nulls.
"""

from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame, DataFrameWriter
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import StringType

from pyspark_tidemark.column_metadata import COLUMN_ID
from pyspark_tidemark.lake.columns import quoted
from pyspark_tidemark.lake.delta.partitions import NULL_TEXTS, refusal


def partitioned(frame: DataFrame, columns: Sequence[str]) -> DataFrameWriter:
    """What writes a frame as a table that these columns partition."""
    writer = without_null_texts(frame, columns).write.format("delta")
    return writer.partitionBy(*columns) if columns else writer


def without_null_texts(
    frame: DataFrame, columns: Sequence[str], is_written: Column | None = None
) -> DataFrame:
    """A frame, reading which fails at a text that Delta would take for a null, in one of `columns`,
    which partition the table; `is_written` says of which rows, by default of all.
    """
    texts = [name for name in columns if isinstance(frame.schema[name].dataType, StringType)]
    if not texts:
        return frame
    checked_rows = F.expr("true") if is_written is None else is_written
    return frame.select(
        [
            # With its metadata, which has the column's identity.
            _checked(name, checked_rows).alias(name, metadata=frame.schema[name].metadata)
            if name in texts
            else F.col(quoted(name))
            for name in frame.columns
        ]
    )


def _checked(name: str, is_written: Column) -> Column:
    column = F.col(quoted(name))
    refused = F.raise_error(F.lit(f"[TM:ErrPartitionUnsupported] {refusal(name)}"))
    return F.when(is_written & column.isin(list(NULL_TEXTS)), refused).otherwise(column)


def identified(frame: DataFrame, ids: Mapping[str, int]) -> DataFrame:
    """The frame with the identities of its columns in their metadata,
    which Delta keeps in the table's schema.
    """
    return frame.select(
        [
            F.col(quoted(name)).alias(name, metadata={COLUMN_ID.decode(): ids[name]})
            if name in ids
            else F.col(quoted(name))
            for name in frame.columns
        ]
    )
