"""A stream that stays open is asked about by one timer, however many messages it has."""

import asyncio

import grpc
import pytest

from server.rpc import recheck
from server.rpc.errors import StatusError
from server.rpc.recheck import Recheck, while_allowed

REFUSAL = StatusError(grpc.StatusCode.PERMISSION_DENIED, "not any more")


async def _message():
    return 7


def _refuse():
    raise REFUSAL


async def test_messages_set_no_timers_of_their_own(monkeypatch):
    loop = asyncio.get_running_loop()
    timers, call_at = [], loop.call_at
    monkeypatch.setattr(
        loop, "call_at", lambda *args, **named: timers.append(args) or call_at(*args, **named)
    )
    with Recheck(lambda: None) as checked:
        for _ in range(1000):
            assert await checked.wait(_message()) == 7
    assert len(timers) <= 2  # one, and another one on a machine that took a second


async def test_a_refusal_ends_what_is_waited_for(monkeypatch):
    monkeypatch.setattr(recheck, "RECHECK_S", 0.001)
    with pytest.raises(StatusError, match="not any more"):
        await while_allowed(asyncio.Event().wait(), _refuse)


async def test_a_backlog_that_lets_no_timer_have_its_turn_is_checked_too(monkeypatch):
    monkeypatch.setattr(recheck, "RECHECK_S", 0.0)
    with Recheck(_refuse) as checked, pytest.raises(StatusError):
        await checked.wait(_message())


async def test_a_timeout_of_the_work_itself_is_not_taken_for_a_refusal():
    async def impatient():
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await while_allowed(impatient(), lambda: None)


async def test_nothing_is_looked_at_after_the_block(monkeypatch):
    monkeypatch.setattr(recheck, "RECHECK_S", 0.001)
    looks = []
    with Recheck(lambda: looks.append(1)) as checked:
        while not looks:
            await checked.wait(asyncio.sleep(0))
    seen = len(looks)
    async with asyncio.timeout(60):
        await asyncio.to_thread(lambda: None)
    assert len(looks) == seen
