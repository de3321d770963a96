"""Every column type of a real TiDB, from its key-value pairs through store,
capture and Spark, equals SELECT's text.
"""

from datetime import date, datetime
from decimal import Decimal

import numpy as np
import pytest

from storage.tidb.field_type import DATES, Type
from tests.integration.spark.cluster import changefeed, flight, write
from tests.unit.storage.tidb import vectors

pytestmark = [pytest.mark.timeout(300), vectors.needed]
WITHOUT_KEY = {"vec.nopk", "vec.nopkuk2"}


def text(column, value):
    """A value of Spark's as the vectors print it."""
    match value:
        case None:
            return None
        case bytes():
            return f"0x{value.hex()}"
        case datetime():
            whole, _, fraction = (
                value.replace(tzinfo=None).isoformat(" ", "microseconds").partition(".")
            )
            return f"{whole}.{fraction[: column.decimal]}" if column.decimal > 0 else whole
        case date():
            return value.isoformat()
        case float():
            digits = str(np.float32(value)) if column.type is Type.FLOAT else repr(value)
            return f"{Decimal(digits):f}".removesuffix(".0")
        case Decimal():
            return f"{value:f}"
    return str(value)


def expected(column, cell):
    """What Spark can hold of a cell: dates that no calendar has become null
    (docs/format/flight.md).
    """
    if cell is None or column.type not in DATES:
        return cell
    try:
        datetime.fromisoformat(cell)
    except ValueError:
        return None
    return cell


def test_every_type_of_tidb_reaches_spark_as_select_shows_it(spark, cluster):
    selected = {
        name: rows
        for name, rows in vectors.lines("steps")[-1]["rows_after"].items()
        if "rows" in rows
    }
    names = sorted(selected.keys() & vectors.tables().keys() - WITHOUT_KEY)
    tables = {name: vectors.tables()[name] for name in names}
    tables = {name: table for name, table in tables.items() if not table.partition_ids}
    assert len(tables) >= 14
    ids = {table.id for table in tables.values()}
    final = {
        bytes.fromhex(pair["key"]): bytes.fromhex(pair["value"])
        for pair in vectors.lines("final_kv")[1:]
    }
    pairs = {key: value for table_id, key, value in vectors.record_pairs(final) if table_id in ids}
    with changefeed(cluster, "types", [("vec", table) for table in tables.values()]) as (
        reader,
        start_ts,
    ):
        end_ts = reader.wait_resolved(write(cluster, pairs))
        options = {"changefeed": "types", "startTs": str(start_ts), "endTs": str(end_ts)}
        for name, table in tables.items():
            frame = (
                spark.read.format("tidemark")
                .options(endpoint=flight(cluster), table=name, **options)
                .load()
            )
            found = [
                [text(column, row[column.name]) for column in table.stored_columns]
                for row in frame.toArrow().to_pylist()
            ]
            places = [
                selected[name]["columns"].index(column.name) for column in table.stored_columns
            ]
            wanted = [
                [
                    expected(column, row[place])
                    for column, place in zip(table.stored_columns, places, strict=True)
                ]
                for row in selected[name]["rows"]
            ]
            assert sorted(found, key=repr) == sorted(wanted, key=repr), name
