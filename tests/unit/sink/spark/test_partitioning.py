"""`partition-by` as it is written, and the partitions of rows, as Iceberg's specification has them
(Appendix B); `tests/integration/lake/test_partitions.py` asks Iceberg itself.
"""

import json
from datetime import UTC, date, datetime
from decimal import Context, Decimal

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.iceberg.partitions import Partitioning, SpecField, transformed
from pyspark_tidemark.lake.partition_columns import check_fields
from pyspark_tidemark.lake.partitioning import PartitionRules, parse_fields, rules_fault
from pyspark_tidemark.sink_uri import SinkUri

WIDE = 2**31 - 1
RULES = (
    "shop.orders = days(created_at),bucket(16, id); shop.*=`odd `` name`;*.t=year(d),truncate(3,s)"
)


def test_the_first_rule_that_fits_a_table_counts():
    rules = PartitionRules.parse(RULES)
    assert ", ".join(map(str, rules.of("shop.orders"))) == "days(`created_at`), bucket(16, `id`)"
    assert [field.column for field in rules.of("shop.t")] == ["odd ` name"]
    assert [field.transform for field in rules.of("other.t")] == ["years", "truncate"]
    assert rules.of("other.u") == ()
    assert PartitionRules.parse("").of("shop.orders") == ()


@pytest.mark.parametrize("table", ["shop.orders", "shop.t", "other.t"])
def test_fields_are_read_as_they_are_recorded(table):
    fields = PartitionRules.parse(RULES).of(table)
    assert parse_fields(", ".join(map(str, fields))) == fields


@pytest.mark.parametrize(
    "text",
    [
        *(
            "orders=id",
            "a.b",
            "a.b=",
            "a.b=id,",
            "a.b=id,id",
            "a.b=(id)",
            "a.b=id)",
            "a.b=`id",
            ";",
        ),
        *("a.b=bucket(id)", "a.b=bucket(0,id)", "a.b=bucket(9999999999,id)", "a.b=days(3,id)"),
        *("a.b=weeks(id)", "a.b=id x.y=id", "a.b=" + ",".join(f"c{of}" for of in range(17))),
    ],
)
def test_what_is_no_rule_is_refused(text):
    assert rules_fault(text)
    with pytest.raises(SourceError, match="ErrTargetInvalid"):
        SinkUri.parse(f"iceberg:///lake?partition-by={text}")


def test_a_uri_says_how_its_tables_are_partitioned():
    uri = SinkUri.parse(f"iceberg:///lake?partition-by={RULES}")
    assert SinkUri.parse(str(uri)) == uri
    assert uri.settings["partition-by"] == RULES


@pytest.mark.parametrize("uri", ["postgresql://u@h/db", "parquet:///lake"])
def test_targets_without_partitions_refuse_them(uri):
    mark = "&" if "?" in uri else "?"
    with pytest.raises(SourceError, match=r"ErrTargetInvalid.*partition-by"):
        SinkUri.parse(f"{uri}{mark}partition-by=a.b=c")
    with pytest.raises(SourceError, match="ErrPartitionUnsupported"):
        SinkUri.parse(uri).partitions("a.b=c")


def test_columns_of_other_types_are_refused_by_name():
    schema = pa.schema([("f", pa.float64()), ("d", pa.date32()), ("ok", pa.bool_())])
    for text in ("f", "hours(d)", "truncate(2, d)", "bucket(2, ok)", "days(ok)", "no"):
        with pytest.raises(SourceError, match=r"ErrPartitionUnsupported.*a\.b"):
            check_fields("a.b", parse_fields(text), schema)
    check_fields("a.b", parse_fields("days(d), ok, bucket(2, d)"), schema)


@pytest.mark.parametrize(
    ("value", "kind", "hashed"),
    [
        (34, pa.int32(), 2017239379),
        (34, pa.int64(), 2017239379),
        (Decimal("14.20"), pa.decimal128(9, 2), -500754589),
        (date(2017, 11, 16), pa.date32(), -653330422),
        (datetime(2017, 11, 16, 22, 31, 8), pa.timestamp("us"), -2047944441),  # noqa: DTZ001
        (datetime(2017, 11, 16, 22, 31, 8, tzinfo=UTC), pa.timestamp("us", "UTC"), -2047944441),
        ("iceberg", pa.string(), 1210000089),
        (b"\x00\x01\x02\x03", pa.binary(), -188683207),
    ],
)
def test_hashes_are_those_of_the_specification(value, kind, hashed):
    [bucket] = transformed(f"bucket[{WIDE}]", pa.array([value], kind)).to_pylist()
    assert bucket == (hashed & 0x7FFFFFFF) % WIDE


