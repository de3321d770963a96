"""Going through all of the key space: stores in parallel, each by at most one worker, within a store range by range.

A region that splits or moves meanwhile is simply met again: what is walked are key ranges, not regions.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

from gcsafepoint.worker.cluster import KeyRange
from storage.tasks import together

Step: TypeAlias = Callable[[KeyRange], Awaitable[bytes | None]]
"""Works on the first region of a range; returns the key to go on from, None at the range's end."""


async def walk(
    stores: Iterable[Sequence[KeyRange]], workers: int, step: Step, ended: Callable[[KeyRange], Awaitable[None]]
) -> None:
    """Take `step` through every range; `ended` is awaited after each."""
    waiting = deque(stores)

    async def work() -> None:
        while waiting:
            for within in waiting.popleft():
                key: bytes | None = within.start_key
                while key is not None:
                    key = await step(KeyRange(key, within.end_key))
                await ended(within)

    await together(work() for _ in range(workers))
