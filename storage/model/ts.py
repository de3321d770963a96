"""Timestamps of the timestamp oracle (TSO): 46 bits of physical milliseconds,
18 bits of logical counter.

Source: PD's tsoutil; `ts = physical_ms << 18 | logical`.
"""

LOGICAL_BITS = 18
LOGICAL_MAX = (1 << LOGICAL_BITS) - 1
MAX_TS = (1 << 64) - 1


def compose(physical_ms: int, logical: int = 0) -> int:
    """Build a timestamp from milliseconds since the Unix epoch and a logical counter."""
    return (physical_ms << LOGICAL_BITS) + logical


def physical_ms(ts: int) -> int:
    """Milliseconds since the Unix epoch at which `ts` was given out."""
    return ts >> LOGICAL_BITS


def physical_s(ts: int) -> float:
    """Seconds since the Unix epoch at which `ts` was given out; 0 for 0, which is no time."""
    return physical_ms(ts) / 1000


def logical(ts: int) -> int:
    """The counter of `ts` within its millisecond."""
    return ts & LOGICAL_MAX
