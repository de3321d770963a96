"""What is wrong with a request whatever the state of its keys: empty and over-long keys, requests over the entry limit.

Limits are TiKV's: `storage.max-key-size` (of the encoded key) and `raftstore.raft-entry-max-size`.
"""

from collections.abc import Sequence

from kvproto import errorpb_pb2 as errorpb

from storage.model.errors import InvalidError
from storage.mvcc.errors import MvccError

MAX_KEY_BYTES = 8 << 10
MAX_ENTRY_BYTES = 8 << 20
_GROUP, _ENCODED_GROUP = 8, 9


class KeyTooLargeError(MvccError, InvalidError):
    """A key is longer than the store takes."""

    code = "ErrKeyTooLarge"

    def __init__(self, size: int) -> None:
        super().__init__(f"a key of {size} encoded bytes is over the limit of {MAX_KEY_BYTES}; shorten it")


class KeyEmptyError(MvccError, InvalidError):
    """A key has no bytes."""

    code = "ErrKeyEmpty"

    def __init__(self) -> None:
        super().__init__("an empty key cannot be written; it stands for the end of the key space in ranges")


def key_fault(keys: Sequence[bytes], *, raw: bool) -> MvccError | None:
    """Why these keys cannot be written, or None."""
    if not keys:
        return None
    if not all(keys):
        return KeyEmptyError()
    longest = max(map(len, keys))
    size = longest if raw else (longest // _GROUP + 1) * _ENCODED_GROUP
    return KeyTooLargeError(size) if size > MAX_KEY_BYTES else None


def entry_fault(size: int, region_id: int) -> errorpb.Error | None:
    """The error of a write of `size` bytes, or None."""
    if size <= MAX_ENTRY_BYTES:
        return None
    too_large = errorpb.RaftEntryTooLarge(region_id=region_id, entry_size=size)
    return errorpb.Error(
        message=f"a write of {size} bytes is over the limit of {MAX_ENTRY_BYTES}; split the transaction's request",
        raft_entry_too_large=too_large,
    )
