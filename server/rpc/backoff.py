"""Waiting between attempts at a peer: exponential, jittered, capped, and never past a deadline."""

import asyncio
import secrets

from storage.model.errors import TidemarkError, UnavailableError

_RANDOM = secrets.SystemRandom()


class GaveUpError(UnavailableError):
    """The deadline passed while every attempt failed; the message carries the last failure."""

    code = "ErrDeadlineExceeded"


def delay_s(attempt: int, jitter: float, *, base_s: float, cap_s: float) -> float:
    """Seconds before attempt number `attempt` (from 0): half fixed, half `jitter` in [0, 1]."""
    full = min(cap_s, base_s * 2.0 ** min(attempt, 32))
    return full * (0.5 + 0.5 * jitter)


class Backoff:
    """One operation's attempts: `await wait(error)` before each further one."""

    def __init__(self, timeout_s: float, *, base_s: float = 0.01, cap_s: float = 1.0) -> None:
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._base_s = base_s
        self._cap_s = cap_s
        self._attempts = 0

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; 0 when it has passed."""
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def wait(self, reason: TidemarkError, at_least_s: float = 0.0) -> None:
        """Sleep before the next attempt.

        Raises:
            GaveUpError: the next attempt would come after the deadline.
        """
        pause = delay_s(self._attempts, _RANDOM.random(), base_s=self._base_s, cap_s=self._cap_s)
        pause = max(pause, at_least_s)
        self._attempts += 1
        if pause > self.remaining_s:
            raise GaveUpError(
                f"gave up after {self._attempts} attempts in {self._timeout_s:g} s; the last one said: {reason}"
            ) from reason
        await asyncio.sleep(pause)
