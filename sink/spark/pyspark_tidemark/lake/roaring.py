"""Deletion vectors as bytes: the positions of rows that a data file has and its table does not.

Pure.

Written as Delta's protocol says (PROTOCOL.md, "Deletion Vector Format"): a 64-bit portable Roaring
bitmap, in a file with a size before and a CRC-32 behind each, or in Delta's log itself as Z85 text.
The same bytes are the blob `deletion-vector-v1` of Iceberg's Puffin files.
"""

import struct
import zlib
from typing import Any

import numpy as np

from pyspark_tidemark.errors import SourceError

_MAGIC = 1681511377
_PLAIN, _WITH_RUNS = 12346, 12347
_NO_OFFSETS_BELOW = 4
# Positions of a container; more of them are a bitmap of 65536 bits, which is then smaller.
_MOST_LISTED = 4096
_BITMAP_BYTES = 8192
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_MOST_ROWS = 1 << 32

VERSION = b"\x01"
"""The first byte of a file of deletion vectors."""
FRAME_BYTES = 8
"""The bytes that a frame adds to a vector: its size and its CRC-32."""


def framed(vector: bytes) -> bytes:
    """A vector as it stands in a file."""
    return struct.pack(">I", len(vector)) + vector + struct.pack(">I", zlib.crc32(vector))


def unframed(data: bytes) -> bytes:
    """The vector in a frame.

    Raises:
        ValueError: the data is damaged.
    """
    (size,) = struct.unpack_from(">I", data)
    vector = data[4 : 4 + size]
    if len(data) < size + 8 or struct.unpack_from(">I", data, 4 + size)[0] != zlib.crc32(vector):
        raise ValueError("a deletion vector does not have its checksum")
    return vector


def positions_in(data: bytes, place: str) -> Any:
    """The positions of a framed vector that was read from the file `place`, sorted (NumPy int64).

    Raises:
        SourceError: ErrLakeDamaged.
    """
    try:
        return decoded(unframed(data))
    except (ValueError, IndexError, struct.error) as err:
        raise SourceError(
            "ErrLakeDamaged",
            f"{place} is damaged ({err or 'it is too short'}), so nobody can tell which rows are gone: "
            "restore the file from a backup, or start a new changefeed and target",
        ) from None


def encoded(positions: Any) -> bytes:
    """Positions (sorted, unique NumPy integers below 2^32) as a vector."""
    if len(positions) and int(positions[-1]) >= _MOST_ROWS:
        raise ValueError("a data file of more than 2^32 rows")
    return struct.pack("<iqI", _MAGIC, 1, 0) + _roaring(positions.astype(np.uint32))


def decoded(vector: bytes) -> Any:
    """The positions in a vector, sorted (NumPy int64).

    Raises:
        ValueError: it is no such bitmap.
    """
    magic, count = struct.unpack_from("<iq", vector)
    if magic != _MAGIC:
        raise ValueError(f"a deletion vector of the unknown kind {magic}")
    at, parts = 12, [np.empty(0, np.int64)]
    for _ in range(count):
        (high,) = struct.unpack_from("<I", vector, at)
        low, at = _unroaring(vector, at + 4)
        parts.append(low.astype(np.int64) + (high << 32))
    return np.concatenate(parts)


def z85(data: bytes) -> str:
    """Bytes, a multiple of four, as text."""
    text = []
    for (word,) in struct.iter_unpack(">I", data):
        text += [_Z85[word // 85**power % 85] for power in (4, 3, 2, 1, 0)]
    return "".join(text)


def unz85(text: str) -> bytes:
    """The bytes of a text."""
    words = []
    for at in range(0, len(text), 5):
        word = 0
        for letter in text[at : at + 5]:
            word = word * 85 + _Z85.index(letter)
        words.append(struct.pack(">I", word))
    return b"".join(words)


def _roaring(positions: Any) -> bytes:
    highs, starts = np.unique(positions >> 16, return_index=True)
    parts = np.split((positions & 0xFFFF).astype("<u2"), starts[1:]) if len(highs) else []
    bodies = [_container(part) for part in parts]
    head = b"".join(
        struct.pack("<HH", high, len(part) - 1) for high, part in zip(highs, parts, strict=True)
    )
    first = 8 + 8 * len(parts)
    offsets = np.cumsum([first, *map(len, bodies)])[:-1].astype("<u4")
    return struct.pack("<II", _PLAIN, len(parts)) + head + offsets.tobytes() + b"".join(bodies)


def _container(low: Any) -> bytes:
    if len(low) <= _MOST_LISTED:
        return bytes(low.tobytes())
    bits = np.zeros(8 * _BITMAP_BYTES, np.uint8)
    bits[low] = 1
    return bytes(np.packbits(bits, bitorder="little").tobytes())


def _unroaring(data: bytes, at: int) -> tuple[Any, int]:
    """A 32-bit bitmap's positions, and where it ends."""
    (cookie,) = struct.unpack_from("<I", data, at)
    with_runs = cookie & 0xFFFF == _WITH_RUNS
    if not with_runs and cookie != _PLAIN:
        raise ValueError("a deletion vector that is no Roaring bitmap")
    if with_runs:
        count, flags = (cookie >> 16) + 1, at + 4
        at = flags + (count + 7) // 8
        runs = np.unpackbits(np.frombuffer(data, np.uint8, at - flags, flags), bitorder="little")[
            :count
        ]
    else:
        (count,) = struct.unpack_from("<I", data, at + 4)
        at += 8
        runs = np.zeros(count, np.uint8)
    head = np.frombuffer(data, "<u2", 2 * count, at).reshape(count, 2)
    # The offsets of containers are left out where there are runs and few containers; containers
    # follow each other, so nobody needs them here.
    at += 4 * count + (4 * count if not with_runs or count >= _NO_OFFSETS_BELOW else 0)
    parts = [np.empty(0, np.int64)]
    for (high, less), run in zip(head.tolist(), runs.tolist(), strict=True):
        low, at = _positions(data, at, less + 1, run=bool(run))
        parts.append(low.astype(np.int64) + (high << 16))
    return np.concatenate(parts), at


def _positions(data: bytes, at: int, count: int, *, run: bool) -> tuple[Any, int]:
    """A container's positions, and where it ends."""
    if run:
        (number,) = struct.unpack_from("<H", data, at)
        pairs = np.frombuffer(data, "<u2", 2 * number, at + 2).reshape(number, 2).tolist()
        return np.concatenate(
            [np.arange(start, start + more + 1) for start, more in pairs]
        ), at + 2 + 4 * number
    if count <= _MOST_LISTED:
        return np.frombuffer(data, "<u2", count, at), at + 2 * count
    bits = np.frombuffer(data, np.uint8, _BITMAP_BYTES, at)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")), at + _BITMAP_BYTES
