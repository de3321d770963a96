"""MySQL's column type codes and flags, as TiDB's model.TableInfo and row values use them.

Source: MySQL's protocol field types; the codes and flags seen in real TableInfo JSON.
"""

import enum


class Type(enum.IntEnum):
    """A column's type code (`FieldType.Tp`)."""

    UNSPECIFIED = 0  # views only: their columns have no type of their own
    TINY = 1
    SHORT = 2
    LONG = 3
    FLOAT = 4
    DOUBLE = 5
    NULL = 6
    TIMESTAMP = 7
    LONGLONG = 8
    INT24 = 9
    DATE = 10
    TIME = 11
    DATETIME = 12
    YEAR = 13
    VARCHAR = 15
    BIT = 16
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


class Flag(enum.IntFlag):
    """The flags of a column (`FieldType.Flag`) that matter here."""

    NOT_NULL = 1
    PRIMARY_KEY = 2
    UNIQUE_KEY = 4
    MULTIPLE_KEY = 8
    UNSIGNED = 32
    BINARY = 128
    NO_DEFAULT = 4096


NO_FLAGS = Flag(0)
INTEGERS = frozenset({Type.TINY, Type.SHORT, Type.INT24, Type.LONG, Type.LONGLONG})
TEXTS = frozenset(
    {
        Type.VARCHAR,
        Type.VAR_STRING,
        Type.STRING,
        Type.TINY_BLOB,
        Type.BLOB,
        Type.MEDIUM_BLOB,
        Type.LONG_BLOB,
    }
)
DATES = frozenset({Type.DATE, Type.DATETIME, Type.TIMESTAMP})
