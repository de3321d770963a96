"""The keys of a cut's inserts that a table has already: their rows are replaced and counted, never
doubled (docs/design/0030-net-underneath.md).
"""

from functools import reduce
from typing import Any, Final

import numpy as np
import pyarrow as pa

from pyspark_tidemark.lake.delta.files import (
    DataFile,
    DeletionVectors,
    Layout,
    meeting,
    stored_columns,
)
from pyspark_tidemark.lake.delta.log import Listing
from pyspark_tidemark.lake.keys import FileKeys, KeyIndex, numbers, those_in
from pyspark_tidemark.lake.schema import IS_CURRENT

_FEWEST_BYTES_A_ROW: Final = 8


class Inserted:
    """Searches the files of tables for keys that should not be there, and counts those that are."""

    def __init__(self, *, soft_delete: bool = False) -> None:
        """With `soft_delete` keys that are inserted may rightly be there: those of deleted rows."""
        self._index = KeyIndex(is_exact=soft_delete)
        self._replaced: dict[str, int] = {}

    def there(self, table: str, listing: Listing, keys: Any) -> Any:
        """Those of `keys` (pyarrow.Table, each key once) that the table shows,
        in mode `scd2` as current versions.
        """
        searched = meeting((file for file in listing.files.values() if not file.ended), keys)
        again = keys.slice(0, 0)
        if searched:
            columns = tuple(listing.layout.physical[name] for name in keys.column_names)
            self._index.keep_only(table, [(path, columns) for path in listing.files])
            digests = numbers(keys)
            hits = [
                self._hits(table, listing.layout, file, (digests, keys.schema, columns))
                for file in searched
            ]
            candidates = keys.filter(pa.array(reduce(np.logical_or, hits)))
            for file, among in zip(searched, hits, strict=True):
                if among.any():
                    shown = _shown(listing.layout, file, keys.schema)
                    again = pa.concat_tables([again, those_in(candidates, shown)])
        self.replacing(table, len(again))
        return again

    def replacing(self, table: str, rows: int) -> None:
        """Note how many rows the cut replaces that is being applied; an earlier try of the same cut
        does not count.
        """
        self._replaced[table] = rows

    def replaced(self, table: str) -> int:
        """How many rows the cut that was applied last has replaced."""
        return self._replaced.pop(table, 0)

    def forget(self, table: str) -> None:
        """Drop the index of a table that is gone."""
        self._index.forget(table)

    def _hits(
        self, table: str, layout: Layout, file: DataFile, keys: tuple[Any, Any, tuple[str, ...]]
    ) -> Any:
        digests, schema, columns = keys
        rows = file.rows or file.size // _FEWEST_BYTES_A_ROW

        def read() -> Any:
            return stored_columns(layout, file, schema)

        return self._index.hits(table, (file.add["path"], columns), digests, FileKeys(read, rows))


def _shown(layout: Layout, file: DataFile, schema: Any) -> Any:
    """The keys in a file that the table shows (mode `scd2`: of current versions)."""
    versioned = IS_CURRENT in layout.schema.names
    stored = stored_columns(
        layout, file, schema.append(layout.schema.field(IS_CURRENT)) if versioned else schema
    )
    live = np.ones(len(stored), bool)
    live[DeletionVectors(layout.root).read(file.add.get("deletionVector"))] = False
    if versioned:
        live &= stored[IS_CURRENT].to_numpy()
    return stored.select(schema.names).filter(pa.array(live))
