"""Row changes of one table: a batch of RAW_SCHEMA out of its row events, in log order,
one change per key and commit.

    value, old_value = format u8, row             0: a row image, 1: a row of the binary protocol

Invariants:
1. An update that changes the key is a delete and an insert: consumers identify rows by their keys.
2. Within one commit_ts and batch a key changes once: several changes of one row in a transaction
   are folded into their net effect, which is none for a row that is inserted and deleted. The
   sorter orders by operation within a transaction, so it could not keep the order of two changes of
   one row.
A transaction that crosses batches must give each of them its own `start_ts`, ascending: see
docs/format/mysql-rows.md.

In a table without a key, images of the same row cannot be recognised. There each image is a row of
its own, whose key is its place in the log: an update is a delete and an insert, and nothing is
folded. The sorter has the deletes of a transaction before its inserts, both in the order of the
log.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.model.errors import CorruptError
from storage.model.event import DELETE, INSERT, RAW_SCHEMA, UPDATE
from storage.mysql.buffer import Bytes, Mask, Offsets, reading
from storage.mysql.event import DELETE_ROWS, UPDATE_ROWS, Events
from storage.mysql.image import (
    KeyColumn,
    Nulls,
    Shape,
    fixed_keys,
    image_keys,
    join_pieces,
    key_columns,
)
from storage.mysql.rows import Images, RowImageError, TableRows, completed, find_images
from storage.mysql.schema import Column, Table

IMAGE: Final = 0
BINARY_ROW: Final = 1
_NONE: Final = -1
_OP_OF_TYPE = np.full(256, INSERT, np.uint8)
_OP_OF_TYPE[list(UPDATE_ROWS)] = UPDATE
_OP_OF_TYPE[list(DELETE_ROWS)] = DELETE

Timestamps = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Plan:
    """The prepared steps for reading a table's row events, made once for each version
    of the table.
    """

    table: Table
    shape: Shape
    key: tuple[KeyColumn, ...]
    hidden: tuple[int, ...] = ()
    """The sizes of columns that row images have after those of the table; no reader sees them."""
    unread: frozenset[int] = frozenset()
    """The places of columns that images may lack, as no reader sees them."""

    @classmethod
    def of(
        cls, table: Table, hidden: Sequence[Column] = (), read: Collection[str] | None = None
    ) -> "Plan":
        """The plan of a table; `hidden` are of types of fixed size, and `read` are the columns that
        somebody reads (None: all).

        Raises:
            ColumnUnsupportedError: one of its columns cannot be read.
        """
        table.check()
        shape = Shape.of([*table.columns, *hidden])
        return cls(
            table,
            shape,
            key_columns(table),
            tuple(size for size, _, _ in shape.columns[len(table.columns) :]),
            frozenset(
                place
                for place, column in enumerate([*table.columns, *hidden])
                if place >= len(table.columns)
                or (read is not None and column.name not in {*read, *table.primary_key})
            ),
        )


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes that some row events made to one table."""

    batch: pa.RecordBatch
    """A batch of RAW_SCHEMA, commit by commit in log order."""
    keys: pa.Array
    """The keys of all images, those before and those after a change, in log order."""


def read_changes(
    events: Events,
    rows: TableRows,
    plan: Plan,
    commit_ts: Timestamps,
    start_ts: Timestamps | None = None,
) -> Changes:
    """Read the changes in the row events `rows`; `commit_ts` and `start_ts` have a value for each
    of `events`.

    Without `start_ts` it is commit_ts - 1, a fence: nothing else has this commit_ts.

    Raises:
        RowImageError: an event does not hold all columns that somebody reads.
        CorruptError: the events cannot be read.
    """
    try:
        images = find_images(events, rows, plan.shape)
    except RowImageError:
        if not plan.unread:
            raise
        events = completed(events, rows, plan.shape, plan.unread)
        commit_ts = commit_ts[rows.numbers]
        start_ts = None if start_ts is None else start_ts[rows.numbers]
        images = find_images(events, TableRows(rows.table, np.arange(len(events))), plan.shape)
    with reading(f"a row image of {rows.table.name}"):
        keys = (
            image_keys(events.data, images.begin, plan.shape, plan.key)
            if plan.key
            else _places(images.begin)
        )
    steps = _split_key_changes(_steps(events, images), keys)
    commits = commit_ts[images.event[steps.image]]
    starts = commits - np.uint64(1) if start_ts is None else start_ts[images.event[steps.image]]
    steps, kept = _fold(steps, keys, commits)
    columns = [
        pa.array(commits[kept]),
        pa.array(starts[kept]),
        pa.array(steps.op),
        keys.take(pa.array(steps.image)),
        _values(events.data, images, steps.after, plan),
        _values(events.data, images, steps.before, plan),
    ]
    return Changes(pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA), keys)


def rows_left(
    events: Events, rows: TableRows, plan: Plan
) -> Iterator[tuple[list[bytes | None], int]]:
    """The cells of each row that an insert or update has left, as bytes, and the number of its
    event. For few rows: an array for each of their columns would cost more than they do.

    Raises: as `read_changes`.
    """
    images, view = find_images(events, rows, plan.shape), events.data.u8s.data
    for image in _steps(events, images).after.tolist():
        if image != _NONE:
            yield plan.shape.cells(view, int(images.begin[image])), int(images.event[image])


def _places(begin: Offsets) -> pa.Array:
    """A key for each image: its place, so that keys ascend in log order."""
    places = np.frombuffer(begin.astype(">u8").tobytes(), np.uint8).reshape(len(begin), 8)
    return fixed_keys([places], len(begin))


