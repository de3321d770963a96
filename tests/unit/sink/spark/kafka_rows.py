"""Changes of a table with a column of each type, and what they are as Python values."""

import datetime as dt
from decimal import Decimal

import pyarrow as pa
from pyspark_tidemark.flight import TableMeta

COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("tiny", pa.int8()),
        ("price", pa.decimal128(12, 2)),
        ("ratio", pa.float64()),
        ("name", pa.string()),
        ("image", pa.binary()),
        ("born", pa.date32()),
        ("at", pa.timestamp("us")),
        ("seen", pa.timestamp("us", "UTC")),
    ]
)
ENVELOPE = pa.schema(
    [
        ("_op", pa.string()),
        ("_commit_ts", pa.int64()),
        ("_start_ts", pa.int64()),
        ("_seq", pa.int64()),
    ]
)
SCHEMA = pa.schema([*ENVELOPE, *COLUMNS])
TABLE = TableMeta("shop.orders", ("id",), SCHEMA, column_ids={"id": 1})
COMMIT_TS = 470615457568391169
BUILT_MS = 1795788000123
FIRST = {
    "id": 7,
    "tiny": -1,
    "price": Decimal("12.50"),
    "ratio": 0.25,
    "name": 'a "b" \\ é\n',
    "image": bytes([0, 65, 255]),
    "born": dt.date(2026, 1, 2),
    "at": dt.datetime(2026, 1, 2, 3, 4, 5, 678000),  # noqa: DTZ001 - it has no zone
    "seen": dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC),
}
SECOND = dict.fromkeys(FIRST) | {"id": 8}


def changes(*rows, schema=COLUMNS):
    """A batch of (op, row, row before or None)."""
    documents = [
        {"_op": op, "_commit_ts": COMMIT_TS + number, "_start_ts": COMMIT_TS - 1, "_seq": number}
        | row
        | {"_before": before}
        for number, (op, row, before) in enumerate(rows)
    ]
    full = pa.schema([*ENVELOPE, *schema, ("_before", pa.struct(list(schema)))])
    return pa.RecordBatch.from_pylist(documents, schema=full)
