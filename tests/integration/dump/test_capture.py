"""By the command line: a capture dumps a real MariaDB under churn, is killed, and ends the dump."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.capture.processes import Cluster, running_cluster
from tests.integration.mysql.lake import Lake
from tests.mariadb import MariaDb, running_mariadb

ROWS = 10_000


def churn(server: MariaDb, stop: threading.Event) -> None:
    connection = server.connect("shop")
    number = 0
    with connection.cursor() as cursor:
        while not stop.is_set():
            number += 1
            cursor.execute(f"UPDATE orders SET version = {number} WHERE id % 211 = {number % 211}")
            cursor.execute(f"DELETE FROM orders WHERE id = {number * 13 % ROWS}")
            cursor.execute(f"REPLACE INTO orders VALUES ({number * 29 % ROWS}, {number}, 'again')")
            time.sleep(0.002)
    connection.close()


def dump(cluster: Cluster, verb: str, *more: str) -> dict[str, Any]:
    found = cluster.cli("changefeed", verb, "-c", "shop", *more)
    assert isinstance(found, dict), found
    return found


@pytest.mark.timeout(300)
def test_a_dump_survives_pauses_and_kills_and_the_reader_has_every_row(tmp_path: Path) -> None:
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute(
            "CREATE DATABASE shop",
            "USE shop",
            "CREATE TABLE orders (id INT PRIMARY KEY, version INT, note VARCHAR(400))",
            f"INSERT INTO orders SELECT seq, 0, REPEAT('n', 300) FROM seq_0_to_{ROWS - 1}",
            "CREATE TABLE names (id VARCHAR(20) COLLATE utf8mb4_general_ci PRIMARY KEY)",
            "INSERT INTO names VALUES ('Abc'), ('b'), ('ß')",
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
        assert "ErrDumpNotExists" in cluster.cli("changefeed", "dumpstatus", "-c", "shop")
        lake = Lake(cluster, "shop", int(made["start_ts"]))
        stop = threading.Event()
        writer = threading.Thread(target=churn, args=(server, stop))
        writer.start()
        try:
            assert (
                dump(cluster, "dumpstart", "--rows-per-second", "4000", "--verify")["state"]
                == "running"
            )
            assert dump(cluster, "dumpstart", "--verify", "--rows-per-second", "4000")["verify"], (
                "asked for twice"
            )
            for share in (0.2, 0.5):
                lake.follow(
                    lambda tables, share=share: len(tables.get("shop.orders", {})) > share * ROWS
                )
                if share == 0.5:
                    assert dump(cluster, "dumppause")["state"] == "paused"
                cluster.capture.kill()
                cluster.capture.start()
                if share == 0.5:
                    assert dump(cluster, "dumpstatus")["state"] == "paused", (
                        "a pause survives a kill"
                    )
                    assert dump(cluster, "dumpresume")["state"] == "running"
            lake.follow(lambda _: dump(cluster, "dumpstatus")["state"] == "finished", 90)
        finally:
            stop.set()
            writer.join()
        server.execute("INSERT INTO shop.orders VALUES (-1, 0, 'the end')")
        lake.follow(lambda tables: -1 in tables.get("shop.orders", {}))
        wanted = {
            row[0]: row for row in server.execute("SELECT id, version, note FROM shop.orders")
        }
        held = {key: tuple(row.values()) for key, row in lake.tables["shop.orders"].items()}
        assert held == wanted
        assert set(lake.tables["shop.names"]) == {"Abc", "b", "ß"}
        status = {each["table"]: each for each in dump(cluster, "dumpstatus")["status"]}
        assert {each["state"] for each in status.values()} == {"done"}
        assert status["shop.orders"]["rows_done"] > ROWS // 2
        assert status["shop.orders"]["progress_percent"] == 100
        for each in status.values():
            assert each["chunks_verified"] == each["chunks_done"] > 0
            assert each["chunks_repaired"] == 0
