"""Some of a table's rows, and where they lie: what is known of them without reading them. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from sorter import order
from sorter.buffer import Rows
from sorter.index import Entry
from sorter.store import Reader


@dataclass(frozen=True, slots=True)
class Extent:
    """Some of a table's rows: how many, how large, and their sorted commit_ts (read when asked for)."""

    min_commit_ts: int
    max_commit_ts: int
    rows: int
    bytes: int
    commit_ts: Callable[[], order.Timestamps]


def on_disk(entry: Entry, read: Reader) -> Extent:
    """The rows of a block, or of a table's share of one."""
    meta = entry.meta
    return Extent(meta.min_commit_ts, meta.max_commit_ts, meta.rows, entry.bytes, lambda: order.commit_ts(read()))


def in_memory(rows: Rows) -> Extent:
    """Sorted rows."""
    batch = rows.batch
    size = batch.nbytes
    return Extent(rows.min_commit_ts, rows.max_commit_ts, batch.num_rows, size, lambda: order.commit_ts(batch))
