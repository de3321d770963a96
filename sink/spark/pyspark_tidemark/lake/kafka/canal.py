"""The protocol canal-json, as TiCDC writes it: one message a row, values as strings. Pure.

| Arrow type | value | mysqlType, sqlType |
|---|---|---|
| int8, int16, int32, int64 | digits | tinyint -6, smallint 5, int 4, bigint -5 |
| decimal | digits, with its scale | decimal 3 |
| float, double | the shortest digits that are the same number | float 7, double 8 |
| bool | 1 or 0 | tinyint -6 |
| string (and TIME, JSON, ENUM, SET) | the text | varchar 12 |
| binary (and BIT) | each byte as the character of that number (ISO 8859-1) | blob 2004 |
| date | 2026-01-02 | date 91 |
| timestamp without, with zone | 2026-01-02 03:04:05.678, in UTC | datetime 93, timestamp 93 |
"""

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.json_text import escaped, objects, quoted
from pyspark_tidemark.lake.kafka.messages import (
    Message,
    Messages,
    Rows,
    Statement,
    compact,
    joined,
    physical_ms,
)

_NO_ROW = {"sqlType": None, "mysqlType": None, "data": None, "old": None}


@dataclasses.dataclass(frozen=True)
class CanalJson:
    """Implements `Encoder`."""

    extended: bool = False
    """Whether messages have `_tidb`, and markers are watermarks (`enable-tidb-extension`)."""
    ddl_to_all = False

    def rows(self, table: TableMeta, batch: Any, built_ms: int) -> Messages:
        """See `Encoder`."""
        rows = Rows.of(batch)
        data = objects(rows.names, rows.columns, texts)
        values = joined(
            _row_head(table),
            _types(rows),
            ',"es":',
            rows.physical_ms.cast(pa.string()),
            f',"ts":{built_ms},"sql":"",{_column_types(rows)},"data":[',
            data,
            '],"old":',
            _old(rows),
            *((',"_tidb":{"commitTs":', rows.commit_ts.cast(pa.string()), "}}")
              if self.extended else ("}",)),
        )  # fmt: skip
        return Messages(_keys(table, rows), values)

    def statement(self, statement: Statement, built_ms: int) -> Message:
        """See `Encoder`."""
        database, _, name = statement.table.partition(".")
        ddl = statement.ddl
        document = {
            "id": 0,
            "database": database,
            "table": name,
            "pkNames": None,
            "isDdl": True,
            "type": statement.kind,
            "es": physical_ms(ddl.ts),
            "ts": built_ms,
            "sql": ddl.query,
        }
        more = {"_tidb": {"commitTs": ddl.ts}} if self.extended else {}
        key = compact({"database": database, "table": name})
        return Message(key.encode(), compact(document | _NO_ROW | more).encode())

    def watermark(self, ts: int, built_ms: int) -> bytes | None:
        """See `Encoder`."""
        if not self.extended:
            return None
        document = {
            "id": 0,
            "database": "",
            "table": "",
            "pkNames": None,
            "isDdl": False,
            "type": "TIDB_WATERMARK",
            "es": physical_ms(ts),
            "ts": built_ms,
            "sql": "",
        }
        return compact(document | _NO_ROW | {"_tidb": {"watermarkTs": ts}}).encode()


def texts(column: Any) -> Any:
    """One JSON string a row, null where the column is null."""
    kind = column.type
    if pa.types.is_boolean(kind):
        return quoted(pc.if_else(column, "1", "0"))
    if pa.types.is_binary(kind):
        return quoted(escaped(_latin_1(column)))
    if pa.types.is_timestamp(kind):
        # The zone is UTC already, and Arrow always writes six digits of a second.
        plain = column.cast(pa.timestamp("us")).cast(pa.string())
        return quoted(pc.replace_substring_regex(plain, r"\.?0+$", ""))
    if pa.types.is_string(kind):
        return quoted(escaped(column))
    return quoted(column.cast(pa.string()))


def _row_head(table: TableMeta) -> str:
    database, _, name = table.name.partition(".")
    key = list(table.key) or None
    head = {"id": 0, "database": database, "table": name, "pkNames": key, "isDdl": False}
    return compact(head)[:-1] + ',"type":"'


def _types(rows: Rows) -> Any:
    # An update whose row before is not told may be one of a dump: consumers may not have the row.
    updated = pc.if_else(rows.has_before, 'UPDATE"', 'INSERT"')
    return pc.if_else(rows.is_insert, 'INSERT"', pc.if_else(rows.is_delete, 'DELETE"', updated))


def _old(rows: Rows) -> Any:
    if rows.before is None:
        return "null"
    fields = list(rows.before.type)
    befores = objects([field.name for field in fields], rows.before.flatten(), texts)
    is_update = pc.and_(rows.before.is_valid(), pc.invert(pc.or_(rows.is_insert, rows.is_delete)))
    return pc.if_else(is_update, joined("[", befores, "]"), "null")


def _keys(table: TableMeta, rows: Rows) -> Any:
    database, _, name = table.name.partition(".")
    head = compact({"database": database, "table": name})[:-1]
    if not table.key:
        return pa.array([head + "}"] * len(rows.op), pa.string())
    return joined(head + ',"key":', objects(table.key, rows.key_columns(table.key), texts), "}")


def _column_types(rows: Rows) -> str:
    kinds = [_type(column.type) for column in rows.columns]
    sql = {name: number for name, (_, number) in zip(rows.names, kinds, strict=True)}
    mysql = {name: kind for name, (kind, _) in zip(rows.names, kinds, strict=True)}
    return f'"sqlType":{compact(sql)},"mysqlType":{compact(mysql)}'


_PLAIN = {
    pa.int8(): ("tinyint", -6),
    pa.int16(): ("smallint", 5),
    pa.int32(): ("int", 4),
    pa.int64(): ("bigint", -5),
    pa.bool_(): ("tinyint", -6),
    pa.float32(): ("float", 7),
    pa.float64(): ("double", 8),
    pa.string(): ("varchar", 12),
    pa.binary(): ("blob", 2004),
    pa.date32(): ("date", 91),
}


def _type(kind: Any) -> tuple[str, int]:
    if pa.types.is_decimal(kind):
        return "decimal", 3
    if pa.types.is_timestamp(kind):
        return ("datetime" if kind.tz is None else "timestamp"), 93
    return _PLAIN[kind]


def _latin_1(data: Any) -> Any:
    """Each byte as the character of that number, of a binary array."""
    cells = pa.concat_arrays([data])
    offsets = np.frombuffer(cells.buffers()[1], np.int32)[
        cells.offset : cells.offset + len(cells) + 1
    ].astype(np.int64)
    raw = cells.buffers()[2]
    given = np.frombuffer(raw, np.uint8)[offsets[0] : offsets[-1]] if raw else np.empty(0, np.uint8)
    # In UTF-8 a character above 127 is two bytes.
    high = given >= 0x80
    places = np.concatenate([[0], np.cumsum(1 + high)])
    text = np.empty(places[-1], np.uint8)
    text[places[:-1]] = np.where(high, 0xC0 | given >> 6, given)
    text[places[:-1][high] + 1] = 0x80 | given[high] & 0x3F
    ends = places[offsets - offsets[0]].astype(np.int32)
    encoded = pa.StringArray.from_buffers(len(cells), pa.py_buffer(ends), pa.py_buffer(text))
    return pc.if_else(data.is_valid(), encoded, None)