def test_strings_of_all_lengths_hash_alike_alone_and_together():
    texts = [b"x" * number for number in range(40)]
    together = transformed(f"bucket[{WIDE}]", pa.array(texts)).to_pylist()
    alone = [transformed(f"bucket[{WIDE}]", pa.array([text]))[0].as_py() for text in texts]
    assert together == alone
    assert len(set(together)) == len(texts)


@pytest.mark.parametrize(
    ("transform", "values", "kind", "expected"),
    [
        ("truncate[10]", [1, -1, None, -(2**31)], pa.int32(), [0, -10, None, 2147483646]),
        (
            "truncate[50]",
            [Decimal("10.65"), Decimal("-0.01")],
            pa.decimal128(9, 2),
            ["10.50", "-0.50"],
        ),
        ("truncate[3]", ["iceberg", "日本語日", ""], pa.string(), ["ice", "日本語", ""]),
        ("truncate[1]", [b"ab", b""], pa.binary(), [b"a", b""]),
        (
            "year",
            [date(1969, 12, 31), date(1970, 1, 1), date(1, 1, 1)],
            pa.date32(),
            [-1, 0, -1969],
        ),
        ("month", [date(1969, 12, 31), date(2024, 2, 29)], pa.date32(), [-1, 649]),
        ("hour", [datetime(1969, 12, 31, 23, 59)], pa.timestamp("us"), [-1]),  # noqa: DTZ001
        ("day", [datetime(1969, 12, 31, 23)], pa.timestamp("us"), [date(1969, 12, 31)]),  # noqa: DTZ001
        ("void", [1, 2], pa.int64(), [None, None]),
    ],
)
def test_values_are_cut_towards_the_past_and_below(transform, values, kind, expected):
    found = transformed(transform, pa.array(values, kind)).to_pylist()
    assert [str(each) if isinstance(each, Decimal) else each for each in found] == expected


MOST = 10**38 - 1


@given(
    st.lists(st.integers(-MOST, MOST), min_size=1, max_size=5),
    st.integers(0, 38),
    st.integers(1, 2**31 - 1),
)
@example([-MOST], 0, 10)
@example([int("12345678901234567890123456789012345678")], 10, 16)
def test_decimals_of_38_digits_are_cut_and_hashed_by_their_integers(numbers, scale, width):
    exact = Context(prec=40)
    values = [Decimal(number).scaleb(-scale, exact) for number in numbers]
    column = pa.array(values, pa.decimal128(38, scale))
    cut = transformed(f"truncate[{width}]", column).to_pylist()
    assert [int(each.scaleb(scale, exact)) for each in cut] == [
        number - number % width for number in numbers
    ]

    def fewest_bytes(number):
        length = next(n for n in range(1, 17) if -(1 << 8 * n - 1) <= number < 1 << 8 * n - 1)
        return number.to_bytes(length, "big", signed=True)

    hashed_texts = pa.array([fewest_bytes(number) for number in numbers], pa.binary())
    by_text = transformed(f"bucket[{width}]", hashed_texts)
    assert transformed(f"bucket[{width}]", column).equals(by_text)


def test_rows_are_split_in_their_order():
    fields = (SpecField("1000", "r", 2, "identity"), SpecField("1001", "b", 1, "truncate[10]"))
    rows = pa.table({"id": [3, 1, 12, None, 2], "r": ["x", None, "x", "x", "x"]})
    parts = list(Partitioning(7, fields).split(rows, {1: "id", 2: "r"}))
    assert {(each.spec, each.values): part["id"].to_pylist() for each, part in parts} == {
        (7, json.dumps({"1000": "x", "1001": 0})): [3, 2],
        (7, json.dumps({"1000": None, "1001": 0})): [1],
        (7, json.dumps({"1000": "x", "1001": 10})): [12],
        (7, json.dumps({"1000": "x", "1001": None})): [None],
    }


@pytest.mark.parametrize(
    "field",
    [{"transform": "zorder", "source-id": 1}, {"transform": "bucket[4]", "source-ids": [1, 2]}],
)
def test_a_transform_that_is_not_known_here_is_named(field):
    spec = {"spec-id": 1, "fields": [{"field-id": 1000, "name": "z"} | field]}
    with pytest.raises(SourceError, match=r"ErrPartitionUnsupported.*by z"):
        Partitioning.parse(json.dumps(spec))
