"""The records of the store: Percolator's lock and write records, and their keys
(docs/format/mvcc.md). Pure.

A column is the first byte of a key. User keys are memcomparable-encoded ("encoded key" everywhere
in this room), so that a version suffix cannot mix two user keys; timestamps descend, so that the
newest version comes first. The META column holds small JSON documents, each with the number of its
format.

`Lock` and `Write` are named tuples and not dataclasses: they are made and taken apart on every
request.
"""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from storage.codec import decode_u64_desc, encode_u64_desc
from storage.model.errors import CorruptError

LOCK_COLUMN = b"l"
WRITE_COLUMN = b"w"
VALUE_COLUMN = b"d"
RAW_COLUMN = b"r"
EXPIRY_COLUMN = b"e"
META_COLUMN = b"m"
AFTER_VERSIONS = b"\xff" * 9
"""Appended to an encoded key: after all its versions, before the next encoded key."""
PUT: Final = ord("P")
DELETE: Final = ord("D")
LOCK: Final = ord("L")
PESSIMISTIC: Final = ord("S")
ROLLBACK: Final = ord("R")
SHORT_VALUE_MAX_BYTES: Final = 255
_TS_BYTES = 8
_GROUP = 9
_VERSION: Final = 1
_ASYNC_VERSION: Final = 2
_HAS_SHORT_VALUE: Final = 1
_OVERLAPPED_ROLLBACK: Final = 2
_HAS_SOURCE: Final = 4
_LOCK_HEAD = struct.Struct(">BBBQQQQQI")
_WRITE_HEAD = struct.Struct(">BBBQ")
_LENGTH = struct.Struct(">I")
_SOURCE = struct.Struct(">Q")


def lock_key(encoded: bytes) -> bytes:
    """The one lock of a key."""
    return LOCK_COLUMN + encoded


def write_key(encoded: bytes, commit_ts: int) -> bytes:
    """The write record of a key at `commit_ts`."""
    return WRITE_COLUMN + encoded + encode_u64_desc(commit_ts)


def value_key(encoded: bytes, start_ts: int) -> bytes:
    """The value of a key that is too long for its write record."""
    return VALUE_COLUMN + encoded + encode_u64_desc(start_ts)


def split_version(key: bytes) -> tuple[bytes, int]:
    """The encoded key and the timestamp of a key of the WRITE or VALUE column."""
    return key[1:-_TS_BYTES], decode_u64_desc(key, len(key) - _TS_BYTES)


def user_key(encoded: bytes) -> bytes:
    """The key that `storage.codec.encode_bytes` encoded; for keys we wrote ourselves, hence
    unchecked and fast.
    """
    data = bytearray(encoded)
    padding = 0xFF - data[-1]
    del data[_GROUP - 1 :: _GROUP]
    return bytes(data[: len(data) - padding]) if padding else bytes(data)


def column_range(column: bytes, lower: bytes, upper: bytes) -> tuple[bytes, bytes]:
    """Bounds in `column` of the encoded keys `[lower, upper)`;
    `upper == b""` means the end of the column.
    """
    return column + lower, column + upper if upper else bytes([column[0] + 1])


class Lock(NamedTuple):
    """A prewritten (PUT, DELETE, LOCK) or pessimistic lock;
    `ttl_ms` counts from the physical time of `start_ts`.

    A transaction with `async_commit` locks is committed once all of them are there; its primary
    names the others. `txn_source` says who wrote it, 0 for users (kvrpcpb.Context.txn_source).
    """

    kind: int
    primary: bytes
    start_ts: int
    ttl_ms: int
    for_update_ts: int = 0
    min_commit_ts: int = 0
    txn_size: int = 0
    short_value: bytes | None = None
    async_commit: bool = False
    secondaries: tuple[bytes, ...] = ()
    txn_source: int = 0

    @property
    def changes_data(self) -> bool:
        """Whether readers and change feeds are concerned by this lock."""
        return self.kind in (PUT, DELETE)

    def encode(self) -> bytes:
        """The bytes of the lock column."""
        flags = _flags(self.short_value, self.txn_source)
        head = _LOCK_HEAD.pack(
            _ASYNC_VERSION if self.async_commit else _VERSION,
            self.kind,
            flags,
            self.start_ts,
            self.ttl_ms,
            self.for_update_ts,
            self.min_commit_ts,
            self.txn_size,
            len(self.primary),
        )
        named = _encode_keys(self.secondaries) if self.async_commit else b""
        return b"".join(
            (head, self.primary, _encode_source(self.txn_source), named, self.short_value or b"")
        )


