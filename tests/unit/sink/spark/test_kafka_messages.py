"""Messages of rows, DDLs and markers are those of the golden file, whatever rows hold their JSON
reads back, and a key's messages have one key.
"""

import base64
import dataclasses
import datetime as dt
import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Ddl, TableMeta
from pyspark_tidemark.lake.cut_record import CutRecord, TableCut
from pyspark_tidemark.lake.kafka.canal import CanalJson
from pyspark_tidemark.lake.kafka.debezium import TABLE_IN_KEY, DebeziumJson
from pyspark_tidemark.lake.kafka.messages import Marker, Statement

from tests.unit.sink.spark.kafka_rows import (
    BUILT_MS,
    COLUMNS,
    COMMIT_TS,
    ENVELOPE,
    FIRST,
    SECOND,
    TABLE,
    changes,
)

GOLDEN = Path(__file__).parents[3] / "golden" / "kafka_messages.json"
CHANGES = (
    ("insert", FIRST, None),
    ("update", FIRST | {"name": "b"}, FIRST),
    ("update", SECOND, None),
    ("delete", FIRST, None),
)
ENCODERS = {
    "canal-json": CanalJson(),
    "canal-json, enable-tidb-extension": CanalJson(extended=True),
    "debezium-json": DebeziumJson("bank"),
    "debezium-json, debezium-disable-schema": DebeziumJson("bank", with_schema=False),
    "debezium-json, enable-tidb-extension": DebeziumJson("bank", extended=True),
}
ALTERED = Statement(
    Ddl(COMMIT_TS, "ALTER TABLE orders ADD c INT", tables=("shop.orders",)),
    "ALTER",
    "shop.orders",
    "shop.orders",
    TABLE,
)
RENAMED = Statement(
    Ddl(COMMIT_TS, "RENAME TABLE a TO orders", renamed=(("shop.a", "shop.orders"),)),
    "RENAME",
    "shop.orders",
    "shop.a",
    TABLE,
)


def encoded(encoder):
    messages = encoder.rows(TABLE, changes(*CHANGES), BUILT_MS)
    statements = [encoder.statement(each, BUILT_MS) for each in (ALTERED, RENAMED)]
    watermark = encoder.watermark(COMMIT_TS, BUILT_MS)
    return {
        "rows": [[json.loads(key), json.loads(value)] for key, value in messages.texts()],
        "statements": [[json.loads(each.key), json.loads(each.value)] for each in statements],
        "watermark": None if watermark is None else json.loads(watermark),
    }


@pytest.mark.parametrize("name", ENCODERS)
def test_messages_are_those_of_the_golden_file(name):
    assert encoded(ENCODERS[name]) == json.loads(GOLDEN.read_text())[name]


def test_a_value_is_compact_json_in_the_order_that_ticdc_has():
    [(_, value)] = CanalJson().rows(TABLE, changes(CHANGES[0]), BUILT_MS).texts()
    assert value.startswith('{"id":0,"database":"shop","table":"orders","pkNames":["id"],')
    assert ": " not in value


plain = dt.datetime.fromisoformat
ROWS = st.fixed_dictionaries(
    {
        "id": st.integers(-(2**63), 2**63 - 1),
        "tiny": st.none() | st.integers(-128, 127),
        "price": st.none() | st.decimals("-9999999999.99", "9999999999.99", places=2),
        "ratio": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "name": st.none() | st.text(st.characters(codec="utf-8")),
        "image": st.none() | st.binary(max_size=40),
        "born": st.none() | st.dates(dt.date(1000, 1, 1)),
        "at": st.none() | st.datetimes(plain("1000-01-01 00:00:00")),
        "seen": st.none() | st.datetimes(plain("1970-01-01 00:00:00"), timezones=st.just(dt.UTC)),
    }
)
SLICES = st.lists(ROWS, min_size=1, max_size=6), st.integers(0, 3)


@given(*SLICES)
def test_canal_rows_read_back_also_of_a_slice(rows, skip):
    batch = changes(*(("update", row, row) for row in rows)).slice(skip)
    messages = CanalJson().rows(TABLE, batch, BUILT_MS)
    values = [json.loads(text) for _, text in messages.texts()]
    assert [canal_row(value["data"][0]) for value in values] == rows[skip:]
    assert [canal_row(value["old"][0]) for value in values] == rows[skip:]


def canal_row(texts):
    readers = {
        "id": int,
        "tiny": int,
        "price": Decimal,
        "ratio": float,
        "name": str,
        "image": lambda text: text.encode("latin-1"),
        "born": dt.date.fromisoformat,
        "at": datetime_of,
        "seen": lambda text: datetime_of(text).replace(tzinfo=dt.UTC),
    }
    return {
        name: None if texts[name] is None else readers[name](texts[name]) for name in COLUMNS.names
    }


def datetime_of(text):
    whole, _, fraction = text.partition(".")
    return plain(whole).replace(microsecond=int(fraction.ljust(6, "0") or 0))


@given(*SLICES)
def test_debezium_rows_read_back_also_of_a_slice(rows, skip):
    batch = changes(*(("update", row, row) for row in rows)).slice(skip)
    messages = DebeziumJson("bank").rows(TABLE, batch, BUILT_MS)
    payloads = [json.loads(text)["payload"] for _, text in messages.texts()]
    assert [debezium_row(each["after"]) for each in payloads] == rows[skip:]
    assert [debezium_row(each["before"]) for each in payloads] == rows[skip:]


