"""Shards of a real MariaDB that lakes keep as one table: the dump, the log, and DDL that reaches
one shard after the other.
"""

import contextlib
from collections import Counter

import pyarrow as pa
import pytest
from pyspark_tidemark.digest import Ranges
from pyspark_tidemark.lake import changes
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.iceberg.target import IcebergTarget
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.parquet.target import ChangelogTarget
from pyspark_tidemark.lake.reading import as_of_cut
from pyspark_tidemark.lake.schema import Policy
from pyspark_tidemark.sink_uri import SinkUri

from server.verify.lake.file_lake import FileLake
from server.verify.lake.question import Question, ShardPart
from server.verify.spans import Extent
from tests.integration.capture.processes import running_cluster
from tests.integration.lake.kept import KeptLake, has_rows
from tests.unit.sink.spark.test_shards import INT, TEXT, WIDE, KeepingFeed, replayed

pytestmark = pytest.mark.timeout(600)
ROUTE = "mall_*.orders*=mall.orders{shard=_shard}"
END = "mall_end.mark"
ROWS = 9
TARGETS = {
    ("delta", "soft-delete"): lambda *at: DeltaTarget(*at, "sharded", mode="soft-delete"),
    ("iceberg", "upsert"): lambda *at: IcebergTarget(*at, "sharded"),
    # Without deletion vectors files are written anew.
    ("iceberg", "soft-delete"): lambda *at: IcebergTarget(
        *at, "sharded", mode="soft-delete", deletion_vectors=False
    ),
    ("parquet", "append"): ChangelogTarget,
}
STEPS = (
    (
        "INSERT INTO mall_a.orders VALUES (1, 'again', 1.5) ON DUPLICATE KEY UPDATE v = 'again'",
        "UPDATE mall_b.orders SET id = 70 WHERE id = 2",
        "DELETE FROM mall_b.orders WHERE id = 3",
        # One shard after the other gets a column, with rows of both schemas between.
        "ALTER TABLE mall_a.orders ADD note VARCHAR(20) DEFAULT 'it\\'s', ADD big BIGINT",
        "INSERT INTO mall_a.orders VALUES (20, 'a', 2, 'new', 1)",
        "INSERT INTO mall_b.orders VALUES (20, 'b', 2)",
        "ALTER TABLE mall_b.orders ADD note VARCHAR(20) DEFAULT 'other' FIRST",
        "ALTER TABLE mall_a.orders DROP price",
        "ALTER TABLE mall_a.orders ADD price DECIMAL(10,2) NOT NULL DEFAULT 9.25",
        "CREATE TABLE mall_b.orders2 (id INT PRIMARY KEY, big INT)",
        "INSERT INTO mall_b.orders2 VALUES (1, 4), (20, 5)",
        "RENAME TABLE mall_a.orders TO mall_a.orders_old",
        "UPDATE mall_a.orders_old SET v = 'moved' WHERE id = 20",
    ),
    # Rows of a shard go, and no others.
    (
        "TRUNCATE mall_b.orders",
        "INSERT INTO mall_b.orders (id, v) VALUES (1, 'after')",
        "DROP TABLE mall_a.orders_old",
        "CREATE TABLE mall_a.orders (id INT PRIMARY KEY, v VARCHAR(20))",
        "INSERT INTO mall_a.orders VALUES (1, 'anew')",
        "CREATE OR REPLACE TABLE mall_b.orders2 (id INT PRIMARY KEY, big INT)",
        "INSERT INTO mall_b.orders2 VALUES (8, 8)",
    ),
)


