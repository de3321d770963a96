"""The file that holds a cut of a Parquet changelog: written in row groups, counted on the way.

Invariant: however large the cut is, what is in memory of it is one row group.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_tidemark.lake.changes import Changes, Counted
from pyspark_tidemark.lake.checksum import checksum, hexadecimal

PART = "part-00000.parquet"
"""The file's name in its cut's directory."""
_GROUP_BYTES = 32 << 20


def write_part(changes: Changes, file: Any) -> Counted:
    """Write all rows of a cut, or none, to a path or a binary file; they come in commit order."""
    rows, total = 0, 0
    with pq.ParquetWriter(file, changes.table.schema) as writer:
        for group in _groups(changes):
            writer.write_table(group)
            here, part = checksum([group])
            rows, total = rows + here, total + part
    return Counted(rows, hexadecimal(total))


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
