"""A Delta lake on a disk of this machine as its job writes it without Spark: no JVM runs here.

What the tasks of a cut write, they write in this process.
"""

import errno
import functools
import json
import os
import pickle
import random
import shutil
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.changes import ByTasks, Counted
from pyspark_tidemark.lake.checksum import hexadecimal
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.delta import inserted, tables, task_writers
from pyspark_tidemark.lake.delta import log as delta_log
from pyspark_tidemark.lake.delta import target as delta
from pyspark_tidemark.lake.delta.evolution import evolved
from pyspark_tidemark.lake.delta.files import DeletionVectors, pieces
from pyspark_tidemark.lake.delta.log import commit_info, commit_on_disk, replayed
from pyspark_tidemark.lake.delta.tables import DeltaTables
from pyspark_tidemark.lake.delta.target import DeltaConnector, DeltaTarget
from pyspark_tidemark.lake.keys import KeyIndex
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.schema import Policy, SchemaChange
from pyspark_tidemark.lake.target import StoredTable
from pyspark_tidemark.sink_uri import SinkUri

from tests.integration.lake.evolving import EvolvingFeed

CUTS = (10, 20, 30, 40)


class NoSpark:
    """A session of no JVM."""

    sparkContext = SimpleNamespace(_gateway=SimpleNamespace(_gateway_client=None))  # noqa: N815 - PySpark's name

    def newSession(self):
        return self


class Lake:
    """A lake, and one life of its job after the other."""

    def __init__(self, root, mode, write="driver"):
        self.root, self.mode, self.write = root, mode, write

    def target(self):
        return DeltaTarget(NoSpark(), str(self.root), "evolving", mode=self.mode, compact_every=0)

    def keep(self, feed, *ends, before_last=lambda: None):
        with FileManifest.opened(str(self.root), "evolving") as manifest:
            writers = TableWriters({}, NoSpark(), 1, self.write)
            cuts = CutApplier(
                feed, "evolving", self.target(), manifest, policy=Policy(self.mode), writers=writers
            )
            for end_ts in ends:
                if end_ts == ends[-1]:
                    before_last()
                start_ts = 0 if manifest.last is None else manifest.last.end_ts
                cuts.apply(Cut(0, start_ts, end_ts))
            return manifest.last

    def place(self, name):
        return self.root / name.replace(".", "/")

    def rows(self, name):
        listing, found = replayed(str(self.place(name))), []
        for file in listing.files.values():
            gone = DeletionVectors(listing.layout.root).read(file.add.get("deletionVector"))
            rows = pa.concat_tables(list(pieces(listing.layout, file.add, gone)))
            found += [tuple(row.values()) for row in rows.to_pylist()]
        return sorted(found, key=repr)


@pytest.fixture(autouse=True)
def _no_jvm(monkeypatch):
    monkeypatch.setattr("pyspark_tidemark.lake.session._activate", lambda spark: None)
    monkeypatch.setattr("pyspark_tidemark.lake.cut.write_by_tasks", by_tasks)


def by_tasks(_, writers):
    """As one task of each table, to which its writer is sent."""
    made = {}
    for changes, writer in writers:
        part = pickle.loads(pickle.dumps(writer)).write(changes)
        counted = Counted(part.rows, hexadecimal(part.checksum))
        made[changes.table.name] = ByTasks(counted, (pickle.loads(pickle.dumps(part.made)),))
    return made


@pytest.fixture
def feed():
    feed, dice = EvolvingFeed(), random.Random(9)
    for name in ("bank.t", "bank.u"):
        feed.create(0, name, id=pa.int64(), v=pa.string())
    for ts in range(1, CUTS[-1], 3):
        for name in ("bank.t", "bank.u"):
            keys = dice.sample(range(12), 3)
            feed.put(ts, name, *({"id": key, "v": f"{name} {ts}"} for key in keys))
            feed.delete(ts + 1, name, dice.choice(keys))
    return feed


@pytest.mark.parametrize("mode", ["upsert", "append", "scd2"])
def test_what_tasks_write_is_what_the_driver_writes(tmp_path, feed, mode):
    by_driver, tasks = Lake(tmp_path / "a", mode), Lake(tmp_path / "b", mode, "spark")
    for end_ts in CUTS:
        told, same = by_driver.keep(feed, end_ts), tasks.keep(feed, end_ts)
        assert told.tables == same.tables
        assert tasks.rows("bank.t") == by_driver.rows("bank.t")