@dataclass(frozen=True, slots=True)
class _Steps:
    """Changes, each with the numbers of its images before and after it; -1: it has none."""

    op: npt.NDArray[np.uint8]
    before: Offsets
    after: Offsets

    @property
    def image(self) -> Offsets:
        """One that has the change's key: the image after it, before it in a delete."""
        return np.where(self.after != _NONE, self.after, self.before)


def _steps(events: Events, images: Images) -> _Steps:
    op = _OP_OF_TYPE[events.types[images.event]]
    updates = np.flatnonzero(op == UPDATE)
    if len(updates) % 2 or not np.array_equal(
        images.event[updates[0::2]], images.event[updates[1::2]]
    ):
        raise CorruptError("an update event has an image before without one after")
    # Of an update's two images only the first one begins a step.
    first = np.ones(len(op), np.bool_)
    first[updates[1::2]] = False
    image, op = np.flatnonzero(first), op[first]
    before = np.where(op == INSERT, _NONE, image)
    return _Steps(op, before, np.where(op == DELETE, _NONE, image + (op == UPDATE)))


def _split_key_changes(steps: _Steps, keys: pa.Array) -> _Steps:
    """Updates that change the key become a delete and an insert."""
    updates = np.flatnonzero(steps.op == UPDATE)
    if not len(updates):
        return steps
    differs = pc.not_equal(
        keys.take(pa.array(steps.before[updates])), keys.take(pa.array(steps.after[updates]))
    )
    if not pc.any(differs).as_py():
        return steps
    changed = np.zeros(len(steps.op), np.bool_)
    changed[updates] = np.asarray(differs)
    rows = np.repeat(np.arange(len(changed)), changed + 1)
    second = np.zeros(len(rows), np.bool_)
    second[1:] = rows[1:] == rows[:-1]
    first = changed[rows] & ~second
    op = np.where(second, INSERT, np.where(first, DELETE, steps.op[rows])).astype(np.uint8)
    return _Steps(
        op, np.where(second, _NONE, steps.before[rows]), np.where(first, _NONE, steps.after[rows])
    )


def _fold(steps: _Steps, keys: pa.Array, commits: Timestamps) -> tuple[_Steps, Offsets | slice]:
    """One step for each key of a commit, and the number of the given step that each replaces."""
    many = _have_neighbours(commits)
    if not bool(many.any()):
        return steps, slice(None)
    rows = np.flatnonzero(many)
    codes = np.asarray(keys.take(pa.array(steps.image[rows])).dictionary_encode().indices)
    # stable: log order within a key of a commit
    order = np.lexsort((codes, commits[rows]))
    same = (codes[order][1:] == codes[order][:-1]) & (
        commits[rows][order][1:] == commits[rows][order][:-1]
    )
    if not bool(same.any()):
        return steps, slice(None)
    begins = np.flatnonzero(np.append(np.ones(1, np.bool_), ~same))
    ends = np.append(begins[1:], len(order)) - 1
    return _merged(steps, rows[order[begins]], rows[order[ends]], ~many)


def _merged(steps: _Steps, first: Offsets, last: Offsets, alone: Mask) -> tuple[_Steps, Offsets]:
    """The steps `alone`, and one for each pair of the first and last step of a key."""
    before, after = steps.before.copy(), steps.after.copy()
    before[last], after[last] = steps.before[first], steps.after[last]
    kept = np.zeros(len(before), np.bool_)
    kept[last] = (before[last] != _NONE) | (after[last] != _NONE)
    kept |= alone
    rows = np.flatnonzero(kept)
    before, after = before[rows], after[rows]
    op = np.where(before == _NONE, INSERT, np.where(after == _NONE, DELETE, UPDATE)).astype(
        np.uint8
    )
    return _Steps(op, before, after), rows


def _have_neighbours(commits: Timestamps) -> Mask:
    """Which steps have a neighbour of the same commit."""
    same = commits[1:] == commits[:-1]
    many = np.zeros(len(commits), np.bool_)
    many[1:] |= same
    many[:-1] |= same
    return many


def _values(data: Bytes, images: Images, number: Offsets, plan: Plan) -> pa.Array:
    """The images of these numbers behind their format byte; null for -1."""
    present: Mask | None = number != _NONE
    if present is not None and bool(present.all()):
        present = None
    begin, end = images.begin[number], images.end[number]
    rows = (
        _without_hidden_columns(data, begin, end, present, plan)
        if plan.hidden
        else data.slices(begin, end, present)
    )
    return pc.binary_replace_slice(rows, start=0, stop=0, replacement=bytes((IMAGE,)))


def _without_hidden_columns(
    data: Bytes, begin: Offsets, end: Offsets, present: Mask | None, plan: Plan
) -> pa.Array:
    """The images without their last, hidden columns: their cells,
    and the bytes of the bitmap that are theirs alone.
    """
    columns = len(plan.table.columns)
    nulls = Nulls(data, begin)
    for place, size in enumerate(plan.hidden, columns):
        null = nulls.of(place)
        end = end - (size if null is None else np.where(null, 0, size))
    own_bytes = (columns + 7) // 8
    if own_bytes == plan.shape.bitmap_bytes:
        return data.slices(begin, end, present)
    bitmaps = data.slices(begin, begin + own_bytes, present)
    return join_pieces([bitmaps, data.slices(begin + plan.shape.bitmap_bytes, end, present)])
