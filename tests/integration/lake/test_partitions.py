"""Partitioned and sorted Iceberg tables: each row is in the partition that Iceberg itself computes
for it, and in no other one any more when it has moved, whoever has chosen the partitions, and
whenever; and in each file it stands where the table's sort order has it.
"""

import itertools
import json
import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake import changes
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.iceberg import files, rewriting
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.target import IcebergTarget
from pyspark_tidemark.lake.iceberg.types import field_ids
from pyspark_tidemark.lake.maintenance import KeptCuts
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.partitioning import PartitionRules
from pyspark_tidemark.lake.reading import as_of_cut
from pyspark_tidemark.lake.schema import Policy
from pyspark_tidemark.lake.sorting import SortRules

from tests.integration.lake.aged import AcknowledgedFeed
from tests.integration.lake.test_iceberg import CUTS, balances, held, keep, read_by_iceberg

pytestmark = pytest.mark.timeout(300)
TABLE = "shop.orders"
STEP = 10
TYPES = {
    "region": pa.string(),
    "created_at": pa.timestamp("us"),
    "seen_at": pa.timestamp("us", "UTC"),
    "day": pa.date32(),
    "price": pa.decimal128(9, 2),
    "small": pa.int32(),
    "code": pa.binary(),
    "paid": pa.bool_(),
}
BY_ALL = (
    "days(created_at), hours(seen_at), months(`day`), truncate(100, price), small, paid,"
    "truncate(2, region), bucket(4, id), bucket(3, region), bucket(3, code), bucket(5, price),"
    "bucket(5, seen_at), truncate(1, code), bucket(7, day), truncate(10, id)"
)
FIRST = datetime(1969, 12, 31, 22, 30)  # noqa: DTZ001 - no zone


def row(dice, key):
    at = FIRST + timedelta(hours=dice.randrange(5), microseconds=dice.randrange(3))
    values = {
        "region": dice.choice(["", "a/b=c %é", "日本語日本語", "west", "x" * 19]),
        "created_at": at,
        "seen_at": at.replace(tzinfo=UTC),
        "day": date(1969, 11, 30) + timedelta(days=dice.randrange(70)),
        "price": Decimal(dice.choice(["-0.01", "12.30", "9999999.99", "-512.00", "0.00"])),
        "small": dice.choice([-1, 0, 2**31 - 1]),
        "code": dice.choice([b"", b"\xff\x00", b"abcde"]),
        "paid": dice.choice([True, False]),
    }
    return {"id": key} | {name: dice.choice([None, *3 * [value]]) for name, value in values.items()}


@pytest.fixture
def feed():
    """Rows come, move to other partitions and go, and come again."""
    made, dice = AcknowledgedFeed(), random.Random(11)
    made.create(0, TABLE, id=pa.int64(), **TYPES)
    for number in range(1, 9):
        ts = number * STEP - 5
        made.put(ts, TABLE, *[row(dice, key) for key in sorted(dice.sample(range(40), 12))])
        for key in dice.sample(sorted(made.state(ts)[TABLE]), 2):
            made.delete(ts + 1, TABLE, key)
    return made


