"""The protocol debezium-json, as TiCDC and Debezium's MySQL connector write it: one message a row,
with the schema of both key and value unless `debezium-disable-schema` is true. Pure.

| Arrow type | value | schema |
|---|---|---|
| int8, int16; int32; int64 | a number | int16; int32; int64 |
| decimal | a string, all digits | string |
| float; double | a number | float; double |
| bool | true or false | boolean |
| string (and TIME, JSON, ENUM, SET) | the text | string |
| binary (and BIT) | a string, base64 | bytes |
| date | days since 1970 | int32, io.debezium.time.Date |
| timestamp without zone | microseconds since 1970 | int64, io.debezium.time.MicroTimestamp |
| timestamp with zone | 2026-01-02T03:04:05.678901Z | string, io.debezium.time.ZonedTimestamp |
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.json_text import objects, quoted, values
from pyspark_tidemark.lake.kafka.messages import (
    Message,
    Messages,
    Rows,
    Statement,
    compact,
    joined,
    physical_ms,
)
from pyspark_tidemark.lake.schema import ENVELOPE

TABLE_IN_KEY: Final = "__dbz__physicalTableIdentifier"
"""The member of a key that has the table's name: what Debezium's ByLogicalTableRouter adds, where
several tables share a topic.
"""
_VERSION: Final = "2.4.0.Final"
_CHANGES: Final = {"CREATE": "CREATE", "ERASE": "DROP"}
_CONNECTOR: Final = "io.debezium.connector.mysql"


@dataclasses.dataclass(frozen=True)
class DebeziumJson:
    """Implements `Encoder`."""

    name: str
    """The logical name of the source: the changefeed."""
    with_schema: bool = True
    extended: bool = False
    """Whether markers are watermarks (`enable-tidb-extension`)."""
    ddl_to_all = True

    def rows(self, table: TableMeta, batch: Any, built_ms: int) -> Messages:
        """See `Encoder`."""
        rows = Rows.of(batch)
        row = objects(rows.names, rows.columns, json_values)
        is_read = pc.invert(pc.or_(pc.or_(rows.is_insert, rows.is_delete), rows.has_before))
        # Whether the consumer has the row already is not told of an update without its row before,
        # as of a dump: Debezium's word for the row as it is now is "read".
        op = pc.if_else(rows.is_delete, '"d"', pc.if_else(is_read, '"r"', '"u"'))
        before = pc.if_else(rows.is_delete, row, _befores(rows))
        begin, middle, end = self._source(table.name)
        texts = joined(
            '{"payload":{"before":',
            pc.if_else(rows.is_insert, "null", before),
            ',"after":',
            pc.if_else(rows.is_delete, "null", row),
            f',"source":{begin}',
            rows.physical_ms.cast(pa.string()),
            ',"snapshot":',
            pc.if_else(is_read, '"true"', '"false"'),
            middle,
            rows.commit_ts.cast(pa.string()),
            f'{end},"op":',
            pc.if_else(rows.is_insert, '"c"', op),
            f',"ts_ms":{built_ms},"transaction":null}}',
        )
        keys, key_end = self._keys(table, rows)
        schema = _envelope(self._full(table.name), _fields(_types(rows)))
        return Messages(keys, texts, key_end, self._schema(schema) + "}")

    def statement(self, statement: Statement, built_ms: int) -> Message:
        """See `Encoder`."""
        ddl, database = statement.ddl, statement.table.partition(".")[0]
        renamed = statement.table_before != statement.table
        names = [statement.table, *([statement.table_before] if renamed else [])]
        change = {
            "type": _CHANGES.get(statement.kind, "ALTER"),
            "id": ",".join(map(_identifier, names)),
            "table": None if statement.columns is None else _described(statement.columns),
        }
        payload = {
            "source": self._plain_source(statement.table, ddl.ts),
            "ts_ms": built_ms,
            "databaseName": database,
            "schemaName": None,
            "ddl": ddl.query or None,
            "tableChanges": [change],
        }
        key = self._document({"databaseName": database}, _DDL_KEY)
        return Message(key, self._document(payload, _DDL_VALUE))

    def watermark(self, ts: int, built_ms: int) -> bytes | None:
        """See `Encoder`."""
        if not self.extended:
            return None
        payload = {
            "source": self._plain_source(".", ts),
            "op": "m",
            "ts_ms": built_ms,
            "transaction": None,
        }
        return self._document(payload, _envelope(f"{self.name}.watermark", None))

    def _keys(self, table: TableMeta, rows: Rows) -> tuple[Any, str]:
        names = [*table.key, TABLE_IN_KEY]
        columns = [*rows.key_columns(table.key), pa.array([table.name] * len(rows.op), pa.string())]
        types = [(name, column.type) for name, column in zip(names, columns, strict=True)]
        schema = _struct(f"{self._full(table.name)}.Key", _fields(types))
        payload = objects(names, columns, json_values)
        return joined('{"payload":', payload), self._schema(schema) + "}"

    def _full(self, table: str) -> str:
        return f"{self.name}.{table}"

    def _schema(self, schema: dict[str, Any]) -> str:
        return f',"schema":{compact(schema)}' if self.with_schema else ""

    def _document(self, payload: dict[str, Any], schema: dict[str, Any]) -> bytes:
        return f'{{"payload":{compact(payload)}{self._schema(schema)}}}'.encode()

    def _source(self, table: str) -> tuple[str, str, str]:
        """The text of `source` before, between and behind its two times and `snapshot`."""
        database, _, name = table.partition(".")
        begin = {"version": _VERSION, "connector": "tidemark", "name": self.name, "ts_ms": 0}
        middle = {"db": database, "table": name} | _NO_POSITION | {"commit_ts": 0}
        return (
            compact(begin)[: -len("0}")],
            "," + compact(middle)[1 : -len("0}")],
            ',"cluster_id":"default"}',
        )

    def _plain_source(self, table: str, ts: int) -> dict[str, Any]:
        begin, middle, end = self._source(table)
        text = f'{begin}{physical_ms(ts)},"snapshot":"false"{middle}{ts}{end}'
        source: dict[str, Any] = json.loads(text)
        return source


_NO_POSITION: Final = {
    "server_id": 0, "gtid": None, "file": "", "pos": 0, "row": 0, "thread": 0, "query": None
}  # fmt: skip


def json_values(column: Any) -> Any:
    """One JSON value a row, null where the column is null."""
    kind = column.type
    if pa.types.is_decimal(kind):
        return quoted(column.cast(pa.string()))
    if pa.types.is_date(kind):
        return column.cast(pa.int32()).cast(pa.string())
    if pa.types.is_timestamp(kind) and kind.tz is None:
        return column.cast(pa.timestamp("us")).cast(pa.int64()).cast(pa.string())
    return values(column)


def _types(rows: Rows) -> list[tuple[str, Any]]:
    """The columns' names and types."""
    return [(name, column.type) for name, column in zip(rows.names, rows.columns, strict=True)]