@pytest.mark.parametrize("write", ["driver", "spark"])
def test_a_deleted_row_comes_back_though_the_index_has_no_room(tmp_path, feed, monkeypatch, write):
    monkeypatch.setattr(inserted, "KeyIndex", functools.partial(KeyIndex, 0))
    monkeypatch.setattr(
        task_writers, "_searched", functools.cache(task_writers._searched.__wrapped__)
    )
    lake = Lake(tmp_path, "soft-delete", write)
    lake.keep(feed, *CUTS)
    keys = {row["id"] for name, row in feed.changes if name == "bank.t"}
    assert sorted(key for key, *_ in lake.rows("bank.t")) == sorted(keys)
    living = {key for key, _, is_deleted, _ in lake.rows("bank.t") if not is_deleted}
    assert living == feed.state(CUTS[-1])["bank.t"].keys()


@pytest.mark.parametrize("mode", ["upsert", "scd2"])
def test_what_tasks_wrote_for_an_older_version_is_made_anew(tmp_path, feed, monkeypatch, mode):
    by_driver, tasks = Lake(tmp_path / "a", mode), Lake(tmp_path / "b", mode, "spark")
    by_driver.keep(feed, *CUTS[:3])
    tasks.keep(feed, *CUTS[:2])

    def overtaken(session, writers):
        made = by_tasks(session, writers)
        path = str(tasks.place("bank.t"))
        note = commit_info("NOTE", {}, 0)
        assert commit_on_disk(path, replayed(path).version + 1, [note])
        return made

    monkeypatch.setattr("pyspark_tidemark.lake.cut.write_by_tasks", overtaken)
    monkeypatch.setattr(
        "pyspark_tidemark.lake.delta.tables.DeltaTables.check_continues", lambda *_: None
    )
    tasks.keep(feed, CUTS[2])
    assert tasks.rows("bank.t") == by_driver.rows("bank.t")


def test_a_table_in_whose_place_another_one_of_the_lake_was_put_is_refused(tmp_path, feed):
    lake = Lake(tmp_path, "upsert")
    lake.keep(feed, *CUTS[:2])
    shutil.rmtree(lake.place("bank.t"))
    shutil.copytree(lake.place("bank.u"), lake.place("bank.t"))
    with pytest.raises(SourceError, match=r"ErrTargetForeign.*is not bank\.t, but bank\.u"):
        lake.keep(feed, CUTS[2])


def test_a_table_put_there_amid_is_refused_though_its_log_has_the_inodes_of_the_former(
    tmp_path, feed, monkeypatch
):
    monkeypatch.setattr(
        "pyspark_tidemark.lake.delta.tables.DeltaTables.check_continues", lambda *_: None
    )
    lake = Lake(tmp_path, "upsert")

    def put_other():
        """Written into the files that are there, as a disk may give new files their numbers."""
        for other in lake.place("bank.u").rglob("*"):
            place = lake.place("bank.t") / other.relative_to(lake.place("bank.u"))
            if other.is_file():
                place.write_bytes(other.read_bytes())

    with pytest.raises(SourceError, match=r"ErrTargetForeign.*is not bank\.t, but bank\.u"):
        lake.keep(feed, *CUTS[:3], before_last=put_other)


def test_columns_that_somebody_else_changes_amid_stop_the_job_by_name(tmp_path, feed, monkeypatch):
    monkeypatch.setattr(
        "pyspark_tidemark.lake.delta.tables.DeltaTables.check_continues", lambda *_: None
    )
    lake = Lake(tmp_path, "upsert")

    def make_anew():
        path, field = str(lake.place("bank.t")), pa.field("v", pa.string())
        newest = replayed(path)
        change = SchemaChange(dropped=("v",), added=(field,))
        actions = evolved(newest.metadata, newest.protocol, change)
        assert commit_on_disk(path, newest.version + 1, actions)

    with pytest.raises(SourceError, match=r"ErrTargetSchema.*columns of bank\.t \(.*\bv\)"):
        lake.keep(feed, *CUTS[:3], before_last=make_anew)


