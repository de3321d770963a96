"""What verify sees of lakes of files at each cut, whatever they keep;
rows that somebody changed are put right.
"""

import dataclasses
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark_tidemark.digest import RangeChecksums, Ranges, digests, key_texts
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.cut_record import TableCut
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.iceberg.files import write
from pyspark_tidemark.lake.iceberg.java_files import CutFiles
from pyspark_tidemark.lake.iceberg.target import IcebergTarget
from pyspark_tidemark.lake.manifest import DIRECTORY, FileManifest, read_cuts
from pyspark_tidemark.lake.partitioning import PartitionRules
from pyspark_tidemark.lake.schema import Policy
from pyspark_tidemark.lake.target import Repair, StoredTable, open_connector
from pyspark_tidemark.sink_uri import SinkUri

from server.verify.lake import file_lake
from server.verify.lake.file_lake import FileLake
from server.verify.lake.question import Question, key_columns
from tests.integration.lake.evolving import EvolvingFeed
from tests.integration.lake.test_evolution import Directory
from tests.integration.lake.test_evolution import keep as evolve

pytestmark = pytest.mark.timeout(400)
NAME, KEY, CUTS = "bank.kinds", ("k1", "k2"), (300, 600)
TARGETS = {"delta": DeltaTarget, "iceberg": IcebergTarget}


@dataclasses.dataclass
class Kept:
    """A lake that its job keeps, with a table in partitions."""

    spark: object
    changefeed: object
    captures: object
    format: str
    mode: str
    root: str

    def apply(self, *ends):
        partitions = PartitionRules.parse(f"{NAME}=amount")
        target = TARGETS[self.format](
            self.spark, self.root, "bank", mode=self.mode, compact_every=0, partitions=partitions
        )
        options = {"endpoint": self.captures.uri, "changefeed": "bank", "ack": "false"}
        with FileManifest.opened(self.root, "bank") as manifest:
            policy = Policy(self.mode)
            cuts = CutApplier(
                self.changefeed,
                "bank",
                target,
                manifest,
                policy=policy,
                writers=TableWriters(source_options=options, spark=self.spark, parallel=2),
            )
            for number, end_ts in enumerate(ends):
                cuts.apply(
                    Cut(number, 0 if manifest.last is None else manifest.last.end_ts, end_ts)
                )
        target.close()
        return target

    @property
    def manifest(self):
        return Path(self.root) / DIRECTORY

    @property
    def side(self):
        return self._side()

    @contextmanager
    def locked(self):
        with FileManifest.opened(self.root, "bank") as manifest:
            yield manifest, self._side(manifest)

    def _side(self, manifest=None):
        uri = SinkUri.parse(f"{self.format}://{self.root}")
        return FileLake(uri, "bank", self.root, manifest=manifest, session=self.spark)


def own_columns(upstream):
    return pa.schema(list(upstream.kinds.schema)[4:])


def state(upstream, ts):
    schema = own_columns(upstream)
    rows = [{name: row[name] for name in schema.names} for row in upstream.kinds.state(ts).values()]
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def asked(upstream, ts, ranges=None, chosen=()):
    return Question(NAME, ts, 0, KEY, own_columns(upstream), ranges or Ranges(), chosen)


def sums(batch, ranges):
    range_checksums = RangeChecksums(ranges)
    range_checksums.add(batch, KEY)
    return range_checksums.to_bytes()


@pytest.fixture(
    params=[
        ("iceberg", "upsert"),
        ("iceberg", "append"),
        ("iceberg", "soft-delete"),
        ("delta", "soft-delete"),
    ],
    ids="-".join,
)
def kept(request, spark, changefeed, captures, tmp_path):
    lake = Kept(spark, changefeed, captures, *request.param, str(tmp_path))
    lake.apply(*CUTS)
    return lake


def test_each_cut_has_the_sums_of_the_upstream_and_repairs_are_for_rows_only(kept, upstream):
    side = kept.side
    assert side.cut(None) == {"cut": 600, "mode": kept.mode, "beyond": {}, "newest_only": False}
    assert side.cut(599)["cut"] == 300
    for ts in CUTS:
        range_checksums = side.range_checksums(asked(upstream, ts))
        assert range_checksums == sums(state(upstream, ts), Ranges())
    some = tuple(
        np.flatnonzero(np.frombuffer(range_checksums, np.uint64)[: len(Ranges())]).tolist()[::2]
    )
    fine = Ranges(3, some)
    assert side.range_checksums(asked(upstream, 600, fine)) == sums(state(upstream, 600), fine)
    found = key_columns(side.rows(asked(upstream, 600, Ranges(), some)), KEY).to_pylist()
    inside = np.isin(Ranges().of(digests(key_texts(state(upstream, 600), KEY))), some)
    assert sorted(map(str, found)) == sorted(
        map(str, state(upstream, 600).filter(pa.array(inside)).select(list(KEY)).to_pylist())
    )
    if kept.mode != "upsert":
        with pytest.raises(SourceError, match="ErrRepairUnsupported"):
            side.check_repair(asked(upstream, 600))


