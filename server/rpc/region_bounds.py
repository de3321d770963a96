"""Where regions begin and end, in raw keys: routes have them encoded. An empty end key is no end. Pure."""

from server.rpc.pd import RegionRoute
from storage.codec import decode_bytes


def region_end(route: RegionRoute) -> bytes:
    """The raw end key of the region; empty means no end."""
    return decode_bytes(route.region.end_key)[0] if route.region.end_key else b""


def region_start(route: RegionRoute) -> bytes:
    """The raw start key of the region; empty is the least."""
    return decode_bytes(route.region.start_key)[0] if route.region.start_key else b""


def nearer(left: bytes, right: bytes) -> bytes:
    """The smaller of two end keys, of which an empty one is no end."""
    return min(left, right) if left and right else left or right


def after(route: RegionRoute, end_key: bytes) -> bytes | None:
    """Where the range that ends at `end_key` goes on behind the region; None if it does not."""
    upper = region_end(route)
    return None if not upper or (end_key and upper >= end_key) else upper


def below(key: bytes) -> bytes:
    """A key below `key`, above all that are likely."""
    return key[:-1] if key.endswith(b"\0") else key[:-1] + bytes((key[-1] - 1,)) + b"\xff" * 16
