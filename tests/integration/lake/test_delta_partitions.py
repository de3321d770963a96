"""Partitioned Delta tables: each row is in the partition that the log says, for us and for Delta,
and in no other one any more when it has moved, whoever writes, and whoever chose the partitions.
"""

import json
import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.delta import maintenance
from pyspark_tidemark.lake.delta.partitions import in_log
from pyspark_tidemark.lake.delta.tables import DeltaTables
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.failure import named
from pyspark_tidemark.lake.maintenance import KeptCuts
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.partitioning import PartitionRules
from pyspark_tidemark.lake.reading import as_of_cut
from pyspark_tidemark.lake.schema import Policy

from tests.integration.lake.aged import AcknowledgedFeed

pytestmark = pytest.mark.timeout(300)
TABLE = "shop.orders"
STEP, CUTS = 10, 6
TYPES = {
    "region": pa.string(),
    "at": pa.timestamp("us"),
    "seen_at": pa.timestamp("us", "UTC"),
    "day": pa.date32(),
    "price": pa.decimal128(9, 2),
    "small": pa.int32(),
    "paid": pa.bool_(),
}
BY_ALL = ", ".join(TYPES)
FIRST = datetime(1969, 12, 31, 22, 30)  # noqa: DTZ001 - no zone


def row(dice, key):
    at = FIRST + timedelta(hours=dice.randrange(5), microseconds=dice.randrange(3))
    values = {
        "region": dice.choice(["a/b=c %20é", "日本語", "west", "\x01\n{x}"]),
        "at": at,
        "seen_at": at.replace(tzinfo=UTC),
        "day": date(1, 1, 1) + timedelta(days=dice.randrange(3)),
        "price": Decimal(dice.choice(["-0.01", "12.30", "9999999.99", "0.00"])),
        "small": dice.choice([-1, 0, 2**31 - 1]),
        "paid": dice.choice([True, False]),
    }
    return {"id": key} | {name: dice.choice([None, *3 * [value]]) for name, value in values.items()}


@pytest.fixture
def feed():
    """Rows come, move to other partitions and go, and come again."""
    made, dice = AcknowledgedFeed(), random.Random(11)
    made.create(0, TABLE, id=pa.int64(), **TYPES)
    for number in range(1, CUTS + 1):
        ts = number * STEP - 5
        made.put(ts, TABLE, *[row(dice, key) for key in sorted(dice.sample(range(20), 8))])
        for key in dice.sample(sorted(made.state(ts)[TABLE]), 2):
            made.delete(ts + 1, TABLE, key)
    return made


class Lake:
    """The lake of a feed, cut after cut; each `keep` is a life of a job."""

    def __init__(self, spark, root, feed):
        self.spark, self.root, self.feed = spark, root, feed
        self.table = root / "shop" / "orders"

    def keep(self, cuts, columns="", *, mode="upsert", **settings):
        rules = PartitionRules.parse(f"shop.*={columns}" if columns else "")
        settings = {"compact_every": 0} | settings
        target = DeltaTarget(
            self.spark, str(self.root), "f", mode=mode, partitions=rules, **settings
        )
        with FileManifest.opened(str(self.root), "f") as manifest:
            applier = CutApplier(
                self.feed,
                "f",
                target,
                manifest,
                policy=Policy(mode),
                writers=TableWriters({}, self.spark, 2),
            )
            try:
                for number in cuts:
                    start_ts = 0 if manifest.last is None else manifest.last.end_ts
                    applier.apply(Cut(0, start_ts, number * STEP))
                    applier.acknowledge()
                    target.maintain(KeptCuts(manifest, 1.0))
            finally:
                target.close()
        return target

    def frame(self, number=None):
        ts = None if number is None else number * STEP
        return as_of_cut(self.spark, f"delta://{self.root}", ts)[TABLE]

    def check(self, *numbers):
        """The lake equals the feed at some cuts, and Delta finds the rows of each region."""
        for number in numbers:
            state = self.feed.state(number * STEP - 1)[TABLE]  # a DDL may stand at the end
            expected = {key: {**each, "_commit_ts": ...} for key, each in state.items()}
            rows = self.frame(number).toArrow().to_pylist()
            assert {each["id"]: each | {"_commit_ts": ...} for each in rows} == expected
            assert len(rows) == len(expected)
        for region in {each["region"] for each in state.values() if "region" in each}:
            there = [key for key, each in state.items() if each["region"] == region]
            equal = F.col("region").eqNullSafe(F.lit(region))
            ids = [each.id for each in self.frame(number).where(equal).collect()]
            assert sorted(ids) == sorted(there), region

    @property
    def partitions(self):
        detail = self.spark.sql(f"DESCRIBE DETAIL delta.`{self.table}`").collect()[0]
        return set(detail.partitionColumns)

    def adds(self):
        """What the log says of each file that ever was added."""
        lines = [
            json.loads(line)
            for path in sorted((self.table / "_delta_log").glob("*.json"))
            for line in path.read_text().split("\n")
            if line
        ]
        return [line["add"] for line in lines if "add" in line]

    def operations(self):
        history = self.spark.sql(f"DESCRIBE HISTORY delta.`{self.table}`").collect()
        return [each.operation for each in sorted(history, key=lambda each: each.version)]


