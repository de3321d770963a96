"""Our own rows in a target database: which table is applied up to where (`_tidemark_tables`),
and its columns.
"""

import base64
import dataclasses
from typing import Any

import pyarrow as pa

from pyspark_tidemark.errors import SourceError

TABLES = "_tidemark_tables"
CUTS = "_tidemark_cuts"
NOT_YET = -1
"""The end_ts of a table that is made, but has no cut yet."""
_NAME, _TS = "varchar(200) NOT NULL", "bigint NOT NULL"
_TABLE_COLUMNS = (
    f"app {_NAME}, name {_NAME}, end_ts {_TS}, columns_now text NOT NULL, columns_next text NOT "
    "NULL"
)
_CUT_COLUMNS = f"app {_NAME}, end_ts {_TS}, applied_at varchar(40) NOT NULL, document text NOT NULL"
_CREATE = (
    f"CREATE TABLE IF NOT EXISTS {TABLES} ({_TABLE_COLUMNS}, PRIMARY KEY (app, name))",
    f"CREATE TABLE IF NOT EXISTS {CUTS} ({_CUT_COLUMNS}, PRIMARY KEY (app, end_ts))",
)


@dataclasses.dataclass(frozen=True)
class Known:
    """A table's row; `next_schema` differs from `schema` while the table is being altered."""

    end_ts: int
    schema: Any
    next_schema: Any


def create(cursor: Any) -> None:
    """Make our tables."""
    for statement in _CREATE:
        cursor.execute(statement)


def known(cursor: Any, app: str, name: str, *, lock: bool = False) -> Known | None:
    """A table's row, locked until the transaction's end if wanted.

    Raises:
        SourceError: ErrTargetForeign, the row is of another table, whose name the database does not
            tell from this.
    """
    cursor.execute(
        f"SELECT end_ts, columns_now, columns_next, name FROM {TABLES} WHERE app = %s AND name = %s"  # noqa: S608 - ours
        + (" FOR UPDATE" if lock else ""),
        (app, name),
    )
    row = cursor.fetchone()
    if row is not None and row[3] != name:
        raise SourceError(
            "ErrTargetForeign",
            f"the database takes the names {row[3]} and {name} for one: give one of them another "
            "target",
        )
    return None if row is None else Known(int(row[0]), _schema(row[1]), _schema(row[2]))


def begin(cursor: Any, app: str, name: str, schema: Any) -> None:
    """A table that is about to be made."""
    text = _text(schema)
    cursor.execute(
        f"INSERT INTO {TABLES} VALUES (%s, %s, %s, %s, %s)",  # noqa: S608 - ours
        (app, name, NOT_YET, text, text),
    )


def applied(cursor: Any, app: str, name: str, end_ts: int) -> None:
    """The table is at a cut."""
    cursor.execute(
        f"UPDATE {TABLES} SET end_ts = %s WHERE app = %s AND name = %s",  # noqa: S608 - ours
        (end_ts, app, name),
    )


def altering(cursor: Any, app: str, name: str, schema: Any) -> None:
    """The table is about to get other columns."""
    cursor.execute(
        f"UPDATE {TABLES} SET columns_next = %s WHERE app = %s AND name = %s",  # noqa: S608 - ours
        (_text(schema), app, name),
    )


def altered(cursor: Any, app: str, name: str) -> None:
    """It has them."""
    cursor.execute(
        f"UPDATE {TABLES} SET columns_now = columns_next WHERE app = %s AND name = %s",  # noqa: S608 - ours
        (app, name),
    )


def renamed(cursor: Any, app: str, old: str, new: str) -> None:
    """The table has another name."""
    cursor.execute(f"UPDATE {TABLES} SET name = %s WHERE app = %s AND name = %s", (new, app, old))  # noqa: S608 - ours


def forget(cursor: Any, app: str, name: str) -> None:
    """The table is gone."""
    cursor.execute(f"DELETE FROM {TABLES} WHERE app = %s AND name = %s", (app, name))  # noqa: S608 - ours


def _text(schema: Any) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def _schema(text: str) -> Any:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
