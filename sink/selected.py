"""Some columns of a table only: what a changefeed's column rules leave out goes to no reader.

Invariants:
1. The key's columns are always there, so rows are the same rows.
2. Rows are mounted whole and cut afterwards: whatever else a mounter promises holds.
"""

from collections.abc import Collection

import pyarrow as pa

from sink.change_columns import META_FIELDS
from sink.mounted import TableMounter


class SelectedMounter:
    """Implements `TableMounter` by `whole`, with the columns `selected`; immutable."""

    def __init__(self, whole: TableMounter, selected: Collection[str]) -> None:
        self.whole = whole
        self.name: str = whole.name
        self.key_columns: tuple[str, ...] = whole.key_columns
        kept = {field.name for field in META_FIELDS} | {*selected, *whole.key_columns}
        self._places = [place for place, field in enumerate(whole.schema) if field.name in kept]
        self.schema: pa.Schema = pa.schema([whole.schema.field(place) for place in self._places])

    def split(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `TableMounter.split`."""
        return self.whole.split(raw)

    def mount(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `TableMounter.mount`."""
        mounted = self.whole.mount(raw)
        return pa.RecordBatch.from_arrays([mounted.column(place) for place in self._places], schema=self.schema)


def whole_mounter(mounter: TableMounter) -> TableMounter:
    """The one that knows all columns."""
    return mounter.whole if isinstance(mounter, SelectedMounter) else mounter
