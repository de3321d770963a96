"""Child processes: ended by SIGTERM, by SIGKILL if that takes too long,
and by themselves when their parent dies.
"""

import asyncio
import contextlib
import os
import signal
import threading
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


def kill_group(process: Process) -> None:
    """SIGKILL a process that leads a group of its own, and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def exit_with_parent() -> None:
    """End this process at once when standard input closes:
    a pipe whose other end only its parent has.

    It closes however the parent dies. What this process started in the same way ends with it.
    """

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
