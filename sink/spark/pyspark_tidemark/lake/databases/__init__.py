"""Tables in a database: PostgreSQL (psycopg) and MySQL or MariaDB (pymysql), written by the driver.

A cut's changes of a table are staged in a temporary table and applied by set operations, in one
transaction together with the row that says so (`_tidemark_tables`): a table is either at a cut or
before it, and a repeated cut finds its row. Rows stream from the captures in Arrow batches, so
memory is bounded, whatever a cut holds.

This module has the records of both formats, with the names that their servers refuse. Pure, so that
daemons read it without a driver. What servers refuse was found by trying it: `test_names.py` in
tests/integration/lake.
"""

from typing import Final

from pyspark_tidemark.lake.format import APPEND, SCD2, SOFT_DELETE, UPSERT, LakeFormat, NameRules

_POSTGRESQL_BYTES_MAX: Final = 63
_POSTGRESQL_COLUMNS: Final = frozenset({"ctid", "tableoid", "cmin", "cmax", "xmin", "xmax"})
_MYSQL_CHARACTERS_MAX: Final = 64
_MYSQL_BLANKS: Final = tuple(" \t\n\v\f\r")
_MYSQL_CHARACTER_MAX: Final = "\uffff"


def _postgresql_identifier(name: str) -> str:
    if len(name.encode()) > _POSTGRESQL_BYTES_MAX:
        return f"{name} has more than {_POSTGRESQL_BYTES_MAX} bytes"
    return ""


def _postgresql_database(name: str) -> str:
    if name.startswith("pg_"):
        return "schemas whose names begin with pg_ are the server's"
    return _begins_with_name(name)


def _postgresql_column(name: str) -> str:
    if name in _POSTGRESQL_COLUMNS:
        return f"each table has a column {name} of its own"
    return ""


def _mysql_identifier(name: str) -> str:
    if len(name) > _MYSQL_CHARACTERS_MAX:
        return f"{name} has more than {_MYSQL_CHARACTERS_MAX} characters"
    if name.endswith(_MYSQL_BLANKS):
        return f"{name!r} ends with a blank"
    if any(character > _MYSQL_CHARACTER_MAX for character in name):
        return f"{name} has a character above U+FFFF"
    return ""


def _begins_with_name(name: str) -> str:
    return "" if name else "the name of its database begins with a dot"


POSTGRESQL: Final = LakeFormat(
    name="postgresql",
    title="PostgreSQL",
    modes=(UPSERT, APPEND, SCD2, SOFT_DELETE),
    entry_point="pyspark_tidemark.lake.databases.postgres:Postgres",
    port=5432,
    aliases=("postgres", "pg"),
    names=NameRules(_postgresql_identifier, _postgresql_database, _postgresql_column),
)
MYSQL: Final = LakeFormat(
    name="mysql",
    title="MySQL",
    modes=(UPSERT, APPEND, SCD2, SOFT_DELETE),
    entry_point="pyspark_tidemark.lake.databases.mysql:MySql",
    port=3306,
    aliases=("mariadb", "tidb"),
    names=NameRules(_mysql_identifier, _begins_with_name, ignores_case=True),
)
