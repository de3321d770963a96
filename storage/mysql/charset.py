"""Character sets: which one a collation number means, and how Python decodes it.

Source: the servers' own lists (information_schema.COLLATIONS of MariaDB 10.11; MySQL 8's mysql-8.0
charset sources).
"""

import codecs
from functools import cache
from typing import Final

BINARY: Final = "binary"
BINARY_COLLATION: Final = 63
UTF8: Final = frozenset({"utf8mb4", "utf8mb3", "utf8", "ascii"})
"""Character sets whose bytes are UTF-8 as they are."""
_NOPAD = 1024  # MariaDB: a NOPAD collation is the padded one's number plus this
_UCA1400 = 2048  # MariaDB: from here on 256 numbers for each of these
_UCA1400_CHARSETS = ("utf8mb3", "utf8mb4", "ucs2", "utf16", "utf32")

_NUMBERS: Final[dict[str, tuple[tuple[int, int], ...]]] = {
    "big5": ((1, 1), (84, 84)),
    "latin2": ((2, 2), (9, 9), (21, 21), (27, 27), (77, 77)),
    "dec8": ((3, 3), (69, 69)),
    "cp850": ((4, 4), (80, 80)),
    "latin1": ((5, 5), (8, 8), (15, 15), (31, 31), (47, 49), (94, 94)),
    "hp8": ((6, 6), (72, 72)),
    "koi8r": ((7, 7), (74, 74)),
    "swe7": ((10, 10), (82, 82)),
    "ascii": ((11, 11), (65, 65)),
    "ujis": ((12, 12), (91, 91)),
    "sjis": ((13, 13), (88, 88)),
    "cp1251": ((14, 14), (23, 23), (50, 52)),
    "hebrew": ((16, 16), (71, 71)),
    "tis620": ((18, 18), (89, 89)),
    "euckr": ((19, 19), (85, 85)),
    "latin7": ((20, 20), (41, 42), (79, 79)),
    "koi8u": ((22, 22), (75, 75)),
    "gb2312": ((24, 24), (86, 86)),
    "greek": ((25, 25), (70, 70)),
    "cp1250": ((26, 26), (34, 34), (44, 44), (66, 66), (99, 99)),
    "gbk": ((28, 28), (87, 87)),
    "cp1257": ((29, 29), (58, 59)),
    "latin5": ((30, 30), (78, 78)),
    "armscii8": ((32, 32), (64, 64)),
    "utf8mb3": ((33, 33), (76, 76), (83, 83), (192, 223), (576, 578)),
    "ucs2": ((35, 35), (90, 90), (128, 159), (640, 642)),
    "cp866": ((36, 36), (68, 68)),
    "keybcs2": ((37, 37), (73, 73)),
    "macce": ((38, 38), (43, 43)),
    "macroman": ((39, 39), (53, 53)),
    "cp852": ((40, 40), (81, 81)),
    "utf8mb4": ((45, 46), (224, 247), (255, 323), (608, 610)),
    "utf16": ((54, 55), (101, 124), (672, 674)),
    "utf16le": ((56, 56), (62, 62)),
    "cp1256": ((57, 57), (67, 67)),
    "utf32": ((60, 61), (160, 183), (736, 738)),
    "binary": ((63, 63),),
    "geostd8": ((92, 93),),
    "cp932": ((95, 96),),
    "eucjpms": ((97, 98),),
    "gb18030": ((248, 250),),
}
_CODECS: Final = {
    "latin1": "cp1252",
    "latin2": "iso8859_2",
    "latin5": "iso8859_9",
    "latin7": "iso8859_13",
    "koi8r": "koi8_r",
    "koi8u": "koi8_u",
    "ujis": "euc_jp",
    "sjis": "shift_jis",
    "euckr": "cp949",
    "hebrew": "iso8859_8",
    "greek": "iso8859_7",
    "tis620": "iso8859_11",
    "macce": "mac_latin2",
    "macroman": "mac_roman",
    "ucs2": "utf_16_be",
    "utf16": "utf_16_be",
    "utf16le": "utf_16_le",
    "utf32": "utf_32_be",
}
_SERVER_MAPPINGS: Final = {
    "sjis": {0xFF3C: "\\"},
    "ujis": {0xFF3C: "\\"},
    "koi8u": {0x2219: "\u2022"},
    "hebrew": {0xAF: "\u203e"},
    "greek": {0x2018: "\u02bd", 0x2019: "\u02bc"},
    "cp866": {0x2116: "\u207f", 0xA4: "\xb2"},
    # of 2005, Python's is of 2000
    "gb18030": {0xE7C7: "\u1e3f", 0x1E3F: "\ue7c7"},
}
"""Characters that the servers map differently: Python's character, the servers'."""
_SAME_NAME_IN_PYTHON: Final = frozenset(
    {
        "big5",
        "cp850",
        "cp852",
        "cp866",
        "cp932",
        "cp1250",
        "cp1251",
        "cp1256",
        "cp1257",
        "gb2312",
        "gbk",
        "gb18030",
    }
)