@pytest.fixture(params=["driver", "spark"])
def written_by(request, monkeypatch):
    """Who writes: the driver, or Spark alone, as on other file systems."""
    if request.param == "spark":
        monkeypatch.setattr(DeltaTables, "_is_local", property(lambda _: False))
    return request.param


@pytest.mark.parametrize("vectors", [True, False], ids=["vectors", "no vectors"])
def test_rows_are_in_their_partitions_and_leave_them_when_they_move(
    spark, tmp_path, feed, written_by, vectors
):
    if written_by == "spark" and not vectors:
        pytest.skip("the same to Delta")
    lake = Lake(spark, tmp_path, feed)
    lake.keep((1, 2), BY_ALL, deletion_vectors=vectors)
    target = lake.keep((3,), BY_ALL, deletion_vectors=vectors)
    assert lake.partitions == set(TYPES)
    assert set(lake.operations()) <= ({"CUT"} if written_by == "driver" else {"WRITE", "MERGE"})
    lake.check(3)
    # Compaction has files of one partition only, for us and for Delta, and both go on from it.
    target._maintenance.compact(TABLE)
    spark.sql(f"OPTIMIZE delta.`{lake.table}`")
    lake.keep((4,), BY_ALL, deletion_vectors=vectors)
    lake.check(2, 4)


@pytest.mark.parametrize(
    ("mode", "column", "shown"),
    [
        ("append", "_op", "_op <> 'delete'"),
        ("scd2", "is_current", "is_current"),
        ("soft-delete", "is_deleted", "NOT is_deleted"),
    ],
)
def test_modes_are_partitioned_by_their_own_columns(spark, tmp_path, feed, mode, column, shown):
    lake = Lake(spark, tmp_path, feed)
    lake.keep(range(1, 4), f"{column}, region", mode=mode)
    assert lake.partitions == {column, "region"}
    assert len({each["partitionValues"][column] for each in lake.adds()}) > 1
    rows = lake.frame(3).where(shown).toArrow().to_pylist()
    expected = feed.state(3 * STEP)[TABLE]
    if mode == "append":
        changes = [each for _, each in feed.changes if each["_commit_ts"] <= 3 * STEP]
        puts = [each for each in changes if each["_op"] != "delete"]
        assert len(rows) == len(puts)
        rows = sorted(rows, key=lambda each: each["_commit_ts"])
        rows = [each for each in rows if each["id"] in expected]
    found = {each["id"]: {name: each[name] for name in TYPES} for each in rows}
    assert found == {key: {name: each[name] for name in TYPES} for key, each in expected.items()}


def test_paths_are_written_as_java_writes_them(spark):
    """Delta's VACUUM removed files whose paths were written otherwise."""
    letters = "".join(map(chr, [*range(1, 0x300), *range(0x2000, 0x3100), 0xFEFF, 0x1F600]))
    for letter in (letters.replace("/", "").replace(":", ""), " ", "%25"):
        path = f"p=x{letter}y/part-1.parquet"
        assert in_log(path) == str(spark._jvm.org.apache.hadoop.fs.Path(path).toUri().toString())


def test_a_log_with_a_checkpoint_and_a_vacuum_keeps_what_partitions_show(
    spark, tmp_path, feed, monkeypatch
):
    monkeypatch.setattr("pyspark_tidemark.lake.delta.tables.CHECKPOINT_EVERY", 2)
    monkeypatch.setattr("pyspark_tidemark.lake.delta.checkpoints.CHECKPOINT_EVERY", 2)
    monkeypatch.setattr("pyspark_tidemark.lake.delta.checkpoints.REST", 0.0)
    monkeypatch.setattr(maintenance.Maintenance, "retention_s", lambda *_: 0.0)
    lake = Lake(spark, tmp_path, feed)
    target = lake.keep(range(1, 5), "region, at, price")
    assert list((lake.table / "_delta_log").glob("*.checkpoint.parquet"))
    target._maintenance.compact(TABLE)
    target._maintenance.vacuum(TABLE, None)
    lake.check(4)
    lake.keep((5, 6), "region, at, price")
    lake.check(6)


