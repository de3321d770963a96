"""The range of a micro-batch from Spark's own offset log, where it is before the batch begins.

The batch's one row says the same, but to collect it is a Spark job with a Python worker: half of a
small cut's CPU.
"""

import json
from pathlib import Path

_VERSION = "v1"
_LINES = 3  # version, metadata, the offset of the query's only source


def logged_range(checkpoint: Path, batch: int, first_ts: int) -> tuple[int, int] | None:
    """`(start_ts, end_ts)` of a batch of the query with that checkpoint directory;
    the first one starts at `first_ts`.

    None where the log is not as we know it: another version of Spark may write another one.
    """
    start_ts = first_ts if batch == 0 else _logged(checkpoint, batch - 1)
    end_ts = _logged(checkpoint, batch)
    return None if start_ts is None or end_ts is None else (start_ts, end_ts)


def _logged(checkpoint: Path, batch: int) -> int | None:
    try:
        lines = (checkpoint / "offsets" / str(batch)).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    if len(lines) != _LINES or lines[0] != _VERSION:
        return None
    try:
        offset = json.loads(lines[-1])
    except ValueError:
        return None
    ts = offset.get("ts") if isinstance(offset, dict) else None
    return ts if isinstance(ts, int) else None
