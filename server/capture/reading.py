"""When the rows of a changefeed were last asked for: whether anybody reads it."""

from dataclasses import dataclass


@dataclass(slots=True)
class Reading:
    """Of a changefeed that runs; set by Flight's threads. Times are the monotonic clock's."""

    since_s: float
    """From when on it is known: this capture has run the changefeed since then."""
    asked_s: float | None = None
    """When rows were last asked for; None: not since `since_s`."""

    def idle_s(self, now_s: float) -> float:
        """For how many seconds, at least, nobody has asked for rows."""
        return max(0.0, now_s - (self.since_s if self.asked_s is None else self.asked_s))
