"""Calls that stay open are asked again and again whether their client may still make them: clients
leave the access file, get another role, or come to their end while their streams are open.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from server.rpc.errors import StatusError

RECHECK_S: Final = 1.0
T = TypeVar("T")


async def while_allowed(work: Awaitable[T], check: Callable[[], object]) -> T:
    """What `work` gives; `check` is called every `RECHECK_S`, and its refusal ends the work.

    Raises:
        StatusError: the refusal; and what `work` raises.
    """
    loop = asyncio.get_running_loop()
    refusals: list[StatusError] = []
    limit = asyncio.timeout(None)

    def look() -> None:
        try:
            check()
        except StatusError as err:
            refusals.append(err)
            limit.reschedule(loop.time())
        else:
            timers[0] = loop.call_later(RECHECK_S, look)

    timers = [loop.call_later(RECHECK_S, look)]
    try:
        async with limit:
            try:
                return await work
            finally:
                timers[0].cancel()
    except TimeoutError:
        # The work may have one of its own.
        if limit.expired() and refusals:
            raise refusals[0] from None
        raise