def test_a_table_whose_cuts_delta_has_forgotten_is_told_from_somebody_elses(monkeypatch, tmp_path):
    module, kept = "pyspark_tidemark.lake.delta.tables", {}
    (tmp_path / "bank" / "t" / "_delta_log").mkdir(parents=True)
    monkeypatch.setattr(f"{module}.DeltaTables.listing", lambda *_: None)
    monkeypatch.setattr(
        f"{module}.DeltaTables.snapshot", lambda *_: SimpleNamespace(version=lambda: 3)
    )
    monkeypatch.setattr(f"{module}.positions", lambda _: {})
    monkeypatch.setattr(f"{module}.version_of", lambda _: (3, {"configuration": kept}, {}))
    tables = Lake(tmp_path, "upsert").target()._tables
    with pytest.raises(SourceError, match=r"ErrTargetForeign.*not by this changefeed"):
        tables.position("bank.t")
    kept["delta.setTransactionRetentionDuration"] = "interval 7 days"
    with pytest.raises(SourceError, match=r"ErrTargetForeign.*7 days.*UNSET TBLPROPERTIES"):
        tables.position("bank.t")


def test_a_table_has_its_new_name_before_it_moves_and_may_have_all_it_ever_had(tmp_path, feed):
    lake, tables = Lake(tmp_path, "upsert"), feed.describe(0).tables
    lake.keep(feed, *CUTS[:2])
    old, other = tables["bank.t"], tables["bank.u"]
    new = SimpleNamespace(name="bank.w", key=old.key, schema=old.schema, shards=())
    lake.target()._tables.add_name("bank.t", "bank.w")
    assert lake.target().position(old) == CUTS[1], "a job that died right here begins as before"
    shutil.move(lake.place("bank.t"), lake.place("bank.w"))
    assert lake.target().position(new) == CUTS[1]
    assert lake.target().position(other) == CUTS[1]


def test_a_table_of_an_earlier_version_has_no_name_until_it_gets_another_one(tmp_path, feed):
    lake = Lake(tmp_path, "upsert")
    lake.keep(feed, *CUTS[:2])
    log = Path(lake.place("bank.t"), "_delta_log", f"{0:020}.json")
    lines = [line for line in log.read_text().splitlines() if ":table:" not in line]
    log.write_text("\n".join(line.replace('"numActions"', '"unused"') for line in lines))
    table = feed.describe(0).tables["bank.t"]
    assert lake.target().position(table) == CUTS[1]
    lake.target()._tables.add_name("bank.t", "bank.w")
    assert lake.target().position(table) == CUTS[1]


