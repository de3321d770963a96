"""What older rows hold in a column is told with its field,
and readers get it back in the field's type.
"""

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark_tidemark.column_metadata import defaults_of, scalar, without_metadata

from sink.mounter import DEFAULT, plain, schema_of, with_default
from sink.tidb_mounter import TidbMounter
from storage.model.event import INSERT, raw_batch
from storage.tidb.field_type import Type
from storage.tidb.record import record_key
from storage.tidb.row import encode_row
from storage.tidb.schema import Column, TableInfo

VALUES = {
    "whole": (pa.int8(), -7),
    "large": (pa.decimal128(20, 0), Decimal(1 << 63)),
    "real": (pa.float64(), 0.1),
    "text": (pa.string(), "it's \\ 'new' é"),
    "raw": (pa.binary(), b"\0\xff"),
    "day": (pa.date32(), dt.date(2024, 2, 29)),
    "at": (pa.timestamp("us"), dt.datetime(2024, 2, 29, 1, 2, 3, 4)),  # noqa: DTZ001 - a DATETIME has none
    "seen": (pa.timestamp("us", tz="UTC"), dt.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=dt.UTC)),
}


def received(schema: pa.Schema) -> pa.Schema:
    return pa.ipc.read_schema(schema.serialize())


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_each_type_comes_back(name: str) -> None:
    found, value = VALUES[name]
    schema = received(
        pa.schema([pa.field("id", pa.int64()), with_default(pa.field(name, found), plain(value))])
    )
    told = defaults_of(schema)
    assert told.keys() == {name}
    assert scalar(told[name], found) == pa.scalar(value, found)
    assert all(field.metadata is None for field in without_metadata(schema))


def test_a_column_of_tidb_tells_what_rows_from_before_it_are_mounted_with() -> None:
    columns = [
        Column.bigint("id"),
        Column(name="state", type=Type.ENUM, elems=("new", "paid"), origin_default="new"),
        Column(name="price", type=Type.NEWDECIMAL, flen=10, decimal=2, origin_default="1.50"),
        Column(name="day", type=Type.DATE, origin_default="2024-02-29"),
        Column(name="never", type=Type.DATE, origin_default="0000-00-00"),
        Column(name="note", type=Type.VARCHAR, flen=9, charset="utf8mb4"),
    ]
    table = TableInfo.build(7, "t", columns)
    mounter = TidbMounter(table, "bank")
    mounted = mounter.mount(
        raw_batch([2], [1], [INSERT], [record_key(7, 1)], [encode_row({})], [None])
    )
    told = defaults_of(received(mounter.schema))
    row = mounted.to_pylist()[0]
    assert {
        name: scalar(value, mounter.schema.field(name).type).as_py() for name, value in told.items()
    } == {name: row[name] for name in ("state", "price", "day")}
    assert row["never"] is None
    before = schema_of(mounter, before=True).field("_before").type
    assert all(DEFAULT not in (field.metadata or {}) for field in before)
