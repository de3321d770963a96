"""Some columns of a table only, and some by other names:
what a changefeed's column rules leave out goes to no reader.

Invariants:
1. The key's columns are always there, so rows are the same rows.
2. Rows are mounted whole and cut afterwards: whatever else a mounter promises holds.
"""

from collections.abc import Collection, Mapping

import pyarrow as pa

from sink.columns import META_FIELDS
from sink.mounted import TableMounter


class SelectedMounter:
    """Implements `TableMounter` by `whole`, with the columns `selected`,
    `renamed` by their names; immutable.
    """

    def __init__(
        self,
        whole: TableMounter,
        selected: Collection[str],
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        self.whole = whole
        self.name: str = whole.name
        names = renamed or {}
        self.key_columns: tuple[str, ...] = tuple(
            names.get(column, column) for column in whole.key_columns
        )
        kept = {*selected, *whole.key_columns}
        own = [
            place
            for place in range(len(META_FIELDS), len(whole.schema))
            if whole.schema.field(place).name in kept
        ]
        self._places = [*range(len(META_FIELDS)), *own]
        """A column of the table may be called like one of ours, so they are told apart by place."""
        fields = [whole.schema.field(place) for place in own]
        self.source_columns: frozenset[str] = frozenset(field.name for field in fields)
        """Those that are taken, by the source's names."""
        shown = [field.with_name(names.get(field.name, field.name)) for field in fields]
        self.schema: pa.Schema = pa.schema([*META_FIELDS, *shown])

    def split(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `TableMounter.split`."""
        return self.whole.split(raw)

    def mount(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `TableMounter.mount`."""
        mounted = self.whole.mount(raw)
        return pa.RecordBatch.from_arrays(
            [mounted.column(place) for place in self._places], schema=self.schema
        )


def whole_mounter(mounter: TableMounter) -> TableMounter:
    """The one that knows all columns."""
    return mounter.whole if isinstance(mounter, SelectedMounter) else mounter


def source_columns(mounter: TableMounter) -> frozenset[str]:
    """The table's columns that are taken, by the source's names."""
    if isinstance(mounter, SelectedMounter):
        return mounter.source_columns
    return frozenset(mounter.schema.names[len(META_FIELDS) :])
