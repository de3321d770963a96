"""Bytes of a log: read by NumPy from any offsets, many at once and no object per value (`Bytes`);
and by a cursor over one event (`Reader`).

Offsets are int64 and never negative; a gather beyond the end raises IndexError or, of slices,
ArrowInvalid, which the callers that read foreign bytes turn into CorruptError (`reading`).

length-encoded number = 0 … 250 | 252 u16 | 253 u24 | 254 u64
varied number         = little-endian; its first byte ends with a one for each byte that follows it
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.model.errors import CorruptError
from storage.tidb.binary import slices_of, unaligned

Mask = npt.NDArray[np.bool_]
Offsets = npt.NDArray[np.int64]
Buffer = bytes | bytearray | memoryview
PAD_BYTES: Final = 8
"""How many readable bytes must follow the last value: numbers are read in words of eight bytes."""
_WIDTHS = {252: 2, 253: 3, 254: 8}
_VARIED_BYTES_MAX = 8


class Bytes:
    """A byte buffer that is followed by `PAD_BYTES` readable bytes of no meaning."""

    __slots__ = ("_u16", "_u32", "_u64", "u8s")

    def __init__(self, data: Buffer | npt.NDArray[np.uint8]) -> None:
        self.u8s = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        if len(self.u8s) < PAD_BYTES:
            self.u8s = np.concatenate([self.u8s, np.zeros(PAD_BYTES, np.uint8)])
        self._u16, self._u32, self._u64 = (
            unaligned(self.u8s, dtype) for dtype in ("<u2", "<u4", "<u8")
        )

    @classmethod
    def padded(cls, data: Buffer) -> "Bytes":
        """A copy of `data` with padding behind it."""
        return cls(bytes(data) + bytes(PAD_BYTES))

    def u8(self, at: Offsets) -> npt.NDArray[np.uint8]:
        """The byte at each offset."""
        values: npt.NDArray[np.uint8] = self.u8s[at]
        return values

    def u64(self, at: Offsets) -> npt.NDArray[np.uint64]:
        """The eight bytes at each offset."""
        values: npt.NDArray[np.uint64] = self._u64[at]
        return values

    def number(self, at: Offsets, width: int) -> npt.NDArray[Any]:
        """The unsigned little-endian number of `width` bytes (1 to 8) at each offset,
        in some unsigned dtype.
        """
        if width == 1:
            return self.u8s[at]
        if width == 2:
            return self._u16[at]
        if width == 3:
            return self._u32[at] & np.uint32(0xFFFFFF)
        if width == 4:
            return self._u32[at]
        return self._u64[at] & np.uint64((1 << 8 * width) - 1)

    def number_be(self, at: Offsets, width: int) -> npt.NDArray[np.uint64]:
        """The unsigned big-endian number of `width` bytes (1 to 8) at each offset."""
        return self._u64[at].byteswap() >> np.uint64(64 - 8 * width)

    def matrix(self, at: Offsets, width: int) -> npt.NDArray[np.uint8]:
        """The `width` bytes at each offset, a line each."""
        windows: npt.NDArray[np.uint8] = np.ndarray(
            (max(len(self.u8s) - width + 1, 0), width), np.uint8, self.u8s, strides=(1, 1)
        )
        return windows[at]

    def slices(self, begin: Offsets, end: Offsets, present: Mask | None = None) -> pa.Array:
        """The bytes `[begin, end)` as a new binary array, null where not `present`.

        Slices that do not ascend are put in order first (`slices_of`). They must not overlap.
        """
        # What is absent may begin anywhere: it becomes an empty slice where the last one ended.
        if present is not None:
            reach = np.maximum.accumulate(np.where(present, end, 0))
            begin, end = np.where(present, begin, reach), np.where(present, end, reach)
        if bool((begin[1:] < end[:-1]).any()):
            order = np.argsort(begin, kind="stable")
            ordered_present = None if present is None else present[order]
            rows = self.slices(begin[order], end[order], ordered_present)
            return rows.take(pa.array(np.argsort(order)))
        return slices_of(self.u8s, begin, end, None if present is None else ~present)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn a read beyond the end into CorruptError."""
    try:
        yield
    # NumPy says the one, Arrow the other of slices beyond the end.
    except (IndexError, pa.ArrowInvalid) as err:
        raise CorruptError(f"{what} reaches beyond its end") from err


class Reader:
    """Reads `data` from `at` on; every read beyond its end raises CorruptError."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    @property
    def rest(self) -> bytes:
        """Return the unread bytes."""
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
