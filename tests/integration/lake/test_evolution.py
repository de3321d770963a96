"""Targets follow their upstream's schemas, each DDL a barrier;
a crash at any barrier changes nothing.
"""

import itertools
from datetime import date, datetime
from decimal import Decimal

import psycopg
import pyarrow as pa
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake import changes
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.databases.manifest import DatabaseManifest
from pyspark_tidemark.lake.databases.target import DatabaseTarget
from pyspark_tidemark.lake.delta import modes
from pyspark_tidemark.lake.delta.log import listing, replayed
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.iceberg.snapshot import Snapshot
from pyspark_tidemark.lake.iceberg.target import IcebergTarget
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.opening import database as database_of
from pyspark_tidemark.lake.parquet.target import ChangelogTarget
from pyspark_tidemark.lake.reading import as_of_cut
from pyspark_tidemark.lake.schema import Policy
from pyspark_tidemark.sink_uri import SinkUri

from tests.integration.lake.aged import read_changelog
from tests.integration.lake.evolving import EvolvingFeed
from tests.integration.lake.test_databases import rows
from tests.integration.lake.test_names import NAMES, is_told

pytestmark = pytest.mark.timeout(400)

_numbers = itertools.count(1)


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


class Database:
    """A target in a database, opened as often as one likes."""

    spark = None

    def __init__(self, uri):
        self._uri = uri

    def opened(self, feed):
        return DatabaseManifest.opened(database_of(SinkUri.parse(self._uri)), "evolving")

    def target(self):
        return DatabaseTarget(database_of(SinkUri.parse(self._uri)), "evolving")

    def rows(self, table, ts):
        return rows(self._uri, table)


class Directory:
    """A target in a directory."""

    def __init__(self, spark, kind, path):
        self.spark, self._kind, self._path = spark, kind, path

    def opened(self, feed):
        return FileManifest.opened(str(self._path), "evolving")

    def target(self):
        return {"delta": DeltaTarget, "iceberg": IcebergTarget}[self._kind](
            self.spark, str(self._path), "evolving"
        )

    def compact(self, table, held):
        """Join files from before and after columns changed;
        the newest version still shows these rows.
        """
        if self._kind == "delta":
            self.target()._maintenance.compact(table)
            history = self.spark.sql(
                f"DESCRIBE HISTORY delta.`{self._path}/{table.replace('.', '/')}`"
            ).collect()
            assert max(history, key=lambda row: row.version).operation == "COMPACT"
            newest = (
                self.spark.read.format("delta")
                .load(f"{self._path}/{table.replace('.', '/')}")
                .collect()
            )
            assert len(newest) == len(held)
            assert {row["id"]: row.asDict() for row in newest} == held

    def versions(self, table):
        """The ids of the rows that each version showed, or shows,
        to whoever reads the newest one, oldest first.
        """
        if self._kind == "delta":
            path = f"{self._path}/{table.replace('.', '/')}"
            count = self.spark.sql(f"DESCRIBE HISTORY delta.`{path}`").count()
            reader = self.spark.read.format("delta")
            frames = [reader.option("versionAsOf", number).load(path) for number in range(count)]
        else:
            catalog = self.target()._catalog
            found = catalog.load(table)
            snapshots = [entry.snapshotId() for entry in list(found.history())]
            frames = [
                Snapshot(self.spark, catalog, found, snapshot).frame() for snapshot in snapshots
            ]
        return [sorted(row["id"] for row in frame.collect()) for frame in frames]

    def rows(self, table, ts):
        return [
            row.asDict()
            for row in as_of_cut(self.spark, f"{self._kind}://{self._path}", ts)[table].collect()
        ]


@pytest.fixture(params=["postgresql", "mysql"])
def database_place(request, tmp_path):
    return opened_place(request, tmp_path)


@pytest.fixture(params=["postgresql", "mysql", "delta", "iceberg"])
def place(request, tmp_path):
    return opened_place(request, tmp_path)


def opened_place(request, tmp_path):
    if request.param in ("delta", "iceberg"):
        return Directory(request.getfixturevalue("spark"), request.param, tmp_path)
    if request.param == "postgresql":
        return Database(request.getfixturevalue("postgres").create(f"evolving{next(_numbers)}"))
    mariadb = request.getfixturevalue("mariadb")
    mariadb.execute("DROP DATABASE IF EXISTS bank")
    return Database(f"{mariadb.uri}/{mariadb.database('lake')}")


def keep(place, feed, ends, *, die_at=(), policy=Policy("upsert")):  # noqa: B008 - frozen
    """Apply cuts; at ends in `die_at` the first try dies before the manifest,
    and another life does it again.
    """
    dying = set(die_at)
    while True:
        with place.opened(feed) as manifest:
            applier = CutApplier(
                feed,
                "evolving",
                place.target(),
                manifest,
                policy=policy,
                writers=TableWriters(source_options={}, spark=place.spark, parallel=1),
            )
            commit = manifest.commit
            try:
                for end_ts in ends:
                    start_ts = 0 if manifest.last is None else manifest.last.end_ts
                    if end_ts <= start_ts:
                        continue
                    manifest.commit = _dead if end_ts in dying else commit
                    dying.discard(end_ts)
                    applier.apply(Cut(0, start_ts, end_ts))
            except Killed:
                continue
            return


def _dead(record):
    raise Killed


def assert_equal(place, feed, table, ts):
    key = feed.describe(ts).tables[table].key[0]
    found = {row[key]: row for row in place.rows(table, ts)}
    assert found == feed.state(ts)[table]


def columns_feed():
    feed = EvolvingFeed()
    first = {"id": pa.int32(), "name": pa.string(), "amount": pa.int32(), "note": pa.string()}
    feed.create(0, "bank.t", **first)
    feed.put(
        10, "bank.t", *({"id": n, "name": f"n{n}", "amount": n, "note": None} for n in range(5))
    )
    second = first | {"extra": pa.string()}
    feed.alter(20, "bank.t", "ALTER TABLE t ADD COLUMN extra TEXT", **second)
    feed.put(30, "bank.t", {"id": 1, "name": "one", "amount": 1, "note": "x", "extra": "e"})
    third = {"id": pa.int32(), "title": pa.string(), "amount": pa.int64(), "extra": pa.string()}
    query = "ALTER TABLE t RENAME COLUMN `name` TO `title`, MODIFY amount BIGINT, DROP COLUMN note"
    feed.alter(40, "bank.t", query, {"name": "title"}, **third)
    feed.put(45, "bank.t", {"id": 1, "title": "uno", "amount": 3, "extra": "e"})
    feed.put(50, "bank.t", {"id": 2, "title": "two", "amount": 1 << 40, "extra": None})
    feed.delete(55, "bank.t", 3)
    feed.truncate(60, "bank.t")
    feed.put(70, "bank.t", {"id": 2, "title": "again", "amount": 7, "extra": "e"})
    return feed


