"""How much of what costs us and says nothing one peer may send: pings, settings, resets, empty frames."""

from collections.abc import Callable

from server.rpc.http2.frames import ConnectionFault, ErrorCode


class Patience:
    """`burst` at once, then `per_s` each second; a token bucket."""

    __slots__ = ("_burst", "_clock", "_last_s", "_left", "_per_s", "_text")

    def __init__(self, text: str, burst: float, per_s: float, clock: Callable[[], float]) -> None:
        """`text` tells the peer, and our log, what was too much."""
        self._text = text
        self._burst = self._left = burst
        self._per_s = per_s
        self._clock = clock
        self._last_s = clock()

    def spend(self) -> None:
        """Another one came.

        Raises:
            ConnectionFault: it is one too many.
        """
        if self._left < 1:
            now_s = self._clock()
            self._left = min(self._burst, self._left + (now_s - self._last_s) * self._per_s)
            self._last_s = now_s
            if self._left < 1:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, self._text)
        self._left -= 1

    def refill(self) -> None:
        """The peer did something useful meanwhile."""
        self._left = self._burst
