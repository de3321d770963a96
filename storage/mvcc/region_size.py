"""How big regions are, and where to split them. Reads no data but the keys it splits at.

LevelDB knows the size of any key range from its table indexes. The place where half of a region lies is therefore found
by bisection over the key space, and the split key is the next user key that exists there: all versions of a row stay in
one region.
"""

from storage.kv import KV
from storage.mvcc.layout import LOCK, RAW, VALUE, WRITE, column_range, split_version
from storage.mvcc.region import Region

_COLUMNS = (LOCK, WRITE, VALUE, RAW)
_WIDTH = 48
"""Bytes of a key that bisection looks at; keys that differ later only are not told apart."""


def range_bytes(kv: KV, lower: bytes, upper: bytes) -> int:
    """About how much disk the encoded range `[lower, upper)` takes, raw keys included."""
    return sum(kv.approximate_bytes(*column_range(column, lower, upper)) for column in _COLUMNS)


def region_bytes(kv: KV, region: Region) -> int:
    """About how much disk a region takes."""
    return range_bytes(kv, region.start_key, region.end_key)


def is_empty(kv: KV, region: Region) -> bool:
    """Whether a region holds nothing at all: no version, no lock, no raw key."""
    return all(_first(kv, column, region.start_key, region.end_key) is None for column in _COLUMNS)


def split_keys(kv: KV, region: Region, part_bytes: int) -> list[bytes]:
    """Encoded keys that cut a region into parts of about `part_bytes`; sorted, inside, each once. May be empty."""
    whole = region_bytes(kv, region)
    parts = round(whole / part_bytes) if part_bytes > 0 else 1
    keys = (_key_near(kv, region, whole * at // parts) for at in range(1, parts))
    return sorted({key for key in keys if key is not None and key > region.start_key})


def _key_near(kv: KV, region: Region, offset_bytes: int) -> bytes | None:
    """The first user key behind which all but `offset_bytes` of a region lie."""
    low = int.from_bytes(region.start_key[:_WIDTH].ljust(_WIDTH, b"\x00"))
    high = int.from_bytes((region.end_key or b"\xff" * _WIDTH)[:_WIDTH].ljust(_WIDTH, b"\x00"))
    while low < high:
        middle = (low + high) // 2
        if range_bytes(kv, region.start_key, middle.to_bytes(_WIDTH)) < offset_bytes:
            low = middle + 1
        else:
            high = middle
    found = (_first(kv, column, low.to_bytes(_WIDTH), region.end_key) for column in _COLUMNS)
    return min((key for key in found if key is not None), default=None)


def _first(kv: KV, column: bytes, lower: bytes, upper: bytes) -> bytes | None:
    for key, _ in kv.scan(*column_range(column, lower, upper)):
        return split_version(key)[0] if column in (WRITE, VALUE) else key[1:]
    return None
