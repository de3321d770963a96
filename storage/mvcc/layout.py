"""Where everything lies in the key-value store (docs/format/mvcc.md). Pure.

A column is the first byte of a key. User keys are memcomparable-encoded ("encoded key" below), so
that a version suffix cannot mix two user keys; timestamps descend, so that the newest version comes
first. The META column holds small JSON documents, each with the number of its format.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from storage.codec import decode_u64_desc, encode_u64_desc
from storage.model.errors import CorruptError

LOCK = b"l"
WRITE = b"w"
VALUE = b"d"
RAW = b"r"
EXPIRY = b"e"
META = b"m"
AFTER_VERSIONS = b"\xff" * 9
"""Appended to an encoded key: after all its versions, before the next encoded key."""

_TS_BYTES = 8
_GROUP = 9


def lock_key(encoded: bytes) -> bytes:
    """The one lock of a key."""
    return LOCK + encoded


def write_key(encoded: bytes, commit_ts: int) -> bytes:
    """The write record of a key at `commit_ts`."""
    return WRITE + encoded + encode_u64_desc(commit_ts)


def value_key(encoded: bytes, start_ts: int) -> bytes:
    """The value of a key that is too long for its write record."""
    return VALUE + encoded + encode_u64_desc(start_ts)


def split_version(key: bytes) -> tuple[bytes, int]:
    """The encoded key and the timestamp of a key of the WRITE or VALUE column."""
    return key[1:-_TS_BYTES], decode_u64_desc(key, len(key) - _TS_BYTES)


def user_key(encoded: bytes) -> bytes:
    """What `storage.codec.encode_bytes` encoded; for keys we wrote ourselves,
    hence unchecked and fast.
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


def encode_document(version: int, /, **fields: Any) -> bytes:
    """A document of the format `version`."""
    return json.dumps({"format": version, **fields}).encode()


@contextmanager
def reading_document(data: bytes, version: int, what: str) -> Iterator[Any]:
    """What `encode_document` wrote, for a block that takes it apart; `what` names it in errors.

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
