"""The bytes that wait for readers, over all feed connections of a store."""

import asyncio

from server.store import metrics


class FeedMemory:
    """What all outboxes of a store hold together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.freed = asyncio.Event()

    def add(self, size: int) -> None:
        """Count `size` bytes more, or fewer when negative."""
        self.used_bytes += size
        metrics.FEED_QUEUED_BYTES.set(self.used_bytes)
        if size < 0:
            self.freed.set()

    async def wait_freed(self) -> None:
        """Until some outbox has got smaller."""
        self.freed.clear()
        await self.freed.wait()
