"""A rate of bytes per second, as a virtual clock: every taking moves the clock by the time its bytes are worth.

Who takes waits until the clock as it was before. Unused time is kept for `_BURST_S` only.
"""

import asyncio
from contextlib import suppress

_BURST_S = 0.1


class ByteRate:
    """`bytes_per_s` 0 is no limit."""

    def __init__(self, bytes_per_s: int = 0) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._changed = asyncio.Event()

    def limit(self, bytes_per_s: int) -> None:
        """Go on at another rate; what was taken before is forgotten, who waits goes on."""
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._changed.set()
        self._changed = asyncio.Event()

    def take(self, size: int, now_s: float) -> float:
        """Take `size` bytes at the monotonic instant `now_s`; returns the seconds to wait before using them."""
        if not self.bytes_per_s:
            return 0.0
        begin_s = max(self._free_at_s, now_s - _BURST_S)
        self._free_at_s = begin_s + size / self.bytes_per_s
        return max(0.0, begin_s - now_s)

    async def throttle(self, size: int) -> None:
        """Take `size` bytes and wait for them."""
        wait_s = self.take(size, asyncio.get_running_loop().time())
        if wait_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
