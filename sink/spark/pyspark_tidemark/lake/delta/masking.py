"""A cut by files: rows of its keys masked where they are, and new files. An upsert adds one file of
the rows that live, or one of each partition; a history adds one of the versions that begin, and
one of those that end.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_tidemark.lake.delta.files import (
    DataFile,
    DeletionVectors,
    Layout,
    as_stored,
    kept_as,
    meeting,
    pieces,
    stored_columns,
    without,
    without_rows,
    written,
    written_by_partition,
)
from pyspark_tidemark.lake.delta.inserted import Inserted
from pyspark_tidemark.lake.delta.log import Listing
from pyspark_tidemark.lake.fold import Folded, endings, versions
from pyspark_tidemark.lake.keys import ROW, ColumnCache, numbered, renamed, those_in
from pyspark_tidemark.lake.schema import IS_CURRENT, VALID_TO, fitted


def masked_and_added(
    name: str,
    listing: Listing,
    folded: Folded,
    key: Sequence[str],
    searched: tuple[Inserted, ColumnCache],
) -> list[dict[str, Any]]:
    """The actions that bring the net effect of a cut to what a version shows; the table is called
    `name` in what was `searched` before: keys by file, and key columns.
    """
    inserted, key_columns = searched
    existing, new = (
        as_stored(listing.layout, rows.select(list(key))) for rows in (folded.existing, folded.new)
    )
    again = inserted.there(name, listing, new)
    keys = pa.concat_tables([existing, again])
    removals = without(listing.layout, listing.files.values(), keys, key_columns)
    live = fitted(folded.live, listing.layout.schema)
    new_files = written_by_partition(listing.layout, live)
    for action, rows in new_files:
        # The next cut that updates one of its rows need not read it.
        name_there = kept_as(listing.layout, action["add"], keys.schema)
        key_columns.put(name_there, rows.select(list(key)))
    return removals + [action for action, _ in new_files]


class VersionChanges:
    """What a cut does to versions of rows, as pyarrow.Tables."""

    def __init__(self, changes: Any, key: Sequence[str]) -> None:
        """`changes` are all changes of a table in the cut (pyarrow.Table)."""
        self._changes = changes
        self._key = key
        self.ends, self.inserted = endings(changes, key)
        """The keys whose versions end, and when; the keys that are new to the upstream, and when a
        version of them ends that should not be there.
        """

    @functools.cached_property
    def begun(self) -> Any:
        """The versions that begin."""
        # Made when they are needed: where much has to be searched for what ends, Spark makes them.
        return versions(self._changes, self._key)


def ended_and_begun(
    name: str, listing: Listing, cut: VersionChanges, inserted: Inserted
) -> list[dict[str, Any]]:
    """The actions that bring a cut to the versions of rows in what a version of the log shows; the
    table is called `name` in what was searched before.
    """
    stored = as_stored(listing.layout, cut.inserted)
    again = inserted.there(name, listing, stored.drop_columns([VALID_TO]))
    ended = [as_stored(listing.layout, cut.ends), those_in(stored, again)]
    return replaced(listing, cut.begun, pa.concat_tables(ended))


def searched(files: Iterable[DataFile], ends: Any) -> list[DataFile]:
    """The files that may hold the current version of a key in `ends` (pyarrow.Table:
    key, VALID_TO).
    """
    return meeting((file for file in files if not file.ended), ends.drop_columns([VALID_TO]))


def replaced(listing: Listing, new: Any, ends: Any) -> list[dict[str, Any]]:
    """The actions of a cut: current versions of keys in `ends` are masked where they are, and
    written again with their end; `new` versions (pyarrow.Table) begin.
    """
    layout, vectors, actions = listing.layout, DeletionVectors(listing.layout.root), []
    rows = [fitted(new, layout.schema)]
    for file in searched(listing.files.values(), ends):
        masked = vectors.read(file.add.get("deletionVector"))
        positions, times, count = _current(layout, file, masked, ends)
        if len(positions):
            rows.append(_ended(layout, file, positions, times, count))
            actions += without_rows(layout, file, (masked, positions, count), vectors)
    vectors.close()
    shown = pa.concat_tables(rows)
    current = pc.is_null(shown[VALID_TO])
    return (
        actions
        + written(layout, shown.filter(current))
        + written(layout, shown.filter(pc.invert(current)))
    )


def _current(layout: Layout, file: DataFile, masked: Any, ends: Any) -> tuple[Any, Any, int]:
    """Where a file holds current versions that end, in order, when they end,
    and how many rows it has.
    """
    key = [name for name in ends.column_names if name != VALID_TO]
    schema = pa.schema([*(ends.schema.field(name) for name in key), (IS_CURRENT, pa.bool_())])
    stored = numbered(stored_columns(layout, file, schema))
    live = np.ones(len(stored), bool)
    live[masked] = False
    current = stored.filter(pc.and_(stored[IS_CURRENT], pa.array(live)))
    there, ending = renamed(current.select(key)), renamed(ends.select(key))
    ended = (
        there.append_column(ROW, current[ROW])
        .join(
            ending.append_column(VALID_TO, ends[VALID_TO]),
            keys=ending.column_names,
            join_type="inner",
            use_threads=False,
        )
        .sort_by(ROW)
    )
    return ended[ROW].to_numpy(), ended[VALID_TO], len(stored)


def _ended(layout: Layout, file: DataFile, positions: Any, times: Any, count: int) -> Any:
    """The rows at `positions`, ended."""
    others = np.setdiff1d(np.arange(count), positions)
    rows = pa.concat_tables(list(pieces(layout, file.add, others)))
    for name, values in (
        (VALID_TO, times),
        (IS_CURRENT, pa.repeat(pa.scalar(value=False), len(rows))),
    ):
        rows = rows.set_column(rows.schema.get_field_index(name), layout.schema.field(name), values)
    return rows