class Lake:
    """The lake of a feed, cut after cut; each `keep` is a life of a job."""

    def __init__(self, spark, root, feed):
        self.spark, self.root, self.feed = spark, root, feed

    def keep(self, cuts, fields="", *, order="", mode="upsert", write="auto", **settings):
        rules = PartitionRules.parse(f"shop.*={fields}" if fields else "")
        sorting = SortRules.parse(f"shop.*={order}" if order else "")
        target = IcebergTarget(
            self.spark,
            str(self.root),
            "f",
            mode=mode,
            partitions=rules,
            sorting=sorting,
            **{"compact_every": 0} | settings,
        )
        with FileManifest.opened(str(self.root), "f") as manifest:
            applier = CutApplier(
                self.feed,
                "f",
                target,
                manifest,
                policy=Policy(mode),
                writers=TableWriters({}, self.spark, 2, write),
            )
            for number in cuts:
                start_ts = 0 if manifest.last is None else manifest.last.end_ts
                applier.apply(Cut(0, start_ts, number * STEP))
                applier.acknowledge()
                target.maintain(KeptCuts(manifest, 1.0))
        target.close()
        return target

    @property
    def java(self):
        return Catalog(self.spark, str(self.root), "f")

    def table(self):
        return self.java.load(TABLE)

    def check(self, number, *, filters=True):
        """The lake equals the feed, for Iceberg with and without a filter, and for us."""
        state = self.feed.state(number * STEP - 1)[TABLE]  # a DDL may stand at the end
        expected = {key: {**each, "_commit_ts": ...} for key, each in state.items()}
        frame = as_of_cut(self.spark, f"iceberg://{self.root}", number * STEP)[TABLE]
        ours = frame.toArrow().to_pylist()
        assert {each["id"]: each | {"_commit_ts": ...} for each in ours} == expected
        assert len(ours) == len(expected)
        assert sorted(self.ids(None)) == sorted(expected)
        for of in range(0, 40, 3) if filters else ():
            equal = self.java.expressions.equal("id", of)
            assert self.ids(equal) == [of] * (of in expected)
        for region in {each["region"] for each in state.values()} if filters else ():
            equal = (
                self.java.expressions.isNull("region")
                if region is None
                else self.java.expressions.equal("region", region)
            )
            there = [key for key, each in state.items() if each["region"] == region]
            assert sorted(self.ids(equal)) == sorted(there)
        self.check_files()

    def check_sorted(self):
        """The rows of each file are in the table's order, as Iceberg itself compares them."""
        iceberg, table = self.spark._jvm.org.apache.iceberg, self.table()
        comparator = iceberg.SortOrderComparators.forSchema(table.schema(), table.sortOrder())
        parser, columns = iceberg.SingleValueParser, table.schema().asStruct()
        for file in self.java.files(table):
            assert int(file.sortOrderId()) == int(table.sortOrder().orderId()) > 0
            rows = pq.ParquetFile(str(file.location())).read()
            numbers = field_ids(rows.schema)
            described = [
                json.dumps({str(numbers[name]): written(value) for name, value in each.items()})
                for each in rows.to_pylist()
            ]
            parsed = [parser.fromJson(columns, each) for each in described]
            assert all(comparator.compare(*pair) <= 0 for pair in itertools.pairwise(parsed))

    def ids(self, condition):
        """What Iceberg's own reader finds."""
        reading = self.spark._jvm.org.apache.iceberg.data.IcebergGenerics.read(self.table())
        if condition is not None:
            reading = reading.where(condition)
        rows = reading.build().iterator()
        found = []
        while rows.hasNext():
            found.append(rows.next().getField("id"))
        return found

    def check_files(self):
        """Each row of each file is of the file's partition, as Iceberg computes it."""
        iceberg, table = self.spark._jvm.org.apache.iceberg, self.table()
        schema, parser = table.schema(), iceberg.SingleValueParser
        there = {field.fieldId() for field in schema.columns()}
        for file in self.java.files(table):
            spec = table.specs().get(file.specId())
            if not {field.sourceId() for field in spec.fields()} <= there:
                continue  # of a column that was dropped since
            key = iceberg.PartitionKey(spec, schema)
            expected = spec.partitionToPath(file.partition())
            rows = pq.ParquetFile(str(file.location())).read()
            numbers = field_ids(rows.schema)
            for each in rows.to_pylist():
                values = {
                    str(numbers[name]): written(value)
                    for name, value in each.items()
                    if numbers[name] in there
                }
                key.partition(parser.fromJson(schema.asStruct(), json.dumps(values)))
                assert key.toPath() == expected


def written(value):
    """As Iceberg's JSON has it."""
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, Decimal) else value


def test_rows_are_in_the_partitions_that_iceberg_computes(spark, tmp_path, feed):
    lake = Lake(spark, tmp_path, feed)
    lake.keep(range(1, 9), BY_ALL)
    assert lake.table().spec().isPartitioned()
    assert len({file.partition().toString() for file in lake.java.files(lake.table())}) > 10
    lake.check(8)


@pytest.mark.parametrize("deletion_vectors", [True, False], ids=["vectors", "equality deletes"])
def test_a_row_that_moves_leaves_its_old_partition(spark, tmp_path, feed, deletion_vectors):
    lake = Lake(spark, tmp_path, feed)
    for number in range(1, 9):
        lake.keep((number,), "region, days(created_at)", deletion_vectors=deletion_vectors)
        lake.check(number)


