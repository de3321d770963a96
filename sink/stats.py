"""What a sink manager tells of itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from storage.model.span import Span


@dataclass(frozen=True, slots=True)
class SinkStats:
    """State of the moment, and totals since the start."""

    tables: int
    resolved_ts: int
    checkpoint_ts: int
    barrier_ts: int | None
    quota_bytes: int
    used_bytes: int
    reads_staged: int
    reads_sorter: int
    sorted_ts: int = 0  # how far all tables are sorted, whether it may be read or not
    slowest: Span | None = None  # the table with the least checkpoint_ts
    failures: Mapping[Span, str] = field(default_factory=dict)  # why tables are not staged, but read from the sorter
