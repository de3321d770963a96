"""LevelDB's own files, checked without LevelDB: which file is damaged, and where.

Nothing is changed.

LevelDB's errors name no file. And a log whose last record has a damaged length looks to LevelDB
like a log that was being written when the process died: the record would be dropped without an
error. `log_damage` tells the two apart.

Formats: LevelDB's doc/log_format.md and doc/table_format.md.
"""

import heapq
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import google_crc32c

_LOG_BLOCK_BYTES: Final = 32 << 10
# masked crc32c of type and payload, length, type
_RECORD: Final = struct.Struct("<IHB")
_LENGTH_BITS: Final = 16
_FOOTER_BYTES: Final = 48
_TABLE_MAGIC: Final = struct.pack("<Q", 0xDB4775248B80FB57)
# compression, masked crc32c of block and compression
_TRAILER: Final = struct.Struct("<BI")
_SNAPPY: Final = 1
_U32: Final = struct.Struct("<I")
_SEQUENCE_BYTES: Final = 8  # behind each key in a table
_SEARCH_BLOCKS: Final = 1024
_FILE_BLOCKS: Final = 64


class Damage(NamedTuple):
    """A place in a file whose bytes are not those that were written.

    `first_key` (exclusive) and `last_key` bound the keys of a damaged block; b"" where they are not
    known.
    """

    path: Path
    offset: int
    reason: str
    first_key: bytes = b""
    last_key: bytes = b""

    def __str__(self) -> str:
        keys = (
            f", with keys from {self.first_key.hex()} to {self.last_key.hex()},"
            if self.last_key
            else ""
        )
        return f"{self.path} is damaged at byte {self.offset}{keys}: {self.reason}"

    def covers(self, key: bytes) -> bool:
        """Whether reading `key` touches the damaged block."""
        return self.first_key < key <= self.last_key and self.path.exists()


def find_log_damage(directory: Path) -> Damage | None:
    """The first damage in the write-ahead logs and manifests of a database that is not open."""
    logs = sorted(
        path
        for path in directory.iterdir()
        if path.suffix == ".log" or path.name.startswith("MANIFEST-")
    )
    for path in logs:
        at = log_damage(path.read_bytes())
        if at is not None:
            return Damage(path, at, "a record does not match its checksum")
    return None


def log_damage(data: bytes) -> int | None:
    """The offset of the first damaged record of a log; None for a whole log,
    and for one that ends within a record.
    """
    for block in range(0, len(data), _LOG_BLOCK_BYTES):
        at, end = block, min(block + _LOG_BLOCK_BYTES, len(data))
        while end - at >= _RECORD.size:
            crc, length, kind = _RECORD.unpack_from(data, at)
            if not any((crc, length, kind)):
                # zeros, as a file system leaves them behind what was written before a power loss
                break
            if at + _RECORD.size + length > end:
                cut_off = end == len(data) and not _has_other_length(data, at, end)
                return None if cut_off else at
            if _record_crc(data, at, length) != crc:
                return at
            at += _RECORD.size + length
    return None


def find_table_damage(
    directory: Path, lower: bytes, upper: bytes, *, reverse: bool = False
) -> Damage | None:
    """The damaged block that a read of `[lower, upper)` (`upper` b"": to the end) meets first;
    None if none is found.

    At most `_SEARCH_BLOCKS` blocks are read, those that a scan would meet first.
    """
    blocks: list[Iterable[Block]] = []
    for path in sorted(directory.glob("*.ldb")):
        index = read_index(path)
        if isinstance(index, Damage):
            return index
        blocks.append(_nearest(index, lower, upper, reverse=reverse))
    merged = heapq.merge(*blocks, key=lambda block: block.last_key, reverse=reverse)
    for block in islice(merged, _SEARCH_BLOCKS):
        if _read_block(block.path, block.offset, block.size) is None:
            reason = "a block does not match its checksum"
            return Damage(block.path, block.offset, reason, block.first_key, block.last_key)
    return None


class Block(NamedTuple):
    """A data block: its place, and the keys that bound what is in it."""

    path: Path
    offset: int
    size: int
    first_key: bytes
    last_key: bytes


def _nearest(
    index: Iterable[Block], lower: bytes, upper: bytes, *, reverse: bool
) -> Iterable[Block]:
    """The blocks that may hold keys of `[lower, upper)`, a few,
    from the side where a scan begins.
    """
    within = (
        block
        for block in index
        if block.last_key >= lower and not (upper and block.first_key >= upper)
    )
    if reverse:
        return reversed(deque(within, _FILE_BLOCKS))
    return islice(within, _FILE_BLOCKS)


def read_index(path: Path) -> list["Block"] | Damage:
    """The blocks of a table, in key order; the damage, if its footer or index is damaged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - _FOOTER_BYTES))
            footer = file.read()
    except FileNotFoundError:
        return []  # compacted away meanwhile
    if len(footer) < _FOOTER_BYTES or not footer.endswith(_TABLE_MAGIC):
        return Damage(path, max(0, size - _FOOTER_BYTES), "its footer is not that of a table")
    # behind the handle of the meta index
    _, at = _varint(footer, _varint(footer, 0)[1])
    offset, at = _varint(footer, at)
    length, _ = _varint(footer, at)
    data = _read_block(path, offset, length) if offset + length <= size else None
    if data is None:
        return Damage(path, offset, "its index does not match its checksum")
    return list(_index_entries(path, data))


def _index_entries(path: Path, data: bytes) -> Iterator[Block]:
    if not data:
        return  # compacted away meanwhile
    end = len(data) - _U32.size * (1 + _U32.unpack_from(data, len(data) - _U32.size)[0])
    at, key, before = 0, b"", b""
    while at < end:
        shared, at = _varint(data, at)
        own, at = _varint(data, at)
        value, at = _varint(data, at)
        key = key[:shared] + data[at : at + own]
        offset, rest = _varint(data, at + own)
        size, _ = _varint(data, rest)
        at += own + value
        last_key = key[:-_SEQUENCE_BYTES]
        yield Block(path, offset, size, before, last_key)
        before = last_key


def _read_block(path: Path, offset: int, size: int) -> bytes | None:
    """Return the block's content; None if it is damaged."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(size + _TRAILER.size)
    except FileNotFoundError:
        return b""
    if len(data) < size + _TRAILER.size:
        return None
    compression, crc = _TRAILER.unpack_from(data, size)
    if _masked(google_crc32c.value(data[: size + 1])) != crc:
        return None
    if compression != _SNAPPY:
        return data[:size]
    # Imported here: daemons that have no other use for it start without 40 MB of it.
    import pyarrow as pa

    plain: bytes = pa.decompress(data[:size], _varint(data, 0)[0], codec="snappy", asbytes=True)
    return plain


def _has_other_length(data: bytes, at: int, end: int) -> bool:
    """Whether the record is whole except for one bit of its length, which therefore reaches beyond
    the end of the file.
    """
    crc, length, _ = _RECORD.unpack_from(data, at)
    lengths = (length ^ 1 << bit for bit in range(_LENGTH_BITS))
    return any(
        at + _RECORD.size + other <= end and _record_crc(data, at, other) == crc
        for other in lengths
    )


def _record_crc(data: bytes, at: int, length: int) -> int:
    begin = at + _RECORD.size
    return _masked(google_crc32c.value(data[begin - 1 : begin + length]))


def _masked(crc: int) -> int:
    """LevelDB stores its checksums so, for a file may hold the bytes of another one with its
    checksums.
    """
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where the next one begins."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
