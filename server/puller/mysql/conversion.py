"""Whether an ALTER of a column leaves all stored values as they are, or changes some,
which no event tells. Pure.

Only what surely changes nothing passes: wider types of the same kind, other collations of the same
characters, members of an ENUM or SET at its end; and, where the session is strict, what fails
rather than changes a value.
"""

from typing import Final

from server.puller.mysql.column_types import character_bytes
from server.puller.mysql.tokens import Dialect
from storage.mysql.schema import Column
from storage.mysql.types import INTEGER_BYTES, INTEGERS, STRINGS, Type

_FRACTIONS: Final = frozenset({Type.DATETIME2, Type.TIMESTAMP2})
_SUPERSETS: Final = {
    "ascii": frozenset({"latin1", "utf8mb3", "utf8mb4"}),
    "latin1": frozenset({"utf8mb3", "utf8mb4"}),
    "utf8mb3": frozenset({"utf8mb4"}),
}


def change_of_values(old: Column, new: Column, dialect: Dialect, *, ignores: bool) -> str:
    """Why stored values may be others after the change; nothing where they are not."""
    strict = dialect.is_strict and not ignores
    return _change_of_rows(old, new, strict=strict) or _change_of_type(
        old, new, dialect, strict=strict
    )


def _change_of_rows(old: Column, new: Column, *, strict: bool) -> str:
    """Values that do not come from the old ones alone."""
    if old.generated or new.generated:
        same = old.generated == new.generated and old == new
        return "" if same else "it is computed, or was"
    if new.auto_increment and not old.auto_increment:
        return "AUTO_INCREMENT numbers rows"
    if old.nullable and not new.nullable and (not strict or new.type is Type.TIMESTAMP2):
        return "NULL becomes a value"
    return ""


def _change_of_type(old: Column, new: Column, dialect: Dialect, *, strict: bool) -> str:
    """Values that the new type holds otherwise."""
    if old.type is Type.FLOAT and new.type is Type.DOUBLE:
        return ""
    if old.type in INTEGERS and new.type in INTEGERS:
        return "" if strict or _holds(old, new) else "numbers may be cut"
    if old.type in STRINGS and new.type in STRINGS:
        return _strings(old, new, dialect)
    if old.type is not new.type:
        return "its type is another one"
    if old.type is Type.NEWDECIMAL:
        return _decimals(old, new, strict=strict)
    if old.type in (Type.ENUM, Type.SET):
        same = new.elems[: len(old.elems)] == old.elems and old.charset == new.charset
        return "" if same else "its members are others"
    if old.type in (Type.FLOAT, Type.DOUBLE):
        return (
            ""
            if old.unsigned == new.unsigned or not new.unsigned or strict
            else "numbers may be cut"
        )
    if old.type in _FRACTIONS and old.as_text:
        return "" if new.meta == old.meta else "texts of moments have another number of digits"
    if old.type in _FRACTIONS:
        return "" if new.meta >= old.meta else "fractions of seconds are cut"
    return "" if old.meta == new.meta else "its type is another one"


def _holds(old: Column, new: Column) -> bool:
    """Whether an integer type has all values of another one."""
    mine, its = INTEGER_BYTES[old.type], INTEGER_BYTES[new.type]
    if old.unsigned == new.unsigned:
        return its >= mine
    return old.unsigned and its > mine


def _decimals(old: Column, new: Column, *, strict: bool) -> str:
    old_scale, new_scale = old.meta & 0xFF, new.meta & 0xFF
    if new_scale < old_scale:
        return "digits are rounded off"
    if new_scale > old_scale:
        return "values are shown with more digits"
    fits = (new.meta >> 8) >= (old.meta >> 8) and (old.unsigned or not new.unsigned)
    return "" if fits or strict else "numbers may be cut"


def _strings(old: Column, new: Column, dialect: Dialect) -> str:
    if old.charset != new.charset and new.charset not in _SUPERSETS.get(old.charset, frozenset()):
        return "its character set is another one"
    blanks = Type.STRING in (old.type, new.type) and (old.type is not new.type or dialect.pads_char)
    if blanks and (new.type is Type.STRING or dialect.pads_char or not old.is_text):
        return "blanks at the end count otherwise"
    if old.type is Type.STRING and not old.is_text and old.meta != new.meta:
        return "values are filled up to another length"
    return "" if _characters(new) >= _characters(old) else "texts may be cut"


def _characters(column: Column) -> int:
    """How many characters, of the least bytes, always fit."""
    if column.type is Type.BLOB:
        return (1 << 8 * column.meta) // character_bytes(column.collation)
    return column.meta // character_bytes(column.collation)
