"""The clock TTLs are measured by (docs/design/0008-gc-state.md).

1. While a leader leads, its clock runs with the monotonic clock: no jump of the wall clock expires or revives anybody.
2. Each of its writes, and a beat, leaves the clock's reading in metadata. The next leader takes the wall clock as it
   finds it, and gives each service what was left of its TTL at the last reading: time in which nobody could renew does
   not count, and neither does a jump of the wall clock, forward or backward, between two leaders.
3. So an expiry is only ever put off, by at most the outage and a beat. What was written later than the last reading (by
   an operator, or by a PD that led in between) is taken as it stands.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from gcsafepoint.barrier import NEVER_S
from storage.meta.meta import KeyValue

BEAT_S = 10


@dataclass(frozen=True, slots=True)
class Outage:
    """From the last reading of the clock, at metadata revision `revision`, to now on the new one: `seconds`."""

    revision: int = 0
    seconds: int = 0

    @classmethod
    def since(cls, reading: KeyValue | None, now_s: float) -> "Outage":
        """The time since the reading, rounded up; none where there never was one. Raises: ValueError: unreadable."""
        if reading is None:
            return cls()
        return cls(reading.mod_revision, math.ceil(now_s) - int(reading.value))

    def put_off(self, expired_at: int, written_at: int) -> int:
        """When what was written at revision `written_at` expires now; 0 or less is stored for never."""
        if not 0 < expired_at < NEVER_S:
            return NEVER_S
        if written_at > self.revision:
            return expired_at
        return min(max(1, expired_at + self.seconds), NEVER_S - 1)


def steady_clock() -> Callable[[], float]:
    """Unix seconds that run with the monotonic clock."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset
