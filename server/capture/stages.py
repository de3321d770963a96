"""How far each stage of a changefeed is behind the one before it: upstream, puller, sorter, sink, reader. Pure.

Sorted is what the pullers have promised to the sorter to be complete; the sink goes as far, but not beyond the schema
changes that are known; the reader is where it has acknowledged. What the lake job does itself is `tidemark_spark_*`.
"""

from storage.model.ts import physical_ms

PULLER, SORTER, SINK, READER = STAGES = ("puller", "sorter", "sink", "reader")


def lags_s(now_s: float, pulled_ts: int, sorted_ts: int, resolved_ts: int, checkpoint_ts: int) -> dict[str, float]:
    """Seconds by stage, never below 0; a position that is not told (0) is no stage, and counts with the next."""
    found, before_s = {}, now_s
    for stage, ts in zip(STAGES, (pulled_ts, sorted_ts, resolved_ts, checkpoint_ts), strict=True):
        if ts:
            at_s = min(physical_ms(ts) / 1e3, before_s)
            found[stage] = before_s - at_s
            before_s = at_s
    return found