class Write(NamedTuple):
    """A transaction's effect on a key; `overlapped_rollback` also records the rollback of the one
    that started here.
    """

    kind: int
    start_ts: int
    short_value: bytes | None = None
    overlapped_rollback: bool = False
    txn_source: int = 0

    def encode(self) -> bytes:
        """The bytes of the write column."""
        flags = _flags(self.short_value, self.txn_source) | (
            _OVERLAPPED_ROLLBACK if self.overlapped_rollback else 0
        )
        head = _WRITE_HEAD.pack(_VERSION, self.kind, flags, self.start_ts)
        return b"".join((head, _encode_source(self.txn_source), self.short_value or b""))


def decode_lock(data: bytes) -> Lock:
    """Read what `Lock.encode` wrote.

    Raises:
        CorruptError: too short, or of an unknown version.
    """
    if len(data) < _LOCK_HEAD.size or data[0] not in (_VERSION, _ASYNC_VERSION):
        raise CorruptError(
            f"a lock record of {len(data)} bytes has no known version; was it written by a newer "
            "store?"
        )
    version, kind, flags, start_ts, ttl_ms, for_update_ts, min_commit_ts, txn_size, length = (
        _LOCK_HEAD.unpack_from(data)
    )
    end = _LOCK_HEAD.size + length
    primary = data[_LOCK_HEAD.size : end]
    txn_source, end = _decode_source(data, flags, end)
    secondaries: tuple[bytes, ...] = ()
    if version == _ASYNC_VERSION:
        secondaries, end = _decode_keys(data, end)
    short_value = data[end:] if flags & _HAS_SHORT_VALUE else None
    fields = (kind, primary, start_ts, ttl_ms, for_update_ts, min_commit_ts, txn_size, short_value)
    return Lock(*fields, version == _ASYNC_VERSION, secondaries, txn_source)


def decode_write(data: bytes) -> Write:
    """Read what `Write.encode` wrote.

    Raises:
        CorruptError: too short, or of an unknown version.
    """
    if len(data) < _WRITE_HEAD.size or data[0] != _VERSION:
        raise CorruptError(
            f"a write record of {len(data)} bytes has no known version; was it written by a newer "
            "store?"
        )
    _, kind, flags, start_ts = _WRITE_HEAD.unpack_from(data)
    txn_source, end = _decode_source(data, flags, _WRITE_HEAD.size)
    short_value = data[end:] if flags & _HAS_SHORT_VALUE else None
    return Write(kind, start_ts, short_value, bool(flags & _OVERLAPPED_ROLLBACK), txn_source)


def _flags(short_value: bytes | None, txn_source: int) -> int:
    return (0 if short_value is None else _HAS_SHORT_VALUE) | (_HAS_SOURCE if txn_source else 0)


def _encode_source(txn_source: int) -> bytes:
    return _SOURCE.pack(txn_source) if txn_source else b""


def _decode_source(data: bytes, flags: int, at: int) -> tuple[int, int]:
    """The source, and where it ends.

    Raises:
        CorruptError: the record ends before it does.
    """
    if not flags & _HAS_SOURCE:
        return 0, at
    if at + _SOURCE.size > len(data):
        raise CorruptError(f"a record of {len(data)} bytes ends within its transaction's source")
    return int(_SOURCE.unpack_from(data, at)[0]), at + _SOURCE.size


def _encode_keys(keys: tuple[bytes, ...]) -> bytes:
    return _LENGTH.pack(len(keys)) + b"".join(_LENGTH.pack(len(key)) + key for key in keys)


def _decode_keys(data: bytes, at: int) -> tuple[tuple[bytes, ...], int]:
    """The keys, and where they end.

    Raises:
        CorruptError: the record ends before they do.
    """
    keys: list[bytes] = []
    try:
        (count,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size + length
            keys.append(data[at - length : at])
    except struct.error as err:
        raise CorruptError(
            f"a lock record of {len(data)} bytes ends within its secondaries"
        ) from err
    if at > len(data):
        raise CorruptError(f"a lock record of {len(data)} bytes ends within its secondaries")
    return tuple(keys), at


def encode_document(version: int, /, **fields: Any) -> bytes:
    """A document of the format `version`."""
    return json.dumps({"format": version, **fields}).encode()


@contextmanager
def reading_document(data: bytes, version: int, what: str) -> Iterator[Any]:
    """Parse what `encode_document` wrote, in a block that reads its members; `what` names it in
    errors.

    Raises:
        CorruptError: it is no such document, has another format, or lacks what the block looks for.
    """
    try:
        document = json.loads(data)
        if document["format"] != version:
            raise CorruptError(
                f"{what} has format {document['format']}; this program knows {version}"
            )
        yield document
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CorruptError(f"{what} is damaged: {err}; restore the store from a backup") from err