def test_columns_change_but_one_that_partitions_is_never_dropped(spark, tmp_path, written_by):
    feed = AcknowledgedFeed()
    columns = {"id": pa.int64(), "a": pa.int32(), "region": pa.string()}
    feed.create(0, TABLE, **columns)
    feed.put(5, TABLE, {"id": 1, "a": 1, "region": "x"}, {"id": 2, "a": 2, "region": "y"})
    columns = {"id": pa.int64(), "b": pa.int64(), "area": pa.string()}
    feed.alter(10, TABLE, "…", {"a": "b", "region": "area"}, **columns)
    feed.put(15, TABLE, {"id": 1, "b": 1 << 40, "area": "y"}, {"id": 3, "b": 1, "area": "x"})
    columns |= {"n": pa.int64()}
    feed.alter(20, TABLE, "…", None, {"n": 77}, **columns)
    feed.put(25, TABLE, {"id": 3, "b": 2, "area": "y", "n": 1})
    feed.truncate(30, TABLE)
    feed.put(35, TABLE, {"id": 3, "b": 1, "area": "z", "n": 1})
    columns = {"id": pa.int64(), "area": pa.string(), "n": pa.int64()}
    feed.alter(40, TABLE, "…", {}, {}, ("b",), **columns)
    feed.put(45, TABLE, {"id": 3, "area": "y", "n": 5})
    lake = Lake(spark, tmp_path, feed)
    lake.keep((1, 2, 3), "a, region")
    assert lake.partitions == {"b", "area"}
    lake.keep((4,), "a, region")
    lake.check(1, 2, 3, 4)
    with pytest.raises(SourceError, match=r"ErrPartitionUnsupported.*by b.*dropped"):
        lake.keep((5,), "a, region")
    lake.check(4)
    with pytest.raises(SourceError, match=r"shop\.orders is partitioned by b, area"):
        lake.keep((5,), "id")


def test_a_table_that_is_made_anew_is_partitioned_as_its_columns_allow(spark, tmp_path, written_by):
    feed = AcknowledgedFeed()
    feed.create(0, TABLE, id=pa.int64(), a=pa.int32(), region=pa.string())
    feed.put(5, TABLE, {"id": 1, "a": 1, "region": "x"}, {"id": 2, "a": 1, "region": "x"})
    feed.create_or_replace(10, TABLE, id=pa.int64(), region=pa.string())
    feed.put(15, TABLE, {"id": 1, "region": "y"}, {"id": 2, "region": "z"})
    feed.put(25, TABLE, {"id": 1, "region": "z"})
    lake = Lake(spark, tmp_path, feed)
    lake.keep((1, 2, 3), "a, region")
    assert lake.partitions == {"region"}
    lake.check(3, 2)
    rows = sorted(tuple(each)[:-1] for each in lake.frame(1).collect())
    assert rows == [(1, 1, "x"), (2, 1, "x")]


def test_partitions_that_somebody_else_gives_a_table_are_followed(spark, tmp_path, feed):
    lake = Lake(spark, tmp_path, feed)
    lake.keep((1, 2))
    rows = spark.read.format("delta").load(str(lake.table))
    writer = rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
    writer.partitionBy("region", "seen_at", "day").save(str(lake.table))
    lake.keep((3, 4))
    assert lake.partitions == {"region", "seen_at", "day"}
    assert lake.operations()[-2:] == ["CUT", "CUT"], "without Spark"
    lake.check(4)
    lake.keep((5,), "region, seen_at, day")
    lake.check(5)


def test_a_text_that_delta_reads_as_a_null_stops_the_job_whoever_writes(
    spark, tmp_path, written_by
):
    feed = AcknowledgedFeed()
    feed.create(0, TABLE, id=pa.int64(), region=pa.string())
    feed.put(5, TABLE, {"id": 1, "region": "x"})
    feed.put(15, TABLE, {"id": 1, "region": ""}, {"id": 2, "region": "y"})
    lake = Lake(spark, tmp_path, feed)
    lake.keep((1,), "region")
    with pytest.raises(Exception, match=r"empty text.*in region") as refused:
        lake.keep((2,), "region")
    error = named(refused.value)
    assert (error.code, error.retryable) == ("ErrPartitionUnsupported", False)
    lake.check(1)
