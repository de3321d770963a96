"""The coordinator's clock, read off between two looks at it: its last answer plus what has passed since."""

from collections.abc import Callable


class Clock:
    """Milliseconds since the Unix epoch as the coordinator counts them; never ahead of it by more than clocks drift."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self.monotonic_s = monotonic_s
        self._marked_s = 0.0
        self._then_ms = 0

    def set(self, marked_s: float, now_ms: int) -> None:
        """The coordinator said `now_ms`; `marked_s` is the monotonic clock from before it was asked."""
        self._marked_s, self._then_ms = marked_s, now_ms

    def now_ms(self) -> int:
        """The time of now."""
        return self._then_ms + int((self.monotonic_s() - self._marked_s) * 1000)
