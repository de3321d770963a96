"""Transactions that move keys over many batches: deletes before inserts,
wherever batches end, staged or read.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.lake.fold import fold

from sink.key_change import deletes_first
from sink.manager import SinkManager
from sink.mounts import Mounting, SequenceMount
from sink.tidb_mounter import TidbMounter
from sorter import Sorter, SorterSettings
from storage.model.event import DELETE, INSERT, UPDATE, Position, raw_batch
from storage.model.span import Span
from storage.tidb.field_type import Flag
from storage.tidb.record import record_key
from storage.tidb.row import encode_row
from storage.tidb.schema import Column, Index, TableInfo

TABLE = 9
COLUMNS = tuple(
    replace(Column.bigint(name), id=number + 1, offset=number, flags=Flag.NOT_NULL)
    for number, name in enumerate("ab")
)
PRIMARY = Index(1, "PRIMARY", (0,), unique=True, primary=True, public=True, whole=True)
MOUNTER = TidbMounter(TableInfo(TABLE, "t", COLUMNS, (PRIMARY,)), "db")
ROWS = 20_000


def row(key: int | None, value: int) -> bytes:
    cells = {2: value.to_bytes(4, "little", signed=True)}
    return encode_row(
        cells | ({1: key.to_bytes(4, "little", signed=True)} if key is not None else {1: None})
    )


def applied(held: dict[int, int], changes: pa.Table) -> dict[int, int]:
    """What a reader has that applies one change after the other."""
    for change in changes.sort_by([("_commit_ts", "ascending"), ("_seq", "ascending")]).to_pylist():
        if change["_op"] == "delete":
            held.pop(change["a"], None)
        else:
            held[change["a"]] = change["b"]
    return held


def shifted(ts: int, moves: dict[int, int]) -> pa.RecordBatch:
    """`UPDATE t SET a = moves[a]`: the records stay where they are."""
    old, new = [row(key, key) for key in moves], [row(key, was) for was, key in moves.items()]
    count = len(moves)
    keys = [record_key(TABLE, was) for was in moves]
    return raw_batch([ts] * count, [ts - 1] * count, [UPDATE] * count, keys, new, old)


@pytest.mark.parametrize("quota", [64 << 20, 256 << 10])
@pytest.mark.parametrize("name", ["shift", "swap", "cycle"])
def test_no_row_is_lost_by_a_large_transaction_that_moves_keys(
    tmp_path: Path, quota: int, name: str
) -> None:
    keys = range(1, ROWS + 1)
    moves = {
        "shift": {key: key + 1 for key in keys},
        "swap": {key: ROWS + 1 - key for key in keys},
        "cycle": {key: key % ROWS + 1 for key in keys},
    }[name]
    sorter = Sorter(
        tmp_path,
        SorterSettings(memory_bytes=0, shards=1, clean_interval_s=0, block_bytes=128 << 10),
    )
    manager = SinkManager(sorter, memory_quota_bytes=quota, workers=1, split_txn=True)
    span = Span(TABLE, b"t", b"u")
    try:
        sorter.add_table(span, 0)
        manager.add_table(span, 0, Mounting(MOUNTER.mount, split=MOUNTER.split))
        sorter.add(span, shifted(11, moves))
        sorter.resolve(span, 20)
        changes = pa.Table.from_batches(list(manager.read(span, 0, 20)))
        again = pa.Table.from_batches(list(manager.read(span, 0, 20)))
    finally:
        manager.stop()
        sorter.close()
    expected = {new: was for was, new in moves.items()}
    assert changes.num_rows == 2 * sum(was != new for was, new in moves.items())
    assert applied({key: key for key in keys}, changes) == expected
    assert changes.combine_chunks().equals(again.combine_chunks()), "a range always gives the same"
    live = fold(changes, ["a"]).live
    assert dict(zip(live["a"].to_pylist(), live["b"].to_pylist(), strict=True)) == expected


CHANGES = st.tuples(
    st.integers(1, 3),
    st.sampled_from([DELETE, UPDATE, INSERT]),
    st.integers(0, 4) | st.none(),
    st.integers(0, 4),
)


@given(st.lists(CHANGES, max_size=40), st.data())
def test_the_order_does_not_depend_on_where_batches_end(
    rows: list[tuple], data: st.DataObject
) -> None:
    rows = sorted(rows, key=lambda change: change[:2])
    changes = [
        (
            2 * ts,
            2 * ts - 1,
            op,
            record_key(TABLE, number),
            None if op == DELETE else row(new, number),
            None if op == INSERT else row(old, number),
        )
        for number, (ts, op, old, new) in enumerate(rows)
    ]
    whole = raw_batch(
        *([list(column) for column in zip(*changes, strict=True)] or [[] for _ in range(6)])
    )

    def cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        ends = sorted(data.draw(st.sets(st.integers(1, max(batch.num_rows, 1)), max_size=12)))
        for begin, end in zip([0, *ends], [*ends, batch.num_rows], strict=True):
            if end > begin and begin < batch.num_rows:
                yield batch.slice(begin, end - begin)

    def again(transaction: Position) -> Iterator[pa.RecordBatch]:
        return cut(whole.filter(pa.array(np.asarray(whole["commit_ts"]) == transaction.commit_ts)))

    given_ = list(
        map(SequenceMount(Mounting(MOUNTER.mount)), deletes_first(cut(whole), MOUNTER.split, again))
    )
    expected = MOUNTER.mount(whole)
    assert (
        pa.Table.from_batches(given_, MOUNTER.schema).combine_chunks().to_pylist()
        == expected.to_pylist()
    )
