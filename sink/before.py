"""Before-images: what each row was before its change, as one more last column `_before`. Pure.

An update and a delete have one, where the source gives old values; an insert has none. It is
mounted as a delete of the old row would be, so its columns have the same values as the row's own
had.
"""

from functools import cached_property
from typing import Final

import numpy as np
import pyarrow as pa

from sink.mounted import TableMounter
from storage.model.event import DELETE, INSERT, RAW_SCHEMA

BEFORE: Final = "_before"
_META_FIELDS: Final = 4  # _op, _commit_ts, _start_ts, _seq


def schema_of(mounter: TableMounter, *, before: bool) -> pa.Schema:
    """The schema of a mounter's rows, with `before` with one more field:
    a struct of the table's columns.
    """
    if not before:
        return mounter.schema
    own = [field.remove_metadata() for field in list(mounter.schema)[_META_FIELDS:]]
    return mounter.schema.append(pa.field(BEFORE, pa.struct(own)))


class WithBefore:
    """A mounter that tells before-images, too."""

    def __init__(self, mounter: TableMounter) -> None:
        self._mounter = mounter

    @cached_property
    def schema(self) -> pa.Schema:
        """Of what `mount` gives."""
        return schema_of(self._mounter, before=True)

    def mount(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `TableMounter.mount`."""
        raw = self._mounter.split(raw)
        mounted = self._mounter.mount(raw)
        return pa.RecordBatch.from_arrays([*mounted.columns, self._before(raw)], schema=self.schema)

    def _before(self, raw: pa.RecordBatch) -> pa.Array:
        op = np.asarray(raw["op"])
        has_before = (op == DELETE) | ((op != INSERT) & np.asarray(raw["old_value"].is_valid()))
        old = _deletes(raw.take(pa.array(np.flatnonzero(has_before))))
        columns = self._mounter.mount(old).columns[_META_FIELDS:]
        fields = list(self.schema.field(BEFORE).type)
        rows = pa.StructArray.from_arrays(columns, fields=fields)
        place = np.cumsum(has_before) - 1
        return rows.take(pa.array(place, pa.int64(), mask=~has_before))


def _deletes(raw: pa.RecordBatch) -> pa.RecordBatch:
    """The same changes as if each had deleted its row."""
    count = raw.num_rows
    op, value = pa.array(np.full(count, DELETE, np.uint8)), pa.nulls(count, pa.binary())
    columns = [raw["commit_ts"], raw["start_ts"], op, raw["key"], value, raw["old_value"]]
    return pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)
