"""A PostgreSQL lake in one snapshot: rows by COPY as CSV, read column by column."""

import binascii
import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv
from pyspark_tidemark.lake.databases import manifest
from pyspark_tidemark.lake.databases.database import driver_errors
from pyspark_tidemark.lake.databases.postgres import Postgres
from pyspark_tidemark.sink_uri import SinkUri

_PIECE_BYTES = 4 << 20
_HEX_MARK = 2


class PostgresReader:
    """Implements `server.verify.lake.database_lake.Reader`."""

    def __init__(self, uri: SinkUri) -> None:
        self._database = Postgres(uri)
        with driver_errors(self._database):
            self._connection = self._database.connect()
            self._connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            self._connection.read_only = True

    def quoted(self, name: str) -> str:
        """See `Reader`."""
        return self._database.quoted(name)

    def quoted_table(self, name: str) -> str:
        """See `Reader`."""
        return self._database.quoted_table(name)

    def manifest(self, changefeed: str) -> tuple[str | None, Mapping[str, int]]:
        """See `Reader`."""
        newest = f"SELECT document FROM {manifest.CUTS} WHERE app = %s ORDER BY end_ts DESC LIMIT 1"  # noqa: S608 - ours
        fences = f"SELECT name, end_ts FROM {manifest.TABLES} WHERE app = %s"  # noqa: S608 - ours
        with driver_errors(self._database), self._connection.cursor() as cursor:
            cursor.execute(newest, (changefeed,))
            row = cursor.fetchone()
            cursor.execute(fences, (changefeed,))
            return (None if row is None else str(row[0])), {
                name: int(ts) for name, ts in cursor.fetchall()
            }

    def batches(self, table: str, query: str, schema: Any) -> Iterator[Any]:
        """See `Reader`."""
        del table
        selected = query.replace("{columns}", ", ".join(map(self.quoted, schema.names)))
        statement = f"COPY ({selected}) TO STDOUT (FORMAT csv)"
        with (
            driver_errors(self._database),
            self._connection.cursor() as cursor,
            cursor.copy(statement.encode()) as copy,
        ):
            for text in _joined(copy):
                yield read_csv(text, schema)

    def close(self) -> None:
        """See `Reader`."""
        self._connection.close()


def _joined(lines: Any) -> Iterator[bytes]:
    """Many rows in one text; COPY brings each by itself."""
    waiting, size = [], 0
    for line in lines:
        waiting.append(bytes(line))
        size += len(line)
        if size >= _PIECE_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def read_csv(text: bytes, schema: Any) -> Any:
    """Lines as COPY writes them, in the schema's types: null is an empty field without quotes.

    Pure.
    """
    # The reader knows no hexadecimal digits: binary columns are text at first.
    types = {
        field.name: pa.string() if pa.types.is_binary(field.type) else field.type
        for field in schema
    }
    convert = csv.ConvertOptions(
        column_types=types,
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        true_values=["t", "true"],
        false_values=["f", "false"],
    )
    table = csv.read_csv(
        io.BytesIO(text),
        csv.ReadOptions(column_names=schema.names, use_threads=False, block_size=max(len(text), 1)),
        csv.ParseOptions(newlines_in_values=True),
        convert,
    ).combine_chunks()
    columns = [
        _unhexed(table[field.name].combine_chunks())
        if pa.types.is_binary(field.type)
        else table[field.name].combine_chunks()
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _unhexed(texts: Any) -> Any:
    """Binary values out of a mark and their digits."""
    # One unhexlify for the whole column: a value's bytes are half as many as its digits.
    digits = pc.fill_null(pc.utf8_slice_codeunits(texts, _HEX_MARK), "")
    ends = np.concatenate([[0], np.cumsum(np.asarray(pc.binary_length(digits)) // 2)]).astype(
        np.int32
    )
    content = digits.buffers()[2]
    data = binascii.unhexlify(content.to_pybytes()[: 2 * ends[-1]]) if content is not None else b""
    values = pa.Array.from_buffers(
        pa.binary(), len(digits), [None, pa.py_buffer(ends), pa.py_buffer(data)]
    )
    return pc.if_else(texts.is_valid(), values, None)
