"""Versions of rows ended without Spark (mode `scd2`): masked where they are,
to be written again with their end.

Ended versions get files of their own, so that the search for current ones does not grow with the
history.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_tidemark.lake.delta.deletion_vectors import DeletionVectors
from pyspark_tidemark.lake.delta.files import DataFile, meeting, numbered, without_rows, written
from pyspark_tidemark.lake.delta.log import Listing
from pyspark_tidemark.lake.delta.parquet import Layout, pieces
from pyspark_tidemark.lake.mode import IS_CURRENT, VALID_TO
from pyspark_tidemark.lake.schema import fitted


def searched(files: Iterable[DataFile], ends: Any) -> list[DataFile]:
    """The files that may hold the current version of a key in `ends` (pyarrow.Table:
    key, VALID_TO).
    """
    return meeting((file for file in files if not file.ended), ends.drop_columns([VALID_TO]))


def replaced(listing: Listing, new: Any, ends: Any) -> list[dict[str, Any]]:
    """The actions of a cut: current versions of keys in `ends` end,
    `new` versions (pyarrow.Table) begin.
    """
    layout, vectors, actions = listing.layout, DeletionVectors(listing.layout.root), []
    rows = [fitted(new, layout.schema)]
    for file in searched(listing.files.values(), ends):
        gone = vectors.read(file.add.get("deletionVector"))
        positions, times, count = _current(layout, file, gone, ends)
        if len(positions):
            rows.append(_ended(layout, file, positions, times, count))
            actions += without_rows(file, gone, positions, count, vectors)
    vectors.close()
    shown = pa.concat_tables(rows)
    current = pc.is_null(shown[VALID_TO])
    return (
        actions
        + written(layout, shown.filter(current))
        + written(layout, shown.filter(pc.invert(current)))
    )


def _current(layout: Layout, file: DataFile, gone: Any, ends: Any) -> tuple[Any, Any, int]:
    """Where a file holds current versions that end, in order, when they end,
    and how many rows it has.
    """
    key = [name for name in ends.column_names if name != VALID_TO]
    schema = pa.schema([*(ends.schema.field(name) for name in key), (IS_CURRENT, pa.bool_())])
    stored = numbered(layout, file, schema)
    live = np.ones(len(stored), bool)
    live[gone] = False
    current = stored.filter(pc.and_(stored[IS_CURRENT], pa.array(live))).select([*key, "_row"])
    ended = current.join(ends, keys=key, join_type="inner", use_threads=False).sort_by("_row")
    return ended["_row"].to_numpy(), ended[VALID_TO], len(stored)


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