def debezium_row(values):
    epoch = plain("1970-01-01 00:00:00")
    readers = {
        "price": Decimal,
        "image": base64.b64decode,
        "born": lambda days: dt.date(1970, 1, 1) + dt.timedelta(days),
        "at": lambda micros: epoch + dt.timedelta(microseconds=micros),
        "seen": dt.datetime.fromisoformat,
    }
    return {
        name: value if value is None or name not in readers else readers[name](value)
        for name, value in values.items()
    }


@pytest.mark.parametrize("encoder", [CanalJson(), DebeziumJson("bank")])
def test_the_key_is_the_same_whatever_happens_to_the_row(encoder):
    other = FIRST | dict.fromkeys(set(FIRST) - {"id"})
    batch = changes(("insert", FIRST, None), ("update", other, FIRST), ("delete", other, None))
    assert len(set(encoder.rows(TABLE, batch, BUILT_MS).keys.to_pylist())) == 1


@pytest.mark.parametrize("encoder", [CanalJson(), DebeziumJson("bank")])
def test_tables_with_equal_keys_have_different_messages_keys(encoder):
    names = ("shop.orders", "shop.items")
    keys = {
        encoder.rows(TableMeta(name, ("id",), TABLE.schema), changes(CHANGES[0]), BUILT_MS).texts()[
            0
        ][0]
        for name in names
    }
    assert len(keys) == 2


def test_a_table_without_a_key_has_one_key_for_all_its_rows():
    table = TableMeta("shop.log", (), TABLE.schema)
    batch = changes(("insert", FIRST, None), ("insert", SECOND, None))
    canal = CanalJson().rows(table, batch, BUILT_MS)
    assert set(canal.keys.to_pylist()) == {'{"database":"shop","table":"log"}'}
    assert json.loads(canal.values[0].as_py())["pkNames"] is None
    debezium = DebeziumJson("bank", with_schema=False).rows(table, batch, BUILT_MS).texts()
    assert {key for key, _ in debezium} == {f'{{"payload":{{"{TABLE_IN_KEY}":"shop.log"}}}}'}


@pytest.mark.parametrize("encoder", [CanalJson(), DebeziumJson("bank")])
def test_a_source_that_tells_no_rows_before_is_encoded_too(encoder):
    batch = changes(*CHANGES).drop_columns(["_before"])
    values = [
        json.loads(text)
        for text in [value for _, value in encoder.rows(TABLE, batch, BUILT_MS).texts()]
    ]
    ops = [value.get("type") or value["payload"]["op"] for value in values]
    assert ops in (["INSERT", "INSERT", "INSERT", "DELETE"], ["c", "r", "r", "d"])


@pytest.mark.parametrize("kind", [pa.int16(), pa.int32(), pa.float32()])
@pytest.mark.parametrize("encoder", [CanalJson(), DebeziumJson("bank")])
def test_each_type_of_the_captures_has_a_text(encoder, kind):
    schema = pa.schema([("id", pa.int64()), ("v", kind)])
    table = TableMeta("shop.t", ("id",), pa.schema([*ENVELOPE, *schema]))
    batch = changes(("insert", {"id": 1, "v": 1}, None), schema=schema)
    value = json.loads(encoder.rows(table, batch, BUILT_MS).texts()[0][1])
    row = value["data"][0] if "data" in value else value["payload"]["after"]
    assert float(row["v"]) == 1.0


def test_an_empty_batch_has_no_messages():
    for encoder in ENCODERS.values():
        assert len(encoder.rows(TABLE, changes(CHANGES[0]).slice(1), BUILT_MS).values) == 0


RECORD = CutRecord(
    "bank", 10, 20, 3, "2026-01-02T03:04:05.678+00:00", (TableCut("shop.orders", 4, 20, "0a"),)
)


def test_a_marker_is_that_of_the_golden_file():
    assert Marker(RECORD, (3, 0, 1)).to_json() == json.loads(GOLDEN.read_text())["marker"]


def test_a_marker_reads_back():
    marker = Marker(RECORD, (3, 0, 1))
    assert Marker.from_json(marker.to_json()) == marker


def test_a_marker_that_the_topic_does_not_take_names_no_tables():
    """A first cut of thousands of tables could never be committed: its record was too large."""
    tables = tuple(TableCut(f"bank.t{number}", 1, 20, "0" * 16) for number in range(8000))
    record = dataclasses.replace(
        RECORD, tables=tables, dropped=("bank.x",), skipped=((5, 10),), mode="append"
    )
    whole = Marker(record, (3, 0, 1))
    short = whole.within(len(whole.to_json()) - 1)
    assert whole.within(len(whole.to_json())) is whole
    assert len(short.to_json()) < 500
    assert Marker.from_json(short.to_json()) == short
    kept = dataclasses.replace(record, tables=(), dropped=(), renamed=())
    assert short == Marker(kept, (3, 0, 1))


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2, "cut": {}, "messages": []}', "[1]"])
def test_a_marker_that_cannot_be_read_is_a_named_error(text):
    with pytest.raises(SourceError, match="ErrManifestCorrupt"):
        Marker.from_json(text)


if __name__ == "__main__":
    golden = {name: encoded(each) for name, each in ENCODERS.items()}
    golden["marker"] = Marker(RECORD, (3, 0, 1)).to_json()
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
