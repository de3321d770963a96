"""SQL literals and identifiers for statements about keys."""

from collections.abc import Iterable
from decimal import Decimal
from typing import Any


def quoted(name: str) -> str:
    """An identifier."""
    return "`" + name.replace("`", "``") + "`"


def any_of(column: str, values: Iterable[Any]) -> str | None:
    """`column IN (…)` for integers, decimals and strings; None when a value has no exact literal."""
    literals = [_literal(value) for value in values]
    if not literals or None in literals:
        return None
    return f"{quoted(column)} IN ({', '.join(str(literal) for literal in literals)})"


def _literal(value: Any) -> str | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Decimal):
        return f"{value:f}BD"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return None
