"""Targets follow their upstream's schemas, each DDL a barrier; a crash at any barrier changes nothing."""

import itertools
from datetime import date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.barrier import Policy
from pyspark_tidemark.lake.cut import Cut, CutApplier
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.iceberg.target import IcebergTarget
from pyspark_tidemark.lake.jdbc.manifest import DatabaseManifest
from pyspark_tidemark.lake.jdbc.target import JdbcTarget
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.reading import as_of_cut
from pyspark_tidemark.lake.target import TargetUri
from pyspark_tidemark.lake.targets import database as database_of

from tests.integration.lake.evolving import EvolvingFeed
from tests.integration.lake.test_databases import rows

pytestmark = pytest.mark.timeout(400)

_numbers = itertools.count(1)


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


class Database:
    """A target in a database, opened as often as one likes."""

    def __init__(self, uri):
        self._uri = uri

    def opened(self, feed):
        return DatabaseManifest.opened(database_of(TargetUri.parse(self._uri)), "evolving")

    def target(self):
        return JdbcTarget(database_of(TargetUri.parse(self._uri)), "evolving")

    def rows(self, table, ts):
        return rows(self._uri, table)


class Directory:
    """A target in a directory."""

    def __init__(self, spark, kind, path):
        self._spark, self._kind, self._path = spark, kind, path

    def opened(self, feed):
        return FileManifest.opened(str(self._path), "evolving")

    def target(self):
        return {"delta": DeltaTarget, "iceberg": IcebergTarget}[self._kind](self._spark, str(self._path), "evolving")

    def compact(self, table, held):
        """Join files from before and after columns changed; the newest version still shows these rows."""
        if self._kind == "delta":
            self.target()._maintenance.compact(table)
            history = self._spark.sql(f"DESCRIBE HISTORY delta.`{self._path}/{table.replace('.', '/')}`").collect()
            assert max(history, key=lambda row: row.version).operation == "COMPACT"
            newest = self._spark.read.format("delta").load(f"{self._path}/{table.replace('.', '/')}").collect()
            assert len(newest) == len(held)
            assert {row["id"]: row.asDict() for row in newest} == held

    def rows(self, table, ts):
        return [row.asDict() for row in as_of_cut(self._spark, f"{self._kind}://{self._path}", ts)[table].collect()]


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
    """Apply cuts; at ends in `die_at` the first try dies before the manifest, and another life does it again."""
    dying = set(die_at)
    while True:
        with place.opened(feed) as manifest:
            applier = CutApplier(
                feed, "evolving", place.target(), manifest, policy=policy, source_options={}, parallel=1
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
    feed.put(10, "bank.t", *({"id": n, "name": f"n{n}", "amount": n, "note": None} for n in range(5)))
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
        valid = [row for row in versions if row["valid_from_ts"] <= ts < (row["valid_to_ts"] or 1 << 62)]
        found = {row["id"]: row | {"_commit_ts": row["valid_from_ts"]} for row in valid}
        state = feed.state(ts)["bank.t"]
        assert len(valid) == len(state)
        assert {key: {name: found[key][name] for name in row} for key, row in state.items()} == state
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
    with pytest.raises(SourceError, match=r"ErrSchemaIncompatible.*1099511627776"):
        keep(place, feed, (50,), policy=Policy("upsert", "ignore"))


def test_a_table_that_somebody_else_has_changed_is_an_error(database_place):
    place = database_place
    feed = columns_feed()
    keep(place, feed, (10,))
    other = EvolvingFeed()
    other.create(0, "bank.t", id=pa.int32(), name=pa.string(), amount=pa.int32())
    other.put(15, "bank.t", {"id": 1, "name": "x", "amount": 1})
    with pytest.raises(SourceError, match=r"ErrTargetSchema.*note is dropped"):
        keep(place, other, (15,))