def _befores(rows: Rows) -> Any:
    if rows.before is None:
        return "null"
    names = [field.name for field in rows.before.type]
    befores = objects(names, rows.before.flatten(), json_values)
    return pc.if_else(rows.before.is_valid(), befores, "null")


_PLAIN = {
    pa.int8(): "int16",
    pa.int16(): "int16",
    pa.int32(): "int32",
    pa.int64(): "int64",
    pa.bool_(): "boolean",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "bytes",
}
_NAMED = {"Date": "int32", "MicroTimestamp": "int64", "ZonedTimestamp": "string"}


def _field(name: str, kind: Any, *, optional: bool = True) -> dict[str, Any]:
    named = ""
    if pa.types.is_date(kind):
        named = "Date"
    elif pa.types.is_timestamp(kind):
        named = "MicroTimestamp" if kind.tz is None else "ZonedTimestamp"
    plain = "string" if pa.types.is_decimal(kind) else _PLAIN.get(kind, "")
    field = {"type": _NAMED[named] if named else plain, "optional": optional, "field": name}
    return field | ({"name": f"io.debezium.time.{named}", "version": 1} if named else {})


def _fields(types: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [_field(name, kind) for name, kind in types]


def _struct(
    name: str, fields: list[dict[str, Any]], field: str = "", *, optional: bool = False
) -> dict[str, Any]:
    struct = {"type": "struct", "fields": fields, "optional": optional, "name": name}
    return struct | ({"field": field} if field else {})


def _required(name: str, kind: str) -> dict[str, Any]:
    return {"type": kind, "optional": False, "field": name}


def _optional(name: str, kind: str) -> dict[str, Any]:
    return {"type": kind, "optional": True, "field": name}


_SOURCE_FIELDS: Final = [
    _required("version", "string"),
    _required("connector", "string"),
    _required("name", "string"),
    _required("ts_ms", "int64"),
    {
        "type": "string",
        "optional": True,
        "name": "io.debezium.data.Enum",
        "version": 1,
        "parameters": {"allowed": "true,last,false,incremental"},
        "default": "false",
        "field": "snapshot",
    },
    _required("db", "string"),
    _optional("sequence", "string"),
    _optional("table", "string"),
    _required("server_id", "int64"),
    _optional("gtid", "string"),
    _required("file", "string"),
    _required("pos", "int64"),
    _required("row", "int32"),
    _optional("thread", "int64"),
    _optional("query", "string"),
    _optional("commit_ts", "int64"),
    _optional("cluster_id", "string"),
]
_SOURCE: Final = _struct(f"{_CONNECTOR}.Source", _SOURCE_FIELDS, "source")
_TRANSACTION: Final = _struct(
    "event.block",
    [
        _required("id", "string"),
        _required("total_order", "int64"),
        _required("data_collection_order", "int64"),
    ],
    "transaction",
    optional=True,
) | {"version": 1}


def _envelope(full: str, columns: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The schema of a value; `columns` None: it has no rows."""
    images = [
        _struct(f"{full}.Value", columns, name, optional=True)
        for name in ("before", "after")
        if columns is not None
    ]
    rest = [_SOURCE, _required("op", "string"), _optional("ts_ms", "int64"), _TRANSACTION]
    return _struct(f"{full}.Envelope", [*images, *rest]) | {"version": 1}


def _array(name: str, items: dict[str, Any], *, optional: bool) -> dict[str, Any]:
    return {"type": "array", "items": items, "optional": optional, "field": name}


_TEXT: Final = {"type": "string", "optional": False}
_DDL_COLUMN: Final = _struct(
    "io.debezium.connector.schema.Column",
    [
        _required("name", "string"),
        _required("typeName", "string"),
        _required("position", "int32"),
        _optional("optional", "boolean"),
    ],
) | {"version": 1}
_DDL_TABLE: Final = _struct(
    "io.debezium.connector.schema.Table",
    [
        _array("primaryKeyColumnNames", _TEXT, optional=True),
        _array("columns", _DDL_COLUMN, optional=False),
    ],
    "table",
    optional=True,
) | {"version": 1}
_DDL_CHANGE: Final = _struct(
    "io.debezium.connector.schema.Change",
    [_required("type", "string"), _required("id", "string"), _DDL_TABLE],
) | {"version": 1}
_DDL_KEY: Final = _struct(
    f"{_CONNECTOR}.SchemaChangeKey", [_required("databaseName", "string")]
) | {"version": 1}
_DDL_VALUE: Final = _struct(
    f"{_CONNECTOR}.SchemaChangeValue",
    [
        _SOURCE,
        _required("ts_ms", "int64"),
        _optional("databaseName", "string"),
        _optional("schemaName", "string"),
        _optional("ddl", "string"),
        _array("tableChanges", _DDL_CHANGE, optional=False),
    ],
) | {"version": 1}


def _identifier(table: str) -> str:
    database, _, name = table.partition(".")
    return f'"{database}"."{name}"'


def _described(table: TableMeta) -> dict[str, Any]:
    own = [field for field in table.schema if field.name not in ENVELOPE]
    columns = [
        {
            "name": field.name,
            "typeName": str(field.type).upper(),
            "position": number,
            "optional": field.name not in table.key,
        }
        for number, field in enumerate(own, 1)
    ]
    return {"primaryKeyColumnNames": list(table.key), "columns": columns}
