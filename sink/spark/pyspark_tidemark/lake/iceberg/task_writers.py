"""What tasks write of an Iceberg table's cut: its data files.

Which rows of older files go is the driver's to find, who has the table's metadata and remembers
what it searched before: of an upsert it gets the keys, and no other column.
"""

import dataclasses
from typing import Any

from pyspark_tidemark.lake.changes import Changes, CountedBatches
from pyspark_tidemark.lake.cut_tasks import Part, check_mounted
from pyspark_tidemark.lake.files import file_system, is_on_disk
from pyspark_tidemark.lake.fold import fold
from pyspark_tidemark.lake.iceberg.files import Layout, Written, write, write_rows


@dataclasses.dataclass(frozen=True)
class Made:
    """What a task has written, and the keys (pyarrow.Tables) of an upsert."""

    files: tuple[Written, ...]
    existing: Any = None
    """Those that the table may have had before."""
    new: Any = None
    """Those that the cut inserts, as the upstream says."""
    live: Any = None
    """Those of the rows in the file, in their order."""


@dataclasses.dataclass(frozen=True)
class ChangesWriter:
    """Implements `TaskWriter` for a changelog: all changes are rows."""

    layout: Layout
    is_divisible = True

    def write(self, changes: Changes) -> Part:
        """See `TaskWriter`."""
        _check(self.layout)
        counting = CountedBatches(changes)
        files = write_rows(self.layout, iter(counting))
        return Part(counting.rows, counting.total, Made(tuple(files)))


@dataclasses.dataclass(frozen=True)
class UpsertWriter:
    """Implements `TaskWriter` for the net effect of changes, for which a task needs all of them."""

    layout: Layout
    is_divisible = False

    def write(self, changes: Changes) -> Part:
        """See `TaskWriter`."""
        _check(self.layout)
        key = list(changes.table.key)
        folded = fold(changes.arrow, key)
        live = self.layout.in_order(folded.live)
        keys = (rows.select(key) for rows in (folded.existing, folded.new, live))
        return Part(*changes.sums, Made(tuple(write(self.layout, live)), *keys))


def _check(layout: Layout) -> None:
    if is_on_disk(layout.data):
        check_mounted(file_system(layout.data)[1])
