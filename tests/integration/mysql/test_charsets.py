"""Every character of every character set is the one that a real server makes of its bytes."""

import pytest

from storage.mysql.charset import UTF8, codec_of, decode_text

_WIDE = ("ucs2", "utf16", "utf16le", "utf32", "binary")
_STEP = 400


def _sequences(longest: int) -> list[bytes]:
    two = (
        [bytes((lead, trail)) for lead in range(0x80, 256) for trail in range(0x30, 256)]
        if longest > 1
        else []
    )
    three = (
        [bytes((0x8F, row, cell)) for row in range(0xA1, 255) for cell in range(0xA1, 255)]
        if longest > 2
        else []
    )
    return [bytes((byte,)) for byte in range(256)] + two + three


@pytest.mark.timeout(180)
def test_bytes_become_the_characters_that_the_server_makes_of_them(mariadb):
    with mariadb.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SELECT character_set_name, maxlen FROM information_schema.character_sets")
        lengths = {
            name: length
            for name, length in cursor.fetchall()
            if name not in UTF8 and name not in _WIDE
        }
        known = {name: length for name, length in lengths.items() if codec_of(name) is not None}
        assert set(lengths) - set(known) == {
            "dec8",
            "hp8",
            "swe7",
            "armscii8",
            "keybcs2",
            "geostd8",
            "eucjpms",
        }
        for charset, longest in known.items():
            other = [
                data
                for data, text in _converted(cursor, charset, longest)
                if decode_text(charset, data) != text
            ]
            assert not other, (charset, other[:9])


def _converted(cursor, charset, longest):
    """What the server takes for one character that Unicode has, and that character."""
    sequences = _sequences(longest)
    for begin in range(0, len(sequences), _STEP):
        part = sequences[begin : begin + _STEP]
        texts = (f"CONVERT(_binary x'{data.hex()}' USING {charset})" for data in part)
        cursor.execute(
            "SELECT " + ", ".join(f"HEX({text}), CONVERT({text} USING utf8mb4)" for text in texts)
        )
        (row,) = cursor.fetchall()
        for data, kept, text in zip(part, row[::2], row[1::2], strict=True):
            known = text not in ("?", "\ufffd") or data == b"?"
            if kept is not None and bytes.fromhex(kept) == data and len(text) == 1 and known:
                yield data, text
