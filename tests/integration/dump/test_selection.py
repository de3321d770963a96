"""What is dumped in which order, by the commands and through a real capture:
nothing is left out silently.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tidemarkpb.v1 import dump_pb2 as pb
from tidemarkpb.v1.dump_pb2_grpc import DumpServiceStub

from server.cli.dump import _output
from tests.integration.capture.processes import COMMAND, Cluster, running_cluster
from tests.integration.mysql.lake import Lake
from tests.mariadb import MariaDb, running_mariadb

WAIT_S = 200.0
BIG = 30_000


def cli(cluster: Cluster, verb: str, *more: str) -> Any:
    return cluster.cli("changefeed", verb, "-c", "shop", *more)


def asked(cluster: Cluster) -> Any:
    """The document of dumpstatus, without a process for it."""
    with grpc.insecure_channel(cluster.capture.endpoints["capture"]) as channel:
        request = pb.GetDumpStatusRequest(changefeed_id="shop")
        return _output(
            DumpServiceStub(channel).GetDumpStatus(request, timeout=60, wait_for_ready=True)
        ).document


def lines(status: Any) -> dict[str, Any]:
    return {each["table"].split(".")[1]: each for each in status["status"]}


def follow(cluster: Cluster, lake: Lake, is_there: Callable[[Any], bool]) -> Any:
    """Read cuts until the status says so."""
    seen: list[Any] = []

    def look(_: Any) -> bool:
        seen.append(asked(cluster))
        return is_there(seen[-1])

    lake.follow(look, WAIT_S)
    return seen[-1]


def equal(server: MariaDb, lake: Lake, *names: str) -> None:
    server.execute("REPLACE INTO shop.small VALUES (-1, 'the end')")
    lake.follow(lambda tables: -1 in tables.get("shop.small", {}), WAIT_S)
    server.execute("DELETE FROM shop.small WHERE id = -1")
    for name in names:
        wanted = {row[0]: row for row in server.execute(f"SELECT * FROM shop.{name}")}
        held = {
            key: tuple(row.values())
            for key, row in lake.tables[f"shop.{name}"].items()
            if key != -1
        }
        assert held == wanted, name


@pytest.mark.timeout(300)
def test_priorities_sums_new_tables_and_what_fails_are_told_by_the_status(tmp_path: Path) -> None:
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        partitions = (
            "PARTITION BY RANGE (id) (PARTITION a VALUES LESS THAN (50), PARTITION b VALUES LESS "
            "THAN MAXVALUE)"
        )
        server.execute("CREATE DATABASE shop", "CREATE DATABASE crm")
        for name, rows, more in (
            ("shop.big", BIG, ""),
            ("shop.small", 100, ""),
            ("shop.bad", 100, ""),
            ("shop.parted", 100, partitions),
            ("crm.hidden", 300, ""),
        ):
            server.execute(
                f"CREATE TABLE {name} (id INT PRIMARY KEY, note VARCHAR(100)) {more}",
                "USE shop",
                f"INSERT INTO {name} SELECT seq, REPEAT('n', 90) FROM seq_1_to_{rows}",
                f"ANALYZE TABLE {name}",
            )
        server.execute("CREATE TABLE shop.keyless (x INT)")
        uri = f"mysql://root@127.0.0.1:{server.port}?idle-row-ms=300&on-unclear-ddl=stop"
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
        made = cluster.cli(
            *create, "--filter", "shop.*", "--ignore-ineligible-table", "--on-unclear-ddl", "stop"
        )
        lake = Lake(cluster, "shop", int(made["start_ts"]))
        assert "ErrDumpInvalid" in cli(cluster, "dumpstart", "--table", "shop.typo")
        assert "could not be replicated" in cli(cluster, "dumpstart", "--table", "shop.keyless")
        _priorities(cluster, lake)
        _new_tables(server, cluster, lake)
        equal(server, lake, "big", "small", "parted", "created", "arrived")
        _moved_rows(server, cluster, lake)
        equal(server, lake, "big", "parted")


def _priorities(cluster: Cluster, lake: Lake) -> None:
    options = [
        "--priority",
        "shop.small=5",
        "--priority",
        "shop.p*=3",
        "--where",
        "shop.bad=no_such_column = 1",
    ]
    begun = cli(cluster, "dumpstart", *options, "--rows-per-second", "2000")
    assert (begun["state"], begun["eta_seconds"], begun["tables_failed"]) == ("running", -1, 0)

    def in_order(status: Any) -> bool:
        each = lines(status)
        for first, second in (("small", "parted"), ("parted", "big")):
            assert not (each.get(second, {}).get("rows_read") and not each[first]["rows_read"]), (
                status
            )
        return bool(each.get("big", {}).get("rows_done"))

    status = follow(cluster, lake, in_order)
    assert lines(status)["small"]["state"] == "done"
    paused = cli(cluster, "dumppause")
    assert (paused["state"], paused["eta_seconds"], paused["rows_per_second"]) == ("paused", -1, 0)
    updated = cli(cluster, "dumpupdate", "--priority", "shop.bad=9", "--rows-per-second", "0")
    assert updated["priority"] == {"shop.small": 5, "shop.p*": 3, "shop.bad": 9}
    cluster.capture.kill()
    cluster.capture.start()
    again = cli(cluster, "dumpstatus")
    assert (again["state"], again["rows_done"]) == (
        "paused",
        sum(each["rows_done"] for each in _counted(again)),
    )
    assert 0 < again["progress_percent"] < 100
    cli(cluster, "dumpresume")
    status = follow(cluster, lake, lambda status: status["state"] == "failed")
    each = lines(status)
    assert {name: each[name]["state"] for name in each} == {
        **dict.fromkeys(("big", "small", "parted"), "done"),
        "bad": "failed",
        "keyless": "ignored",
    }
    assert "no_such_column" in each["bad"]["error"]
    assert (status["progress_percent"], status["eta_seconds"]) == (100, 0)
    assert (status["rows_done"], status["rows_estimated"]) == (BIG + 200, BIG + 200)
    assert (status["tables_done"], status["tables_failed"]) == (3, 1)
    assert status["bytes_done"] > BIG * 90


def _counted(status: Any) -> list[Any]:
    return [each for each in status["status"] if each["state"] not in ("failed", "ignored")]


def _new_tables(server: MariaDb, cluster: Cluster, lake: Lake) -> None:
    """They are dumped by themselves, though all was over;
    one that is renamed into the filter has rows already.
    """
    server.execute(
        "CREATE TABLE shop.created (id INT PRIMARY KEY, note VARCHAR(100))",
        "INSERT INTO shop.created VALUES (1, 'one')",
        "RENAME TABLE crm.hidden TO shop.arrived",
        "UPDATE shop.arrived SET note = 'new' WHERE id = 5",
    )
    done = {"created", "arrived"}
    status = follow(
        cluster,
        lake,
        lambda status: (
            done <= {name for name, each in lines(status).items() if each["state"] == "done"}
        ),
    )
    assert lines(status)["arrived"]["rows_done"] == 300


def _moved_rows(server: MariaDb, cluster: Cluster, lake: Lake) -> None:
    """A partition is emptied after the dump: the changefeed stops by name,
    and the ways out of it work.
    """
    server.execute(
        "ALTER TABLE shop.parted TRUNCATE PARTITION a",
        "INSERT INTO shop.parted VALUES (7, 'seven')",
    )
    seen: list[Any] = []

    def has_failed(_: Any) -> bool:
        seen.append(cluster.cli("changefeed", "query", "-c", "shop"))
        return bool(seen[-1]["state"] == "failed")

    lake.follow(has_failed, WAIT_S)  # it fails when everything before the statement was delivered
    found = seen[-1]
    assert found["error"]["code"] == "TM:ErrMySQLRowsMoved"
    assert "dumpstart --table shop.parted" in found["error"]["message"]
    cli(cluster, "dumpstart", "--table", "shop.parted")
    cluster.cli("changefeed", "resume", "-c", "shop")
    follow(
        cluster, lake, lambda status: status["state"] == "finished" and status["tables_done"] == 1
    )
    flags = [
        "cli",
        "--server",
        cluster.capture.endpoints["capture"],
        "--pd",
        cluster.pd,
        "changefeed",
        "dumpstart",
    ]
    codes = [
        subprocess.run(
            [*COMMAND, *flags, "-c", "shop", *more], capture_output=True, timeout=60, check=False
        ).returncode
        for more in (["--table", "shop.typo"], ["--priority", "x"], ["--rows-per-second", "-1"])
    ]
    assert codes == [1, 1, 2]
    told = cluster.cli("changefeed", "update", "-c", "shop", "--on-unclear-ddl", "reread")
    assert told["source_uri"].endswith("&on-unclear-ddl=reread")
    server.execute("ALTER TABLE shop.parted TRUNCATE PARTITION b")
    follow(
        cluster,
        lake,
        lambda status: "TRUNCATE PARTITION b" in lines(status)["parted"].get("reason", ""),
    )
    follow(cluster, lake, lambda status: lines(status)["parted"]["state"] == "done")
    assert cluster.cli("changefeed", "query", "-c", "shop")["state"] == "normal"