def test_columns_are_added_renamed_widened_and_dropped_and_a_truncated_table_is_empty(place):
    feed = columns_feed()
    ends = feed.cut_ends(10, 30, 55, 65)
    if isinstance(place, Directory):
        keep(place, feed, [ts for ts in ends if ts <= 55], die_at=(55,))
        place.compact("bank.t", feed.state(55)["bank.t"])
    keep(place, feed, ends, die_at=(30, 55, 65) if isinstance(place, Database) else ())
    if isinstance(place, Directory):
        for ts in (10, 55):
            assert_equal(place, feed, "bank.t", ts)
    assert place.rows("bank.t", 65) == []
    keep(place, feed, (70,))
    assert_equal(place, feed, "bank.t", 70)


def statements_feed():
    """A DDL of each kind that a table can have."""
    feed = EvolvingFeed()
    first = {"id": pa.int32(), "x": pa.int32(), "y": pa.string()}
    feed.create(0, "bank.t", **first)
    feed.put(10, "bank.t", *({"id": n, "x": n, "y": f"y{n}"} for n in range(5)))
    swapped = {"id": pa.int32(), "y": pa.int32(), "x": pa.string()}
    feed.alter(
        20,
        "bank.t",
        "ALTER TABLE t RENAME COLUMN x TO y, RENAME COLUMN y TO x",
        {"x": "y", "y": "x"},
        **swapped,
    )
    feed.put(25, "bank.t", {"id": 5, "y": 5, "x": "y5"})
    feed.delete(26, "bank.t", 1)
    filled = {"id": pa.int64(), "y": pa.int64(), "z": pa.timestamp("us")}
    at = datetime(2024, 1, 1)  # noqa: DTZ001 - a DATETIME
    query = (
        "ALTER TABLE t MODIFY id BIGINT, MODIFY y BIGINT, DROP COLUMN x, ADD COLUMN z DATETIME "
        "DEFAULT '2024-01-01'"
    )
    feed.alter(30, "bank.t", query, None, {"z": at}, **filled)
    feed.put(35, "bank.t", {"id": 6, "y": 1 << 40, "z": None})
    feed.alter(
        40,
        "bank.t",
        "ALTER TABLE t DROP y, ADD y INT",
        None,
        None,
        ("y",),
        **filled | {"y": pa.int32()},
    )
    feed.put(45, "bank.t", {"id": 2, "y": 7, "z": at})
    feed.truncate(50, "bank.t")
    feed.put(55, "bank.t", {"id": 3, "y": 8, "z": at})
    feed.create_or_replace(
        60, "bank.t", id=pa.string(), y=pa.date32(), **{"with a blank": pa.timestamp("us")}
    )
    feed.put(65, "bank.t", {"id": "a", "y": date(2024, 1, 1), "with a blank": at})
    feed.rename(70, "bank.t", "bank.u")
    feed.put(75, "bank.u", {"id": "b", "y": None, "with a blank": None})
    return feed


def test_delta_follows_ddls_of_a_small_table_without_spark_jobs_as_delta_itself_reads_them(
    spark, tmp_path
):
    """Each job took a second and more, at the creation of each table and at each DDL."""
    place, feed = Directory(spark, "delta", tmp_path), statements_feed()
    scheduler = spark.sparkContext._jsc.sc().dagScheduler()
    ends, jobs = feed.cut_ends(10, 25, 26, 35, 45, 55, 65, 75), scheduler.numTotalJobs()
    keep(place, feed, [ts for ts in ends if ts <= 65])
    assert scheduler.numTotalJobs() == jobs
    keep(place, feed, ends)  # behind a new name Delta opens the log once
    for ts in (10, 25, 26, 35, 45, 55):
        assert_equal(place, feed, "bank.t", ts)
    assert_equal(place, feed, "bank.u", 75)

    path = f"{tmp_path}/bank/u"
    spark.sql(f"INSERT INTO delta.`{path}` VALUES ('c', NULL, NULL, 80)")
    spark.sql(f"ALTER TABLE delta.`{path}` ADD COLUMN more INT")
    assert (
        replayed(path).layout
        == listing(spark, place.target()._tables.snapshot("bank.u"), path).layout
    )
    assert spark.read.format("delta").load(path).count() == 3


@pytest.mark.parametrize(
    "arrow_bytes", [changes.ARROW_READ_MAX_BYTES, -1], ids=["by the driver", "by tasks"]
)
@pytest.mark.parametrize("place", ["delta", "iceberg"], indirect=True)
def test_whoever_reads_the_newest_version_sees_a_table_before_it_is_emptied_or_refilled(
    place, arrow_bytes, monkeypatch
):
    monkeypatch.setattr(changes, "ARROW_READ_MAX_BYTES", arrow_bytes)
    columns = {"id": pa.int32(), "name": pa.string()}
    feed = EvolvingFeed()
    feed.create(0, "bank.t", **columns)
    feed.put(10, "bank.t", *({"id": n, "name": f"n{n}"} for n in range(9)))
    feed.delete(20, "bank.t", 3)
    feed.truncate(30, "bank.t")
    feed.put(40, "bank.t", *({"id": n, "name": "again"} for n in range(2, 6)))
    feed.delete(45, "bank.t", 4)
    feed.put(60, "bank.t", {"id": 1, "name": "last"}, {"id": 2, "name": "changed"})
    feed.truncate(70, "bank.t")
    keep(place, feed, (10, 20, 30, 50, 60, 70, 80), die_at=(50, 80))
    before, refilled = [*range(3), *range(4, 9)], [2, 3, 5]
    seen = [ids for ids, _ in itertools.groupby(place.versions("bank.t"))]
    assert seen == [[*range(9)], before, refilled, [1, *refilled], []]
    assert_equal(place, feed, "bank.t", 60)