def shards(server):
    """All rows of all shards as the lakes must have them, without what is null."""
    rows = []
    with contextlib.closing(server.connect()) as connection, connection.cursor() as cursor:
        cursor.execute(
            "SELECT table_schema, table_name FROM information_schema.tables "
            "WHERE table_schema LIKE 'mall\\_%' AND table_name LIKE 'orders%'"
        )
        for schema, name in cursor.fetchall():
            cursor.execute(f"SELECT * FROM {schema}.{name}")
            columns = [each[0] for each in cursor.description]
            shard = {"_shard": f"{schema}.{name}"}
            rows += [dict(zip(columns, row, strict=True)) | shard for row in cursor.fetchall()]
    return sorted(map(shown, rows))


def shown(row):
    return sorted((name, str(value)) for name, value in row.items() if value is not None)


def test_shards_are_one_table_in_lakes_through_dump_log_and_ddl(
    mariadb, spark, tmp_path, monkeypatch
):
    for name in ("mall_a", "mall_b", "mall_end", "other"):
        mariadb.execute(f"CREATE OR REPLACE DATABASE {name}")
    for name in ("mall_a", "mall_b"):
        mariadb.execute(
            "CREATE TABLE orders (id INT PRIMARY KEY, v VARCHAR(20), price DECIMAL(10,2))",
            f"INSERT INTO orders SELECT seq, '{name}', seq FROM seq_1_to_{ROWS}",
            database=name,
        )
    mariadb.execute(
        "CREATE TABLE other.t (id INT PRIMARY KEY)", f"CREATE TABLE {END} (id INT PRIMARY KEY)"
    )
    with running_cluster(tmp_path) as cluster:
        target = f"delta://{tmp_path}/lake"
        flags = ["-c", "shards", "--sink-uri", target, "--route", ROUTE, "--dump"]
        flags += ["--source-uri", f"{mariadb.uri}?idle-row-ms=300"]
        filters = [part for each in ("mall_*.*", "other.*") for part in ("--filter", each)]
        made = cluster.cli("changefeed", "create", *flags, *filters)
        assert {each["table"]: each.get("target") for each in made["tables"]} == {
            "mall_a.orders": "mall.orders",
            "mall_b.orders": "mall.orders",
            "other.t": None,
            END: None,
        }
        endpoint = f"grpc://{cluster.capture.endpoints['flight']}"
        lake = KeptLake(endpoint, "shards", target, spark, tmp_path / "spark")
        brought = Counter()

        def is_dumped(record):
            brought.update({each.table: each.rows for each in record.tables})
            return brought["mall.orders"] >= 2 * ROWS

        with monkeypatch.context() as large:
            # Read by tasks, as large cuts are.
            for most in ("DRIVER_READ_MAX_BYTES", "ARROW_READ_MAX_BYTES"):
                large.setattr(changes, most, -1)
            lake.keep(is_dumped)
        for number, statements in enumerate(STEPS):
            mariadb.execute(*statements, f"INSERT INTO {END} VALUES ({number})")
            lake.keep(lambda record: has_rows(record, END))
            tables = lake.tables()
            assert {*tables} == {"mall.orders", "other.t", END}
            assert sorted(map(shown, tables["mall.orders"])) == shards(mariadb), number
        assert cluster.cli("changefeed", "query", "-c", "shards")["state"] == "normal"


