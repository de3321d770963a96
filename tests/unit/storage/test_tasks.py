"""Coroutines beside a block, and together: all have ended when the caller goes on,
whoever failed.
"""

import asyncio

import pytest

from storage.model.errors import UnavailableError
from storage.tasks import Changes, background_tasks, gather, run_in_task


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


async def test_a_change_runs_to_its_end_before_the_next_one_though_its_caller_is_gone() -> None:
    changes, go_on, steps = Changes(), asyncio.Event(), list[str]()

    async def change(name: str) -> str:
        steps.append(f"{name} begins")
        await go_on.wait()
        steps.append(f"{name} ends")
        return name

    loop = asyncio.get_running_loop()
    first, never, last = (
        loop.create_task(changes.make(lambda name=name: change(name)))  # type: ignore[misc]  # mypy infers no defaults
        for name in ("first", "never", "last")
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    never.cancel()
    await asyncio.wait([first, never], timeout=60)
    assert first.cancelled()
    assert never.cancelled()
    assert steps == ["first begins"]
    go_on.set()
    assert await last == "last"
    assert steps == ["first begins", "first ends", "last begins", "last ends"]


async def test_a_change_that_fails_says_so_and_lets_the_next_one_begin() -> None:
    changes = Changes()
    for _ in range(2):
        with pytest.raises(UnavailableError, match="gone"):
            await changes.make(failing)