def retyped_feed():
    """An empty table gets a key, and a column, of types that no widening leads to."""
    feed = EvolvingFeed()
    feed.create(0, "bank.t", id=pa.int32(), v=pa.string())
    feed.put(10, "bank.t", *({"id": n, "v": f"v{n}"} for n in range(3)))
    feed.truncate(20, "bank.t")
    feed.alter(30, "bank.t", "ALTER TABLE t MODIFY id VARCHAR(9)", id=pa.string(), v=pa.string())
    feed.put(35, "bank.t", {"id": "a", "v": "x"}, {"id": "b", "v": "y"})
    feed.put(40, "bank.t", {"id": "a", "v": "z"})
    feed.delete(45, "bank.t", "b")
    feed.delete(46, "bank.t", "a")
    feed.alter(50, "bank.t", "ALTER TABLE t MODIFY v DATE", id=pa.string(), v=pa.date32())
    feed.put(55, "bank.t", {"id": "c", "v": date(2024, 1, 1)})
    return feed


def test_a_table_that_is_empty_takes_columns_of_any_type(place):
    """TRUNCATE, then another type of the key, ended the job for good."""
    feed = retyped_feed()
    ends = feed.cut_ends(10, 35, 40, 46, 55)
    keep(place, feed, [ts for ts in ends if ts <= 40], die_at=(30, 35))
    assert_equal(place, feed, "bank.t", 40)
    keep(place, feed, ends, die_at=(50, 55))
    assert_equal(place, feed, "bank.t", 55)


def identity_feed():
    """Names that change hands: what SQL text and names alone cannot tell apart."""
    feed = EvolvingFeed()
    first = {"id": pa.int32(), "a": pa.string(), "b": pa.string(), "v": pa.int32()}
    feed.create(0, "bank.t", **first)
    feed.put(10, "bank.t", *({"id": n, "a": f"a{n}", "b": f"b{n}", "v": n} for n in range(4)))
    swap = "/* app:1 */ ALTER TABLE t RENAME COLUMN a TO b, RENAME COLUMN b TO a"
    feed.alter(20, "bank.t", swap, {"a": "b", "b": "a"}, **first)
    feed.put(25, "bank.t", {"id": 1, "a": "x", "b": "y", "v": 1})
    shifted = {"id": pa.int32(), "b": pa.string(), "c": pa.string(), "v": pa.int32()}
    shift = "ALTER TABLE t CHANGE a b TEXT, CHANGE b c TEXT"
    feed.alter(30, "bank.t", shift, {"a": "b", "b": "c"}, **shifted)
    feed.put(35, "bank.t", {"id": 2, "b": "x", "c": "y", "v": 2})
    again = "ALTER TABLE t DROP v, ADD v INT DEFAULT 5 COMMENT 'rename column b to v'"
    feed.alter(40, "bank.t", again, None, {"v": 5}, ("v",), **shifted)
    feed.put(45, "bank.t", {"id": 3, "b": "x", "c": "y", "v": 9})
    taken = {"id": pa.int32(), "B": pa.string(), "w": pa.int64(), "c": pa.string(), "v": pa.int32()}
    query = "ALTER TABLE t RENAME COLUMN v TO w, MODIFY w BIGINT, ADD v INT, RENAME COLUMN b TO B"
    feed.alter(50, "bank.t", query, {"v": "w", "b": "B"}, **taken)
    feed.put(55, "bank.t", {"id": 0, "B": "x", "w": 1 << 40, "c": "y", "v": 9})
    return feed


def test_values_stay_with_their_column_whatever_becomes_of_its_name(place):
    feed = identity_feed()
    ends = feed.cut_ends(10, 25, 35, 45, 55)
    for (
        ts
    ) in ends:  # a life a cut; each dies once behind its barrier and its rows, before the manifest
        keep(place, feed, (ts,), die_at=() if ts == 10 else (ts,))
        if all(
            ddl.ts != ts for ddl in feed.ddls
        ):  # the cut that ends at a DDL is still on its near side
            assert_equal(place, feed, "bank.t", ts)
    if isinstance(place, Directory):
        place.compact("bank.t", feed.state(55)["bank.t"])


def test_a_key_and_another_column_change_their_names(place):
    feed, columns = EvolvingFeed(), {"id": pa.int32(), "v": pa.int32()}
    feed.create(0, "bank.t", **columns)
    feed.put(10, "bank.t", *({"id": n, "v": 10 * n} for n in range(4)))
    swap = "ALTER TABLE t RENAME COLUMN id TO v, RENAME COLUMN v TO id"
    feed.alter(20, "bank.t", swap, {"id": "v", "v": "id"}, **dict(reversed(columns.items())))
    feed.put(25, "bank.t", {"v": 1, "id": 7}, {"v": 10, "id": 7})
    feed.delete(28, "bank.t", 2)
    keep(place, feed, feed.cut_ends(10, 25, 28), die_at=(25,))
    found = {row["v"]: row for row in place.rows("bank.t", 28)}
    assert found == feed.state(28)["bank.t"]


def test_a_target_without_recorded_identities_takes_those_from_before_the_ddl(place):
    feed = identity_feed()
    identities = {id(version): version.column_ids for version in feed.versions}
    for version in feed.versions:
        version.column_ids = {}
    keep(place, feed, (10,))
    for version in feed.versions:
        version.column_ids = identities[id(version)]
    keep(place, feed, (20, 25, 30, 35), die_at=(25, 35))
    assert_equal(place, feed, "bank.t", 35)


def test_columns_have_any_name_that_the_upstream_allows(place):
    names = ("a b", "c,d;{}()=", "x.y", 'it\'s `"quoted"`', "Größe", "order", "n" * 60)
    feed = EvolvingFeed()
    columns = {"the id": pa.int32(), **{name: pa.string() for name in names}}
    feed.create(0, "bank.t", **columns)
    feed.put(
        10, "bank.t", *({"the id": n, **{name: f"{name}{n}" for name in names}} for n in range(3))
    )
    feed.put(15, "bank.t", {"the id": 1, **dict.fromkeys(names, "new")})
    feed.alter(
        20,
        "bank.t",
        "ALTER …",
        {"a b": "b a"},
        **{"b a" if name == "a b" else name: kind for name, kind in columns.items()},
        **{"e f": pa.int64()},
    )
    feed.put(
        25,
        "bank.t",
        {"the id": 2, **{"b a" if name == "a b" else name: "z" for name in names}, "e f": 7},
    )
    keep(place, feed, feed.cut_ends(10, 15, 25))
    found = {row["the id"]: row for row in place.rows("bank.t", 25)}
    assert found == feed.state(25)["bank.t"]


ADDED = {
    "status": (pa.string(), "it's \\ new"),
    "small": (pa.int8(), 7),
    "price": (pa.decimal128(10, 2), Decimal("1.50")),
    "day": (pa.date32(), date(2020, 2, 29)),
    "at": (pa.timestamp("us"), datetime(2020, 1, 2, 3, 4, 5, 60)),  # noqa: DTZ001 - a DATETIME has none
    "raw": (pa.binary(), b"\0'\xff"),
    "plain": (pa.string(), None),
}


