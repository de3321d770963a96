"""Rows found by their keys, whatever the key's columns are called. Pure."""

from typing import Any, Final

import numpy as np
import pyarrow as pa

from pyspark_tidemark.lake.columns import internal

ROW: Final = internal("_row")
"""A column with the position of a row in its file."""
MOST_BYTES: Final = 64 << 20
"""Of key columns that stay in memory (`kept`), of all tables together."""


def numbered(columns: Any) -> Any:
    """A file's columns (pyarrow.Table) with the position of each row as ROW."""
    return columns.append_column(ROW, pa.array(np.arange(len(columns))))


def renamed(keys: Any) -> Any:
    """The same columns under names of ours: Arrow's joins take a name that begins with a dot or a
    bracket for a path, and so for no column or for another one.
    """
    return keys.rename_columns([f"key {number}" for number in range(keys.num_columns)])


def places_of(columns: Any, keys: Any) -> Any:
    """The positions, sorted (NumPy), of those of `columns` that are among `keys`; both are
    pyarrow.Tables with the key's columns, and no others.
    """
    wanted = renamed(keys)
    found = numbered(renamed(columns)).join(
        wanted, keys=wanted.column_names, join_type="left semi", use_threads=False
    )
    return np.sort(found[ROW].to_numpy())


def those_in(rows: Any, keys: Any) -> Any:
    """The rows (pyarrow.Table), in their order, whose key is among `keys` (pyarrow.Table of the
    key's columns).
    """
    return rows.take(pa.array(places_of(rows.select(keys.column_names), keys)))
