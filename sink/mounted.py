"""Mounted batches (typed rows, sorted by `_commit_ts`): slicing, joining,
and `_seq` across batch borders. Pure.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import numpy as np
import pyarrow as pa

Mount = Callable[[pa.RecordBatch], pa.RecordBatch]

_COMMIT_TS: Final = "_commit_ts"
_START_TS: Final = "_start_ts"
_SEQ: Final = "_seq"


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
        """Of what `mount` gives: `_op, _commit_ts, _start_ts, _seq`,
        then the columns of the table.
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


def clip(batch: pa.RecordBatch, start_ts: int, end_ts: int) -> pa.RecordBatch:
    """The rows with `start_ts` < commit_ts <= `end_ts`, without a copy."""
    timestamps = batch.column(_COMMIT_TS).to_numpy(zero_copy_only=False)
    first, end = np.searchsorted(timestamps, [start_ts, end_ts], "right")
    return batch if end - first == batch.num_rows else batch.slice(int(first), int(end - first))


def coalesce(batches: Iterable[pa.RecordBatch], target_bytes: int) -> Iterator[pa.RecordBatch]:
    """The same rows, small batches joined to about `target_bytes`."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        waiting.append(batch)
        size += batch.nbytes
        if size >= target_bytes:
            yield _join(waiting)
            waiting, size = [], 0
    if waiting:
        yield _join(waiting)


class SequenceMount:
    """Mounts the consecutive batches of one range;
    a transaction that crosses batches keeps counting its `_seq`.
    """

    def __init__(self, mount: Mount) -> None:
        self._mount = mount
        self._last = (-1, -1)
        self._next_seq = 0

    def __call__(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Mount the next batch of the range; it must not be empty."""
        mounted = self._mount(raw)
        if _SEQ not in mounted.schema.names or not mounted.num_rows:
            return mounted
        if _transaction(mounted, 0) == self._last:
            mounted = self._continued(mounted)
        self._last = _transaction(mounted, mounted.num_rows - 1)
        self._next_seq = mounted.column(_SEQ)[mounted.num_rows - 1].as_py() + 1
        return mounted

    def _continued(self, mounted: pa.RecordBatch) -> pa.RecordBatch:
        commit, start = (
            mounted.column(name).to_numpy(zero_copy_only=False) for name in (_COMMIT_TS, _START_TS)
        )
        same = (commit == self._last[0]) & (start == self._last[1])
        seq = mounted.column(_SEQ).to_numpy(zero_copy_only=False) + np.where(
            same, self._next_seq, 0
        )
        index = mounted.schema.get_field_index(_SEQ)
        return mounted.set_column(index, mounted.schema.field(index), pa.array(seq, pa.int64()))


def _transaction(mounted: pa.RecordBatch, row: int) -> tuple[int, int]:
    return mounted.column(_COMMIT_TS)[row].as_py(), mounted.column(_START_TS)[row].as_py()


def _join(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