def defaults_feed():
    feed = EvolvingFeed()
    first = {"id": pa.int32(), "name": pa.string()}
    feed.create(0, "bank.t", **first)
    feed.put(10, "bank.t", *({"id": n, "name": f"n{n}"} for n in range(4)))
    feed.delete(15, "bank.t", 3)
    values = {column: value for column, (_, value) in ADDED.items() if value is not None}
    types = {column: found for column, (found, _) in ADDED.items()}
    feed.alter(20, "bank.t", "ALTER TABLE t ADD COLUMN …", None, values, **first, **types)
    feed.put(30, "bank.t", {"id": 1, "name": "x"} | dict.fromkeys(ADDED))
    feed.put(40, "bank.t", {"id": 9, "name": "y"} | dict.fromkeys(ADDED))
    feed.put(50, "bank.t", {"id": 0, "name": "z", "plain": None} | values)
    return feed


def test_rows_older_than_a_column_hold_its_default_also_after_a_death_at_the_barrier(place):
    feed = defaults_feed()
    keep(place, feed, feed.cut_ends(15, 25), die_at=(25,))
    assert_equal(place, feed, "bank.t", 25)
    keep(place, feed, (50,))
    assert_equal(place, feed, "bank.t", 50)


def test_versions_older_than_a_column_hold_its_default_too(spark, tmp_path):
    place, feed, policy = Directory(spark, "delta", tmp_path), defaults_feed(), Policy("scd2")
    place.target = lambda: DeltaTarget(spark, str(tmp_path), "evolving", mode="scd2")
    keep(place, feed, feed.cut_ends(15, 25), die_at=(25,), policy=policy)
    keep(place, feed, (50,), policy=policy)
    versions = place.rows("bank.t", 50)
    for ts in (25, 50):
        valid = [
            row for row in versions if row["valid_from_ts"] <= ts < (row["valid_to_ts"] or 1 << 62)
        ]
        found = {row["id"]: row | {"_commit_ts": row["valid_from_ts"]} for row in valid}
        state = feed.state(ts)["bank.t"]
        assert len(valid) == len(state)
        assert {
            key: {name: found[key][name] for name in row} for key, row in state.items()
        } == state
    (gone,) = [row for row in versions if row["id"] == 3]
    assert (gone["valid_to_ts"], gone["status"], gone["small"]) == (15, "it's \\ new", 7)


def tables_feed():
    feed = EvolvingFeed()
    for name in ("bank.a", "bank.b"):
        feed.create(0, name, id=pa.int64(), v=pa.string())
        feed.put(10, name, {"id": 1, "v": name}, {"id": 2, "v": name})
    feed.drop(20, "bank.a")
    feed.create(30, "bank.c", id=pa.int64(), v=pa.string())
    feed.put(40, "bank.c", {"id": 5, "v": "c"})
    feed.create(50, "bank.a", id=pa.int64(), v=pa.string())
    feed.put(60, "bank.a", {"id": 9, "v": "new"})
    return feed


@pytest.mark.parametrize("on_drop", ["keep", "drop"])
def test_tables_come_go_and_come_again(place, on_drop):
    feed = tables_feed()
    policy = Policy("upsert", on_drop=on_drop)
    if isinstance(place, Directory):
        if on_drop == "keep":
            pytest.skip("databases show it, and it is the same code")
        keep(place, feed, feed.cut_ends(10, 60), die_at=(60,), policy=policy)
        assert place.rows("bank.a", 60) == [{"id": 9, "v": "new", "_commit_ts": 60}]
        return
    keep(place, feed, feed.cut_ends(10, 25), die_at=(25,), policy=policy)
    if on_drop == "keep":
        assert len(place.rows("bank.a", 0)) == 2
    keep(place, feed, feed.cut_ends(40, 60), die_at=(40, 60), policy=policy)
    for table in ("bank.a", "bank.b", "bank.c"):
        assert_equal(place, feed, table, 60)


def recreated_feed():
    """What stopped all tables of a changefeed: each table of the name has other types,
    keys and columns.
    """
    feed = EvolvingFeed()
    for name in ("bank.a", "bank.b"):
        feed.create(0, name, id=pa.int32(), v=pa.string())
        feed.put(10, name, {"id": 1, "v": "old"}, {"id": 2, "v": "old"})
    feed.drop(20, "bank.a")
    second = {
        "id": pa.decimal128(20, 0),
        "y": pa.decimal128(38, 10),
        "at": pa.timestamp("us"),
        "V": pa.int64(),
    }
    feed.create(30, "bank.a", **second)
    at = datetime(2026, 1, 2, 3, 4, 5, 60)  # noqa: DTZ001 - a DATETIME has none
    feed.put(40, "bank.a", {"id": Decimal(1 << 63), "y": Decimal("1.5000000000"), "at": at, "V": 7})
    feed.put(40, "bank.b", {"id": 3, "v": "on"})
    feed.drop(45, "bank.a")
    feed.create(50, "bank.a", code=pa.string(), id=pa.int64())
    feed.put(55, "bank.a", {"code": "k", "id": 1}, {"code": "l", "id": 1})
    feed.create_or_replace(60, "bank.a", id=pa.int32(), v=pa.string())
    feed.put(70, "bank.a", {"id": 9, "v": "new"})
    feed.put(70, "bank.b", {"id": 4, "v": "on"})
    feed.create_or_replace(80, "bank.a", id=pa.int32(), v=pa.string())
    feed.put(90, "bank.a", {"id": 8, "v": "again"})
    return feed


def dying_after_replace(place, ends):
    """Lives that die right after a table of the target was replaced; the last one does not."""
    original, deaths = place.target, set(ends)

    def target():
        found = original()
        replace = found.replace

        def replaced(table, ts, change):
            replace(table, ts, change)
            if ts in deaths:
                deaths.discard(ts)
                raise Killed

        found.replace = replaced
        return found

    place.target = target
    return deaths


def test_a_table_dropped_and_made_again_is_a_new_one_whatever_its_columns_and_the_others_go_on(
    place,
):
    feed = recreated_feed()
    deaths = dying_after_replace(place, (30, 60))
    for end_ts, part in (
        (10, (10,)),
        (40, (20, 30, 40)),
        (55, (45, 50, 55)),
        (70, (60, 70)),
        (90, (80, 90)),
    ):
        keep(place, feed, part, die_at=part[-1:])
        for table in ("bank.a", "bank.b"):
            assert_equal(place, feed, table, end_ts)
    assert not deaths, "each death was died"
    if isinstance(place, Directory):
        for end_ts in (10, 40, 55, 70, 90):  # cuts before show the tables of their time
            assert_equal(place, feed, "bank.a", end_ts)


