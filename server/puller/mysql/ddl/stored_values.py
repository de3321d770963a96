"""The values of stored rows after a change of their columns, which no event of the log tells. Pure.

1. `change_of_values`: whether an ALTER of a column leaves all stored values as they are. Only what
   surely changes nothing passes: wider types of the same kind, other collations of the same
   characters, members of an ENUM or SET at its end; and, where the session is strict, what fails
   rather than changes a value.
2. `initial_default_of`: what rows hold in a column that is younger than they are, as their batches
   would show it. A constant DEFAULT becomes a value of the column as the server makes it one. Where
   that depends on what is not known here (expressions, time zones, character sets, values that do
   not fit), UnclearValueError says so: rows are read again.
"""

import base64
import datetime as dt
import ipaddress
import math
import re
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Final, TypeAlias

from pyspark_tidemark.lake.schema import widens

from server.puller.mysql.ddl.column_types import character_bytes
from server.puller.mysql.ddl.tokens import Dialect
from server.puller.mysql.ddl.tree import ColumnDef, Expression, Literal
from storage.mysql.arrow import arrow_type
from storage.mysql.charset import UTF8, codec_of
from storage.mysql.schema import INTEGER_BYTES, INTEGERS, STRINGS, Column, Type

_FRACTIONS: Final = frozenset({Type.DATETIME2, Type.TIMESTAMP2})
_SUPERSETS: Final = {
    "ascii": frozenset({"latin1", "utf8mb3", "utf8mb4"}),
    "latin1": frozenset({"utf8mb3", "utf8mb4"}),
    "utf8mb3": frozenset({"utf8mb4"}),
}
_WIDE: Final = frozenset({"ucs2", "utf16", "utf16le", "utf32"})
"""Character sets whose letters of ASCII have several bytes."""
_BASIC_PLANE: Final = frozenset({"utf8mb3", "utf8", "ucs2"})
"""Character sets that end at U+FFFF."""
_EXACT: Final = Context(prec=120)
_DAYS: Final = re.compile(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})")
_CLOCK: Final = re.compile(r"(\d{1,2}):(\d{1,2})(?::(\d{1,2})(?:\.(\d*))?)?")
_TIME: Final = re.compile(r"(-?)(\d{1,3}):(\d{1,2})(?::(\d{1,2})(?:\.(\d*))?)?")
_ARITHMETIC: Final = re.compile(r"[+-]? ?\d{1,9}(?: [-+*] \d{1,9})*")
_TERMS: Final = re.compile(r"([-+]) ?(\d+(?: \* \d+)*)")
_UUID: Final = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_TIME_HOURS_MAX: Final = 838
_ZERO, _ZERO_MOMENT = "0000-00-00", "0000-00-00T00:00:00"
_INLINE_UNKNOWN: Final = frozenset(
    {Type.TIMESTAMP, Type.TIME, Type.DATETIME, Type.JSON, Type.GEOMETRY, Type.VECTOR, Type.NEWDATE}
)


