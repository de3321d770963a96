"""Calls to a server that may hang: so many at once,
and a process that ends without their answers.
"""

import asyncio
import subprocess
import sys
import threading

import pytest

from server.puller.mysql.session.connection import QueryThreads

LIMIT_S = 60


async def ask(askers: QueryThreads, *call: object) -> object:
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.get_running_loop().run_in_executor(askers, *call)


async def test_who_asks_gets_the_answer_or_the_error() -> None:
    askers = QueryThreads(1, "asks")
    assert await ask(askers, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await ask(askers, divmod, 7, 0)


async def test_no_more_ask_at_once_than_may() -> None:
    askers, go, begun = QueryThreads(2, "asks"), threading.Event(), threading.Semaphore(0)

    def wait() -> bool:
        begun.release()
        return go.wait(LIMIT_S)

    asked = [askers.submit(wait) for _ in range(3)]
    assert begun.acquire(timeout=LIMIT_S)
    assert begun.acquire(timeout=LIMIT_S)
    assert not begun.acquire(timeout=0.2)
    go.set()
    assert all(each.result(LIMIT_S) for each in asked)


async def test_who_waits_no_more_has_asked_nothing() -> None:
    askers, go, begun = QueryThreads(1, "asks"), threading.Event(), threading.Event()
    asked: list[int] = []
    first = askers.submit(lambda: (begun.set(), go.wait(LIMIT_S)))
    assert begun.wait(LIMIT_S)
    second = askers.submit(asked.append, 1)
    assert second.cancel()
    go.set()
    assert all(first.result(LIMIT_S)[1:])
    await ask(askers, asked.append, 2)
    assert asked == [2]


def test_a_process_ends_while_a_server_is_asked() -> None:
    program = """
import asyncio, threading
from server.puller.mysql.session.connection import QueryThreads

async def main():
    begun = threading.Event()
    QueryThreads(1, "asks").submit(lambda: (begun.set(), threading.Event().wait()))
    await asyncio.to_thread(begun.wait)

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT_S)
