"""MySQL's column type codes and flags, as TiDB's model.TableInfo and row values use them; and how a
changefeed shows dates that no calendar has, such as 0000-00-00.

Source: MySQL's protocol field types; the codes and flags seen in real TableInfo JSON.
"""

import enum
from typing import Any, Final


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
NULL_DATES: Final = "null"
SHOWN_DATES: Final = (NULL_DATES, "key-text", "text")
"""The presentations of dates that no calendar has. null: as null, but one in a key stops the
changefeed; key-text: date columns of keys are text; text: all date columns are text.
"""
ZERO_DATES: Final = "tidemark_zero_dates"
"""The member that Tidemark adds to a table's JSON: which of its columns of dates are text
(`dates_as_text`).
"""


def dates_as_text(setting: Any, *, in_key: bool) -> bool:
    """Whether a DATE, DATETIME or TIMESTAMP is text, so that it can hold 0000-00-00 and 2024-02-31.

    `setting` is one of `SHOWN_DATES`, or None for the first.
    """
    return setting == "text" or (setting == "key-text" and in_key)