def test_what_deltas_log_store_commits_without_links_is_durable(tmp_path, feed, monkeypatch):
    def no_link(*_):
        raise OSError(errno.EOPNOTSUPP, "no links here")

    def stored(directory, _, version, actions):
        (directory / f"{version:020}.json").write_text(
            "".join(f"{json.dumps(each)}\n" for each in actions)
        )
        return True

    synced, fsync = [], os.fsync

    def noted(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    lake = Lake(tmp_path, "upsert")
    lake.keep(feed, CUTS[0])
    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(tables, "commit", stored)
    monkeypatch.setattr(tables, "java_classes", lambda _: None)
    monkeypatch.setattr(DeltaTables, "_log", lambda self, name: Path(self.path(name), "_delta_log"))
    synced.clear()
    lake.keep(feed, CUTS[1])
    directory = lake.place("bank.t") / "_delta_log"
    commits = [place for place, path in enumerate(synced) if path == directory / f"{1:020}.json"]
    assert commits, "the commit itself"
    assert directory in synced[commits[-1] :], "and then its name"


class Reading:
    """Spark's reader, which finds every version."""

    _jsparkSession = None  # noqa: N815 - PySpark's name
    read = property(lambda self: self)
    format = option = lambda self, *_: self
    load = str


def test_a_version_of_a_later_table_of_the_name_is_not_read_as_the_former_one(
    tmp_path, feed, monkeypatch
):
    lake = Lake(tmp_path, "upsert")
    lake.keep(feed, *CUTS)
    place = lake.place("bank.t")
    monkeypatch.setattr(delta, "java_classes", MagicMock())
    monkeypatch.setattr(
        delta_log,
        "commits_between",
        lambda _, __, first, last: [
            (last, delta_log._actions(place / f"_delta_log/{last:020}.json"))
        ],
    )
    uri, version = SinkUri.parse(f"delta://{tmp_path}"), replayed(str(place)).version
    for ts in (CUTS[-1], CUTS[-1] + 5, None):
        table = StoredTable(uri, "evolving", "bank.t", ts)
        assert DeltaConnector().read(Reading(), table, version)
    table = StoredTable(uri, "evolving", "bank.t", CUTS[-1] - 1)
    with pytest.raises(SourceError, match=r"ErrCutExpired.*another table has its name now"):
        DeltaConnector().read(Reading(), table, version)


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "data that is cut off": ("t/*.parquet", half, "ErrLakeDamaged"),
    "vectors that are cut off": ("t/deletion_vector*", half, "ErrLakeDamaged"),
    "a first version without columns": (
        f"t/_delta_log/{0:020}.json",
        lambda path: path.write_text('{"commitInfo": {}}'),
        "ErrLakeDamaged",
    ),
    "a file without a name": (
        f"t/_delta_log/{1:020}.json",
        lambda path: path.write_text('{"add": {}}'),
        "ErrLakeDamaged",
    ),
    "a manifest that is no text": (
        "../_tidemark_cuts/*30.json",
        lambda path: path.write_bytes(b"\xff" + path.read_bytes()),
        "ErrManifestCorrupt",
    ),
    "a manifest that is cut off": ("../_tidemark_cuts/*30.json", half, "ErrManifestCorrupt"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_stops_the_job_by_name(tmp_path, feed, kind):
    pattern, damage, code = DAMAGE[kind]
    lake = Lake(tmp_path, "upsert")
    lake.keep(feed, *CUTS[:3])
    damaged = sorted((tmp_path / "bank").glob(pattern))
    assert damaged
    for path in damaged:
        damage(path)
    with pytest.raises(SourceError, match=code) as refused:
        lake.keep(feed, CUTS[3])
    assert not refused.value.retryable


def test_files_of_others_without_statistics_are_searched(tmp_path, feed):
    lake, other = Lake(tmp_path / "a", "upsert"), Lake(tmp_path / "b", "upsert")
    other.keep(feed, *CUTS)
    lake.keep(feed, *CUTS[:3])
    for log in lake.place("bank.t").glob("_delta_log/*.json"):
        actions = [json.loads(line) for line in log.read_text().splitlines()]
        for action in actions:
            action.get("add", {}).pop("stats", None)
        log.write_text("\n".join(map(json.dumps, actions)))
    lake.keep(feed, CUTS[3])
    assert lake.rows("bank.t") == other.rows("bank.t")


HUGE = 2**64 - 40


@pytest.mark.parametrize(
    ("first", "low", "high"),
    [
        (HUGE, 2**63 - 1, 2**63 - 1),
        (2**53 + 9, 2**53 + 8, 2**53 + 18),
        (2**53 + 9, 2**53 + 9, 2**53 + 19),
    ],
    ids=["beyond 64 bits", "rounded", "exact"],
)
def test_large_decimals_are_found_in_files_whose_statistics_rounded_them(
    tmp_path, first, low, high
):
    """As delta-rs writes them where it compacts a table: keys of BIGINT UNSIGNED came twice."""
    feed, lake = EvolvingFeed(), Lake(tmp_path, "upsert")
    feed.create(0, "bank.t", id=pa.decimal128(20, 0), v=pa.string())
    feed.put(5, "bank.t", *({"id": Decimal(first + key), "v": "old"} for key in range(11)))
    feed.put(15, "bank.t", {"id": Decimal(first + 10), "v": "new"})
    lake.keep(feed, 10)
    [log] = lake.place("bank.t").glob("_delta_log/*.json")
    exact = (f'\\"id\\":{first}', f'\\"id\\":{first + 10}')
    text = log.read_text()
    assert all(part in text for part in exact)
    for part, rounded in zip(exact, (low, high), strict=True):
        text = text.replace(part, f'\\"id\\":{rounded}')
    log.write_text(text)
    lake.keep(feed, 20)
    rows = lake.rows("bank.t")
    assert sorted(row[:2] for row in rows) == sorted(
        (row["id"], row["v"]) for row in feed.state(20)["bank.t"].values()
    )


def test_versions_end_in_files_with_columns_of_types_that_arrow_cannot_filter(tmp_path, feed):
    """As delta-rs writes them for UPDATE and MERGE: `string_view`."""
    lake, other = Lake(tmp_path / "a", "scd2"), Lake(tmp_path / "b", "scd2")
    other.keep(feed, *CUTS)
    lake.keep(feed, *CUTS[:3])
    for path in lake.place("bank.t").glob("*.parquet"):
        rows = pq.read_table(path)
        pq.write_table(rows.set_column(1, "v", rows["v"].cast(pa.string_view())), path)
    lake.keep(feed, CUTS[3])
    assert lake.rows("bank.t") == other.rows("bank.t")