def operations(kept):
    """What made the versions of the table, the newest first."""
    history = kept.spark.sql(f"DESCRIBE HISTORY delta.`{kept.root}/bank/kinds`")
    return [row.operation for row in history.orderBy("version", ascending=False).collect()]


def in_spark(kept, table):
    return kept.spark.createDataFrame(table, from_arrow_schema(table.schema))


def damage(kept, batch):
    """Somebody removes two rows and adds one, in a version that the newest cut then shows;
    returns these.
    """
    lost, strange = batch.slice(0, 2), batch.slice(2, 1)
    new = strange.set_column(0, batch.schema.field(0), pa.array(["a key of somebody"]))
    rows = pa.Table.from_batches([new]).append_column("_commit_ts", pa.array([1], pa.int64()))
    gone = pa.Table.from_batches([lost]).select(list(KEY))
    if kept.format == "delta":
        path = f"{kept.root}/bank/kinds"
        in_spark(kept, gone).createOrReplaceTempView("gone")
        same = " AND ".join(f"t.{name} = g.{name}" for name in KEY)
        kept.spark.sql(
            f"MERGE INTO delta.`{path}` t USING gone g ON {same} WHEN MATCHED THEN DELETE"
        )
        in_spark(kept, rows).write.format("delta").mode("append").save(path)
        version = int(
            kept.spark.sql(f"DESCRIBE HISTORY delta.`{path}` LIMIT 1").collect()[0].version
        )
    else:
        catalog = kept.apply()._catalog
        table = catalog.load(NAME)
        written = write(catalog.layout(table, KEY), rows, gone)
        catalog.commit(table.newTransaction(), CutFiles(written, KEY), 600)
        version = int(catalog.load(NAME).currentSnapshot().snapshotId())
    return version, lost, new


@pytest.mark.parametrize(
    "kept", [("delta", "upsert"), ("iceberg", "upsert")], ids="-".join, indirect=True
)
def test_a_damaged_table_is_repaired_and_its_job_goes_on_from_there(kept, upstream):
    question = asked(upstream, 600)
    if kept.format == "delta":
        # The rows stay as they are: it was taken for a change that no cut shows.
        DeltaTarget(kept.spark, kept.root, "bank")._maintenance.compact(NAME)
        assert operations(kept)[0] == "COMPACT"
    kept.side.check_repair(question)
    version, lost, new = damage(kept, state(upstream, 600))
    with pytest.raises(
        SourceError, match=r"ErrRepairUnsupported.*changes \(.*\) that no cut shows"
    ):
        kept.side.check_repair(question)
    assert kept.side.range_checksums(question) == sums(state(upstream, 600), Ranges()), (
        "the cut's version is as it was"
    )
    with kept.locked() as (manifest, _):
        file_lake.publish(manifest, NAME, version)
    assert kept.side.range_checksums(question) != sums(state(upstream, 600), Ranges())

    live, gone = pa.Table.from_batches([lost]), pa.Table.from_batches([new]).select(list(KEY))
    with kept.locked() as (_, side):
        side.check_repair(question)
        repaired = side.repair(question, gone, live)
        assert side.range_checksums(question) == sums(state(upstream, 600), Ranges())
    shown = {item.table: item for item in read_cuts(kept.manifest)[-1].tables}
    assert shown[NAME] == TableCut(NAME, shown[NAME].rows, repaired)
    kept.apply(1000)
    assert kept.side.range_checksums(asked(upstream, 1000)) == sums(state(upstream, 1000), Ranges())


@pytest.mark.parametrize("lake", ["delta", "iceberg"])
def test_a_table_is_repaired_whatever_it_and_its_columns_are_called(spark, tmp_path, lake):
    """Of Delta, a table with a backtick could not be repaired, and rows to add that had a column
    `_old_id` removed others.
    """
    name, columns = "bank.a`b", {"id": pa.int64(), "_old_id": pa.int64(), "_new": pa.int64()}
    feed = EvolvingFeed()
    feed.create(0, name, **columns)
    feed.put(5, name, *({"id": n, "_old_id": n + 1, "_new": 0} for n in range(4)))
    place = Directory(spark, lake, tmp_path)
    evolve(place, feed, (5,))
    version = place.target().version(feed.describe(5).tables[name])
    table = StoredTable(SinkUri.parse(f"{lake}://{tmp_path}"), "evolving", name)
    connector = open_connector(lake)
    assert connector.changes_after(spark, table, version) == ""
    gone = pa.table({"id": pa.array([0, 1], pa.int64())})
    live = pa.table([[1], [3], [9]], schema=pa.schema(list(columns.items())))
    repaired = connector.repair(spark, table, Repair(5, ("id",), gone, live))
    found = connector.read(spark, table, repaired).select(*columns).collect()
    assert sorted(map(tuple, found)) == [(1, 3, 9), (2, 3, 0), (3, 4, 0)]