@pytest.mark.parametrize("kind", ["delta", "iceberg", "parquet"])
def test_a_changelog_keeps_what_it_had_of_the_earlier_table_and_each_cut_can_be_read(
    spark, tmp_path, kind
):
    feed = recreated_feed()
    targets = {
        "delta": lambda: DeltaTarget(spark, str(tmp_path), "evolving", mode="append"),
        "iceberg": lambda: IcebergTarget(spark, str(tmp_path), "evolving", mode="append"),
        "parquet": lambda: ChangelogTarget(spark, str(tmp_path)),
    }
    place = Directory(spark, kind, tmp_path)
    place.target = targets[kind]
    deaths = dying_after_replace(place, (30, 60))
    keep(place, feed, feed.cut_ends(10, 40, 55, 70, 90), die_at=(40, 70), policy=Policy("append"))
    assert not deaths
    for end_ts, codes in (
        (10, [1, 2]),
        (40, [Decimal(1 << 63)]),
        (55, [1, 1]),
        (70, [9]),
        (90, [8]),
    ):
        found = [row for row in place.rows("bank.a", end_ts) if row["_commit_ts"] == end_ts]
        assert sorted(row["id"] for row in found) == codes
    newest = place.rows("bank.a", 90)
    assert len(newest) == (1 if kind == "parquet" else 7)
    for end_ts in (10, 40, 55, 70, 90) if kind == "parquet" else ():
        for name in feed.tables_at(end_ts):
            found = [
                (row["_commit_ts"], row["_seq"]) for row in read_changelog(tmp_path, name, end_ts)
            ]
            assert sorted(found) == [
                (row["_commit_ts"], row["_seq"]) for row in feed.history(name, end_ts)
            ]


def test_versions_of_the_earlier_table_end_and_stay(spark, tmp_path):
    feed, policy = recreated_feed(), Policy("scd2")
    place = Directory(spark, "delta", tmp_path)
    place.target = lambda: DeltaTarget(spark, str(tmp_path), "evolving", mode="scd2")
    keep(place, feed, feed.cut_ends(10, 40, 55, 70, 90), die_at=(40,), policy=policy)
    current = [row for row in place.rows("bank.a", 90) if row["is_current"]]
    assert [(row["id"], row["v"]) for row in current] == [(8, "again")]
    assert len(place.rows("bank.a", 90)) == 7


@pytest.mark.parametrize("mode", ["append", "scd2"])
def test_history_in_a_database_stays_under_another_name_where_columns_cannot_become_the_new_ones(
    database_place, mode
):
    place, feed = database_place, recreated_feed()
    place.target = lambda: DatabaseTarget(
        database_of(SinkUri.parse(place._uri)), "evolving", mode=mode
    )
    keep(place, feed, feed.cut_ends(10, 40, 55, 70, 90), die_at=(40, 70), policy=Policy(mode))
    assert [
        row["id"]
        for row in place.rows("bank.a", 90)
        if row.get("is_current", row.get("_commit_ts") == 90)
    ] == [8]
    assert sorted(row["id"] for row in place.rows("bank.a__until_30", 0)) == [1, 2]
    assert [row["id"] for row in place.rows("bank.a__until_50", 0)] == [Decimal(1 << 63)]
    assert sorted(row["code"] for row in place.rows("bank.a__until_60", 0)) == ["k", "l"]


def odd_names_feed():
    """Names that stopped a target, or that its job took for something else."""
    feed = EvolvingFeed()
    first = {"id": pa.int32(), "a b": pa.string(), "x.y": pa.int32(), "p,q;{r}(s)=t": pa.string()}
    feed.create(0, "bank.odd", **first)
    feed.put(
        10, "bank.odd", *({"id": n, "a b": "a", "x.y": n, "p,q;{r}(s)=t": "p"} for n in range(3))
    )
    plain = {"id": pa.int32(), "v": pa.string()}
    feed.create(0, "bank.t", **plain)
    feed.put(10, "bank.t", {"id": 1, "v": "a"}, {"id": 2, "v": "b"})
    feed.alter(
        20, "bank.t", "ALTER TABLE t RENAME COLUMN v TO V", {"v": "V"}, id=pa.int32(), V=pa.string()
    )
    feed.put(25, "bank.t", {"id": 2, "V": "c"}, {"id": 3, "V": "d"})
    second = {"id": pa.int32(), "V": pa.string(), "m n.o": pa.int32()}
    feed.alter(
        30, "bank.t", "ALTER TABLE t ADD `m n.o` INT DEFAULT 7", None, {"m n.o": 7}, **second
    )
    third = {
        "ID": pa.int32(),
        "A b": pa.string(),
        "x z.w": pa.int64(),
        "p,q;{r}(s)=t": pa.string(),
        "=": pa.int32(),
    }
    query = (
        "ALTER TABLE odd CHANGE id ID INT, RENAME COLUMN `a b` TO `A b`, CHANGE `x.y` `x z.w` "
        "BIGINT, ADD `=` INT"
    )
    feed.alter(40, "bank.odd", query, {"id": "ID", "a b": "A b", "x.y": "x z.w"}, **third)
    feed.put(50, "bank.odd", {"ID": 1, "A b": "b", "x z.w": 1 << 40, "p,q;{r}(s)=t": None, "=": 5})
    feed.put(50, "bank.t", {"id": 1, "V": "e", "m n.o": 8})
    feed.delete(55, "bank.odd", 2)
    feed.create_or_replace(
        60, "bank.t", **{"id": pa.int32(), "e f": pa.string(), "g.h": pa.string()}
    )
    feed.put(70, "bank.t", {"id": 5, "e f": "e", "g.h": "g"})
    feed.put(80, "bank.t", {"id": 5, "e f": "E", "g.h": "G"})
    return feed


