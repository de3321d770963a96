"""What a database says of an error, without the values of rows that it quotes. Pure.

Errors go into logs, into `changefeed list` and to whoever may see states, who need not be allowed
to see rows. Names of tables, columns and keys stay, as they say where to look. A text that is not
known to be free of values loses all that it quotes: rather too much than a value.
"""

import re
from typing import Any, Final

MASK: Final = "?"
_MYSQL_PLAIN: Final = frozenset(
    {1005, 1007, 1008, 1010, 1021, 1025, 1030, 1040, 1044, 1045, 1046, 1049, 1050, 1051, 1053, 1054}
    | {1059, 1060, 1061, 1068, 1069, 1070, 1071, 1072, 1075, 1091, 1101, 1102, 1103, 1104, 1110}
    | {1113, 1114, 1115, 1117, 1118, 1129, 1130, 1141, 1142, 1143, 1146, 1152, 1153, 1158, 1159}
    | {1160, 1161, 1163, 1166, 1167, 1170, 1171, 1176, 1184, 1193, 1198, 1203, 1205, 1213, 1220}
    | {1226, 1227, 1236, 1238, 1251, 1264, 1265, 1273, 1290, 1298, 1317, 1347, 1370, 1396, 1406}
    | {1698, 1836, 1862, 3024, 3948, 4052, 4151}
)
"""Errors of MySQL and MariaDB whose texts have names, but no values."""
_MYSQL_CLIENT: Final = range(2000, 3000)
_MYSQL_OWN_TEXT: Final = frozenset({1643, 1644, 1645, 3094})
"""SIGNAL: the text is of a trigger or a procedure."""
_MYSQL_NAMED_END: Final = re.compile(
    r"""['`"](?P<end>\ (?:for\ key|for\ column|in\ column)
    \ (?:'[^'`"]*'|`[^'`"]*`(?:\.`[^'`"]*`){0,2})(?:\ at\ row\ \d+)?)$""",
    re.VERBOSE,
)
_MYSQL_BARE_VALUE: Final = re.compile(r"(?i)\b((?:for|of) value )\S.*$")
_QUOTES: Final = "'\"`"

_POSTGRES_VALUES: Final = ("22", "2F", "38", "39", "42601", "42704", "F0", "HV", "P0", "XX")
"""SQLSTATEs and classes whose texts quote data or statements, or are of the database's own code."""


def mysql_text(number: int, text: str) -> str:
    """The text of error `number` of a MySQL or MariaDB server."""
    if number in _MYSQL_PLAIN or number in _MYSQL_CLIENT:
        return text
    if number in _MYSQL_OWN_TEXT:
        return "raised by the database's own code, a trigger or a procedure; its text is not shown"
    first = min((at for at in map(text.find, _QUOTES) if at >= 0), default=-1)
    if first < 0:
        return _MYSQL_BARE_VALUE.sub(rf"\1{MASK}", text)
    # A value may have quotes itself, and may look like a name: only the end of the text is one.
    named = _MYSQL_NAMED_END.search(text, first)
    if named is not None:
        return f"{text[:first]}{MASK}{named['end']}"
    last = max(map(text.rfind, _QUOTES))
    return f"{text[:first]}{MASK}{text[last + 1 :]}" if last > first else f"{text[:first]}{MASK}"


def mysql_error(err: Exception) -> str:
    """What PyMySQL raised: the server's number and text."""
    if len(err.args) > 1 and isinstance(err.args[0], int):
        return f"{err.args[0]} {mysql_text(err.args[0], str(err.args[1]))}"
    return str(err)


def postgres_error(err: Any) -> str:
    """What psycopg raised: the server's own message, never its DETAIL and CONTEXT, which quote
    rows, and the names that it tells.
    """
    diagnosis, state = err.diag, err.sqlstate or ""
    if diagnosis.message_primary is None:
        # Of the client: of the connection, and before anything was sent.
        return str(err).strip()
    message = str(diagnosis.message_primary)
    if state.startswith(_POSTGRES_VALUES):
        message = "the text, which may quote a row, is not shown"
    names = {
        "table": ".".join(filter(None, (diagnosis.schema_name, diagnosis.table_name))),
        "column": diagnosis.column_name,
        "constraint": diagnosis.constraint_name,
        "type": diagnosis.datatype_name,
    }
    shown = "".join(f", {what} {name}" for what, name in names.items() if name)
    return f"{message} (SQLSTATE {state}{shown})"


_SQL_LITERAL: Final = re.compile(
    r"""
    (?P<comment>/\*.*?\*/|--[ \t].*?$|\#.*?$)
    | (?P<name>`(?:[^`]|``)*`)
    | (?P<text>[xXbBnN]?'(?:[^'\\]|\\.|'')*(?:'|\Z)|"(?:[^"\\]|\\.|"")*(?:"|\Z))
    | (?P<number>\b0[xXbB][0-9a-fA-F]+\b|(?<![\w.@$`])\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def sql_statement(sql: str) -> str:
    """A statement of MySQL's with a mark for each literal, and without comments."""

    def masked(match: re.Match[str]) -> str:
        if match["name"] is not None:
            return match["name"]
        return " " if match["comment"] is not None else MASK

    return _SQL_LITERAL.sub(masked, sql)
