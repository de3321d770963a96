"""From MariaDB to PostgreSQL under `tidemark spark keep`: names that come again,
and jobs that give up.
"""

import contextlib
import subprocess
import time
import urllib.request

import pytest

from tests.integration.capture.processes import COMMAND, running_cluster
from tests.integration.lake.test_databases import execute, rows
from tests.mariadb import running_mariadb

pytestmark = pytest.mark.timeout(500)
PATIENCE_S = 200


@contextlib.contextmanager
def keeping(cluster, directory, *more):
    """`tidemark spark keep` for the block."""
    flags = [
        "--capture",
        cluster.capture.endpoints["capture"],
        "--checkpoint-dir",
        str(directory / "checkpoints"),
    ]
    flags += ["--http-addr", "127.0.0.1:0", "--master", "local[1]", "--trigger", "0 seconds", *more]
    with (directory / "keep.log").open("wb") as log:
        process = subprocess.Popen([*COMMAND, "spark", "keep", *flags], stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(100)


def until(seen, wanted):
    """Wait for what should be seen, and show what was."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := seen()) != wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def sample(cluster, name):
    """A metric of the capture, with its labels."""
    url = f"http://{cluster.capture.endpoints['http']}/metrics"
    text = urllib.request.urlopen(url, timeout=60).read().decode()
    return next(
        (float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)),
        None,
    )


def test_a_name_that_comes_again_is_a_new_table_and_a_job_that_gives_up_is_seen(tmp_path, postgres):
    target = postgres.create("keeping")
    secret = tmp_path / "password"
    secret.write_text("s3cret")
    with (
        running_mariadb() as server,
        running_cluster(tmp_path) as cluster,
        contextlib.ExitStack() as stack,
    ):

        def lake(table):
            with contextlib.suppress(Exception):  # it may not be there yet
                return sorted(tuple(row.values())[:-1] for row in rows(target, table))

        def shown():
            (feed,) = cluster.cli("changefeed", "list")
            return feed["summary"]["state"], (feed["summary"]["error"] or {}).get("code")

        server.execute(
            "CREATE USER cdc IDENTIFIED BY 's3cret'",
            "GRANT ALL ON *.* TO cdc",
            "CREATE DATABASE shop",
        )
        server.execute(
            "CREATE TABLE shop.a (id INT PRIMARY KEY, z VARCHAR(10), `x.y z` INT)",
            "CREATE TABLE shop.b (id INT PRIMARY KEY)",
        )
        source = f"mysql://cdc@127.0.0.1:{server.port}?password-file={secret}&idle-row-ms=500"
        create = [
            "changefeed",
            "create",
            "-c",
            "shop",
            "--sink-uri",
            target,
            "--source-uri",
            source,
        ]
        assert cluster.cli(*create, "--filter", "shop.*")["state"] == "normal"
        stack.enter_context(keeping(cluster, tmp_path))
        server.execute("INSERT INTO shop.a VALUES (1, 'old', 5)", "INSERT INTO shop.b VALUES (1)")
        until(lambda: lake("shop.a"), [(1, "old", 5)])

        # several DDLs between two cuts: another key type, other columns, the same name four times
        server.execute(
            "DROP TABLE shop.a",
            "CREATE TABLE shop.a (id BIGINT UNSIGNED PRIMARY KEY, y DECIMAL(38,10), j LONGTEXT)",
            "INSERT INTO shop.a VALUES (9, 1.5, 'gone, too')",
            "DROP TABLE shop.a",
            "CREATE TABLE shop.a (code VARCHAR(20) PRIMARY KEY, n INT)",
            "INSERT INTO shop.a VALUES ('never seen', 1)",
            "CREATE OR REPLACE TABLE shop.a (id VARCHAR(20) PRIMARY KEY, n INT)",
            "INSERT INTO shop.a VALUES ('new', 7)",
            "INSERT INTO shop.b VALUES (2)",
        )
        until(lambda: (lake("shop.a"), lake("shop.b")), ([("new", 7)], [(1,), (2,)]))
        until(shown, ("normal", None))
        until(
            lambda: cluster.cli("changefeed", "query", "-c", "shop")["lake_job"]["state"], "ready"
        )

        # a table that somebody else has made: the job gives up, and is not started again and again
        execute(target, "CREATE TABLE shop.c (id INT)")
        server.execute("CREATE TABLE shop.c (id INT PRIMARY KEY)", "INSERT INTO shop.c VALUES (3)")
        until(shown, ("failed", "TM:ErrTargetForeign"))
        error = cluster.cli("changefeed", "query", "-c", "shop")["error"]
        assert "the table shop.c is there, but not by this changefeed" in error["message"]
        assert sample(cluster, 'tidemark_capture_job_state{changefeed="shop",state="failed"}') == 1
        assert (
            sample(cluster, 'tidemark_capture_changefeed_state{changefeed="shop",state="failed"}')
            == 1
        )
        assert (tmp_path / "keep.log").read_text().count("lake job started") == 1

        # the new owner of the changefeeds knows it, and resume lets a job try again
        cluster.capture.kill()
        cluster.capture.start()
        until(shown, ("failed", "TM:ErrTargetForeign"))
        assert cluster.cli("changefeed", "resume", "-c", "shop")["state"] == "normal"
        until(shown, ("failed", "TM:ErrTargetForeign"))
        assert cluster.cli("changefeed", "query", "-c", "shop")["error"]["time"] > error["time"]
        cluster.cli("changefeed", "remove", "-c", "shop", "--no-confirm")