@pytest.mark.parametrize(("kind", "mode"), TARGETS)
def test_a_merged_table_shows_its_shards_at_every_cut(spark, tmp_path, kind, mode):
    feed = evolving()
    with FileManifest.opened(str(tmp_path), "sharded") as manifest:
        target = TARGETS[kind, mode](spark, str(tmp_path))
        applier = CutApplier(
            feed,
            "sharded",
            target,
            manifest,
            policy=Policy(mode),
            writers=TableWriters(source_options={}, spark=spark, parallel=1),
        )
        start_ts = 0
        for end_ts in feed.cut_ends(75, 200):
            applier.apply(Cut(0, start_ts, end_ts))
            start_ts = end_ts
        target.close()

    def rows(ts):
        return as_of_cut(spark, f"{kind}://{tmp_path}", ts)["lake.t"].collect()

    if kind == "parquet":
        kept = [(row["_shard"], row["id"], row["_op"]) for row in rows(200)]
        sent = [(name, row["id"], row["_op"]) for name, row in feed.changes]
        assert Counter(kept) == Counter(sent)
        return
    for ts in (75, 200):
        expected = (feed.kept(ts) if mode == "soft-delete" else replayed(feed, ts)).values()
        assert sorted(map(shown, map(dict_of, rows(ts)))) == sorted(map(shown, expected)), ts
    if mode == "soft-delete":
        return
    see_repaired(spark, f"{kind}://{tmp_path}", tmp_path)
    [row] = [row for row in rows(200) if (row["_shard"], row["id"]) == ("s2.t", 1)]
    assert (row["a"], row["c"], row["z"]) == (99, None, None)
    others = [each for each in map(dict_of, rows(200)) if each["_commit_ts"] != 200]
    expected = [row for row in replayed(feed, 200).values() if row["_shard"] != "s2.t"]
    assert sorted(map(shown, others)) == sorted(map(shown, expected))


def see_repaired(spark, uri, directory):
    """A row of one shard is written anew, in types that are narrower than those of the lake: a
    shard that had the wider ones is gone.
    """
    narrow = {"_shard": TEXT, "id": INT, "a": INT, "c": INT, "z": TEXT}
    schema = pa.schema([*narrow.items()])
    row = pa.Table.from_pylist([{"_shard": "s2.t", "id": 1, "a": 99}], schema)
    key, part = ("_shard", "id"), ShardPart("_shard", "s2.t")
    question = Question("lake.t", 200, 0, key, schema, Ranges(), part=part)
    with FileManifest.opened(str(directory), "sharded") as manifest:
        lake = FileLake(
            *(SinkUri.parse(uri), "sharded", directory), manifest=manifest, session=spark
        )
        lake.check_repair(question)
        lake.repair(question, row.select(key), row)
        assert lake.extent(question) == Extent(1, 1, 1)


def dict_of(row):
    return row.asDict()


def evolving():
    """Shards whose DDL comes one after the other."""
    feed = KeepingFeed()
    feed.create(0, "s1.t", id=INT, a=INT, b=TEXT)
    feed.create(0, "s2.t", id=INT, a=INT)
    feed.put(10, "s1.t", {"id": 1, "a": 1, "b": "x"}, {"id": 2, "a": 2, "b": "y"})
    feed.put(20, "s2.t", {"id": 1, "a": 5}, {"id": 2, "a": 6})
    columns = {"id": INT, "a": INT, "b": TEXT, "d": TEXT}
    feed.alter(30, "s1.t", "ADD", {}, {"c": 7, "d": "it's \\"}, (), **columns, c=INT)
    feed.put(40, "s1.t", {"id": 3, "a": 3, "b": "z", "d": "n", "c": 9})
    feed.put(41, "s2.t", {"id": 3, "a": 7})
    feed.alter(50, "s2.t", "ADD", {}, {"c": 8}, (), id=INT, a=WIDE, c=INT)
    feed.rename(60, "s1.t", "s3.t")
    feed.put(70, "s3.t", {"id": 1, "a": 11, "b": "xx", "d": "d", "c": 1})
    feed.alter(80, "s3.t", "DROP", {}, {}, ("c",), **columns)
    feed.create(90, "s1.t", id=INT, z=TEXT)
    feed.put(95, "s1.t", {"id": 1, "z": "z"})
    feed.truncate(100, "s2.t")
    feed.put(105, "s2.t", {"id": 1, "a": 50, "c": 51})
    feed.drop(110, "s3.t")
    feed.put(115, "s1.t", {"id": 2, "z": "w"})
    # Rows 1 and 2 take the places of those of the shard that had the name before; 3 stays.
    feed.rename(120, "s1.t", "s3.t")
    feed.delete(125, "s3.t", 2)
    return feed
