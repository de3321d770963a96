"""Raw keys: no versions, no locks, at most an end of life in seconds of the store's clock. Pure.

A value lies in column RAW, its end of life, if it has one, in column EXPIRY (docs/format/mvcc.md).
What is past its end reads as absent; `sweep` removes it for good. Clients compare ranges by
`range_sum`, TiKV's Crc64_Xor: the XOR of every pair's CRC-64/XZ (ECMA-182, reflected) over the key
and then the value.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from struct import Struct
from typing import NamedTuple

from fastcrc import crc64

from storage.kv import Reader
from storage.mvcc.engine import STEP_KEYS, Draft, Unfinished
from storage.mvcc.record import EXPIRY_COLUMN, RAW_COLUMN, column_range

_SECONDS = Struct(">Q")


class RawPair(NamedTuple):
    """One raw key to write; `expires_s` 0 means never."""

    key: bytes
    value: bytes
    expires_s: int = 0


@dataclass(frozen=True, slots=True)
class Swapped:
    """The result of compare-and-swap: the value before, and whether it wrote."""

    succeeded: bool
    previous: bytes | None


def get(reader: Reader, key: bytes, now_s: int) -> bytes | None:
    """The value of a key that is alive at `now_s`."""
    value = reader.get(RAW_COLUMN + key)
    return None if value is None or _is_over(expires_s(reader, key), now_s) else value


def expires_s(reader: Reader, key: bytes) -> int:
    """Return the time at which a key expires, in seconds since the Unix epoch; 0: never."""
    data = reader.get(EXPIRY_COLUMN + key)
    return 0 if data is None else _seconds(data)


def scan(
    reader: Reader, lower: bytes, upper: bytes, now_s: int, limit: int, *, reverse: bool = False
) -> list[tuple[bytes, bytes]]:
    """Return at most `limit` unexpired pairs of `[lower, upper)` in key order; `upper == b""` is
    unbounded.
    """
    return list(islice(living(reader, lower, upper, now_s, reverse=reverse), limit))


def living(
    reader: Reader, lower: bytes, upper: bytes, now_s: int, *, reverse: bool = False
) -> Iterator[tuple[bytes, bytes]]:
    """All living pairs of `[lower, upper)` in key order; `upper == b""` is no end."""
    ends = reader.scan(*column_range(EXPIRY_COLUMN, lower, upper), reverse=reverse)
    end = next(ends, None)
    for column_key, value in reader.scan(*column_range(RAW_COLUMN, lower, upper), reverse=reverse):
        key = column_key[1:]
        while end is not None and (end[0][1:] > key if reverse else end[0][1:] < key):
            end = next(ends, None)
        if end is None or end[0][1:] != key or not _is_over(_seconds(end[1]), now_s):
            yield key, value


def put(draft: Draft, pairs: Sequence[RawPair]) -> None:
    """Write pairs, each with its own end or none, whatever they had before."""
    for key, value, end_s in pairs:
        draft.put(RAW_COLUMN + key, value)
        if end_s:
            draft.put(EXPIRY_COLUMN + key, _SECONDS.pack(end_s))
        else:
            draft.delete(EXPIRY_COLUMN + key)


def delete(draft: Draft, keys: Sequence[bytes]) -> None:
    """Remove keys."""
    for key in keys:
        draft.delete(RAW_COLUMN + key)
        draft.delete(EXPIRY_COLUMN + key)


def delete_range(draft: Draft, lower: bytes, upper: bytes) -> Unfinished | None:
    """Remove the keys of `[lower, upper)`."""
    keys = [
        key[1:] for key, _ in islice(draft.scan(*column_range(RAW_COLUMN, lower, upper)), STEP_KEYS)
    ]
    delete(draft, keys)
    if len(keys) < STEP_KEYS:
        return None
    return Unfinished(partial(delete_range, lower=keys[-1] + b"\0", upper=upper))


def compare_and_swap(
    draft: Draft, new: RawPair, previous: bytes | None, now_s: int, *, remove: bool
) -> Swapped:
    """Write `new`, or remove its key, if the key holds `previous` (None: is absent)."""
    current = get(draft, new.key, now_s)
    if current != previous:
        return Swapped(succeeded=False, previous=current)
    if remove:
        delete(draft, [new.key])
    else:
        put(draft, [new])
    return Swapped(succeeded=True, previous=current)


def expired(reader: Reader, now_s: int, limit: int) -> list[bytes]:
    """Return at most `limit` expired keys."""
    over = (
        key[1:]
        for key, data in reader.scan(*column_range(EXPIRY_COLUMN, b"", b""))
        if _is_over(_seconds(data), now_s)
    )
    return list(islice(over, limit))


def sweep(draft: Draft, keys: Sequence[bytes], now_s: int) -> None:
    """Remove those of `keys` that are still past their end.

    `expired` looked at a snapshot; a key may have been written anew since, with a later end.
    """
    delete(draft, [key for key in keys if _is_over(expires_s(draft, key), now_s)])


def _seconds(data: bytes) -> int:
    value: int = _SECONDS.unpack(data)[0]
    return value


def _is_over(end_s: int, now_s: int) -> bool:
    return 0 < end_s <= now_s  # 0 is no end


class RangeSum(NamedTuple):
    """The sums of a range; sums of disjoint ranges are combined by `xor` and addition."""

    xor: int = 0
    pairs: int = 0
    size: int = 0


def range_sum(pairs: Iterable[tuple[bytes, bytes]]) -> RangeSum:
    """The sum over key-value pairs."""
    xor = count = size = 0
    for key, value in pairs:
        xor ^= crc64.xz(key + value)
        count += 1
        size += len(key) + len(value)
    return RangeSum(xor, count, size)
