"""Changes that readers do not get: TiCDC's event filters. Pure.

A filter ignores the changes of a table by what they are (`OPERATIONS`), or where a condition holds
of a row's values: of the new ones of an insert or update, of the old ones of an update or delete.
Conditions are about columns that readers get, by their names at the source: a source need not bring
the values of others. A row of a dump, which comes as an update of nothing, counts as an insert.

Rows are numbered before they are filtered (`sink.mounts.SequenceMount`): which rows a reader gets,
and their `_seq`, does not depend on where batches end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sink.condition import Condition, ConditionError
from sink.mounter import META_FIELDS, TableMounter, as_deletes, source_columns, whole_mounter
from storage.model.event import DELETE, INSERT, UPDATE

OPERATIONS: Final[Mapping[str, int]] = {"insert": INSERT, "update": UPDATE, "delete": DELETE}
CONDITIONS: Final[Mapping[str, tuple[int, bool]]] = {
    "insert": (INSERT, True),
    "update_new": (UPDATE, True),
    "update_old": (UPDATE, False),
    "delete": (DELETE, False),
}
"""What each condition is asked of: an operation, and whether of its new values."""


@dataclass(frozen=True)
class RowFilter:
    """What is ignored of one table."""

    operations: frozenset[str] = frozenset()
    """Some of `OPERATIONS`."""
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    """By some of `CONDITIONS`."""

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> "RowFilter":
        """Read what `to_document` made; raises ConditionError."""
        conditions = {name: Condition(text) for name, text in document["conditions"].items()}
        return cls(frozenset(document["operations"]), conditions)

    def to_document(self) -> dict[str, Any]:
        """As a table's record holds it."""
        conditions = {name: each.text for name, each in self.conditions.items()}
        return {"operations": sorted(self.operations), "conditions": conditions}

    def check(self, mounter: TableMounter) -> None:
        """See that its conditions can be asked of a table; raises ConditionError."""
        columns = {name.lower() for name in source_columns(mounter)}
        for condition in self.conditions.values():
            condition.check(_own(whole_mounter(mounter).schema))
            if not condition.columns <= columns:
                raise ConditionError(
                    f"{condition.text!r} is about {', '.join(sorted(condition.columns - columns))}, "
                    "which the changefeed does not take: see its rules about columns"
                )

    def ignored(self, raw: pa.RecordBatch, mounter: TableMounter) -> npt.NDArray[np.bool_]:
        """Which changes of `raw` readers do not get; updates that change a key were split."""
        ops, whole = _ops(raw), whole_mounter(mounter)
        ignored = np.isin(ops, [OPERATIONS[name] for name in self.operations])
        for name, condition in self.conditions.items():
            op, is_new = CONDITIONS[name]
            places = np.flatnonzero((ops == op) & ~ignored)
            if len(places):
                rows = raw.take(pa.array(places))
                mounted = whole.mount(rows if is_new else as_deletes(rows))
                ignored[places] = condition.mask(_values(mounted))
        return ignored


class FilteredMounter:
    """Implements `TableMounter` by `inner`; `kept` leaves out rows of what it gives."""

    def __init__(self, inner: TableMounter, row_filter: RowFilter) -> None:
        self.inner = inner
        self.row_filter = row_filter
        self.name: str = inner.name
        self.key_columns: tuple[str, ...] = inner.key_columns
        self.schema: pa.Schema = inner.schema
        self.moves_keys: bool = inner.moves_keys

    def split(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `TableMounter.split`."""
        return self.inner.split(raw)

    def mount(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `TableMounter.mount`: all rows, as whoever calls counts what comes out."""
        return self.inner.mount(raw)

    def kept(self, raw: pa.RecordBatch, mounted: pa.RecordBatch) -> pa.RecordBatch:
        """What readers get of `mounted`, which was made of `raw` after `split`."""
        ignored = self.row_filter.ignored(raw, self.inner)
        return mounted.filter(pa.array(~ignored)) if ignored.any() else mounted


def _ops(raw: pa.RecordBatch) -> npt.NDArray[np.uint8]:
    """What each change is to a filter."""
    ops = np.asarray(raw["op"])
    return np.where((ops == UPDATE) & np.asarray(raw["old_value"].is_null()), INSERT, ops)


def _own(schema: pa.Schema) -> pa.Schema:
    """The table's own columns: one of them may be called like one of ours."""
    return pa.schema(list(schema)[len(META_FIELDS) :])


def _values(mounted: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        mounted.columns[len(META_FIELDS) :], schema=_own(mounted.schema)
    )
