"""Columns that a changefeed leaves out reach no reader: by no dump, by no log,
after no restart and no DDL.
"""

from pathlib import Path

import pytest

from tests.integration.capture.processes import running_cluster
from tests.integration.mysql.lake import Lake
from tests.mariadb import running_mariadb


@pytest.mark.timeout(300)
def test_dump_and_log_agree_on_the_columns_that_are_taken(tmp_path: Path) -> None:
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute(
            "CREATE DATABASE shop",
            "USE shop",
            "CREATE TABLE orders (secret VARCHAR(99) NOT NULL, id INT PRIMARY KEY, name "
            "VARCHAR(20), photo LONGBLOB)",
            "INSERT INTO orders SELECT 'hidden', seq, CONCAT('n', seq), REPEAT('p', 999) FROM "
            "seq_1_to_3000",
            "CREATE TABLE plain (id INT PRIMARY KEY, secret INT)",
            "INSERT INTO plain VALUES (1, 2)",
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
        create += ["--filter", "shop.*"]
        assert "ErrColumnRuleInvalid" in cluster.cli(*create, "--columns", "shop.orders=*,!secert")
        made = cluster.cli(*create, "--columns", "shop.orders=name,more*")
        assert made["columns"] == ["shop.orders=name,more*"]
        lake = Lake(cluster, "shop", int(made["start_ts"]))
        server.execute(
            "INSERT INTO shop.orders VALUES ('hidden', 0, 'log', ''), ('hidden', -1, 'log', '')"
        )
        server.execute("UPDATE shop.orders SET secret = 'changed', name = 'new' WHERE id = 7")
        assert cluster.cli("changefeed", "dumpstart", "-c", "shop")["state"] == "running"
        lake.follow(
            lambda tables: len(tables.get("shop.orders", {})) == 3002 and "shop.plain" in tables, 60
        )
        cluster.capture.kill()
        cluster.capture.start()
        server.execute(
            "ALTER TABLE shop.orders ADD COLUMN hidden INT DEFAULT 1, ADD COLUMN more INT DEFAULT "
            "2",
            "UPDATE shop.orders SET secret = '!', more = id",
            "DELETE FROM shop.orders WHERE id = -1",
        )
        lake.follow(lambda tables: -1 not in tables["shop.orders"], 60)
        server.execute(
            "RENAME TABLE shop.orders TO shop.moved",
            "UPDATE shop.moved SET hidden = 3, name = 'x' WHERE id = 0",
        )
        lake.follow(lambda tables: tables.get("shop.moved", {}).get(0, {}).get("name") == "x", 60)
        wanted = server.execute("SELECT id, name, more FROM shop.moved")
        held = {(row["id"], row["name"], row["more"]) for row in lake.tables["shop.moved"].values()}
        assert held == set(wanted)
        assert {name for row in lake.tables["shop.moved"].values() for name in row} == {
            "id",
            "name",
            "more",
        }
        assert lake.tables["shop.plain"] == {1: {"id": 1, "secret": 2}}