def test_columns_of_odd_names_and_names_that_differ_in_case_only_are_followed(place):
    feed = odd_names_feed()
    for part in ((10,), (20, 25), (30, 40, 50, 55), (60, 70), (80,)):
        keep(place, feed, part, die_at=part[-1:])
        for table in ("bank.odd", "bank.t"):
            assert_equal(place, feed, table, part[-1])
    if isinstance(place, Directory):
        for end_ts in (10, 25, 55):
            assert_equal(place, feed, "bank.t", end_ts)


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_lakes_of_files_hold_every_name_that_check_names_does_not_refuse(spark, tmp_path, kind):
    names = {name.lower(): name for name in (*NAMES, "select *", "a.b.c", "element", "key")}
    columns = [
        name
        for name in names.values()
        if not is_told(SinkUri(kind, str(tmp_path)), ("bank", "t"), [name])
    ]
    assert len(columns) == len(names)
    place, feed = Directory(spark, kind, tmp_path), EvolvingFeed()
    feed.create(0, "bank.t", id=pa.int32(), **dict.fromkeys(columns, pa.string()))
    feed.put(
        10,
        "bank.t",
        *({"id": number} | {name: f"{number} {name}" for name in columns} for number in range(3)),
    )
    feed.put(20, "bank.t", {"id": 1} | {name: name[::-1] for name in columns})
    keep(place, feed, (10, 20))
    assert_equal(place, feed, "bank.t", 20)


def test_tables_of_any_name_have_views_and_none_is_shown_as_another(spark, tmp_path):
    place, feed = Directory(spark, "delta", tmp_path), EvolvingFeed()
    names = ("bank.a b", "bank./*", "x.y_z", "x_y.z", "bank.`")
    for number, name in enumerate(names):
        feed.create(0, name, id=pa.int32())
        feed.put(10, name, {"id": number})
    keep(place, feed, (10,))
    for number, name in enumerate(names):
        assert [row["id"] for row in place.rows(name, 10)] == [number]
    for number, view in ((0, "`bank_a b`"), (1, "`bank_/*`"), (4, "`bank_```")):
        assert [row["id"] for row in spark.table(view).collect()] == [number]
    assert not spark.catalog.tableExists("x_y_z")


def rekeyed_feed():
    """A table whose key is about to become another one."""
    feed = EvolvingFeed()
    feed.create(0, "bank.t", id=pa.int32(), name=pa.string())
    feed.put(10, "bank.t", {"id": 1, "name": "one"}, {"id": 2, "name": "two"})
    return feed


def test_a_new_key_on_a_new_column_whose_values_nobody_tells_is_an_error_with_its_name(place):
    feed = rekeyed_feed()
    columns = {"uid": pa.int32(), "id": pa.int32(), "name": pa.string()}
    query = "ALTER TABLE t ADD uid INT AUTO_INCREMENT, DROP PRIMARY KEY, ADD PRIMARY KEY (uid)"
    feed.alter(20, "bank.t", query, **columns)
    keep(place, feed, (10, 20))
    for evolution in ("evolve", "ignore"):
        with pytest.raises(
            SourceError, match=r"ErrKeyUnknown.*bank\.t: its key is uid now.*new changefeed"
        ) as caught:
            keep(place, feed, (30,), policy=Policy("upsert", evolution))
        assert not caught.value.retryable
    assert sorted(row["id"] for row in place.rows("bank.t", 20)) == [1, 2]


def test_a_new_key_on_a_new_column_of_an_empty_table_is_followed(place):
    feed = rekeyed_feed()
    feed.truncate(15, "bank.t")
    feed.alter(20, "bank.t", "ALTER TABLE t …", uid=pa.int32(), id=pa.int32(), name=pa.string())
    feed.put(30, "bank.t", {"uid": 7, "id": 1, "name": "one"}, {"uid": 8, "id": 1, "name": "one"})
    feed.put(40, "bank.t", {"uid": 7, "id": 2, "name": "x"})
    keep(place, feed, (10, 15, 20, 30, 40), die_at=(30, 40))
    assert_equal(place, feed, "bank.t", 40)


def test_a_new_key_on_columns_that_were_there_is_followed(place):
    """A database has the key as an index: upserts by the old one would be refused,
    or hit other rows.
    """
    feed = rekeyed_feed()
    feed.put(15, "bank.t", {"id": 3, "name": "n3"})  # written by the job that crosses the barrier
    feed.alter(
        20,
        "bank.t",
        "ALTER TABLE t DROP PRIMARY KEY, ADD PRIMARY KEY (name)",
        id=pa.int32(),
        name=pa.string(),
    )
    change_by_name(feed, "bank.t")
    keep(place, feed, (10, 15, 20, 30))
    assert_equal(place, feed, "bank.t", 30)


@pytest.mark.parametrize("place", ["delta", "iceberg"], indirect=True)
def test_conditions_on_columns_that_have_changed_names_find_their_rows(place):
    """Iceberg's files were left out by what they say of the column that had the name before; and
    types that differ ended the job.
    """
    feed, price = EvolvingFeed(), pa.decimal128(10, 2)
    first = {"id": pa.int32(), "a": pa.int32(), "b": pa.int32(), "c": price, "d": pa.string()}
    feed.create(0, "bank.t", **first)
    some = [
        {"id": n, "a": n, "b": 100 * n, "c": Decimal(n).quantize(Decimal("0.01")), "d": f"d{n}"}
        for n in range(1, 4)
    ]
    feed.put(10, "bank.t", *some)
    feed.put(12, "bank.t", some[0])
    swapped = {"id": pa.int32(), "b": pa.int32(), "a": pa.int32(), "d": price, "c": pa.string()}
    names = {"a": "b", "b": "a", "c": "d", "d": "c"}
    feed.alter(20, "bank.t", "ALTER TABLE t …", names, **swapped)
    feed.put(25, "bank.t", {"id": 4, "a": 400, "b": 4, "c": "d4", "d": Decimal("4.00")})
    both = {**swapped, "e": pa.int32()}
    feed.alter(30, "bank.t", "ALTER TABLE t ADD e INT DEFAULT 7", None, {"e": 7}, **both)
    keep(place, feed, (10, 12, 20, 25, 30, 35))
    for ts in (25, 35):
        table = as_of_cut(place.spark, f"{place._kind}://{place._path}", ts)["bank.t"]
        for condition in ("a = 200", "b = 2", "c = 'd2'", "d = 2.00", "a > 150 AND b < 3"):
            assert [row["id"] for row in table.where(condition).collect()] == [2], condition
    assert_equal(place, feed, "bank.t", 35)


