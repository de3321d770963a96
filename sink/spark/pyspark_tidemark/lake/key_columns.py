"""The key columns of data files, which never change: those that were used last stay in memory, so
that a cut after a cut need not read them again. And rows found by their keys, whatever the key's
columns are called.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final

import numpy as np
import pyarrow as pa

from pyspark_tidemark.lake.columns import internal

ROW: Final = internal("_row")
"""A column with the position of a row in its file."""
MOST_BYTES: Final = 64 << 20
"""Of all tables together."""


class KeyColumns:
    """Key columns by file; any number of threads may ask."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def of(self, file: Hashable, read: Callable[[], Any]) -> Any:
        """The columns of a file (pyarrow.Table): as they were kept, or as `read` gives them."""
        with self._lock:
            if file in self._kept:
                self._kept.move_to_end(file)
                return self._kept[file]
        columns = read()
        self.put(file, columns)
        return columns

    def put(self, file: Hashable, columns: Any) -> None:
        """Keep the columns of a file, as of one that was just written."""
        if columns.nbytes > self._most_bytes:
            return
        with self._lock:
            if file not in self._kept:
                self._kept[file] = columns
                self._bytes += columns.nbytes
            while self._bytes > self._most_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= oldest.nbytes


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
