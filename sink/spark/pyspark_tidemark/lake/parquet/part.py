"""The file that holds a cut of a Parquet changelog: written in row groups, counted on the way.

Invariant: however large the cut is, what is in memory of it is one row group.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_tidemark.defaults import with_column_ids
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.changes import Changes, Counted
from pyspark_tidemark.lake.checksum import checksum, hexadecimal

PART = "part-00000.parquet"
"""The file's name in its cut's directory."""
_GROUP_BYTES = 32 << 20
_FIELD_ID = b"PARQUET:field_id"
_NO_ID = -1


def write_part(changes: Changes, file: Any) -> Counted:
    """Write all rows of a cut, or none, to a path or a binary file; they come in commit order."""
    rows, total = 0, 0
    with pq.ParquetWriter(file, with_field_ids(changes.table)) as writer:
        for group in _groups(changes):
            writer.write_table(group)
            here, part = checksum([group])
            rows, total = rows + here, total + part
    return Counted(rows, hexadecimal(total))


def with_field_ids(table: TableMeta) -> Any:
    """The columns of a table with their identities as Parquet's field ids,
    which readers may choose columns by.
    """
    return pa.schema(
        [
            field.with_metadata({_FIELD_ID: str(table.column_ids[field.name])})
            if field.name in table.column_ids
            else field
            for field in table.schema
        ]
    )


def read_columns(file: Any) -> Any:
    """The pyarrow.Schema of a file, with the identities of its columns."""
    schema = pq.read_schema(file).remove_metadata()
    ids = {field.name: int((field.metadata or {}).get(_FIELD_ID, _NO_ID)) for field in schema}
    return with_column_ids(
        schema, {name: number for name, number in ids.items() if number != _NO_ID}
    )


def _groups(changes: Changes) -> Iterator[Any]:
    pending, size = [], 0
    for batch in changes.batches():
        pending.append(batch)
        size += batch.nbytes
        if size >= _GROUP_BYTES:
            yield pa.Table.from_batches(pending)
            pending, size = [], 0
    if pending:
        yield pa.Table.from_batches(pending)
