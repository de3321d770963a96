"""What a small table holds, kept in the driver's memory: it is then rewritten whole, which is one append-like commit.

Invariant: a mirror equals its table; it is read from the table when the job starts and changed only after a commit.
"""

import dataclasses
from typing import Any

import pyarrow as pa

from pyspark_tidemark.lake.fold import Folded

SMALL_ROWS = 20_000
"""Up to here rewriting a table costs less than finding the changed rows in it."""


@dataclasses.dataclass(frozen=True)
class Mirror:
    """The rows of one table (pyarrow.Table in the lake's schema)."""

    rows: Any
    key: tuple[str, ...]

    @property
    def small(self) -> bool:
        """Whether it is worth keeping."""
        return len(self.rows) <= SMALL_ROWS

    def after(self, folded: Folded) -> "Mirror":
        """The same table one cut later."""
        key = list(self.key)
        kept = self.rows.join(folded.known.select(key), keys=key, join_type="left anti") if folded.known else self.rows
        live = folded.live.select(self.rows.schema.names)
        return Mirror(pa.concat_tables([kept.select(self.rows.schema.names), live]).combine_chunks(), self.key)
