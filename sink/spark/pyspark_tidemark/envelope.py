"""The envelope: one schema for the changes of all tables, with key,
row before and row after as JSON text.

It never changes, so schema changes pass through it: they come as rows themselves, `_op` is `ddl`,
`after` tells the statement and what it did to the table, and rows with a larger `_commit_ts` have
the new columns.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_tidemark.flight import BEFORE, Ddl
from pyspark_tidemark.json_text import objects

META = ("_op", "_commit_ts", "_start_ts", "_seq")
SCHEMA = pa.schema(
    [
        ("_op", pa.string()),
        *((name, pa.int64()) for name in META[1:]),
        *((name, pa.string()) for name in ("_table", "key", "before", "after")),
    ]
)


def enveloped(rows: Any, table: str, key: Sequence[str]) -> Any:
    """Mounted rows of one table in the envelope; a table without a key has null keys."""
    names = [name for name in rows.schema.names if name not in (*META, BEFORE)]
    row = objects(names, [rows[name] for name in names])
    is_delete = pc.equal(rows["_op"], "delete")
    nothing = pa.nulls(len(rows), pa.string())
    before = _before(rows[BEFORE], names) if BEFORE in rows.schema.names else nothing
    columns = [
        *(rows[name] for name in META),
        pa.repeat(pa.scalar(table), len(rows)),
        objects(key, [rows[name] for name in key]) if key else nothing,
        pc.if_else(is_delete, row, before),
        pc.if_else(is_delete, None, row),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def ddl_rows(ddl: Ddl, tables: Sequence[str]) -> Any:
    """A schema change, a row for each of `tables`."""
    after = [
        json.dumps({"query": ddl.query} | dict(_deeds(ddl, name)), ensure_ascii=False)
        for name in tables
    ]
    count = len(tables)
    columns = [
        ["ddl"] * count,
        [ddl.ts] * count,
        [ddl.ts] * count,
        range(count),
        tables,
        *[[None] * count] * 2,
        after,
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _deeds(ddl: Ddl, name: str) -> Iterator[tuple[str, Any]]:
    for deed in ("dropped", "truncated"):
        if name in getattr(ddl, deed):
            yield deed, True
    for old, new in ddl.renamed:
        if name in (old, new):
            yield ("renamed_to", new) if name == old else ("renamed_from", old)


def _before(images: Any, names: Sequence[str]) -> Any:
    columns = [pc.struct_field(images, [name]) for name in names]
    return pc.if_else(images.is_valid(), objects(names, columns), None)