def _user_defined_characters(lead: bytes, first: int) -> dict[bytes, str]:
    """The ten rows of EUC that are for users' own characters, in Unicode's area for these."""
    places = ((row, cell) for row in range(0xF5, 0xFF) for cell in range(0xA1, 0xFF))
    return {lead + bytes(place): chr(first + number) for number, place in enumerate(places)}


_EXTRA_CHARACTERS: Final = {
    # seven of ETEN's: 碁, 銹, 裏, 墻, 恒, 粧, 嫺
    "big5": {
        bytes((0xF9, trail)): bytes((0xF9, trail)).decode("cp950") for trail in range(0xD6, 0xDD)
    },
    "ujis": _user_defined_characters(b"", 0xE000) | _user_defined_characters(b"\x8f", 0xE3AC),
}
"""Characters of the servers that Python's codec does not have, by their bytes."""


class _ExtraCharacters:
    """Python's error handler of a character set that has more characters than Python knows."""

    def __init__(self, characters: dict[bytes, str]) -> None:
        self._characters = characters
        self._bytes = {character: data for data, character in characters.items()}

    def __call__(self, error: UnicodeError) -> tuple[str | bytes, int]:
        """A character, U+FFFD, or the bytes of a character."""
        if isinstance(error, UnicodeDecodeError):
            for size in (2, 3):
                data = error.object[error.start : error.start + size]
                if data in self._characters:
                    return self._characters[data], error.start + size
            return codecs.replace_errors(error)
        if isinstance(error, UnicodeEncodeError) and error.object[error.start] in self._bytes:
            return self._bytes[error.object[error.start]], error.start + 1
        raise error


for _charset, _characters in _EXTRA_CHARACTERS.items():
    codecs.register_error(f"tidemark-{_charset}", _ExtraCharacters(_characters))


@cache
def charset_of(collation: int) -> str | None:
    """The character set of the collation with that number; None if it is unknown."""
    if collation >= _UCA1400:
        place = (collation - _UCA1400) // 256
        return _UCA1400_CHARSETS[place] if place < len(_UCA1400_CHARSETS) else None
    number = collation - _NOPAD if collation >= _NOPAD else collation
    for name, ranges in _NUMBERS.items():
        if any(first <= number <= last for first, last in ranges):
            return name
    return None


def codec_of(charset: str) -> str | None:
    """Return Python's name of the character set; None: Python has no such codec (dec8, hp8, swe7,
    armscii8, eucjpms, …).
    """
    if charset in UTF8:
        return "utf_8"
    return charset if charset in _SAME_NAME_IN_PYTHON else _CODECS.get(charset)


def decode_text(charset: str, data: bytes) -> str:
    """The characters of `data`, U+FFFD for bad bytes;
    MySQL's latin1 is cp1252 with its five holes filled.
    """
    if charset == "latin1":
        return _latin1(data)
    text = data.decode(codec_of(charset) or "latin_1", errors=_error_handler(charset, "replace"))
    return text.translate(_SERVER_MAPPINGS[charset]) if charset in _SERVER_MAPPINGS else text


@cache
def is_one_to_one(charset: str) -> bool:
    """Whether different bytes always decode to different texts; in multi-byte sets other than UTF-8
    some do not.
    """
    if charset in UTF8 or charset == BINARY:
        return True
    singles = {decode_text(charset, bytes((byte,))) for byte in range(256)}
    return len(singles) == 256 and "\ufffd" not in singles


def is_exact(charset: str, data: bytes) -> bool:
    """Whether `data` is the server's encoding of the text it decodes to, and so the only one."""
    # Python encodes only its own characters: those that the servers map differently are mapped back
    # first. Whichever of the two decodes to the same text again is the server's encoding.
    text = decode_text(charset, data)
    for each in (text, text.translate(_python_mappings(charset))):
        try:
            made = each.encode(
                codec_of(charset) or "latin_1", errors=_error_handler(charset, "strict")
            )
        except UnicodeEncodeError:
            continue
        if decode_text(charset, made) == text:
            return made == data
    return False


def _error_handler(charset: str, usual: str) -> str:
    return f"tidemark-{charset}" if charset in _EXTRA_CHARACTERS else usual


@cache
def _python_mappings(charset: str) -> dict[int, int]:
    return {ord(theirs): ours for ours, theirs in _SERVER_MAPPINGS.get(charset, {}).items()}


def _latin1(data: bytes) -> str:
    try:
        return data.decode("cp1252")
    except UnicodeDecodeError:
        return "".join(bytes((byte,)).decode("cp1252", "ignore") or chr(byte) for byte in data)


def pad_of(charset: str) -> bytes:
    """Return the padding of CHAR or BINARY values, which has no meaning at a value's end."""
    return {
        BINARY: b"\0",
        "ucs2": b"\0 ",
        "utf16": b"\0 ",
        "utf16le": b" \0",
        "utf32": b"\0\0\0 ",
    }.get(charset, b" ")
