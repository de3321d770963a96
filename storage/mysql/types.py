"""The column types of a binlog's TABLE_MAP event, and what `meta` means for each of ours.

FLOAT, DOUBLE         bytes                    VARCHAR, STRING   the most bytes a value can have
NEWDECIMAL            precision << 8 | digits after the point
BIT                   bits                     ENUM, SET         bytes
TIME2, DATETIME2, TIMESTAMP2                   digits of the second's fraction
BLOB, JSON, GEOMETRY, VECTOR                   bytes of the length before a value

CHAR and BINARY are STRING, TEXT is BLOB; ENUM and SET, which the event hides behind STRING, have
their own type here. Source: MySQL's binary_log_types.h and Table_map_log_event, MariaDB's
rpl_utility.
"""

import enum
from typing import Final


class Type(enum.IntEnum):
    """A column's type code."""

    TINY = 1
    SHORT = 2
    LONG = 3
    FLOAT = 4
    DOUBLE = 5
    TIMESTAMP = 7
    LONGLONG = 8
    INT24 = 9
    DATE = 10
    TIME = 11
    DATETIME = 12
    YEAR = 13
    NEWDATE = 14
    VARCHAR = 15
    BIT = 16
    TIMESTAMP2 = 17
    DATETIME2 = 18
    TIME2 = 19
    BLOB_COMPRESSED = 140
    VARCHAR_COMPRESSED = 141
    VECTOR = 242
    JSON = 245
    NEWDECIMAL = 246
    ENUM = 247
    SET = 248
    TINY_BLOB = 249
    MEDIUM_BLOB = 250
    LONG_BLOB = 251
    BLOB = 252
    VAR_STRING = 253
    STRING = 254
    GEOMETRY = 255


INTEGERS: Final = frozenset({Type.TINY, Type.SHORT, Type.INT24, Type.LONG, Type.LONGLONG})
NUMERIC: Final = INTEGERS | {Type.NEWDECIMAL, Type.FLOAT, Type.DOUBLE}
STRINGS: Final = frozenset({Type.VARCHAR, Type.STRING, Type.BLOB})
"""The types whose values are characters, or bytes where the character set is `binary`."""
DATES: Final = frozenset(
    {Type.DATE, Type.DATETIME, Type.DATETIME2, Type.TIMESTAMP, Type.TIMESTAMP2}
)
LENGTH_FIRST: Final = frozenset({Type.BLOB, Type.JSON, Type.GEOMETRY, Type.VECTOR})

INTEGER_BYTES: Final = {Type.TINY: 1, Type.SHORT: 2, Type.INT24: 3, Type.LONG: 4, Type.LONGLONG: 8}
FIXED_BYTES: Final = INTEGER_BYTES | {
    Type.FLOAT: 4,
    Type.DOUBLE: 8,
    Type.TIMESTAMP: 4,
    Type.DATE: 3,
    Type.TIME: 3,
    Type.DATETIME: 8,
    Type.YEAR: 1,
}
_WHOLE_BYTES = {Type.TIMESTAMP2: 4, Type.DATETIME2: 5, Type.TIME2: 3}
_DIGITS_BYTES: Final = (0, 1, 1, 2, 2, 3, 3, 4, 4)
_GROUP_DIGITS = 9


def fraction_bytes(digits: int) -> int:
    """How many bytes hold that many digits of a second's fraction."""
    return (digits + 1) // 2


def decimal_bytes(precision: int, scale: int) -> int:
    """How many bytes a DECIMAL(precision, scale) takes."""
    whole = precision - scale
    groups = whole // _GROUP_DIGITS + scale // _GROUP_DIGITS
    return 4 * groups + _DIGITS_BYTES[whole % _GROUP_DIGITS] + _DIGITS_BYTES[scale % _GROUP_DIGITS]


def fixed_bytes(kind: Type, meta: int) -> int | None:
    """How many bytes each value of the type takes in a row image;
    None where each value has its own length.
    """
    if kind in FIXED_BYTES:
        return FIXED_BYTES[kind]
    if kind in _WHOLE_BYTES:
        return _WHOLE_BYTES[kind] + fraction_bytes(meta)
    if kind is Type.NEWDECIMAL:
        return decimal_bytes(meta >> 8, meta & 0xFF)
    if kind is Type.BIT:
        return (meta + 7) // 8
    return meta if kind in {Type.ENUM, Type.SET} else None


def length_bytes(kind: Type, meta: int) -> int:
    """How many bytes hold the length of a value of a type without fixed size."""
    if kind in LENGTH_FIRST:
        return meta
    return 1 if meta < 256 else 2
