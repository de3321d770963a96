"""Tables without a key in lakes: every change is a row, once, on each target that keeps changes."""

from collections import Counter

import pytest
from pyspark_tidemark.lake.reading import as_of_cut

from tests.integration.capture.processes import running_cluster
from tests.integration.lake.kept import KeptLake, has_rows
from tests.integration.lake.test_databases import rows as rows_of_database
from tests.mariadb import running_mariadb

pytestmark = pytest.mark.timeout(300)
END = "shop.z_end"


def test_changes_of_a_table_without_a_key_come_to_its_rows(spark, postgres, tmp_path):
    targets = {
        "parquet": f"parquet://{tmp_path}/parquet",
        "delta": f"delta://{tmp_path}/delta?mode=append",
        "iceberg": f"iceberg://{tmp_path}/iceberg?mode=append",
        "postgresql": f"{postgres.create('keyless')}?mode=append",
    }
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.log (a INT, b VARCHAR(9))",
            f"CREATE TABLE {END} (id INT PRIMARY KEY)",
        )
        source = f"{server.uri}?idle-row-ms=300"
        for kind, target in targets.items():
            made = cluster.cli(
                *("changefeed", "create", "-c", kind, "--sink-uri", target, "--filter", "shop.*"),
                *("--source-uri", source, "--force-replicate"),
            )
            assert made["state"] == "normal", made
        server.execute(
            "INSERT INTO shop.log VALUES (1, 'x'), (1, 'x'), (2, NULL), (3, 'y')",
            "UPDATE shop.log SET b = 'z' WHERE a = 1 LIMIT 1",
            "DELETE FROM shop.log WHERE a = 3",
            "ALTER TABLE shop.log RENAME COLUMN b TO c",
            "INSERT INTO shop.log VALUES (2, NULL), (4, 'w')",
            f"INSERT INTO {END} VALUES (1)",
        )
        wanted = Counter(server.execute("SELECT * FROM shop.log"))
        endpoint = f"grpc://{cluster.capture.endpoints['flight']}"
        for kind, target in targets.items():
            lake = KeptLake(endpoint, kind, target, spark, tmp_path / f"spark-{kind}")
            lake.keep(lambda cut: has_rows(cut, END))
            assert held(kind, spark, target.partition("?")[0]) == wanted, kind


def held(kind, spark, target):
    """How often each row is there by the changes in a lake."""
    if kind == "postgresql":
        changes = rows_of_database(target, "shop.log")
    elif kind == "parquet":
        # The files of the first cuts call the column otherwise.
        files = f"{target.partition('://')[2]}/shop/log/cut=*"
        frame = spark.read.option("mergeSchema", "true").parquet(files)
        renamed = frame.selectExpr("_op", "a", "coalesce(c, b) AS c")
        changes = [row.asDict() for row in renamed.collect()]
    else:
        changes = [row.asDict() for row in as_of_cut(spark, target)["shop.log"].collect()]
    bag = Counter()
    for row in changes:
        bag[row["a"], row["c"]] += {"insert": 1, "delete": -1}[row["_op"]]
    assert min(bag.values()) >= 0
    return +bag
