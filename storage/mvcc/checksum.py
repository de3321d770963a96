"""The checksum of raw pairs that clients compare ranges by: the XOR of every pair's CRC-64. Pure.

Source: TiKV's Crc64_Xor: CRC-64/XZ (ECMA-182, reflected) over the key and then the value.
"""

from collections.abc import Iterable
from typing import NamedTuple

_POLYNOMIAL = 0xC96C5795D7870F42
_ONES = (1 << 64) - 1


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = [_entry(byte) for byte in range(256)]


class RangeSum(NamedTuple):
    """What a range amounts to; sums of disjoint ranges are combined by `xor` and addition."""

    xor: int = 0
    pairs: int = 0
    size: int = 0


def crc64(data: bytes) -> int:
    """CRC-64/XZ of `data`."""
    crc = _ONES
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ _ONES


def range_sum(pairs: Iterable[tuple[bytes, bytes]]) -> RangeSum:
    """The sum over key-value pairs."""
    xor = count = size = 0
    for key, value in pairs:
        xor ^= crc64(key + value)
        count += 1
        size += len(key) + len(value)
    return RangeSum(xor, count, size)
