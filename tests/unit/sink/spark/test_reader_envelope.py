import json

import pyarrow as pa
from pyspark_tidemark.flight import Ddl
from pyspark_tidemark.reader import ENVELOPE_SCHEMA, ddl_rows, in_envelope

META = [
    ("_op", pa.string()),
    ("_commit_ts", pa.int64()),
    ("_start_ts", pa.int64()),
    ("_seq", pa.int64()),
]
ROW = [("id", pa.int64()), ("name", pa.string())]
ROWS = [
    {"_op": "insert", "id": 1, "name": "a", "_before": None},
    {"_op": "update", "id": 1, "name": "b", "_before": {"id": 1, "name": "a"}},
    {"_op": "delete", "id": 1, "name": "b", "_before": {"id": 1, "name": "b"}},
]


def mounted(*, before):
    rows = [
        row | {"_commit_ts": 10 * at, "_start_ts": 10 * at - 1, "_seq": 0}
        for at, row in enumerate(ROWS, 1)
    ]
    schema = pa.schema([*META, *ROW, *([("_before", pa.struct(ROW))] if before else [])])
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def images(batch, name):
    return [None if text is None else json.loads(text) for text in batch[name].to_pylist()]


def test_deletes_have_a_before_the_others_an_after():
    batch = in_envelope(mounted(before=False), "shop.t", ("id",))
    assert batch.schema == ENVELOPE_SCHEMA
    assert batch["_table"].to_pylist() == ["shop.t"] * 3
    assert images(batch, "key") == [{"id": 1}] * 3
    assert images(batch, "after") == [{"id": 1, "name": "a"}, {"id": 1, "name": "b"}, None]
    assert images(batch, "before") == [None, None, {"id": 1, "name": "b"}]


def test_with_before_images_updates_have_both():
    batch = in_envelope(mounted(before=True), "shop.t", ())
    assert images(batch, "before") == [None, {"id": 1, "name": "a"}, {"id": 1, "name": "b"}]
    assert batch["key"].to_pylist() == [None] * 3


def test_a_schema_change_is_a_row_for_each_table():
    ddl = Ddl(7, "rename table a to b", dropped=("s.a",), renamed=(("s.a", "s.b"),))
    batch = ddl_rows(ddl, ["s.a", "s.b"])
    assert batch.schema == ENVELOPE_SCHEMA
    assert images(batch, "after") == [
        {"query": ddl.query, "dropped": True, "renamed_to": "s.b"},
        {"query": ddl.query, "renamed_from": "s.a"},
    ]
