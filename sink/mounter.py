"""The mounters' interface, what those of all sources share, and two that wrap others. Pure.

A mounter makes typed rows of a table's raw changes. First come the columns that say what happened
to a row (`META_FIELDS`), then those of the table. A field's metadata tells what a column is beside
its type. `tidemark.column_id` is a decimal number: a column keeps it through renames, moves and
changes of type, and no other column of the table ever has it. Readers compare columns by it.
`tidemark.default` is what rows hold that were written before the column was added: JSON text of the
value as the rows' batches would show it; numbers and text; decimals, dates and times as text, bytes
as base64. Without it such rows show null. See docs/format/flight.md.

`SelectedMounter` gives some columns of a table only, and some by other names: what a changefeed's
column rules leave out goes to no reader.
It masks columns, too (`sink.masking`): what a value is shown as is all that leaves the capture.
1. The key's columns are always there, so rows are the same rows.
2. Rows are mounted whole and cut afterwards: whatever else a mounter promises holds.

`WithBefore` adds before-images: what each row was before its change, as a last column `_before`. An
update and a delete have one, if the source gives old values; an insert has none. It is mounted as a
delete of the old row would be, so its columns have the values that the row's own columns had.
"""

import base64
import datetime as dt
import json
from collections.abc import Collection, Mapping
from decimal import Decimal
from functools import cache, cached_property
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark_tidemark.column_metadata import scalar

from sink.masking import Mask
from storage.model.errors import CorruptError, KeyValueError
from storage.model.event import DELETE, INSERT, RAW_SCHEMA, UPDATE

META_FIELDS: Final = (
    pa.field("_op", pa.string()),
    pa.field("_commit_ts", pa.int64()),
    pa.field("_start_ts", pa.int64()),
    pa.field("_seq", pa.int64()),
)
_SHOWN_CHARACTERS: Final = 500
DEFAULT: Final = b"tidemark.default"
COLUMN_ID: Final = b"tidemark.column_id"
Plain: TypeAlias = str | int | float
"""A value as JSON has it."""
BEFORE: Final = "_before"


