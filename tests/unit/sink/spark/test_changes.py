"""Which changes of a cut the driver reads itself, and which it takes."""

import dataclasses

import pyarrow as pa
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed, SliceEndpoint, TableMeta
from pyspark_tidemark.lake.changes import (
    ARROW_READ_MAX_BYTES,
    DRIVER_ONLY_ARROW_READ_MAX_BYTES,
    DRIVER_ONLY_READ_MAX_BYTES,
    DRIVER_READ_MAX_BYTES,
    FEW_ROWS_MAX,
    ByTasks,
    Changes,
    Counted,
)
from pyspark_tidemark.options import parse

CHANGEFEED = Changefeed(
    parse({"endpoint": "grpc://127.0.0.1:1", "changefeed": "bank", "cuts": "true"})
)


def planned(*slices, columns=8):
    schema = pa.schema([(f"c{number}", pa.int64()) for number in range(columns)])
    parts = tuple(
        SliceEndpoint("bank.accounts", (), b'{"start": 0}', rows, size) for rows, size in slices
    )
    return Changes(TableMeta("bank.accounts", ("c0",), schema), 0, 9, parts, CHANGEFEED, {})


@pytest.mark.parametrize(
    ("slices", "here"),
    [
        ((), True),
        (((1, DRIVER_READ_MAX_BYTES),), True),
        (((1, DRIVER_READ_MAX_BYTES + 1),), False),
        (((1, DRIVER_READ_MAX_BYTES - 1), (1, 1)), True),
        (((1, DRIVER_READ_MAX_BYTES), (1, 1)), False),
    ],
)
def test_the_driver_reads_up_to_so_many_bytes_of_a_table(slices, here):
    assert planned(*slices).here is here


@pytest.mark.parametrize(
    ("write", "here_bytes", "arrow_bytes"),
    [
        ("auto", DRIVER_READ_MAX_BYTES, ARROW_READ_MAX_BYTES),
        ("driver", DRIVER_ONLY_READ_MAX_BYTES, DRIVER_ONLY_ARROW_READ_MAX_BYTES),
    ],
)
def test_a_driver_that_is_asked_to_write_reads_more(write, here_bytes, arrow_bytes):
    for size, here, in_arrow in (
        (here_bytes, True, True),
        (here_bytes + 1, False, True),
        (arrow_bytes, False, True),
        (arrow_bytes + 1, False, False),
    ):
        changes = dataclasses.replace(planned((1, size)), write=write)
        assert (changes.here, changes.in_arrow) == (here, in_arrow)


def test_where_tasks_are_asked_to_write_the_driver_reads_nothing():
    changes = dataclasses.replace(planned((1, 1)), write="spark")
    assert (changes.here, changes.in_arrow) == (False, False)
    nothing = dataclasses.replace(planned(), write="spark")
    assert (nothing.here, nothing.in_arrow) == (True, True), "no task is needed for no row"


def test_what_tasks_have_counted_is_not_read_again():
    counted = Counted(2, "00ff")
    changes = dataclasses.replace(planned((2, 100)), by_tasks=ByTasks(counted, ()), write="spark")
    assert changes.counted(None) == counted
    assert changes.read_again.by_tasks is None
    assert changes.read_again.here, "as if nobody had asked for tasks"


def test_columns_that_the_store_holds_in_a_byte_count_as_in_memory():
    assert planned((100_000, 1 << 20), columns=8).here
    assert not planned((100_000, 1 << 20), columns=100).here, "80 MB in memory"
    assert not planned((1 << 20, 0), columns=8).here, "a capture that tells no bytes"


def test_many_small_rows_are_read_here_but_are_not_few():
    changes = planned((FEW_ROWS_MAX + 1, 1 << 20))
    assert changes.here
    assert not changes.few


def test_a_null_in_a_key_stops_the_driver_by_name(monkeypatch):
    changes = planned((2, 100))
    rows = pa.RecordBatch.from_pylist([{"c0": 1}, {"c1": 1}], changes.table.schema)
    monkeypatch.setattr(Changefeed, "read", lambda _self, _part: iter([rows]))
    with pytest.raises(
        SourceError, match=r"ErrKeyValueUnsupported\] bank\.accounts: a row's key column c0 is null"
    ):
        _ = changes.arrow
