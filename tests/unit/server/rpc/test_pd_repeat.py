"""Calls to the coordinator that are repeated: until one is answered,
but not beyond the caller's end.
"""

import asyncio

import grpc
import grpc.aio
import pytest

from server.rpc.pd import PdRefusedError, PdUnavailableError, _repeat


def failure(code: grpc.StatusCode, details: str = "") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.UNAVAILABLE, "not leader; the leader is http://other:2379"),
        (
            grpc.StatusCode.UNKNOWN,
            "[PD:tso:ErrGenerateTimestamp]generate timestamp failed, requested pd is not leader",
        ),
        (grpc.StatusCode.INTERNAL, "Internal error from Core"),
    ],
)
async def test_who_does_not_lead_or_broke_off_is_not_asked_again_before_the_leader_is(
    code: grpc.StatusCode, details: str
) -> None:
    failed: list[bool] = []

    async def attempt() -> int:
        if not failed:
            raise failure(code, details)
        return 7

    assert await _repeat("here:2379", attempt, 5.0, lambda: failed.append(True)) == 7
    assert failed == [True]


async def test_a_refusal_is_final_and_names_who_refused() -> None:
    async def attempt() -> None:
        raise failure(grpc.StatusCode.UNKNOWN, "no such thing")

    with pytest.raises(PdRefusedError, match="at here:2379 answered UNKNOWN: no such thing"):
        await _repeat("here:2379", attempt, 5.0)


async def test_nobody_is_asked_after_the_time_is_over() -> None:
    async def attempt() -> None:
        raise failure(grpc.StatusCode.UNAVAILABLE, "gone")

    with pytest.raises(PdUnavailableError, match="gone; is it running"):
        await _repeat("here:2379", attempt, 0.0)


async def test_a_cancelled_caller_whom_grpc_answers_with_a_failure_ends_all_the_same() -> None:
    entered = asyncio.Event()

    async def attempt() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise failure(grpc.StatusCode.UNAVAILABLE, "connection reset") from None

    async with asyncio.TaskGroup() as tasks:
        caller = tasks.create_task(_repeat("here:2379", attempt, 60.0))
        await entered.wait()
        caller.cancel()
    assert caller.cancelled()
