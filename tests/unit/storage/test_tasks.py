"""Coroutines beside a block, and together: all have ended when the caller goes on,
whoever failed.
"""

import asyncio

import pytest

from storage.model.errors import UnavailableError
from storage.tasks import background_tasks, gather, run_in_task


async def forever(ended: list[str], name: str) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(name)


async def failing() -> None:
    raise UnavailableError("gone")


async def failed_beside(ended: list[str]) -> None:
    async with background_tasks(forever(ended, "one")):
        await asyncio.sleep(0)
        raise UnavailableError("ours")


async def test_what_runs_beside_a_block_has_ended_when_it_is_left() -> None:
    ended: list[str] = []
    async with background_tasks(forever(ended, "one"), forever(ended, "other")):
        await asyncio.sleep(0)
        assert not ended
    assert sorted(ended) == ["one", "other"]


async def left_by_failure(ended: list[str]) -> None:
    async with background_tasks(forever(ended, "one"), failing()):
        await asyncio.Event().wait()


async def test_a_failure_beside_a_block_ends_the_block_and_what_else_runs() -> None:
    ended: list[str] = []
    with pytest.raises(ExceptionGroup) as raised:
        await left_by_failure(ended)
    assert ended == ["one"]
    assert [str(err) for err in raised.value.exceptions] == [str(UnavailableError("gone"))]


async def test_a_failure_of_the_block_ends_what_runs_beside_it() -> None:
    ended: list[str] = []
    with pytest.raises(ExceptionGroup) as raised:
        await failed_beside(ended)
    assert ended == ["one"]
    assert raised.group_contains(UnavailableError, match="ours")


async def test_together_gives_results_in_order_and_the_first_failure_as_itself() -> None:
    async def number(value: int) -> int:
        await asyncio.sleep(0)
        return value

    assert await gather(number(value) for value in range(5)) == [0, 1, 2, 3, 4]
    ended: list[str] = []
    with pytest.raises(UnavailableError, match="gone"):
        await gather([forever(ended, "one"), failing()])
    assert ended == ["one"]


async def stubborn() -> None:
    """Fails when it is to end."""
    try:
        await asyncio.Event().wait()
    finally:
        raise UnavailableError("not now")


async def once() -> None:
    async with background_tasks(stubborn()):
        await asyncio.Event().wait()


async def again_and_again() -> None:
    for _ in range(3):
        try:
            await run_in_task(once())
        except* UnavailableError:
            pass


async def test_a_loop_that_goes_on_after_errors_ends_when_it_is_cancelled() -> None:
    looping = asyncio.get_running_loop().create_task(again_and_again())
    await asyncio.sleep(0.01)
    looping.cancel()
    await asyncio.wait([looping], timeout=60.0)
    assert looping.cancelled()


async def test_what_runs_apart_gives_its_result_or_its_error() -> None:
    assert await run_in_task(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(UnavailableError, match="gone"):
        await run_in_task(failing())
