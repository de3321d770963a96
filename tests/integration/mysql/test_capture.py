"""The whole way: a capture follows a real MariaDB;
what its readers applied cut by cut equals SELECT.
"""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.capture.processes import running_cluster
from tests.integration.mysql.lake import Lake
from tests.mariadb import MariaDb, running_mariadb

Key = tuple[Any, ...]


@pytest.mark.timeout(240)
def test_what_readers_of_a_capture_apply_equals_select(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("s3cret\n")
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute(
            "CREATE USER cdc IDENTIFIED BY 's3cret'",
            "GRANT ALL ON *.* TO cdc",
            "CREATE DATABASE shop",
        )
        server.execute(
            "CREATE TABLE shop.t (id INT PRIMARY KEY, v VARCHAR(50))",
            "CREATE TABLE shop.old (id INT PRIMARY KEY)",
        )
        server.execute("CREATE TABLE shop.skipped (x INT)")
        uri = f"mysql://cdc@127.0.0.1:{server.port}?password-file={secret}&idle-row-ms=500"
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
        refused = cluster.cli(*create, "--filter", "shop.*")
        assert "ErrTableIneligible" in refused, refused
        assert "shop.skipped" in refused
        dry = ["--filter", "shop.*", "--ignore-ineligible-table", "--dry-run"]
        checked = cluster.cli(*create, *dry)
        assert {each["table"] for each in checked["eligible_tables"]} == {"shop.t", "shop.old"}
        assert [each["table"] for each in checked["ineligible_tables"]] == ["shop.skipped"]
        made = cluster.cli(*create, "--filter", "shop.*", "--filter", "!shop.skipped")
        assert made["state"] == "normal", made
        lake = Lake(
            cluster, "shop", made["start_ts"] if "start_ts" in made else int(made["checkpoint_ts"])
        )
        churn = threading.Thread(target=write, args=(server,))
        churn.start()
        lake.follow(lambda tables: len(tables.get("shop.t", {})) > 20)
        cluster.capture.kill()
        cluster.capture.start()
        churn.join()
        server.execute("INSERT INTO shop.t VALUES (-1, 'the end', 0)")
        lake.follow(lambda tables: -1 in tables.get("shop.t", {}))
        for table in ("t", "renamed"):
            columns = [row[0] for row in server.execute(f"SHOW COLUMNS FROM shop.{table}")]
            wanted = {
                row[0]: dict(zip(columns, row, strict=True))
                for row in server.execute(f"SELECT * FROM shop.{table}")
            }
            held = {
                key: dict.fromkeys(columns) | row
                for key, row in lake.tables[f"shop.{table}"].items()
            }
            assert held == wanted
        assert [query.split("shop.")[0].strip() for query in lake.ddls] == [
            "RENAME TABLE",
            "ALTER TABLE",
            "CREATE TABLE",
        ]
        shown = json.dumps(cluster.cli("changefeed", "query", "-c", "shop"))
        assert "s3cret" not in shown
        server.execute("DROP TABLE shop.t, shop.renamed, shop.new")
        lake.follow(lambda tables: not tables)
        deadline = time.monotonic() + 60
        while int(cluster.cli("changefeed", "query", "-c", "shop")["checkpoint_tso"]) <= lake.at_ts:
            assert time.monotonic() < deadline, "without tables the checkpoint goes on with the log"
            time.sleep(0.2)
        cluster.cli("changefeed", "remove", "-c", "shop", "--no-confirm")


def write(server: MariaDb) -> None:
    """Inserts, updates that move keys, deletes, and DDLs between them."""
    for number in range(60):
        server.execute(
            *(
                "BEGIN",
                (
                    f"INSERT INTO shop.t (id, v) VALUES ({number * 10}, 'a'), ({number * 10 + 1}, "
                    f"'é{number}')"
                ),
            ),
            f"UPDATE shop.t SET v = 'changed' WHERE id % 7 = {number % 7}",
            *(
                f"UPDATE shop.t SET id = id + 5 WHERE id = {number * 10}",
                f"DELETE FROM shop.t WHERE id = {number}",
                "COMMIT",
            ),
        )
        if number == 10:
            server.execute(
                "INSERT INTO shop.old VALUES (1), (2)", "RENAME TABLE shop.old TO shop.renamed"
            )
        if number == 30:
            server.execute(
                "ALTER TABLE shop.t ADD COLUMN n INT", "INSERT INTO shop.renamed VALUES (3)"
            )
            server.execute(
                "CREATE TABLE shop.new (id INT PRIMARY KEY)", "INSERT INTO shop.new VALUES (1)"
            )