class TableMounter(Protocol):
    """Makes typed rows of a table's raw changes; immutable,
    so any number of threads may share it.
    """

    @property
    def name(self) -> str:
        """`schema.table`."""
        ...

    @property
    def key_columns(self) -> tuple[str, ...]:
        """The columns that identify a row."""
        ...

    @property
    def schema(self) -> pa.Schema:
        """The schema of mounted rows: `_op, _commit_ts, _start_ts, _seq`, then the columns of the
        table.
        """
        ...

    @property
    def moves_keys(self) -> bool:
        """Whether an update may change the key without the source saying so: `split` then makes a
        delete and an insert of it.
        """
        ...

    def split(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """The changes of `raw` as `mount` gives them, one by one:
        an update may be a delete and an insert.
        """
        ...

    def mount(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Mount a batch of RAW_SCHEMA, in its order.

        Raises:
            CorruptError: a key or row is not what the source writes for this table.
        """
        ...


class SelectedMounter:
    """Implements `TableMounter` by `whole`, with the columns `selected` (None: all),
    some `renamed` and some with `masks`, both by the source's names; immutable.
    """

    def __init__(
        self,
        whole: TableMounter,
        selected: Collection[str] | None,
        renamed: Mapping[str, str] | None = None,
        masks: Mapping[str, Mask] | None = None,
    ) -> None:
        self.whole = whole
        self.name: str = whole.name
        self.moves_keys: bool = whole.moves_keys
        names = renamed or {}
        self.key_columns: tuple[str, ...] = tuple(
            names.get(column, column) for column in whole.key_columns
        )
        kept = {*(whole.schema.names if selected is None else selected), *whole.key_columns}
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
        own_masks = masks or {}
        self._masks = {
            place: own_masks[field.name]
            for place, field in enumerate(fields, len(META_FIELDS))
            if field.name in own_masks
        }
        """By the place in `schema`."""
        self._hides_key = any(column in own_masks for column in whole.key_columns)
        shown = [_masked(field, own_masks.get(field.name)) for field in fields]
        shown = [field.with_name(names.get(field.name, field.name)) for field in shown]
        self.schema: pa.Schema = pa.schema([*META_FIELDS, *shown])

    def split(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `TableMounter.split`."""
        return self.whole.split(raw)

    def mount(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `TableMounter.mount`; raises what a mask's salt raises, too."""
        mounted = self._mount_whole(raw)
        columns = [mounted.column(place) for place in self._places]
        for place, mask in self._masks.items():
            columns[place] = mask.shown(columns[place])
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _mount_whole(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        try:
            return self.whole.mount(raw)
        except KeyValueError:
            if not self._hides_key:
                raise
            # The message shows the key of the row, which is not to leave the capture.
            raise KeyValueError(
                f"a row of {self.name} has a value in its key that readers would be shown as "
                "another one, such as a date that no calendar has. Its key is masked, so the row is "
                "not told; a changefeed without masks, and with a test target, tells it"
            ) from None


def _masked(field: pa.Field, mask: Mask | None) -> pa.Field:
    """A column as its mask shows it, and so its default."""
    if mask is None:
        return field
    number = int((field.metadata or {}).get(COLUMN_ID, 0))
    masked = with_column_id(pa.field(field.name, pa.string(), field.nullable), number)
    return with_default(masked, mask.default)


def default_of(field: pa.Field) -> pa.Array | None:
    """The value that rows older than the column have, alone in an array; None: null."""
    text = (field.metadata or {}).get(DEFAULT)
    if text is None:
        return None
    return pa.array([scalar(json.loads(text), field.type)])


def whole_mounter(mounter: TableMounter) -> TableMounter:
    """The mounter of the whole table, which is inside those that leave out columns or rows."""
    mounter = unfiltered(mounter)
    return mounter.whole if isinstance(mounter, SelectedMounter) else mounter


def unfiltered(mounter: TableMounter) -> TableMounter:
    """The mounter inside the one that leaves out rows (`sink.row_filter`), or `mounter` itself."""
    inner: TableMounter = getattr(mounter, "inner", mounter)
    return inner


def source_columns(mounter: TableMounter) -> frozenset[str]:
    """The table's columns that are taken, by the source's names."""
    mounter = unfiltered(mounter)
    if isinstance(mounter, SelectedMounter):
        return mounter.source_columns
    return frozenset(mounter.schema.names[len(META_FIELDS) :])


class WithBefore:
    """A mounter that tells before-images, too."""

    def __init__(self, mounter: TableMounter) -> None:
        self._mounter = mounter

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of mounted rows."""
        return schema_of(self._mounter, before=True)

    def mount(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `TableMounter.mount`."""
        # Split first: `mount` splits, too, and each row needs its own before-image. Splitting what
        # is split changes nothing.
        raw = self._mounter.split(raw)
        mounted = self._mounter.mount(raw)
        return pa.RecordBatch.from_arrays([*mounted.columns, self._before(raw)], schema=self.schema)

    def _before(self, raw: pa.RecordBatch) -> pa.Array:
        op = np.asarray(raw["op"])
        has_before = (op == DELETE) | ((op != INSERT) & np.asarray(raw["old_value"].is_valid()))
        # Only these rows are mounted a second time, and spread over all rows afterwards.
        old = as_deletes(raw.take(pa.array(np.flatnonzero(has_before))))
        columns = self._mounter.mount(old).columns[len(META_FIELDS) :]
        fields = list(self.schema.field(BEFORE).type)
        rows = pa.StructArray.from_arrays(columns, fields=fields)
        place = np.cumsum(has_before) - 1
        return rows.take(pa.array(place, pa.int64(), mask=~has_before))


def schema_of(mounter: TableMounter, *, before: bool) -> pa.Schema:
    """The schema of a mounter's rows, with `before` with one more field:
    a struct of the table's columns.
    """
    if not before:
        return mounter.schema
    own = [field.remove_metadata() for field in list(mounter.schema)[len(META_FIELDS) :]]
    return mounter.schema.append(pa.field(BEFORE, pa.struct(own)))


def as_deletes(raw: pa.RecordBatch) -> pa.RecordBatch:
    """The same changes as if each had deleted its row."""
    count = raw.num_rows
    op, value = pa.array(np.full(count, DELETE, np.uint8)), pa.nulls(count, pa.binary())
    columns = [raw["commit_ts"], raw["start_ts"], op, raw["key"], value, raw["old_value"]]
    return pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)


def row_values(raw: pa.RecordBatch) -> pa.Array:
    """The row of each change of a batch of RAW_SCHEMA tables: the new value, or a delete's old one.

    Raises:
        CorruptError: an insert or update has no new value.
    """
    deletes = pc.equal(raw["op"], pa.scalar(DELETE, pa.uint8()))
    if pc.any(pc.and_not(raw["value"].is_null(), deletes)).as_py():
        raise CorruptError(
            "an insert or update without a row; a puller must give each change its value"
        )
    # Most batches have no deletes: their column of values goes on as it is, without a copy.
    if not pc.any(deletes).as_py():
        return raw["value"]
    return pc.if_else(deletes, raw["old_value"], raw["value"])


def check_dates(
    table: str, key: Mapping[str, pa.Array], dates: Collection[str], has_key: pa.Array
) -> None:
    """See that no date of a key, in its columns by name, became null;
    `has_key` are the rows of which there is a key.

    Raises:
        KeyValueError: such rows would be one row at the reader.
    """
    for name in dates:
        unknown = pc.and_(key[name].is_null(), has_key)
        if pc.any(unknown, min_count=0).as_py():
            raise KeyValueError(
                f"a row of {table}{_others(key, name, pc.index(unknown, True).as_py())} has a "
                f"date in its key column {name} that no calendar has, such as 0000-00-00; as null "
                "it would be one row with others like it. Create the changefeed anew, with a new "
                "target and --zero-dates key-text (all DATE, DATETIME and TIMESTAMP columns of "
                "keys are text then), or correct such rows at the source and create it anew with "
                "a dump"
            )


def inexact(
    table: str, key: Mapping[str, pa.Array], name: str, row: int, reason: str
) -> KeyValueError:
    """The error for a row whose key has a value that readers get as another one, so that they would
    take two rows for one.
    """
    return KeyValueError(
        f"a row of {table}{_others(key, name, row)} has {reason} in its key column {name}: it "
        "would be one row with others. Correct it, or the column's type or character set, at the "
        "source, and create the changefeed anew with a dump; or leave the table out"
    )


def _others(key: Mapping[str, pa.Array], name: str, row: int) -> str:
    """The values of a row's key, but for the column `name`, for a message."""
    values = ", ".join(
        f"{other} = {column[row].as_py()!r}" for other, column in key.items() if other != name
    )
    return f" ({values[:_SHOWN_CHARACTERS]})" if values else ""


def meta_columns(raw: pa.RecordBatch) -> list[pa.Array]:
    """The columns of `META_FIELDS`, of a batch of RAW_SCHEMA."""
    commit_ts, start_ts = (
        np.asarray(raw[name]).astype(np.int64) for name in ("commit_ts", "start_ts")
    )
    ops = _op_names().take(raw["op"].cast(pa.int64()))
    return [ops, pa.array(commit_ts), pa.array(start_ts), pa.array(_seq(commit_ts, start_ts))]


@cache
def _op_names() -> pa.Array:
    """The operations' names. Made when they are needed: the first array of a process costs 0.4 s
    where pandas is installed, and a command line that asks for help has no use for it.
    """
    names = {DELETE: "delete", UPDATE: "update", INSERT: "insert"}
    return pa.array([names.get(op) for op in range(INSERT + 1)])


def _seq(
    commit_ts: npt.NDArray[np.int64], start_ts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Each row's number within its transaction."""
    rows = np.arange(len(commit_ts), dtype=np.int64)
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = (commit_ts[1:] != commit_ts[:-1]) | (start_ts[1:] != start_ts[:-1])
    return rows - np.maximum.accumulate(np.where(begins, rows, 0))


def with_default(field: pa.Field, value: Plain | None) -> pa.Field:
    """The field with `value` in its metadata, as what rows hold that are older than the column;
    None: the field as it is.
    """
    return field if value is None else _with(field, DEFAULT, json.dumps(value))


def with_column_id(field: pa.Field, number: int) -> pa.Field:
    """The field with its column's identity in its metadata; 0: the field as it is."""
    return _with(field, COLUMN_ID, str(number)) if number else field


def _with(field: pa.Field, key: bytes, value: str) -> pa.Field:
    return field.with_metadata({**(field.metadata or {}), key: value.encode()})


def plain(value: Any) -> Plain | None:
    """The value as `pa.array` takes it."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, dt.date):
        return value.isoformat()
    number_or_text: Plain | None = value
    return number_or_text
