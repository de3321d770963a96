"""Waiting for pessimistic locks: a client that says how long it would wait is not told "locked" before that.

client-go asks again at once when it is refused, so that an immediate answer would make it spin. Trying again here costs
no sync: a refused command writes nothing. Like TiKV's `wait-for-lock-timeout`, no wait is longer than a second. Clients
that name no wait (the Rust one) do their own back-off and get their answer at once.
"""

import asyncio

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.store.methods import METHODS
from server.store.runner import Call, Runner

MAX_WAIT_S = 1.0
_PAUSES_S = (0.005, 0.1)


async def lock_or_wait(runner: Runner, request: kvrpcpb.PessimisticLockRequest) -> kvrpcpb.PessimisticLockResponse:
    """Take the locks, trying again while others hold them and the request's `wait_timeout` (ms) is not over."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(request.wait_timeout / 1000, MAX_WAIT_S)
    pause, most = _PAUSES_S
    while True:
        response: kvrpcpb.PessimisticLockResponse
        (response,) = await runner.write([Call(METHODS["KvPessimisticLock"], request)])
        if loop.time() + pause > deadline or not any(error.HasField("locked") for error in response.errors):
            return response
        await asyncio.sleep(pause)
        pause = min(pause * 2, most)
