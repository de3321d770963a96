"""The right to lead: it ends by the clock, interrupts what runs in it, and never comes back."""

import asyncio
import math
from collections.abc import Coroutine

import grpc
import pytest
from kvproto import pdpb_pb2

from server.coordinator.errors import NotLeaderError
from server.coordinator.header import Headers
from server.coordinator.leadership.leadership import Leadership
from server.rpc.errors import status_of


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_it_ends_at_its_deadline_and_not_when_somebody_says_so() -> None:
    clock = Clock()
    leadership = Leadership(deadline=lambda: 103.0, clock=clock)
    leadership.check()
    clock.now_s = 102.999
    leadership.check()
    clock.now_s = 103.0
    assert not leadership.held
    assert not leadership.ended.is_set()
    with pytest.raises(NotLeaderError):
        leadership.check()


def test_a_renewal_moves_the_deadline_but_an_end_is_final() -> None:
    clock, deadlines = Clock(), [103.0]
    leadership = Leadership(deadline=lambda: deadlines[-1], clock=clock)
    deadlines.append(106.0)
    clock.now_s = 105.0
    leadership.check()
    leadership.end()
    deadlines.append(math.inf)
    assert not leadership.held


async def test_what_runs_throughout_is_interrupted_by_its_end_with_the_leaders_address() -> None:
    leadership = Leadership(refusal=lambda: NotLeaderError("http://other:2379"))
    entered = asyncio.Event()

    async def waits() -> None:
        async with leadership.while_held():
            entered.set()
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(_refused(waits()))
        await entered.wait()
        leadership.end()
    assert waiting.result() == (
        grpc.StatusCode.UNAVAILABLE,
        "not leader; the leader is http://other:2379",
    )


async def test_a_timeout_of_its_own_inside_is_not_taken_for_the_end() -> None:
    leadership = Leadership()
    with pytest.raises(TimeoutError):
        async with leadership.while_held(), asyncio.timeout(0):
            await asyncio.Event().wait()
    assert leadership.held


async def test_nothing_starts_throughout_a_leadership_that_is_over() -> None:
    leadership = Leadership()
    leadership.end()
    with pytest.raises(NotLeaderError):
        async with leadership.while_held():
            pytest.fail("it ran")


def test_every_message_is_checked_for_leadership_before_anything_else() -> None:
    leadership = Leadership()
    headers = Headers(7, lambda: True, leadership)
    leadership.end()
    with pytest.raises(NotLeaderError, match="not leader; there is no leader now"):
        headers.check(pdpb_pb2.RequestHeader(cluster_id=8))


async def _refused(call: Coroutine[None, None, None]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(NotLeaderError) as refused:
        await call
    return status_of(refused.value)