@pytest.mark.parametrize("here_bytes", [1 << 20, -1], ids=["by the driver", "by tasks"])
@pytest.mark.parametrize("deletion_vectors", [True, False], ids=["vectors", "equality deletes"])
def test_partitioned_tables_equal_the_replay_whoever_writes_them(
    spark, changefeed, captures, upstream, tmp_path, monkeypatch, deletion_vectors, here_bytes
):
    for most in ("DRIVER_READ_MAX_BYTES", "ARROW_READ_MAX_BYTES"):
        monkeypatch.setattr(changes, most, here_bytes)
    rules = PartitionRules.parse("bank.accounts=truncate(50,balance),bucket(2,id); *.*=amount")
    settings = {"deletion_vectors": deletion_vectors, "partitions": rules}
    keep(spark, changefeed, captures, tmp_path, CUTS[:3], **settings)
    accounts = read_by_iceberg(spark, tmp_path, "bank.accounts")
    assert balances(accounts) == held(upstream, CUTS[2])
    for ts in (150, CUTS[2]):
        rows = as_of_cut(spark, f"iceberg://{tmp_path}", ts)["bank.kinds"].collect()
        state = upstream.kinds.state(ts // 100 * 100)
        assert {(each.k1, each.k2): each.amount for each in rows} == {
            key: each["amount"] for key, each in state.items()
        }
        assert len(rows) == len(state)


def test_a_changelog_is_partitioned(spark, tmp_path, feed):
    lake = Lake(spark, tmp_path, feed)
    lake.keep(range(1, 9), "_op, days(created_at)", mode="append")
    lake.check_files()
    assert len(lake.ids(None)) == len(feed.changes)
    deletes = lake.java.expressions.equal("_op", "delete")
    assert len(lake.ids(deletes)) == sum(each["_op"] == "delete" for _, each in feed.changes)


@pytest.mark.parametrize("deletion_vectors", [True, False], ids=["vectors", "equality deletes"])
def test_the_option_may_change_between_two_lives(spark, tmp_path, feed, deletion_vectors):
    lake = Lake(spark, tmp_path, feed)
    asked = (
        "",
        "region",
        "days(created_at), region",
        "bucket(3, id)",
        "",
        "region",
        "hours(seen_at)",
    )
    for number, fields in enumerate(asked, 1):
        lake.keep((number,), fields, deletion_vectors=deletion_vectors)
        spec = json.loads(lake.java.spec_json(lake.table()))
        assert len(spec["fields"]) == len(
            PartitionRules.parse(f"a.b={fields}" if fields else "").of("a.b")
        )
        lake.check(number)


@pytest.mark.parametrize("deletion_vectors", [True, False], ids=["vectors", "equality deletes"])
def test_a_spec_that_another_engine_changes_is_followed(spark, tmp_path, feed, deletion_vectors):
    """As by ALTER TABLE … ADD, REPLACE and DROP PARTITION FIELD."""
    lake = Lake(spark, tmp_path, feed)
    settings = {"deletion_vectors": deletion_vectors}
    expressions = lake.java.expressions
    lake.keep((1, 2), **settings)
    lake.table().updateSpec().addField(expressions.ref("region")).commit()
    lake.keep((3, 4), **settings)
    lake.check(4)
    update = lake.table().updateSpec().addField(expressions.bucket("id", 4))
    update.removeField("region").commit()
    lake.keep((5, 6), **settings)
    lake.check(6)
    lake.table().updateSpec().removeField("id_bucket_4").commit()
    lake.keep((7, 8), **settings)
    lake.check(8)


@pytest.mark.parametrize("way", ["vectors", "vectors, by tasks", "equality deletes"])
def test_files_are_joined_within_their_partition(spark, tmp_path, feed, monkeypatch, way):
    if way.endswith("tasks"):
        monkeypatch.setattr(rewriting, "MOST_BYTES", -1)
    lake = Lake(spark, tmp_path, feed)
    settings = {"deletion_vectors": way != "equality deletes"}
    lake.keep((1, 2, 3), "region", **settings)
    lake.keep((4, 5, 6), "months(day)", **settings)
    before = len(lake.java.files(lake.table()))
    target = lake.keep((7,), "months(day)", **settings)
    target._maintenance.rewrite(TABLE)
    assert len(lake.java.files(lake.table())) < before
    lake.check(7)
    lake.keep((8,), "months(day)", **settings)
    lake.check(8)


def test_a_lake_goes_from_equality_deletes_to_vectors(spark, tmp_path, feed):
    lake = Lake(spark, tmp_path, feed)
    lake.keep((1, 2, 3), "region", deletion_vectors=False)
    target = lake.keep((4, 5), "region", deletion_vectors=True)
    target._maintenance.rewrite(TABLE)
    lake.check(5)
    lake.keep((6,), "region", deletion_vectors=True)
    lake.check(6)


def test_more_partitions_than_may_be_written_at_a_time(spark, tmp_path, feed, monkeypatch):
    for most in ("OPEN_FILES_MAX", "PENDING_BYTES_MAX", "_GROUP_BYTES"):
        monkeypatch.setattr(files, most, 2)
    lake = Lake(spark, tmp_path, feed)
    lake.keep((1, 2), "bucket(30, id)")
    lake.check(2)


def altered_feed():
    """A table whose column `a` is renamed before the second cut, and dropped before the third."""
    feed = AcknowledgedFeed()
    feed.create(0, TABLE, id=pa.int64(), a=pa.int32(), region=pa.string())
    feed.put(5, TABLE, {"id": 1, "a": 1, "region": "x"}, {"id": 2, "a": 2, "region": "y"})
    feed.alter(10, TABLE, "…", {"a": "b"}, id=pa.int64(), b=pa.int32(), region=pa.string())
    feed.put(15, TABLE, {"id": 1, "b": 7, "region": "y"}, {"id": 3, "b": 1, "region": "x"})
    feed.alter(20, TABLE, "…", {}, {}, ("b",), id=pa.int64(), region=pa.string())
    feed.put(25, TABLE, {"id": 3, "region": "y"}, {"id": 4, "region": "z"})
    return feed


def test_a_column_of_the_spec_is_renamed_and_never_dropped(spark, tmp_path):
    feed = altered_feed()
    lake = Lake(spark, tmp_path, feed)
    for number in (1, 2):
        lake.keep((number,), "a, region")
        lake.check(number, filters=False)
    with pytest.raises(SourceError, match=r"ErrPartitionUnsupported.*identity of b.*dropped"):
        lake.keep((3,), "a, region")
    lake.check(2, filters=False)


def test_a_column_of_the_spec_is_widened_only_where_iceberg_can_read_that(spark, tmp_path):
    feed = AcknowledgedFeed()
    feed.create(0, TABLE, id=pa.int64(), a=pa.int32())
    feed.put(5, TABLE, {"id": 1, "a": 1}, {"id": 2, "a": 2})
    feed.alter(10, TABLE, "…", id=pa.int64(), a=pa.int64())
    feed.put(15, TABLE, {"id": 2, "a": 1 << 40}, {"id": 3, "a": 1})
    lake, other = Lake(spark, tmp_path / "a", feed), Lake(spark, tmp_path / "b", feed)
    lake.keep((1, 2), "bucket(3, a)")
    lake.check(2, filters=False)
    feed.previous_ts = feed.acked_ts = 0
    other.keep((1,), "a")
    with pytest.raises(SourceError, match=r"ErrPartitionUnsupported.*identity of a.*wider"):
        other.keep((2,), "")


def test_a_table_that_is_made_anew_keeps_the_partitions_that_its_columns_allow(spark, tmp_path):
    feed = AcknowledgedFeed()
    feed.create(0, TABLE, id=pa.int64(), a=pa.int32(), region=pa.string())
    feed.put(5, TABLE, {"id": 1, "a": 1, "region": "x"}, {"id": 2, "a": 1, "region": "x"})
    feed.put(15, TABLE, {"id": 1, "a": 3, "region": "x"})
    feed.create_or_replace(20, TABLE, id=pa.int64(), region=pa.string())
    feed.put(25, TABLE, {"id": 1, "region": "y"}, {"id": 2, "region": "z"})
    feed.put(35, TABLE, {"id": 1, "region": "z"})
    lake = Lake(spark, tmp_path, feed)
    lake.keep(range(1, 5), "a, region")
    names = [each["name"] for each in json.loads(lake.java.spec_json(lake.table()))["fields"]]
    assert names == ["region"]
    lake.check(4, filters=False)
    before = ([(1, 1, "x"), (2, 1, "x")], [(1, 3, "x"), (2, 1, "x")], [(1, "y"), (2, "z")])
    for number, rows in enumerate(before, 1):
        frame = as_of_cut(spark, f"iceberg://{tmp_path}", number * STEP)[TABLE]
        assert sorted(tuple(each)[:-1] for each in frame.collect()) == rows


def test_columns_of_a_spec_that_are_not_there_stop_by_name(spark, tmp_path, feed):
    lake = Lake(spark, tmp_path, feed)
    with pytest.raises(SourceError, match=r"ErrPartitionUnsupported.*shop.orders.*no column when"):
        lake.keep((1,), "days(when)")
    with pytest.raises(SourceError, match=r"ErrPartitionUnsupported.*hours\(`day`\)"):
        lake.keep((1,), "hours(day)")
    lake.keep((1,), "months(day)")
    lake.check(1)


ORDER = "region desc nulls first, days(created_at) nulls last, bucket(3, code), price desc"


@pytest.mark.parametrize("way", ["the driver", "tasks", "equality deletes"])
def test_rows_are_sorted_whoever_writes_them(spark, tmp_path, feed, monkeypatch, way):
    if way == "tasks":
        monkeypatch.setattr(rewriting, "MOST_BYTES", -1)
    lake = Lake(spark, tmp_path, feed)
    settings = {
        "order": ORDER,
        "write": "spark" if way == "tasks" else "driver",
        "deletion_vectors": way != "equality deletes",
    }
    lake.keep((1, 2, 3, 4), "months(day)", **settings)
    target = lake.keep((5,), **settings)
    lake.check(5)
    lake.check_sorted()
    joined, rewriter = [], target._maintenance
    if way != "equality deletes":
        # A cut comes while files are joined: its masks are of the old ones, and move with the rows.
        join = rewriter._rewriting._joined

        def join_and_cut(*given):
            joined.append(join(*given))
            lake.keep((6,), **settings)
            return joined[-1]

        monkeypatch.setattr(rewriter._rewriting, "_joined", join_and_cut)
    rewriter.rewrite(TABLE)
    assert bool(joined) == (way != "equality deletes")
    lake.check(6 if joined else 5)
    lake.check_sorted()
    lake.keep((7, 8) if joined else (6, 7, 8), **settings)
    lake.check(8)
    lake.check_sorted()


def test_large_cuts_are_sorted_in_several_files(spark, tmp_path, feed, monkeypatch):
    monkeypatch.setattr(files, "PENDING_BYTES_MAX", 2)
    lake = Lake(spark, tmp_path, feed)
    lake.keep(range(1, 9), order="region, id desc", mode="append", write="spark")
    assert len(lake.ids(None)) == len(feed.changes)
    lake.check_sorted()


def test_an_order_changes_and_is_another_engine_s_and_goes(spark, tmp_path, feed):
    lake = Lake(spark, tmp_path, feed)
    lake.keep((1,), order="region")
    first = int(lake.table().sortOrder().orderId())
    lake.check_sorted()
    lake.keep((2,))
    assert [int(lake.table().sortOrder().orderId()), len(lake.java.files(lake.table()))] == [0, 2]
    # As by ALTER TABLE … WRITE ORDERED BY.
    small, java = lake.java.expressions.ref("small"), lake.java
    lake.table().replaceSortOrder().desc(small, java.null_order(is_first=False)).commit()
    target = lake.keep((3,))
    target._maintenance.rewrite(TABLE)
    lake.check_sorted()
    lake.check(3)
    assert int(lake.table().sortOrder().orderId()) not in (0, first)
    for order in ("price, missing", "days(region)"):
        with pytest.raises(SourceError, match=r"ErrSortUnsupported.*shop.orders"):
            lake.keep((4,), order=order)
    lake.check(3)


def test_a_column_of_the_order_is_renamed_and_dropped_and_the_table_made_anew(spark, tmp_path):
    feed = altered_feed()
    feed.create_or_replace(30, TABLE, id=pa.int64(), region=pa.string())
    feed.put(35, TABLE, {"id": 1, "region": "y"}, {"id": 2, "region": "z"})
    lake = Lake(spark, tmp_path, feed)
    fields = []
    for number in range(1, 5):
        lake.keep((number,), order="a desc, region desc")
        lake.check(number, filters=False)
        order = json.loads(lake.java.sort_order_json(lake.table()))
        fields.append(len(order["fields"]))
    assert fields == [2, 2, 1, 1]
    lake.check_sorted()