def test_rows_that_went_by_a_former_key_stay_away(place):
    """Iceberg's deletes name the key of their time, which is no column any more in the end."""
    feed = rekeyed_feed()
    feed.put(12, "bank.t", {"id": 1, "name": "uno"}, {"id": 3, "name": "drei"})
    feed.delete(15, "bank.t", 3)
    feed.alter(20, "bank.t", "ALTER TABLE t …", id=pa.int32(), name=pa.string())
    feed.versions[-1].key = "name"
    state = feed._state(20)
    state["bank.t"] = {row["name"]: row for row in state["bank.t"].values()}
    feed._change("bank.t", "delete", 30, 0, {"id": 2, "name": "two"})
    feed._change("bank.t", "insert", 30, 1, {"id": 1, "name": "four"})
    rows = feed._state(30)["bank.t"]
    del rows["two"]
    rows["four"] = {"id": 1, "name": "four", "_commit_ts": 30}
    keep(place, feed, (10, 12, 15, 20, 30))
    assert_equal(place, feed, "bank.t", 30)
    feed.alter(40, "bank.t", "ALTER TABLE t DROP id", None, None, ("id",), name=pa.string())
    feed.versions[-1].key = "name"
    feed._change("bank.t", "delete", 45, 0, {"name": "uno"})
    del feed._state(45)["bank.t"]["uno"]
    keep(place, feed, (40, 45))
    assert_equal(place, feed, "bank.t", 45)


def test_columns_may_be_called_what_the_job_calls_its_own(place):
    names = ("_first_op", "_last", "_file", "_sequence", "_deleted", "_ends", "_row", "_first")
    feed = EvolvingFeed()
    columns = {"_row": pa.int32(), **{name: pa.string() for name in names if name != "_row"}}
    feed.create(0, "bank.t", **columns)
    for ts in (10, 20):
        new = [{"_row": n} | {c: f"{c} {ts}" for c in columns if c != "_row"} for n in range(3)]
        feed.put(ts, "bank.t", *new[: 3 if ts == 10 else 2])
    keep(place, feed, (10, 20))
    found = {row["_row"]: row for row in place.rows("bank.t", 20)}
    assert found == feed.state(20)["bank.t"]


@pytest.mark.parametrize("place", ["delta", "iceberg"], indirect=True)
def test_so_may_those_of_large_cuts(place, monkeypatch):
    monkeypatch.setattr(changes, "ARROW_READ_MAX_BYTES", -1)
    test_columns_may_be_called_what_the_job_calls_its_own(place)


@pytest.mark.parametrize("way", ["driver", "MERGE", "postgresql", "mysql"])
def test_so_may_those_of_histories(request, tmp_path, monkeypatch, way):
    place = opened_place(_Param(request, "delta" if way in ("driver", "MERGE") else way), tmp_path)
    if isinstance(place, Database):
        place.target = lambda: DatabaseTarget(
            database_of(SinkUri.parse(place._uri)), "evolving", mode="scd2"
        )
    else:
        monkeypatch.setattr(modes, "MOST_SEARCHED_BYTES", -1 if way == "MERGE" else 1 << 20)
        place.target = lambda: DeltaTarget(place.spark, str(tmp_path), "evolving", mode="scd2")
    feed = EvolvingFeed()
    feed.create(0, "bank.t", id=pa.int32(), _ends=pa.string(), _first=pa.string(), _row=pa.string())
    for ts in (10, 20):
        feed.put(ts, "bank.t", {"id": 1, "_ends": f"e{ts}", "_first": f"f{ts}", "_row": f"r{ts}"})
    keep(place, feed, (10, 20), policy=Policy("scd2"))
    found = sorted(
        (r["valid_from_ts"], r["_ends"], r["_first"], r["_row"]) for r in place.rows("bank.t", 20)
    )
    assert found == [(10, "e10", "f10", "r10"), (20, "e20", "f20", "r20")]


class _Param:
    """A request with another parameter."""

    def __init__(self, request, param):
        self.param, self.getfixturevalue = param, request.getfixturevalue


def test_a_column_that_is_no_key_any_more_takes_nulls(place):
    """A database kept it NOT NULL, and refused the row."""
    feed = rekeyed_feed()
    feed.alter(20, "bank.t", "ALTER TABLE t …", id=pa.int32(), name=pa.string())
    change_by_name(feed, "bank.t")
    feed._change("bank.t", "insert", 40, 0, {"id": None, "name": "four"})
    feed._state(40)["bank.t"]["four"] = {"id": None, "name": "four", "_commit_ts": 40}
    keep(place, feed, (10, 20, 30, 40), die_at=(40,))
    assert_equal(place, feed, "bank.t", 40)


def test_versions_of_rows_may_have_nulls_in_a_later_key_or_be_equal_in_it(database_place):
    """A primary key was refused by what had ended, and the job with it."""
    feed, policy = EvolvingFeed(), Policy("scd2")
    database_place.target = lambda: DatabaseTarget(
        database_of(SinkUri.parse(database_place._uri)), "evolving", mode="scd2"
    )
    feed.create(0, "bank.t", id=pa.int32(), name=pa.string())
    feed.put(10, "bank.t", *({"id": n, "name": None if n < 2 else "same"} for n in range(4)))
    feed.put(15, "bank.t", *({"id": n, "name": f"n{n}"} for n in range(4)))
    for ts, key in ((20, "name"), (30, "id"), (40, "name")):
        feed.alter(ts, "bank.t", "ALTER TABLE t …", id=pa.int32(), name=pa.string())
        feed.versions[-1].key = key
    feed._change("bank.t", "update", 50, 0, {"id": 7, "name": "n1"})
    feed._change("bank.t", "insert", 50, 1, {"id": None, "name": "new"})
    keep(database_place, feed, (10, 15, 20, 30, 40, 50), die_at=(30, 50), policy=policy)
    rows = database_place.rows("bank.t", 50)
    assert len(rows) == 4 + 4 + 2
    current = {row["name"]: row["id"] for row in rows if row["is_current"]}
    assert current == {"n0": 0, "n1": 7, "n2": 2, "n3": 3, "new": None}


def test_a_new_key_and_a_new_name_in_one_statement_are_followed(database_place):
    feed = rekeyed_feed()
    feed.rename(20, "bank.t", "bank.u")
    change_by_name(feed, "bank.u")
    keep(database_place, feed, (10, 20, 30), die_at=(30,))
    assert_equal(database_place, feed, "bank.u", 30)


def change_by_name(feed, table):
    """From 20 on the table's key is its name; two rows change by it at 30,
    and have the same id then.
    """
    feed.versions[-1].key = "name"
    state = feed._state(20)
    state[table] = {row["name"]: row for row in state[table].values()}
    feed._change(table, "update", 30, 0, {"id": 2, "name": "one"})
    feed._change(table, "insert", 30, 1, {"id": 2, "name": "three"})
    rows = feed._state(30)[table]
    rows["one"] = {"id": 2, "name": "one", "_commit_ts": 30}
    rows["three"] = {"id": 2, "name": "three", "_commit_ts": 30}


