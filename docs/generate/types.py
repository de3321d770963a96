"""The page of column types: what each type of MySQL and MariaDB becomes, asked of the code."""

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type
from pyspark_tidemark.lake.databases.mysql import MySql
from pyspark_tidemark.lake.databases.postgres import Postgres
from pyspark_tidemark.lake.iceberg.types import type_name
from pyspark_tidemark.sink_uri import SinkUri

from storage.mysql.arrow import arrow_type
from storage.mysql.schema import Column, Type

_UTF8MB4 = 45
_COLUMNS = (
    ("TINYINT, BOOLEAN", Column(name="c", type=Type.TINY)),
    ("TINYINT UNSIGNED", Column(name="c", type=Type.TINY, unsigned=True)),
    ("SMALLINT", Column(name="c", type=Type.SHORT)),
    ("SMALLINT UNSIGNED", Column(name="c", type=Type.SHORT, unsigned=True)),
    ("MEDIUMINT, signed or not", Column(name="c", type=Type.INT24, unsigned=True)),
    ("INT", Column(name="c", type=Type.LONG)),
    ("INT UNSIGNED", Column(name="c", type=Type.LONG, unsigned=True)),
    ("BIGINT", Column(name="c", type=Type.LONGLONG)),
    ("BIGINT UNSIGNED", Column(name="c", type=Type.LONGLONG, unsigned=True)),
    ("DECIMAL(10, 2)", Column(name="c", type=Type.NEWDECIMAL, meta=10 << 8 | 2)),
    ("DECIMAL of more than 38 digits", Column(name="c", type=Type.NEWDECIMAL, meta=65 << 8 | 2)),
    ("FLOAT", Column(name="c", type=Type.FLOAT)),
    ("DOUBLE", Column(name="c", type=Type.DOUBLE)),
    ("BIT", Column(name="c", type=Type.BIT, meta=8)),
    ("DATE", Column(name="c", type=Type.DATE)),
    ("DATETIME", Column(name="c", type=Type.DATETIME2)),
    ("TIMESTAMP", Column(name="c", type=Type.TIMESTAMP2)),
    ("TIME", Column(name="c", type=Type.TIME2)),
    ("YEAR", Column(name="c", type=Type.YEAR)),
    ("CHAR, VARCHAR, TEXT", Column(name="c", type=Type.VARCHAR, collation=_UTF8MB4)),
    ("BINARY, VARBINARY, BLOB", Column(name="c", type=Type.VARCHAR)),
    ("ENUM, SET", Column(name="c", type=Type.ENUM, elems=("a",), collation=_UTF8MB4)),
    ("JSON", Column(name="c", type=Type.JSON)),
    ("GEOMETRY, VECTOR (of MySQL, MariaDB)", Column(name="c", type=Type.GEOMETRY)),
)
_HEAD = """# Types

What a column of MySQL or MariaDB becomes. Those of TiDB become the same. Dates that no calendar
has, such as 0000-00-00, are null, or text with `--zero-dates`. Text columns of a key are
VARCHAR in MySQL, since it cannot index longer ones.

| source | Arrow, Parquet | Spark, Delta | Iceberg | PostgreSQL | MySQL |
|---|---|---|---|---|---|
"""


def page() -> str:
    """The page as Markdown."""
    postgres = Postgres(SinkUri.parse("postgresql://user@host/db"))
    mysql = MySql(SinkUri.parse("mysql://user@host/db"))
    rows = []
    for name, column in _COLUMNS:
        kind: pa.DataType = arrow_type(column)
        types = (
            str(kind),
            from_arrow_type(kind, True).simpleString(),  # noqa: FBT003 - as query_schema.py
            type_name(kind),
            postgres.type_of(kind, key_columns=0),
            mysql.type_of(kind, key_columns=0),
        )
        rows.append(f"| {name} | {' | '.join(f'`{each}`' for each in types)} |\n")
    return _HEAD + "".join(rows)
