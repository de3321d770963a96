"""Waiting for pessimistic locks: a request that is refused waits in a queue, is woken by the
unlock, and is tried again.

client-go asks again at once when it is refused, so an immediate answer would make it spin.
`wait_timeout` says how long a client would wait, in ms: below 0 not at all, 0 as long as the store
likes; like TiKV's `wait-for-lock-timeout`, no wait is longer than the store's ceiling. Trying again
costs no sync: a refused command writes nothing.

All of this runs on the event loop. No wake-up is lost: a refusal reaches `enlist` in the same step
of its task that took the group's result, and `GroupCommit` tells of that group's unlocked keys only
after such steps.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvproto import errorpb_pb2 as errorpb
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.store import metrics
from server.store.key_error import key_error
from server.store.methods import METHODS
from server.store.runner import Call, Runner
from storage.defect import DefectError
from storage.model.errors import CorruptError
from storage.mvcc.pessimistic import DeadlockError, LockQueue, Waiter
from storage.mvcc.record import user_key

MAX_WAITS = 4096

Request = kvrpcpb.PessimisticLockRequest
Response = kvrpcpb.PessimisticLockResponse


@dataclass(slots=True, eq=False, kw_only=True)
class Wait(Waiter):
    """One request in the queue; `woken` is done when it may try again."""

    request: Request
    deadline: float
    woken: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class LockWaits:
    """The waiting lock requests of a store; at most 4096, later ones are answered at once."""

    def __init__(self, runner: Runner, ceiling_s: float) -> None:
        self._runner = runner
        self._ceiling_s = ceiling_s
        self._queue = LockQueue()
        runner.watch_unlocked(self._unlocked)

    async def lock(self, request: Request) -> Response:
        """Take the locks, waiting for them if the request allows it."""
        answer = self.enlist(request, await self._attempt(request))
        return await self.wait_for_locks(answer) if isinstance(answer, Wait) else answer

    def enlist(self, request: Request, answer: Response) -> Wait | Response:
        """The first answer if it is for the client; else a `Wait` for `wait_for_locks`."""
        return self._enlist(request, answer, self._deadline(request))

    async def wait_for_locks(self, wait: Wait) -> Response:
        """Wait and try again, until the locks are taken, something else is wrong,
        or the time is over.
        """
        while True:
            answer, in_time = await self._turn(wait)
            following = self._enlist(wait.request, answer, wait.deadline) if in_time else answer
            if not isinstance(following, Wait):
                return following
            wait = following

    async def _turn(self, wait: Wait) -> tuple[Response, bool]:
        """The answer to the next attempt, and whether there is time for another one. Who was woken,
        also in the same moment as its deadline, gives the next waiter its turn.
        """
        answer: Response | None = None
        try:
            async with asyncio.timeout_at(wait.deadline):
                # Shielded: the deadline must not cancel what `_wake` sets in the same moment.
                await asyncio.shield(wait.woken)
        except TimeoutError:
            # One last attempt: the lock may have gone in the same turn as the deadline.
            if not wait.woken.done():
                self._queue.remove(wait)
                return await self._attempt(wait.request), False
            in_time = False
        except asyncio.CancelledError:
            # Cancelled after it was woken: the turn must go to the next one, or nobody would try
            # until another unlock.
            if wait.woken.done():
                self._wake(wait.key)
            else:
                self._queue.remove(wait)
            raise
        else:
            in_time = True
        try:
            answer = await self._attempt(wait.request)
        finally:
            self._pass_on(wait, answer)
        return answer, in_time

    def _pass_on(self, wait: Wait, answer: Response | None) -> None:
        """After a woken waiter's attempt: record the key's new owner, or wake the next waiter."""
        if answer is not None and not answer.errors and not answer.HasField("region_error"):
            self._queue.hold(wait.key, wait.start_ts)
        elif answer is not None and answer.errors and answer.errors[0].locked.key == wait.key:
            self._queue.hold(wait.key, answer.errors[0].locked.lock_version)
        else:
            self._wake(wait.key)

    async def _attempt(self, request: Request) -> Response:
        response: Response | CorruptError | DefectError
        (response,) = await self._runner.write([Call(METHODS["KvPessimisticLock"], request)])
        if isinstance(response, CorruptError | DefectError):
            return Response(region_error=errorpb.Error(message=str(response)))
        return response

    def _deadline(self, request: Request) -> float:
        ceiling_s = self._ceiling_s
        wait_s = min(request.wait_timeout / 1000, ceiling_s) if request.wait_timeout else ceiling_s
        return asyncio.get_running_loop().time() + wait_s

    def _enlist(self, request: Request, answer: Response, deadline: float) -> Wait | Response:
        locked = next((error.locked for error in answer.errors if error.HasField("locked")), None)
        # More than `MAX_WAITS` are answered at once: their clients ask again, and the store's
        # memory stays bounded.
        if locked is None or request.wait_timeout < 0 or len(self._queue) >= MAX_WAITS:
            return answer
        # Before it queues: two transactions that wait for each other would otherwise both run into
        # the ceiling.
        cycle = self._queue.cycle(request.start_version, locked.lock_version, locked.key)
        if cycle:
            metrics.DEADLOCKS.inc()
            refused = key_error(DeadlockError(cycle))
            return Response(errors=[refused], results=answer.results)
        wait = Wait(request.start_version, locked.key, request=request, deadline=deadline)
        self._queue.add(wait, locked.lock_version)
        metrics.LOCK_WAITS.inc()
        return wait

    def _unlocked(self, keys: Sequence[bytes]) -> None:
        """Encoded keys lost their locks, and that is durable."""
        if len(self._queue):
            for key in keys:
                self._wake(user_key(key))

    def _wake(self, key: bytes) -> None:
        waiter = self._queue.pop(key)
        if isinstance(waiter, Wait):
            waiter.woken.set_result(None)
