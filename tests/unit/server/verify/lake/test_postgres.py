"""Lines of COPY are read back as what they were made of."""

import datetime as dt
from decimal import Decimal

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark_tidemark.lake.databases.text import as_csv

from server.verify.lake.postgres import read_csv

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("flag", pa.bool_()),
        ("ratio", pa.float64()),
        ("amount", pa.decimal128(20, 2)),
        ("name", pa.string()),
        ("raw", pa.binary()),
        ("at", pa.timestamp("us")),
        ("seen", pa.timestamp("us", tz="UTC")),
        ("day", pa.date32()),
    ]
)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
TIMES = st.integers(-(10**15), 10**15).map(lambda us: dt.datetime.fromtimestamp(us / 10**6, dt.UTC))
ROW = st.fixed_dictionaries(
    {
        "id": st.integers(-(2**63), 2**63 - 1),
        "flag": st.none() | st.booleans(),
        "ratio": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "amount": st.none() | st.decimals(-(10**17), 10**17, places=2),
        "name": st.none() | TEXT,
        "raw": st.none() | st.binary(),
        "at": st.none() | TIMES.map(lambda at: at.replace(tzinfo=None)),
        "seen": st.none() | TIMES,
        "day": st.none() | st.dates(),
    }
)


@settings(max_examples=40)
@given(st.lists(ROW, min_size=1, max_size=5))
def test_what_is_written_for_copy_is_read_back(rows):
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    assert read_csv(as_csv(batch), SCHEMA).to_pylist() == batch.to_pylist()


def test_lines_as_a_server_prints_them():
    line = b't,"a ""quoted""\nline",,"",\\x00ff,12.50,2026-01-02 03:04:05.6,2026-01-02 03:04:05+00,1000-01-01\n'
    schema = pa.schema(
        [
            ("flag", pa.bool_()),
            ("name", pa.string()),
            ("null", pa.string()),
            ("empty", pa.string()),
            ("raw", pa.binary()),
            ("amount", pa.decimal128(20, 2)),
            ("at", pa.timestamp("us")),
            ("seen", pa.timestamp("us", tz="UTC")),
            ("day", pa.date32()),
        ]
    )
    [row] = read_csv(line, schema).to_pylist()
    assert list(row.values()) == [
        True,
        'a "quoted"\nline',
        None,
        "",
        b"\x00\xff",
        Decimal("12.50"),
        dt.datetime(2026, 1, 2, 3, 4, 5, 600_000, dt.UTC).replace(tzinfo=None),
        dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC),
        dt.date(1000, 1, 1),
    ]