def change_of_values(old: Column, new: Column, dialect: Dialect, *, ignores: bool) -> str:
    """Why stored values may be others after the change; nothing where they are not."""
    strict = dialect.is_strict and not ignores
    return (
        _change_of_rows(old, new, strict=strict)
        or _change_of_type(old, new, dialect, strict=strict)
        or _change_for_readers(old, new)
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


def _change_for_readers(old: Column, new: Column) -> str:
    """The same values in a type that readers cannot make of the one they have: BIGINT UNSIGNED is a
    decimal for them, and a DECIMAL of more than 38 digits a text.
    """
    old_type, new_type = arrow_type(old), arrow_type(new)
    if old_type == new_type or widens(old_type, new_type):
        return ""
    return f"readers have it as {new_type} then, not {old_type}"


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


Value: TypeAlias = str | int | float | None


class UnclearValueError(Exception):
    """The value is not known; the message says why."""


def initial_default_of(column: Column, definition: ColumnDef, dialect: Dialect) -> Value:
    """The value as JSON has it (`sink.mounter`); None: null.

    Raises:
        UnclearValueError: it is not known from the statement.
    """
    default = definition.default
    if isinstance(default, Expression):
        number = _computed(default.text) if column.type in INTEGERS else None
        if number is None:
            raise UnclearValueError(f"it is computed ({default.text})")
        default = Literal("number", str(number))
    if (
        definition.type.scale is not None
        and column.type in (Type.FLOAT, Type.DOUBLE)
        and default is not None
    ):
        raise UnclearValueError("digits of a floating-point number are rounded off")
    try:
        if default is None or default.sort == "null":
            return None if column.nullable else _implicit(column, definition)
        return _constant(column, default, definition, dialect)
    except (ValueError, ArithmeticError, StopIteration, LookupError) as err:
        raise UnclearValueError(
            f"{default.text if default else ''!r} is not understood: {err!r}"
        ) from err


def _implicit(column: Column, definition: ColumnDef) -> Value:
    """The implicit default of a NOT NULL column without DEFAULT."""
    kind = column.type
    if kind in _INLINE_UNKNOWN or kind is Type.TIMESTAMP2:
        raise UnclearValueError(f"a {definition.type.base} has no plain value of its own")
    if kind is Type.ENUM:
        return column.elems[0]
    if kind is Type.SET or (kind in STRINGS and column.is_text):
        return ""
    if kind in STRINGS:
        return _bytes(b"\0" * column.meta if kind is Type.STRING else b"")
    if kind is Type.BIT:
        return _bytes(bytes((column.meta + 7) // 8))
    if kind in (Type.DATE, Type.DATETIME2):
        return _ZERO if kind is Type.DATE else _ZERO_MOMENT
    if kind is Type.TIME2:
        return _time_text("", 0, 0, 0, "", column.meta)
    return f"{_decimal(Decimal(0), column):f}" if kind is Type.NEWDECIMAL else 0


def _constant(column: Column, literal: Literal, definition: ColumnDef, dialect: Dialect) -> Value:
    kind = column.type
    if kind in _INLINE_UNKNOWN or kind is Type.TIMESTAMP2:
        raise UnclearValueError(f"constants of a {definition.type.base} are not computed")
    if definition.type.base in _ADDRESSES:
        if literal.sort != "string":
            raise ValueError("no text")
        return _bytes(_ADDRESSES[definition.type.base](literal.text))
    if kind in STRINGS:
        return _string(column, literal, dialect)
    if literal.charset and not literal.text.isascii():
        raise ValueError("a character set of its own")
    if kind in INTEGERS:
        return _integer(column, literal)
    if kind is Type.NEWDECIMAL:
        return f"{_decimal(_number(literal), column):f}"
    if kind is Type.YEAR:
        return _year(literal)
    if kind is Type.TIME2:
        return _time(column, literal, dialect)
    if kind in (Type.DATE, Type.DATETIME2):
        return _moment(column, literal, dialect)
    if kind in (Type.ENUM, Type.SET):
        members = _enum if kind is Type.ENUM else _set
        return members(column, literal, strict=dialect.is_strict)
    return _OTHERS[kind](column, literal)


def _computed(text: str) -> int | None:
    """A sum, difference or product of whole numbers; None: it is something else."""
    if not _ARITHMETIC.fullmatch(text):
        return None
    total = 0
    for sign, product in _TERMS.findall(f"+ {text}" if text[0] not in "+-" else text):
        value = math.prod(map(int, product.split("*")))
        total += -value if sign == "-" else value
    return total


def _uuid(text: str) -> bytes:
    if not _UUID.fullmatch(text):
        raise ValueError("no UUID as it is usually written")
    return bytes.fromhex(text.replace("-", ""))


def _float(column: Column, literal: Literal) -> float:
    number = float(_number(literal))
    if column.unsigned and number < 0:
        raise ValueError("out of range")
    return number


def _number(literal: Literal) -> Decimal:
    if literal.charset and literal.sort in ("hex", "bits"):
        raise ValueError("the bytes of a string")
    if literal.sort == "hex":
        return Decimal(int(literal.text or "0", 16))
    if literal.sort == "bits":
        return Decimal(int(literal.text or "0", 2))
    number = Decimal(literal.text.strip())
    if not number.is_finite():
        raise ValueError("no number")
    return number


def _integer(column: Column, literal: Literal) -> int:
    if "e" in literal.text.lower() and literal.sort in ("number", "string"):
        raise ValueError("a floating-point number")
    number = int(_number(literal).to_integral_value(ROUND_HALF_UP, context=_EXACT))
    bits = 8 * INTEGER_BYTES[column.type]
    least, most = (
        (0, (1 << bits) - 1) if column.unsigned else (-(1 << bits - 1), (1 << bits - 1) - 1)
    )
    if column.type is Type.INT24:
        least, most = (0, (1 << 24) - 1) if column.unsigned else (-(1 << 23), (1 << 23) - 1)
    if not least <= number <= most:
        raise ValueError("out of range")
    return number


def _decimal(number: Decimal, column: Column) -> Decimal:
    precision, scale = column.meta >> 8, column.meta & 0xFF
    rounded = number.quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP, context=_EXACT)
    if abs(rounded) >= Decimal(10) ** (precision - scale) or (column.unsigned and rounded < 0):
        raise ValueError("out of range")
    return rounded or abs(rounded)


def _year(literal: Literal) -> int:
    if literal.sort not in ("number", "string") or not literal.text.isdecimal():
        raise ValueError("no year")
    number = int(literal.text)
    if number >= 100:
        if not 1901 <= number <= 2155:
            raise ValueError("out of range")
        return number
    if number == 0 and (literal.sort == "number" or len(literal.text) == 4):  # '000' is 2000
        return 0
    return number + (2000 if number < 70 else 1900)


def _bits(column: Column, literal: Literal) -> str:
    if literal.sort == "string":
        raise ValueError("the bytes of a string")
    number = _number(literal)
    if number != number.to_integral_value() or not 0 <= number < 1 << column.meta:
        raise ValueError("out of range")
    return _bytes(int(number).to_bytes((column.meta + 7) // 8, "big"))


def _enum(column: Column, literal: Literal, *, strict: bool) -> str:
    if literal.sort == "string":
        return _member(column, literal.text, strict=strict)
    if literal.sort != "number" or int(literal.text) < 1:
        raise ValueError("no member")
    return column.elems[int(literal.text) - 1]


def _set(column: Column, literal: Literal, *, strict: bool) -> str:
    if literal.sort == "number":
        number = int(literal.text)
        if not 0 <= number < 1 << len(column.elems):
            raise ValueError("no members")
        return ",".join(elem for place, elem in enumerate(column.elems) if number >> place & 1)
    if literal.sort != "string":
        raise ValueError("no members")
    parts = filter(None, literal.text.split(","))
    members = {_member(column, part, strict=strict) for part in parts}
    return ",".join(elem for elem in column.elems if elem in members)


def _member(column: Column, text: str, *, strict: bool) -> str:
    """The first member that equals the text by the column's collation."""
    if not text.isascii() and text not in column.elems:
        raise ValueError("which letters are equal depends on the collation")
    text = text.rstrip(" ")
    equal = [elem for elem in column.elems if elem.lower() == text.lower()]
    member = text if text in equal else next(iter(equal))
    # A strict session gets no members that are equal to each other.
    before = () if strict else column.elems[: column.elems.index(member)]
    if any(elem in equal or not (elem + text).isascii() for elem in before):
        raise ValueError("which members are equal depends on the collation")
    return member


def _string(column: Column, literal: Literal, dialect: Dialect) -> str:
    if literal.sort == "hex":
        if len(literal.text) % 2:
            raise ValueError("half a byte")
        data = bytes.fromhex(literal.text)
    elif literal.sort == "bits":
        size = (len(literal.text) + 7) // 8
        data = int(literal.text or "0", 2).to_bytes(size, "big")
    elif literal.sort == "number":
        data = _number_text(literal.text).encode()
    else:
        return _text(column, literal, dialect)
    if not column.is_text:
        return _bytes(_padded(column, data))
    return _fitting(column, data.decode("ascii"))


def _number_text(text: str) -> str:
    if "e" in text.lower():
        raise ValueError("a floating-point number")
    negative, digits = text.startswith("-"), text.lstrip("+-")
    whole, dot, fraction = digits.partition(".")
    whole = whole.lstrip("0") or "0"
    shown = f"{whole}{dot if fraction else ''}{fraction}"
    return f"-{shown}" if negative and shown.strip("0.") else shown


def _text(column: Column, literal: Literal, dialect: Dialect) -> str:
    text, connection = literal.text, dialect.connection
    if "\ufffd" in text or (literal.charset and not text.isascii()):
        raise ValueError("characters of another character set")
    if not (text.isascii() or _has_all(connection, text)):
        raise ValueError("characters that the session's constants do not have")
    if column.is_text:
        return _fitting(column, text)
    # A constant has the bytes of the connection's character set, but for a BLOB those of UTF-8.
    if connection in _WIDE or not (text.isascii() or connection in UTF8):
        raise ValueError("bytes of another character set")
    return _bytes(_padded(column, text.encode()))


def _has_all(charset: str, text: str) -> bool:
    """Whether a character set surely has all characters of a text that is not ASCII alone."""
    codec = None if charset == "ascii" else codec_of(charset)
    if codec is None or (charset in _BASIC_PLANE and max(text) > "\uffff"):
        return False
    try:
        text.encode(codec)
    except UnicodeEncodeError:
        return False
    return True


def _fitting(column: Column, text: str) -> str:
    if not (text.isascii() or _has_all(column.charset, text)):
        raise ValueError("characters of another character set")
    if column.type is Type.STRING:
        text = text.rstrip(" ")
    width = character_bytes(column.collation)
    if len(text) > (
        column.meta // width
        if column.type is not Type.BLOB
        else ((1 << 8 * column.meta) - 1) // width
    ):
        raise ValueError("too long")
    return text


def _padded(column: Column, data: bytes) -> bytes:
    size = (1 << 8 * column.meta) - 1 if column.type is Type.BLOB else column.meta
    if len(data) > size:
        raise ValueError("too long")
    return data.ljust(column.meta, b"\0") if column.type is Type.STRING else data


def _bytes(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _moment(column: Column, literal: Literal, dialect: Dialect) -> str | None:
    """DATE, DATETIME."""
    text = literal.text.strip()
    if literal.sort not in ("string", "number"):
        raise ValueError("no date")
    if text.isdecimal() and len(text) in (8, 14):
        text = f"{text[:4]}-{text[4:6]}-{text[6:8]} " + ":".join(
            text[time_match : time_match + 2] for time_match in range(8, len(text), 2)
        )
    elif literal.sort == "number":
        raise ValueError("no date")
    days, _, clock = text.strip().replace("T", " ").partition(" ")
    date_match, time_match = _DAYS.fullmatch(days), _CLOCK.fullmatch(clock.strip() or "0:0")
    if date_match is None or time_match is None:
        raise ValueError("no date")
    if set(days) <= set("0-/.") and set(clock) <= set("0:. "):
        return _ZERO if column.type is Type.DATE else _ZERO_MOMENT
    day = dt.date(int(date_match[1]), int(date_match[2]), int(date_match[3]))
    if column.type is Type.DATE:
        return day.isoformat()
    fraction = _fraction(time_match[4] or "", column.meta, dialect)
    clock_time = dt.time(
        int(time_match[1]), int(time_match[2]), int(time_match[3] or 0), int(fraction.ljust(6, "0"))
    )
    return dt.datetime.combine(day, clock_time).isoformat()


def _fraction(digits: str, count: int, dialect: Dialect) -> str:
    """The digits of a second's fraction that are kept: MariaDB cuts the others off,
    MySQL rounds.
    """
    if len(digits.rstrip("0")) > count and (not dialect.mariadb or dialect.rounds_fractions):
        raise ValueError("fractions of a second are rounded")
    return digits[:count].ljust(count, "0")


def _time(column: Column, literal: Literal, dialect: Dialect) -> str:
    text = literal.text.strip()
    if literal.sort not in ("string", "number"):
        raise ValueError("no time")
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    if digits.isdecimal() and len(digits) <= 7:
        digits = digits.rjust(7, "0")
        return _checked_time(sign, (digits[:3], digits[3:5], digits[5:], ""), column, dialect)
    match = _TIME.fullmatch(text)
    if match is None or literal.sort == "number":
        raise ValueError("no time")
    return _checked_time(
        sign, (match[2], match[3], match[4] or "0", match[5] or ""), column, dialect
    )


def _checked_time(
    sign: str, parts: tuple[str, str, str, str], column: Column, dialect: Dialect
) -> str:
    hours, minutes, seconds = map(int, parts[:3])
    if hours > _TIME_HOURS_MAX or minutes > 59 or seconds > 59:
        raise ValueError("out of range")
    return _time_text(
        sign, hours, minutes, seconds, _fraction(parts[3], column.meta, dialect), column.meta
    )


def _time_text(sign: str, hours: int, minutes: int, seconds: int, fraction: str, count: int) -> str:
    fraction = fraction.ljust(count, "0")
    if not (hours or minutes or seconds or fraction.strip("0")):
        sign = ""
    return f"{sign}{hours:02}:{minutes:02}:{seconds:02}" + (f".{fraction}" if count else "")


_ADDRESSES: Final[dict[str, Callable[[str], bytes]]] = {
    "uuid": _uuid,
    "inet4": lambda text: ipaddress.IPv4Address(text).packed,
    "inet6": lambda text: ipaddress.IPv6Address(text).packed,
}
"""MariaDB's types whose constants are texts of bytes."""
_OTHERS: Final[dict[Type, Callable[[Column, Literal], Value]]] = {
    Type.BIT: _bits,
    Type.FLOAT: _float,
    Type.DOUBLE: _float,
}
