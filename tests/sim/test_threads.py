"""Threads of a simulation: what waits lets the others run, and nothing else does."""

import asyncio

from tests.sim.clock import simulated
from tests.sim.process import Process
from tests.sim.threads import Condition, KilledError, Submitted, wait


def _simulated(story):
    async def whole():
        loop, process = asyncio.get_running_loop(), Process("one")
        told = []
        await story(loop, process, told)
        return told

    return simulated(whole())


def test_a_thread_that_waits_lets_the_loop_go_on():
    async def story(loop, process, told):
        def blocks():
            told.append("begins")
            wait(asyncio.sleep(2.0))
            told.append(loop.time())
            return "done"

        began_s = loop.time()
        thread = loop.create_task(loop.in_thread(process, blocks))
        await asyncio.sleep(1.0)
        told.append("meanwhile")
        told.append(await thread)
        assert told[2] == began_s + 2.0
        told[2] = "later"

    assert _simulated(story) == ["begins", "meanwhile", "later", "done"]


def test_what_a_thread_raises_is_raised_where_it_is_awaited():
    async def story(loop, process, told):
        def fails():
            wait(asyncio.sleep(0.1))
            raise ValueError("no")

        try:
            await loop.in_thread(process, fails)
        except ValueError as err:
            told.append(str(err))

    assert _simulated(story) == ["no"]


def test_a_thread_of_a_stopped_process_stands_still_and_one_of_a_killed_process_ends():
    async def story(loop, process, told):
        def blocks():
            try:
                wait(asyncio.sleep(1.0))
                told.append("went on")
                wait(asyncio.sleep(1.0))
            except KilledError:
                told.append("ended")
                raise

        process.start(asyncio.Event().wait())
        thread = loop.create_task(loop.in_thread(process, blocks))
        await asyncio.sleep(0.5)
        process.stop()
        await asyncio.sleep(5.0)
        assert told == []
        process.go_on()
        await asyncio.sleep(0.1)
        assert told == ["went on"]
        await process.kill()
        await asyncio.wait([thread])
        assert thread.cancelled()

    assert _simulated(story) == ["went on", "ended"]


def test_threads_that_wait_when_all_is_over_end():
    ended = []

    async def story(loop, process, _told):
        def blocks():
            try:
                wait(asyncio.sleep(100.0))
            except KilledError:
                ended.append(True)
                raise

        process.main = loop.create_task(loop.in_thread(process, blocks))
        await asyncio.sleep(0.1)

    _simulated(story)
    assert ended == [True]


def test_a_condition_is_waited_for_until_it_holds_or_the_time_is_over():
    async def story(loop, process, told):
        condition = Condition()

        def waits():
            with condition:
                told.append(condition.wait_for(lambda: "set" in told, 1.0))
                told.append(condition.wait_for(lambda: "set" in told, 5.0))

        thread = loop.create_task(loop.in_thread(process, waits))
        await asyncio.sleep(2.0)
        with condition:
            told.append("set")
        await thread

    assert _simulated(story) == [False, "set", True]


def test_a_coroutine_that_a_thread_submits_runs_in_the_loop():
    async def story(loop, process, told):
        async def work():
            await asyncio.sleep(3.0)
            return "outcome"

        def submits():
            submitted = Submitted(work(), loop)
            try:
                submitted.result(1.0)
            except TimeoutError:
                told.append("not yet")
            told.append(submitted.result(5.0))

        await loop.in_thread(process, submits)

    assert _simulated(story) == ["not yet", "outcome"]
