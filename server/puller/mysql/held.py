"""What rows hold in a column that is younger than they are, as their batches would show it. Pure.

Null where nothing is told: expressions, TIMESTAMPs (they depend on the session's time zone), BITs, BINARYs, dates that
no calendar has (which batches show as null, too).
"""

import base64
import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from typing import Final

from server.puller.mysql.added import Constant, Implicit, Said, added_columns
from storage.mysql.schema import Column
from storage.mysql.types import INTEGERS, STRINGS, Type

_TIME: Final = re.compile(r"-?\d{2,3}:[0-5]\d:[0-5]\d")
_DAYS: Final = re.compile(r"\d{4}-\d\d-\d\d")
_MOMENT: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")


def with_held(columns: Sequence[Column], before: Sequence[Column], query: str) -> tuple[Column, ...]:
    """The columns with what rows hold that are older; those of `before` keep what was told of them."""
    known = {column.name.lower(): column for column in before}
    said = added_columns(query) if any(column.name.lower() not in known for column in columns) else {}
    return tuple(_with(column, known.get(column.name.lower()), said) for column in columns)


def _with(column: Column, was: Column | None, said: Mapping[str, Said]) -> Column:
    if was is not None:
        return replace(column, held=was.held if was == column else None)
    return replace(column, held=held_value(column, said.get(column.name.lower())))


def held_value(column: Column, said: Said) -> str | int | float | None:
    """The value as JSON has it (`sink.defaults`); None: null, or not told."""
    try:
        if isinstance(said, Implicit):
            return None if column.nullable else _constant(column, _implicit(column))
        return None if said is None or said.text is None else _constant(column, said)
    except (ValueError, ArithmeticError):
        return None


def _implicit(column: Column) -> Constant:
    if column.type is Type.ENUM:
        return Constant("1")
    if column.type in (Type.TIME, Type.TIME2):
        return Constant("00:00:00", quoted=True)
    text = column.type is Type.SET or column.type in STRINGS
    return Constant("", quoted=True) if text else Constant("0")


def _constant(column: Column, said: Constant) -> str | int | float | None:
    kind, text = column.type, said.text or ""
    if kind in INTEGERS:
        return int(Decimal(text).to_integral_value(ROUND_HALF_UP))
    if kind in (Type.FLOAT, Type.DOUBLE):
        return float(text)
    if kind is Type.YEAR:
        return _year(int(text), quoted=said.quoted)
    if kind is Type.NEWDECIMAL:
        return f"{Decimal(text).quantize(Decimal(1).scaleb(-(column.meta & 0xFF)), ROUND_HALF_UP):f}"
    if kind is Type.ENUM:
        return _member(column, text) if said.quoted else column.elems[int(text) - 1]
    if kind is Type.SET:
        members = {_member(column, part) for part in text.split(",") if part} if said.quoted else None
        return None if members is None else ",".join(elem for elem in column.elems if elem in members)
    if kind in STRINGS:
        return _string(column, text) if said.quoted or text.isdecimal() else None
    return _moment(column, text)


def _year(number: int, *, quoted: bool) -> int:
    if number >= 100 or (number == 0 and not quoted):
        return number
    return number + (2000 if number < 70 else 1900)


def _member(column: Column, text: str) -> str:
    return next(elem for elem in column.elems if elem.lower() == text.rstrip(" ").lower())


def _string(column: Column, text: str) -> str | None:
    if column.is_text:
        return text.rstrip(" ") if column.type is Type.STRING else text
    if column.type is Type.STRING or not text.isascii():
        return None
    return base64.b64encode(text.encode()).decode()


def _moment(column: Column, text: str) -> str | None:
    kind = column.type
    if kind is Type.DATE and _DAYS.fullmatch(text):
        return dt.date.fromisoformat(text).isoformat()
    if kind is Type.DATETIME2 and _MOMENT.fullmatch(text):
        return dt.datetime.fromisoformat(text).isoformat()
    if kind is Type.TIME2 and _TIME.fullmatch(text):
        return text + (f".{'0' * column.meta}" if column.meta else "")
    return None
