"""A cursor over the bytes of one event: numbers, length-encoded numbers and strings, bitmaps.

length-encoded number = 0 … 250 | 252 u16 | 253 u24 | 254 u64
varied number         = little-endian; its first byte ends with a one for each byte that follows it
"""

import struct

from storage.model.errors import CorruptError

_WIDTHS = {252: 2, 253: 3, 254: 8}
_VARIED_BYTES_MAX = 8


class Reader:
    """Reads `data` from `at` on; every read beyond its end raises CorruptError."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    @property
    def rest(self) -> bytes:
        """What has not been read."""
        return self.data[self.at :]

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        part = self.data[self.at : self.at + size]
        if len(part) != size:
            raise CorruptError(
                f"{size} bytes at offset {self.at} reach beyond the end of {len(self.data)}"
            )
        self.at += size
        return part

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        """The numbers of a fixed form."""
        return form.unpack(self.take(form.size))

    def number(self, width: int) -> int:
        """A little-endian number of `width` bytes."""
        return int.from_bytes(self.take(width), "little")

    def packed(self) -> int:
        """A length-encoded number."""
        first = self.number(1)
        if first < 251:
            return first
        if first not in _WIDTHS:
            raise CorruptError(f"{first} at offset {self.at - 1} begins no length-encoded number")
        return self.number(_WIDTHS[first])

    def varied(self) -> int:
        """A number whose first byte ends with as many ones as bytes follow it (MySQL's tagged
        GTIDs).
        """
        first = self.number(1)
        more = (first ^ (first + 1)).bit_length() - 1
        if more == _VARIED_BYTES_MAX:
            return self.number(_VARIED_BYTES_MAX)
        return (first | self.number(more) << 8) >> more + 1

    def string(self) -> bytes:
        """Bytes behind their length-encoded size."""
        return self.take(self.packed())

    def bits(self, count: int) -> tuple[bool, ...]:
        """A bitmap of `count` bits, the least significant bit of each byte first."""
        number = int.from_bytes(self.take((count + 7) // 8), "little")
        return tuple(bool(number >> place & 1) for place in range(count))

    def bits_be(self, count: int) -> tuple[bool, ...]:
        """A bitmap of `count` bits, the most significant bit of each byte first."""
        content = self.take((count + 7) // 8)
        return tuple(bool(content[place // 8] << place % 8 & 0x80) for place in range(count))

    def packed_list(self) -> list[int]:
        """All length-encoded numbers up to the end."""
        numbers = []
        while self.at < len(self.data):
            numbers.append(self.packed())
        return numbers
