"""A rate of bytes per second, as a virtual clock. Pure: the caller says what time it is, and waits.

Every taking moves the clock by the time its bytes are worth; who takes waits until the clock as it was before. Unused
time is kept for `_BURST_S` only.
"""

_BURST_S = 0.1


class ByteRate:
    """`bytes_per_s` 0 is no limit."""

    def __init__(self, bytes_per_s: int = 0) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def limit(self, bytes_per_s: int) -> None:
        """Go on at another rate."""
        self.bytes_per_s = bytes_per_s

    def take(self, size: int, now_s: float) -> float:
        """Take `size` bytes at the monotonic instant `now_s`; returns the seconds to wait before using them."""
        if not self.bytes_per_s:
            return 0.0
        begin_s = max(self._free_at_s, now_s - _BURST_S)
        self._free_at_s = begin_s + size / self.bytes_per_s
        return max(0.0, begin_s - now_s)
