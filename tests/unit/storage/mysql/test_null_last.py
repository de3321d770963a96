"""A null in the last column of the last row: nothing is behind it."""

import pyarrow as pa
import pytest

from storage.mysql.arrow import arrow_columns
from storage.mysql.schema import Column, Table, Type


@pytest.mark.parametrize(
    ("kind", "meta"),
    [
        (Type.DATETIME2, 6),
        (Type.TIMESTAMP2, 3),
        (Type.TIME2, 6),
        (Type.NEWDECIMAL, 65 << 8 | 30),
        (Type.LONGLONG, 0),
        (Type.BIT, 64),
        (Type.SET, 8),
        (Type.ENUM, 2),
        (Type.DOUBLE, 8),
        (Type.VARCHAR, 300),
    ],
)
def test_a_null_at_the_very_end_is_read_whatever_its_type(kind: Type, meta: int) -> None:
    columns = (
        Column(name="k", type=Type.TINY),
        Column(name="last", type=kind, meta=meta, elems=("a",)),
    )
    row = bytes((0, 0b10, 7))
    key, last = arrow_columns(Table(1, "t", columns, ("k",)), pa.array([row], pa.binary()))
    assert (key.to_pylist(), last.to_pylist()) == ([7], [None])
