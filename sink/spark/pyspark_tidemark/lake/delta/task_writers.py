"""What tasks write of a Delta table's cut, and what the driver puts into the commit of it.

For rows that are only added, a task writes files, which fit on top of any version with the same
columns. For an upsert or a history it reads the changes, searches the files of one version for
their keys, and writes masks and new files, as the driver does where it reads the changes itself
(`masking`); that fits on top of the same version only.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.changes import Changes, CountedBatches
from pyspark_tidemark.lake.cut_tasks import Part, check_arrived, check_mounted
from pyspark_tidemark.lake.delta.files import Layout, NewFiles, written
from pyspark_tidemark.lake.delta.inserted import Inserted
from pyspark_tidemark.lake.delta.log import Listing
from pyspark_tidemark.lake.delta.masking import VersionChanges, ended_and_begun, masked_and_added
from pyspark_tidemark.lake.fold import fold, versions
from pyspark_tidemark.lake.keys import KEPT_BYTES, ColumnCache
from pyspark_tidemark.lake.schema import fitted, lake_columns


@dataclasses.dataclass(frozen=True)
class Made:
    """What a task has written."""

    layout: Layout
    actions: Sequence[Mapping[str, Any]]
    version: int | None = None
    """On top of which version; None: of any with this layout."""
    replaced: int = 0
    """How many keys the cut inserts that were there already."""


@dataclasses.dataclass(frozen=True)
class ChangesWriter:
    """Implements `TaskWriter` for a changelog: all changes are rows."""

    layout: Layout
    is_divisible = True

    def write(self, changes: Changes) -> Part:
        """See `TaskWriter`."""
        check_mounted(self.layout.root)
        files, counting = NewFiles(self.layout), CountedBatches(changes)
        for batch in counting:
            files.add(fitted(pa.Table.from_batches([batch]), self.layout.schema))
        return Part(counting.rows, counting.total, Made(self.layout, files.close()))


@dataclasses.dataclass(frozen=True)
class UpsertWriter:
    """Implements `TaskWriter` for the net effect of changes, for which a task needs all of them."""

    listing: Listing
    is_new: bool = False
    """The table is not there yet, or loses all rows with the cut: none can have a key of it."""
    is_divisible = False

    def write(self, changes: Changes) -> Part:
        """See `TaskWriter`."""
        listing, layout, key = self.listing, self.listing.layout, changes.table.key
        check_mounted(layout.root)
        folded = fold(changes.arrow, key)
        if self.is_new:
            live = folded.live.select(lake_columns(changes.table))
            made = Made(layout, written(layout, fitted(live, layout.schema)))
        else:
            inserted, key_columns = _searched(soft_delete=changes.soft_delete)
            # By its directory: a process of Spark's may write tables of several lakes.
            name = layout.root
            actions = masked_and_added(name, listing, folded, key, (inserted, key_columns))
            made = Made(layout, actions, listing.version, inserted.replaced(name))
        return Part(*changes.sums, made)


@dataclasses.dataclass(frozen=True)
class HistoryWriter:
    """Implements `TaskWriter` for versions of rows, for which a task needs all changes."""

    listing: Listing
    is_new: bool = False
    """The table is not there yet."""
    is_divisible = False

    def write(self, changes: Changes) -> Part:
        """See `TaskWriter`."""
        listing, layout = self.listing, self.listing.layout
        check_mounted(layout.root)
        if self.is_new:
            rows = versions(changes.arrow, changes.table.key)
            made = Made(layout, written(layout, fitted(rows, layout.schema)))
        else:
            inserted, _ = _searched()
            cut = VersionChanges(changes.arrow, changes.table.key)
            actions = ended_and_begun(layout.root, listing, cut, inserted)
            made = Made(layout, actions, listing.version, inserted.replaced(layout.root))
        return Part(*changes.sums, made)


@functools.cache
def _searched(*, soft_delete: bool = False) -> tuple[Inserted, ColumnCache]:
    """What this process has searched before: data files never change."""
    return Inserted(soft_delete=soft_delete), ColumnCache(KEPT_BYTES)


def made_for(changes: Changes, current: Listing) -> list[Made]:
    """What tasks have written of the changes, if it can be put on top of `current`; else nothing.

    Raises:
        SourceError: ErrTargetUnusable, the driver does not see their files; ErrTargetBusy, the
            table has got other columns meanwhile.
    """
    assert changes.by_tasks is not None
    made: list[Made] = list(changes.by_tasks.parts)
    if any(part.version not in (None, current.version) for part in made):
        return []
    if any(part.layout != current.layout for part in made):
        raise SourceError(
            "ErrTargetBusy",
            f"somebody else has changed the columns of {changes.table.name} while a cut was "
            "written: it is written again",
            retryable=True,
        )
    for part in made:
        for add in (action["add"] for action in part.actions if "add" in action):
            check_arrived(Path(current.layout.location(add)), int(add["size"]))
    return made


def actions_of(made: Sequence[Made]) -> list[Mapping[str, Any]]:
    """The actions of all tasks."""
    return [action for part in made for action in part.actions]
