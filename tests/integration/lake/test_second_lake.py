"""A lake beside the changefeed's own, by a job that is a further reader: both have all rows, and
what becomes of one is nothing to the other.
"""

import subprocess
from contextlib import contextmanager

import pytest

from tests.integration.capture.processes import COMMAND, running_cluster
from tests.integration.lake.test_databases import rows
from tests.integration.lake.test_job_errors import keeping, until
from tests.mariadb import running_mariadb

pytestmark = pytest.mark.timeout(400)


@contextmanager
def beside(cluster, directory, target):
    """`tidemark spark run --reader second`, for the block."""
    capture = cluster.capture.endpoints["flight"]
    flags = ["--endpoint", f"grpc://{capture}", "--changefeed", "orders", "--reader", "second"]
    flags += ["--target", target, "--checkpoint-dir", str(directory / "second")]
    with (directory / "second.log").open("ab") as log:
        job = subprocess.Popen(
            [*COMMAND, "spark", "run", *flags, "--http-addr", "127.0.0.1:0"], stdout=log, stderr=log
        )
    try:
        yield job
    finally:
        job.terminate()
        job.wait(100)


def test_a_second_lake_has_all_rows_and_is_waited_for(postgres, tmp_path):
    first, second = postgres.create("firstlake"), postgres.create("secondlake")

    def ids(target):
        try:
            return sorted(row["id"] for row in rows(target, "shop.a"))
        except Exception as err:  # noqa: BLE001 - the table is not there yet
            return type(err).__name__

    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute("CREATE DATABASE shop", "CREATE TABLE shop.a (id INT PRIMARY KEY, v INT)")
        source = ("--source-uri", f"{server.uri}?idle-row-ms=300", "--filter", "shop.*")
        cluster.cli("changefeed", "create", "-c", "orders", "--sink-uri", first, *source)
        cluster.cli("changefeed", "add-reader", "-c", "orders", "--reader", "second")

        def query():
            return cluster.cli("changefeed", "query", "-c", "orders")

        with keeping(cluster, tmp_path):
            with beside(cluster, tmp_path, second):
                server.execute("INSERT INTO shop.a VALUES (1, 1)")
                until(lambda: ids(first), [1])
                until(lambda: ids(second), [1])
            # It is gone, and says nothing of the changefeed's own job.
            server.execute(
                "ALTER TABLE shop.a ADD w INT DEFAULT 7", "INSERT INTO shop.a VALUES (2, 2, 2)"
            )
            until(lambda: ids(first), [1, 2])
            assert query()["lake_job"]["state"] == "ready"
            [reader] = query()["readers"]
            assert query()["checkpoint_tso"] <= reader["checkpoint_tso"]
            with beside(cluster, tmp_path, second):
                until(lambda: ids(second), [1, 2])
                assert {row["id"]: row["w"] for row in rows(second, "shop.a")} == {1: 7, 2: 2}
                server.execute("DELETE FROM shop.a WHERE id = 1")
                until(lambda: ids(first), [2])
                until(lambda: ids(second), [2])
            assert (query()["state"], query()["error"]) == ("normal", None)
