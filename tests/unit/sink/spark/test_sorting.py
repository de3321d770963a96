"""`sort-by` as it is written, and the order of rows by Iceberg's sort orders;
`tests/integration/lake/test_partitions.py` asks Iceberg itself.
"""

import dataclasses
import functools
import json
import math
import tempfile

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.iceberg import files
from pyspark_tidemark.lake.iceberg.files import Layout, Share, joined, joined_places, live_rows
from pyspark_tidemark.lake.iceberg.row_order import OrderField, RowOrder
from pyspark_tidemark.lake.sorting import SortRules, parse_sort_fields, sort_rules_fault
from pyspark_tidemark.sink_uri import SinkUri

RULES = "shop.orders=created_at DESC, `a b`; shop.*=days(at) desc nulls first,bucket(16, id)"


def field(name, kind, number):
    return pa.field(name, kind, metadata={b"PARQUET:field_id": str(number).encode()})


SCHEMA = pa.schema([field("n", pa.int32(), 1), field("s", pa.string(), 2)])
NAMES = {1: "n", 2: "s"}


def test_the_first_rule_that_fits_a_table_counts():
    rules = SortRules.parse(RULES)
    text = ", ".join(map(str, rules.of("shop.orders")))
    assert text == "`created_at` desc nulls last, `a b` asc nulls first"
    assert parse_sort_fields(text) == rules.of("shop.orders")
    assert str(rules.of("shop.t")[0]) == "days(`at`) desc nulls first"
    assert rules.of("other.t") == ()
    assert parse_sort_fields("") == ()


@pytest.mark.parametrize(
    "text",
    [
        *(
            "orders=id",
            "a.b=",
            "a.b=id,",
            "a.b=id,id",
            "a.b=id down",
            "a.b=id nulls",
            "a.b=weeks(i)",
        ),
        *("a.b=id desc asc", "a.b=id nulls first desc", "a.b=id asc, id"),
    ],
)
def test_what_is_no_rule_is_refused(text):
    assert sort_rules_fault(text)
    with pytest.raises(SourceError, match="ErrTargetInvalid"):
        SinkUri.parse(f"iceberg:///lake?sort-by={text}")


def test_a_uri_and_an_option_say_how_tables_are_sorted():
    given = ["--endpoint", "grpc://h:1", "--changefeed", "c", "--sort-by", "a.b=x"]
    assert Arguments.parse([*given, "--target", "iceberg:///lake"]).sorting.of("a.b")
    uri = Arguments.parse([*given, "--target", f"iceberg:///lake?sort-by={RULES}"])
    assert uri.sorting == SortRules.parse(RULES)


@pytest.mark.parametrize(
    "uri",
    ["postgresql://u@h/db", "parquet:///lake", "delta:///lake", "kafka://h/t?protocol=canal-json"],
)
def test_targets_without_sort_orders_refuse_them(uri):
    mark = "&" if "?" in uri else "?"
    with pytest.raises(SourceError, match=r"ErrTargetInvalid.*sort-by is nothing for a"):
        SinkUri.parse(f"{uri}{mark}sort-by=a.b=c")
    with pytest.raises(SourceError, match="ErrSortUnsupported"):
        SinkUri.parse(uri).sorting("a.b=c")


def test_an_order_of_another_engine_that_is_unknown_here_is_none():
    def parsed(transform, source=1, kind=SCHEMA.types[0]):
        described = {"transform": transform, "source-id": source, "direction": "asc"}
        order = {"order-id": 4, "fields": [described | {"null-order": "nulls-last"}]}
        return RowOrder.parse(json.dumps(order), pa.schema([field("n", kind, 1)]))

    assert parsed("bucket[3]").number == 4
    assert parsed("zorder") == parsed("identity", 9) == parsed("year") == RowOrder()
    assert parsed("identity", kind=pa.float64()).number == 4
    assert parsed("bucket[3]", kind=pa.float64()) == RowOrder()
    assert RowOrder.parse('{"order-id": 0, "fields": []}', SCHEMA) == RowOrder()


