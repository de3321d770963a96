"""Texts as Go prints them, for the places where PD's wording is part of the protocol or of a stored
record.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime

_LAST_DATE_S = 253_402_300_799  # the year 9999
_ESCAPES = {
    '"': '\\"',
    "\\": "\\\\",
    "\a": "\\a",
    "\b": "\\b",
    "\f": "\\f",
    "\n": "\\n",
    "\r": "\\r",
}
_ESCAPES |= {"\t": "\\t", "\v": "\\v"}
_IN_JSON = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"})
_ESCAPED_BYTES = range(0xDC80, 0xDD00)
_ASCII = 0x80
_BASIC = 0x10000


def quoted(text: str) -> str:
    """`%+q`: in double quotes, all ASCII."""
    return f'"{"".join(_ESCAPES.get(char) or _char(ord(char)) for char in text)}"'


def time_text(unix_s: int) -> str:
    """`time.Time.String()` of a whole second in UTC;
    the bare number where there is no such date.
    """
    if not 0 <= unix_s <= _LAST_DATE_S:
        return str(unix_s)
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S +0000 UTC")


def json_text(fields: Mapping[str, str | int]) -> bytes:
    """`json.Marshal`: no blanks, UTF-8 as it is, and what HTML would misread escaped."""
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).translate(_IN_JSON)
    return valid_text(text).encode()


def key_text(raw: bytes) -> str:
    """A part of a key as text that `key_bytes` turns back, whatever it holds."""
    return raw.decode(errors="surrogateescape")


def key_bytes(text: str) -> bytes:
    """The inverse of `key_text`."""
    return text.encode(errors="surrogateescape")


def valid_text(text: str) -> str:
    """`text` with U+FFFD for what is no Unicode, as a message or a JSON text needs it."""
    return key_bytes(text).decode(errors="replace")


def _char(number: int) -> str:
    if number in _ESCAPED_BYTES:
        return f"\\x{number - 0xDC00:02x}"
    if number < _ASCII:
        return chr(number) if chr(number).isprintable() else f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < _BASIC else f"\\U{number:08x}"