def test_names_that_postgresql_would_cut_off_are_refused_before_anything_is_written(postgres):
    place = Database(postgres.create(f"evolving{next(_numbers)}"))
    feed = EvolvingFeed()
    feed.create(0, "bank.t", **{"id": pa.int32(), "é" * 32: pa.string()})
    feed.put(10, "bank.t", {"id": 1, "é" * 32: "x"})
    with pytest.raises(
        SourceError,
        match=r"ErrNameUnsupported.*columns of bank\.t: é+ has more than 63 bytes.*--columns",
    ):
        keep(place, feed, (10,))


def test_a_renamed_table_goes_on_under_its_new_name(place):
    feed = EvolvingFeed()
    feed.create(0, "bank.old", id=pa.int64(), v=pa.string())
    feed.put(10, "bank.old", {"id": 1, "v": "a"})
    feed.rename(20, "bank.old", "bank.new")
    feed.put(30, "bank.new", {"id": 1, "v": "b"}, {"id": 2, "v": "c"})
    if isinstance(place, Directory) and isinstance(place.target(), IcebergTarget):
        with pytest.raises(SourceError, match="ErrRenameUnsupported"):
            keep(place, feed, feed.cut_ends(10, 30))
        return
    keep(place, feed, feed.cut_ends(10, 30), die_at=(30,))
    assert_equal(place, feed, "bank.new", 30)


def test_a_table_moves_to_a_schema_where_its_names_are_another_tables(postgres):
    """`RENAME TABLE shop.t TO bank.u` while there are shop.u and an index bank.t_pkey, as tables
    that an earlier version made have them.
    """
    place = Database(postgres.create(f"evolving{next(_numbers)}"))
    feed = EvolvingFeed()
    names = ("bank.t", "shop.t", "shop.u")
    for name in names:
        feed.create(0, name, id=pa.int64(), v=pa.string())
        feed.put(10, name, {"id": 1, "v": name})
    feed.rename(20, "bank.t", "bank.kept")
    feed.rename(30, "shop.t", "bank.u")
    feed.rename(40, "shop.u", "bank.t")
    feed.put(50, "bank.t", {"id": 2, "v": "a"})
    feed.put(50, "bank.u", {"id": 2, "v": "b"})
    keep(place, feed, (10,))
    with psycopg.connect(place._uri) as connection:
        found = connection.execute(
            "SELECT schemaname, tablename, indexname FROM pg_indexes "
            "WHERE schemaname IN ('bank', 'shop')"
        )
        for schema, table, index in found.fetchall():
            connection.execute(f'ALTER INDEX {schema}."{index}" RENAME TO {table}_pkey')
    keep(place, feed, (20, 30, 40, 50), die_at=(30, 40))
    for name in ("bank.kept", "bank.t", "bank.u"):
        assert_equal(place, feed, name, 50)


def test_by_policy_a_ddl_is_an_error_or_leaves_the_target_as_it_is(database_place):
    place = database_place
    feed = columns_feed()
    with pytest.raises(SourceError, match=r"ErrSchemaChanged.*bank\.t"):
        keep(place, feed, (10, 20, 30), policy=Policy("upsert", "exception"))
    with place.opened(feed) as manifest:
        assert manifest.last.end_ts == 20, "everything before the DDL is committed"
    keep(place, feed, (30, 40, 45), policy=Policy("upsert", "ignore"))
    found = {row["id"]: row for row in place.rows("bank.t", 45)}
    assert found[1] == {"id": 1, "name": None, "amount": 3, "note": None, "_commit_ts": 45}
    assert found[2]["name"] == "n2"
    fault = r"ErrSchemaIncompatible.*column amount: int64 into int32"
    with pytest.raises(SourceError, match=fault) as refused:
        keep(place, feed, (50,), policy=Policy("upsert", "ignore"))
    assert str(1 << 40) not in str(refused.value), "errors have no values of rows"


def test_a_table_that_somebody_else_has_changed_is_an_error(database_place):
    place = database_place
    feed = columns_feed()
    keep(place, feed, (10,))
    other = EvolvingFeed()
    other.create(0, "bank.t", id=pa.int32(), name=pa.string(), amount=pa.int32())
    other.put(15, "bank.t", {"id": 1, "name": "x", "amount": 1})
    with pytest.raises(SourceError, match=r"ErrTargetSchema.*note is dropped"):
        keep(place, other, (15,))


@pytest.mark.parametrize("place", ["delta", "iceberg"], indirect=True)
def test_a_key_that_is_narrower_upstream_is_found_among_wider_ones(place):
    """With `--schema-evolution ignore` the lake keeps its type; files have values that the new one
    has not.
    """
    feed = EvolvingFeed()
    feed.create(0, "bank.t", id=pa.int64(), v=pa.int32())
    feed.put(5, "bank.t", {"id": 2**40, "v": 1}, {"id": 3, "v": 1}, {"id": 4, "v": 1})
    feed.delete(15, "bank.t", 2**40)
    feed.alter(20, "bank.t", "ALTER TABLE t MODIFY id INT", id=pa.int32(), v=pa.int32())
    feed.put(25, "bank.t", {"id": 3, "v": 2}, {"id": 9, "v": 2})
    feed.delete(26, "bank.t", 4)
    keep(place, feed, (10, 20, 30), policy=Policy("upsert", "ignore"))
    rows = {(row["id"], row["v"]) for row in place.rows("bank.t", 30)}
    assert rows == {(3, 2), (9, 2)}


@pytest.mark.parametrize("place", ["iceberg"], indirect=True)
def test_a_table_whose_rows_are_all_gone_is_rewritten_to_nothing(place):
    feed = EvolvingFeed()
    feed.create(0, "bank.t", id=pa.int64(), v=pa.int32())
    feed.put(5, "bank.t", *[{"id": key, "v": key} for key in range(5)])
    for key in range(5):
        feed.delete(15 + key, "bank.t", key)
    feed.put(25, "bank.t", {"id": 3, "v": 33})
    keep(place, feed, (10, 20))
    place.target()._maintenance.rewrite("bank.t")
    table = place.target()._catalog.load("bank.t")
    assert table.currentSnapshot().operation() == "replace"
    assert int(table.currentSnapshot().summary().get("total-data-files")) == 0
    assert place.rows("bank.t", 20) == []
    keep(place, feed, (30,))
    assert [(row["id"], row["v"]) for row in place.rows("bank.t", 30)] == [(3, 33)]
