"""Columns that are called like ours: refused by name, or known to readers by another name,
from log and dump alike.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.capture.processes import Cluster, running_cluster
from tests.integration.mysql.lake import Lake
from tests.mariadb import MariaDb, running_mariadb

COLUMNS = 'id INT PRIMARY KEY, v INT, `_op` VARCHAR(9), `_Commit_TS` INT, `x.y z,"é` INT'


def rows_of(server: MariaDb) -> dict[int, dict[str, Any]]:
    names = ("id", "v", "their_op", "their_ts", 'x.y z,"é')
    rows = server.execute("SELECT * FROM a.t")
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows}


def create(cluster: Cluster, server: MariaDb, *flags: str) -> Any:
    base = ["changefeed", "create", "-c", "f", "--sink-uri", "parquet:///lake", "--filter", "a.*"]
    return cluster.cli(*base, "--source-uri", server.uri, *flags)


@pytest.mark.timeout(240)
def test_a_column_that_is_called_like_one_of_ours(tmp_path: Path) -> None:
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute("CREATE DATABASE a", f"CREATE TABLE a.t ({COLUMNS})")
        server.execute("INSERT INTO a.t VALUES (1, 1, 'insert', 5, 6), (2, 2, 'delete', 7, 8)")
        refused = json.dumps(create(cluster, server))
        assert "a.t=*,_op->upstream_op" in refused, refused
        made = create(cluster, server, "--columns", "a.t=*,_op->their_op,_commit_ts->their_ts")
        assert made["state"] == "normal", made
        lake = Lake(cluster, "f", made["start_ts"])
        cluster.cli("changefeed", "dumpstart", "-c", "f", "--verify")
        lake.follow(lambda tables: len(tables.get("a.t", {})) == 2)
        assert lake.tables["a.t"] == rows_of(server), "from the dump"
        server.execute(
            "UPDATE a.t SET _op = 'delete'", "INSERT INTO a.t VALUES (3, 3, 'x', 1, NULL)"
        )
        lake.follow(lambda tables: 3 in tables["a.t"])
        assert lake.tables["a.t"] == rows_of(server), "from the log"
        server.execute(
            "ALTER TABLE a.t ADD `_SEQ` INT", "INSERT INTO a.t VALUES (4, 4, 'x', 1, NULL, 9)"
        )
        stopped = wait_for_error(cluster, lake)
        assert "_SEQ" in stopped["message"], stopped
        assert 4 not in lake.tables["a.t"]


def wait_for_error(cluster: Cluster, lake: Lake) -> Any:
    found: list[Any] = []

    def failed(_: Any) -> bool:
        shown = cluster.cli("changefeed", "query", "-c", "f")
        found[:] = [shown["error"]] if shown["error"] else []
        return bool(found)

    lake.follow(failed)
    return found[0]
