"""A server's tables are dumped in a capture with workers, too: a log is read, and dumped,
by the capture itself.
"""

from pathlib import Path

import pytest

from tests.integration.capture.processes import running_cluster
from tests.integration.dump.test_capture import dump
from tests.integration.mysql.test_capture import Lake
from tests.mariadb import running_mariadb

ROWS = 2000


@pytest.mark.timeout(180)
def test_a_capture_with_workers_dumps_a_servers_tables(tmp_path: Path) -> None:
    with running_mariadb() as server, running_cluster(tmp_path, "--workers", "2") as cluster:
        server.execute(
            "CREATE DATABASE shop",
            "USE shop",
            "CREATE TABLE orders (id INT PRIMARY KEY, version INT)",
            f"INSERT INTO orders SELECT seq, 0 FROM seq_0_to_{ROWS - 1}",
        )
        uri = f"mysql://root@127.0.0.1:{server.port}?idle-row-ms=300"
        create = [
            "changefeed",
            "create",
            "-c",
            "shop",
            "--sink-uri",
            "parquet:///lake",
            "--source-uri",
            uri,
        ]
        made = cluster.cli(*create, "--filter", "shop.*")
        lake = Lake(cluster, "shop", int(made["start_ts"]))
        assert dump(cluster, "dumpstart", "--rows-per-second", "2000")["state"] == "running"
        server.execute("UPDATE shop.orders SET version = 1 WHERE id < 100")
        lake.follow(lambda tables: len(tables.get("shop.orders", {})) > ROWS // 4)
        cluster.capture.kill()
        cluster.capture.start()
        server.execute("DELETE FROM shop.orders WHERE id >= 1900")
        lake.follow(lambda _: dump(cluster, "dumpstatus")["state"] == "finished", 90)
        server.execute("INSERT INTO shop.orders VALUES (-1, 2)")
        lake.follow(lambda tables: -1 in tables.get("shop.orders", {}))
        wanted = {row[0]: row for row in server.execute("SELECT id, version FROM shop.orders")}
        assert {
            key: tuple(row.values()) for key, row in lake.tables["shop.orders"].items()
        } == wanted
