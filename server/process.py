"""Child processes: ended by SIGTERM, and by SIGKILL only if that takes too long."""

import asyncio
import contextlib
import signal
from asyncio.subprocess import Process


async def drain(process: Process, limit_s: float) -> bool:
    """End `process` and wait for it; returns False if it had to be killed."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(limit_s):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return False
    return True