rows = st.lists(
    st.tuples(st.none() | st.integers(-2, 2), st.none() | st.text("aé\U0001f600", max_size=2)),
    max_size=30,
)
orders = st.lists(
    st.builds(
        OrderField,
        st.sampled_from(sorted(NAMES)),
        st.sampled_from(["identity", "truncate[2]", "void"]),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=3,
)


def value(each, row):
    column = row[each.source - 1]
    if column is None or each.transform == "void":
        return None
    if each.transform == "identity":
        return column.encode() if isinstance(column, str) else column
    return column[:2].encode() if isinstance(column, str) else column - column % 2


def compared(order, one, two):
    for each in order:
        left, right = value(each, one), value(each, two)
        if left == right:
            continue
        if left is None or right is None:
            return -1 if (left is None) == each.nulls_first else 1
        return (-1 if left < right else 1) * (-1 if each.is_descending else 1)
    return 0


@given(rows, orders)
def test_rows_are_sorted_as_one_would_by_hand(given_rows, order):
    table = pa.table([list(column) for column in zip(*given_rows, strict=True)] or [[], []], SCHEMA)
    places = RowOrder(1, tuple(order)).places(table, NAMES).tolist()
    by_hand = functools.cmp_to_key(
        lambda one, two: compared(order, given_rows[one], given_rows[two])
    )
    assert places == sorted(range(len(given_rows)), key=by_hand)


BY_SIGN_AND_BITS = [
    *(-math.nan, -math.inf, -1.5, -5e-324, -0.0, 0.0, 5e-324, 1.5, math.inf, math.nan),
]
"""Floating point numbers in Iceberg's order ("Sorting")."""


@given(
    st.lists(st.none() | st.sampled_from(range(len(BY_SIGN_AND_BITS)))),
    st.booleans(),
    st.booleans(),
    st.sampled_from([pa.float32(), pa.float64()]),
)
def test_floating_point_numbers_are_sorted_by_sign_and_nan_is_the_largest(
    ranks, is_descending, nulls_first, kind
):
    if kind == pa.float32():
        ranks = [rank for rank in ranks if rank is None or abs(BY_SIGN_AND_BITS[rank]) != 5e-324]
    numbers = [None if rank is None else BY_SIGN_AND_BITS[rank] for rank in ranks]
    table = pa.table({"x": pa.array(numbers, kind)})
    order = RowOrder(1, (OrderField(1, "identity", is_descending, nulls_first),))
    places = order.places(table, {1: "x"}).tolist()

    def by_hand(place):
        rank = ranks[place]
        if rank is None:
            return (-1 if nulls_first else 1, 0)
        return (0, -rank if is_descending else rank)

    assert places == sorted(range(len(ranks)), key=by_hand)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(rows, st.booleans()), min_size=1, max_size=4), orders, st.integers(1, 9))
def test_rows_of_files_are_joined_in_order_whether_these_have_it_or_not(parts, order, at_once):
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_READ_ROWS", at_once)
        sorted_layout = Layout(
            root, SCHEMA.serialize().to_pybytes(), (), order=RowOrder(1, tuple(order))
        )
        unsorted_layout = dataclasses.replace(sorted_layout, order=RowOrder())
        shares, given_rows = [], []
        for part, is_sorted in parts:
            columns = [list(column) for column in zip(*part, strict=True)] or [[], []]
            layout = sorted_layout if is_sorted else unsorted_layout
            shares += [
                Share(file.path, 1, 0, 1) for file in files.write(layout, pa.table(columns, SCHEMA))
            ]
            given_rows.append(layout.in_order(pa.table(columns, SCHEMA)))
        new = joined(sorted_layout, shares)
        expected = sorted_layout.in_order(pa.concat_tables(given_rows)).to_pylist()
        batches = (
            []
            if new is None
            else live_rows(unsorted_layout.storage, Share(new.path, 1, 0, 1), SCHEMA)
        )
        assert [row for batch, _ in batches for row in batch.to_pylist()] == expected


def test_rows_of_joined_files_are_found_at_their_new_places(tmp_path, monkeypatch):
    order = RowOrder(3, (OrderField(2, "identity", is_descending=True, nulls_first=False),))
    layout = Layout(str(tmp_path), SCHEMA.serialize().to_pybytes(), ("n",), order=order)
    old = [
        pa.table({"n": range(5), "s": ["b", None, "d", "a", "d"]}, SCHEMA),
        pa.table({"n": range(5, 9), "s": ["c", "e", None, "a"]}, SCHEMA),
    ]
    monkeypatch.setattr(files, "PENDING_BYTES_MAX", 1 << 20)
    written = [file for each in old for file in files.write(layout, each)]
    assert [file.sort_order for file in written] == [3, 3]
    shares = [Share(file.path, 1, 0, 1) for file in written]

    def read(share):
        return [
            each
            for part, _ in live_rows(layout.storage, share, SCHEMA)
            for each in part.to_pylist()
        ]

    before = [each for share in shares for each in read(share)]
    new = joined(layout, shares)
    after = read(Share(new.path, 1, 0, 1))
    assert [each["s"] for each in after] == ["e", "d", "d", "c", "b", "a", "a", None, None]
    for places in ([0], [4, 8], list(range(9))):
        moved = joined_places(layout, shares, places)
        assert sorted(moved) == list(moved)
        assert {after[at]["n"] for at in moved} == {before[at]["n"] for at in places}
