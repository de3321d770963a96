"""Users' data stay out of logs where `redact-info-log` is on: keys and values, which are logged in
hexadecimal, literals of SQL statements, and whatever else is quoted. Each is a `?`.

Names of tables, changefeeds and daemons stay where they are fields of their own: without them a log
helps nobody. Source: TiKV's and TiCDC's setting of this name.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

_HIDDEN: Final = "?"
_LITERAL: Final = re.compile(r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.|\"\")*\"", re.DOTALL)
_HEXADECIMAL: Final = re.compile(r"(?<![0-9A-Za-z])(?:0x)?[0-9A-Fa-f]{16,}(?![0-9A-Za-z])")
_NUMBER: Final = re.compile(r"(?<![\w`.])\d+(?:\.\d+)?(?![\w`])")
_STATEMENTS: Final = frozenset({"query", "statement", "sql"})
"""Fields with a statement, of which the numbers are literals, too."""
_OURS: Final = frozenset(
    {
        *("event", "level", "timestamp", "daemon", "logger", "code", "kind", "state", "outcome"),
        *("changefeed", "capture", "uuid", "client", "peer", "method", "of", "leader", "store"),
        *("address", "version", "traceparent", "table", "tables", "worker", "source", "target"),
    }
)
"""Fields that hold nothing of a row."""


def redacted(event: Mapping[str, Any]) -> dict[str, Any]:
    """A log's event without users' data."""
    return {name: _hidden(name, value) for name, value in event.items()}


def _hidden(name: str, value: Any) -> Any:
    if name in _OURS:
        return value
    if isinstance(value, str):
        return _text(value, is_statement=name in _STATEMENTS)
    if isinstance(value, bytes):
        return _HIDDEN
    if isinstance(value, Mapping):
        return {key: _hidden(str(key), each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_hidden(name, each) for each in value]
    return value


def _text(text: str, *, is_statement: bool) -> str:
    hidden = _HEXADECIMAL.sub(_HIDDEN, _LITERAL.sub(_HIDDEN, text))
    return _NUMBER.sub(_HIDDEN, hidden) if is_statement else hidden
