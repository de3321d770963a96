"""Rows by their keys: where a file has them (`places_of`), what of files stays in memory for that
(`ColumnCache`), and which files may have a key that a cut inserts (`KeyIndex`).

Whatever a key's columns are called, they have names of ours while Arrow joins them. An insert
promises that its key is new, and the promise is checked: files are looked into only where their
bounds do not exclude the key, so keys that ascend cost a comparison a file. What is looked into is
remembered as one 64-bit number a key, as data files never change: random keys cost reading each
file's key columns once in the life of a job. Files beyond the budget are not searched, which one
warning a table says (docs/design/0030); with soft delete they are read for each cut, as a key
that was deleted has its row, and may be inserted again.
"""

import dataclasses
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_tidemark.lake.columns import internal

ROW: Final = internal("_row")
"""A column with the position of a row in its file."""
KEPT_BYTES: Final = 64 << 20
"""Of key columns that stay in memory (`ColumnCache`), of all tables together."""
INDEXED_BYTES: Final = 128 << 20
"""For the hashes of all tables, 8 bytes a key: sixteen million keys."""
_FACTORS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_NULL: Final = np.uint64(0x6A09E667F3BCC909)

_logger = logging.getLogger(__name__)


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
    searched = renamed(keys)
    matching = numbered(renamed(columns)).join(
        searched, keys=searched.column_names, join_type="left semi", use_threads=False
    )
    return np.sort(matching[ROW].to_numpy())


def those_in(rows: Any, keys: Any) -> Any:
    """The rows (pyarrow.Table), in their order, whose key is among `keys` (pyarrow.Table of the
    key's columns).
    """
    return rows.take(pa.array(places_of(rows.select(keys.column_names), keys)))


class ColumnCache:
    """A cache of what was read from data files, which never change: the values used most recently,
    up to a size, so that the next cut need not read them again.

    Values have a size (`nbytes`: Arrow tables, NumPy arrays). Thread-safe; two threads that miss
    the same value both read it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def of(self, name: Hashable, read: Callable[[], Any]) -> Any:
        """The value of that name: as it was kept, or as `read` gives it."""
        with self._lock:
            if name in self._values:
                self._values.move_to_end(name)
                return self._values[name]
        value = read()
        self.put(name, value)
        return value

    def put(self, name: Hashable, value: Any) -> None:
        """Keep a value, as of a file that was just written."""
        if value.nbytes > self._most_bytes:
            return
        with self._lock:
            if name not in self._values:
                self._values[name] = value
                self._bytes += value.nbytes
            while self._bytes > self._most_bytes:
                _, oldest = self._values.popitem(last=False)
                self._bytes -= oldest.nbytes


@dataclasses.dataclass(frozen=True)
class FileKeys:
    """The keys of a data file."""

    read: Callable[[], Any]
    """As a pyarrow.Table of the key's columns."""
    rows: int
    """How many at most."""


class KeyIndex:
    """The keys of data files, by table; tables may be searched by threads of their own."""

    def __init__(self, most_bytes: int = INDEXED_BYTES, *, is_exact: bool = False) -> None:
        """With `is_exact` a file that there is no room for may hold every key."""
        self._most_bytes = most_bytes
        self._is_exact = is_exact
        self._files: dict[str, dict[Hashable, Any]] = {}
        self._bytes = 0
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def keep_only(self, table: str, files: Collection[Hashable]) -> None:
        """Forget the files that a table does not show any more."""
        with self._lock:
            indexed = self._files.get(table, {})
            for file in indexed.keys() - set(files):
                self._bytes -= indexed.pop(file).nbytes

    def forget(self, table: str) -> None:
        """Drop the hashes of a table that is another one now."""
        self.keep_only(table, ())
        self._warned.discard(table)

    def hits(self, table: str, file: Hashable, keys: Any, there: FileKeys) -> Any:
        """For each of `keys` (`numbers`) whether the file may hold it.

        "No" is certain for a file that is remembered. Of one that there is no room for nothing is
        known: it may hold all, or is taken for one without them.
        """
        hashes = self._files.get(table, {}).get(file)
        if hashes is None:
            if self._bytes + 8 * there.rows > self._most_bytes:
                if self._is_exact:
                    return np.ones(len(keys), bool)
                self._warn(table)
                return np.zeros(len(keys), bool)
            hashes = np.sort(numbers(there.read()))
            # Tables are searched in parallel, and the budget is one for all of them.
            with self._lock:
                self._files.setdefault(table, {})[file] = hashes
                self._bytes += hashes.nbytes
        if not len(hashes):
            return np.zeros(len(keys), bool)
        # Past the end for keys above all hashes: compared with the last one, they are not equal.
        places = np.minimum(np.searchsorted(hashes, keys), len(hashes) - 1)
        return hashes[places] == keys

    def _warn(self, table: str) -> None:
        if table not in self._warned:
            self._warned.add(table)
            _logger.warning(
                "%s: more keys than %s MiB of their numbers hold lie between those that are "
                "inserted: not all of its files are searched for keys that are there already; "
                "tidemark cli verify compares them",
                table,
                self._most_bytes >> 20,
            )


def numbers(keys: Any) -> Any:
    """One 64-bit number for each key (pyarrow.Table of the key's columns),
    equal in this process for equal keys.
    """
    hashes = np.zeros(len(keys), np.uint64)
    for column in keys.columns:
        hashes = _mixed(hashes ^ _values(column))
    return hashes


def _values(column: Any) -> Any:
    if pa.types.is_integer(column.type):
        values = _mixed(
            pc.fill_null(column, 0).cast(pa.int64(), safe=False).to_numpy().view(np.uint64)
        )
        return (
            values
            if not column.null_count
            else values ^ np.where(column.is_null().to_numpy(), _NULL, np.uint64(0))
        )
    hashes = (hash(value) & 0xFFFF_FFFF_FFFF_FFFF for value in column.to_pylist())
    return _mixed(np.fromiter(hashes, np.uint64, len(column)))


def _mixed(values: Any) -> Any:
    """Spread over all 64 bits, one to one (the finalizer of SplitMix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * _FACTORS[0]
    values = (values ^ (values >> np.uint64(27))) * _FACTORS[1]
    return values ^ (values >> np.uint64(31))
