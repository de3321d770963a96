"""The pauses between attempts: doubled up to a cap, with jitter, and never past a deadline.

An endless loop has a `Backoff`, one operation with a deadline a `Backoffer`. Two places double
pauses by themselves: TiKV's puller, which resets after a time without failures, and the audit's
plan, which waits by table.
"""

import asyncio
import random

from storage.model.errors import TidemarkError, UnavailableError


class GaveUpError(UnavailableError):
    """The deadline passed while every attempt failed; the message carries the last failure."""

    code = "ErrDeadlineExceeded"


class Backoff:
    """The pauses of one loop, in seconds: the first is `base_s`,
    each further one twice as long, `cap_s` at most.
    """

    def __init__(self, base_s: float, cap_s: float) -> None:
        self.failures = 0
        """The number of pauses since the last success."""
        self._base_s = base_s
        self._cap_s = cap_s

    def next_s(self) -> float:
        """The pause before the next attempt, with jitter, so that many that failed at once do not
        try again at once.
        """
        full_s = min(self._cap_s, self._base_s * 2.0 ** min(self.failures, 32))
        self.failures += 1
        return jittered(full_s)

    def reset(self) -> None:
        """An attempt succeeded: the next pause is the first one again."""
        self.failures = 0


class Backoffer:
    """One operation's attempts within `timeout_s` seconds:
    `await wait(error)` before each further one.
    """

    def __init__(self, timeout_s: float, *, base_s: float = 0.01, cap_s: float = 1.0) -> None:
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._backoff = Backoff(base_s, cap_s)

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; 0 when it has passed."""
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def wait(self, reason: TidemarkError, at_least_s: float = 0.0) -> None:
        """Sleep before the next attempt.

        Raises:
            GaveUpError: the next attempt would come after the deadline.
        """
        pause_s = max(self._backoff.next_s(), at_least_s)
        if pause_s > self.remaining_s:
            raise GaveUpError(
                f"gave up after {self._backoff.failures} attempts in {self._timeout_s:g} s; the "
                f"last one said: {reason}"
            ) from reason
        await asyncio.sleep(pause_s)


def jittered(pause_s: float) -> float:
    """Between a half of `pause_s` and all of it."""
    return pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - it keeps nothing secret
