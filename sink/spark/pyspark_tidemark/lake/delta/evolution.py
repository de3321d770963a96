"""Schemas of Delta tables: added and widened columns in place, renamed and dropped ones by column mapping.

Column mapping is turned on for a table at its first renaming or drop, since it asks more of the table's readers.
"""

from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type

from pyspark_tidemark.lake.delta.tables import DeltaTables
from pyspark_tidemark.lake.literal import with_columns
from pyspark_tidemark.lake.predicate import quoted
from pyspark_tidemark.lake.schema import SchemaChange

_MAPPING = "'delta.columnMapping.mode' = 'name'"
_WITHOUT_ZONE = "'delta.feature.timestampNtz' = 'supported'"
_WIDENING = "'delta.enableTypeWidening' = 'true'"


def alter(tables: DeltaTables, name: str, change: SchemaChange) -> None:
    """Make the steps of a change, each a Delta commit; a crash between them leaves less to change the next time."""
    if change.renamed or change.dropped:
        _set(tables, name, _MAPPING)
    for old, new in change.renamed:
        _alter(tables, name, f"RENAME COLUMN {quoted(old)} TO {quoted(new)}")
    if change.dropped:
        _alter(tables, name, f"DROP COLUMNS ({', '.join(quoted(column) for column in change.dropped)})")
    if change.widened:
        _set(tables, name, _WIDENING)
    for field in change.widened:
        _alter(tables, name, f"ALTER COLUMN {quoted(field.name)} TYPE {_type(field)}")
    if any(pa.types.is_timestamp(field.type) and field.type.tz is None for field in change.added):
        _set(tables, name, _WITHOUT_ZONE)
    if change.filled:
        _add_filled(tables, name, change)
    elif change.added:
        _alter(tables, name, f"ADD COLUMNS ({', '.join(f'{quoted(f.name)} {_type(f)}' for f in change.added)})")


def empty(tables: DeltaTables, name: str) -> None:
    """Delete all rows, in one commit without a fence: doing it again changes nothing."""
    tables.session(name).sql(f"DELETE FROM {tables.sql_name(name)}")  # noqa: S608 - quoted


def end_current(tables: DeltaTables, name: str, ts: int) -> None:
    """End all current versions of an scd2 table at `ts`."""
    tables.session(name).sql(
        f"UPDATE {tables.sql_name(name)} SET valid_to_ts = {ts}, is_current = false WHERE is_current"  # noqa: S608 - quoted
    )


def _add_filled(tables: DeltaTables, name: str, change: SchemaChange) -> None:
    """Columns and what existing rows hold in them, in one commit: after a crash it is either done or all to be done."""
    old = tables.session(name).read.format("delta").load(tables.path(name))
    frame = with_columns(old, change.added, dict(change.filled))
    frame.write.format("delta").mode("overwrite").option("mergeSchema", "true").save(tables.path(name))


def _set(tables: DeltaTables, name: str, setting: str) -> None:
    _alter(tables, name, f"SET TBLPROPERTIES ({setting})")


def _alter(tables: DeltaTables, name: str, clause: str) -> None:
    tables.session(name).sql(f"ALTER TABLE {tables.sql_name(name)} {clause}")


def _type(field: Any) -> str:
    return from_arrow_type(field.type).simpleString()
