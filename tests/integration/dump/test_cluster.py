"""Tables of the cluster: rows from before the changefeed come through a dump,
while writers go on and kills happen.
"""

import asyncio
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from storage.tidb.record import encode_record, record_key
from storage.tidb.schema import Column, TableInfo
from tests.integration.capture.processes import Cluster, Reader, running_cluster

tikv_client = pytest.importorskip("tikv_client")
ROWS = 3000
ORDERS = TableInfo.build(500, "orders", [Column.bigint("id"), Column.bigint("v")])
EMPTY = TableInfo.build(501, "empty", [Column.bigint("id"), Column.bigint("v")])
NAMES = ("shop.orders", "shop.empty")


class Writer(threading.Thread):
    """Writes until it is stopped: new rows, changed ones, deletes;
    `rows` is what it has committed.
    """

    def __init__(self, pd: str) -> None:
        super().__init__()
        self.rows: dict[int, int] = {}
        self.stopped = threading.Event()
        self._pd = pd

    def run(self) -> None:
        asyncio.set_event_loop(loop := asyncio.new_event_loop())
        client = tikv_client.TransactionClient.connect([self._pd])
        chance, number = random.Random(4), 0
        while not self.stopped.is_set():
            number += 1
            self.write(
                client,
                {
                    chance.randrange(ROWS + 500): number if chance.random() < 0.8 else None
                    for _ in range(4)
                },
            )
            time.sleep(0.01)
        loop.close()

    def write(self, client: Any, rows: dict[int, int | None]) -> None:
        txn = client.begin(pessimistic=False)
        for key, value in rows.items():
            if value is None:
                txn.delete(record_key(ORDERS.id, key))
            else:
                txn.put(*encode_record(ORDERS, {"id": key, "v": value}))
        txn.commit()
        for key, value in rows.items():
            if value is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = value


class Target:
    """Reads cut by cut, keeps the rows, and acknowledges; a capture may be away meanwhile."""

    def __init__(self, cluster: Cluster, start_ts: int) -> None:
        self.rows: dict[str, dict[int, int]] = {name: {} for name in NAMES}
        self.at = start_ts
        self._reader = Reader(cluster, "shop")

    def follow(self, until: Any, limit_s: float = 150.0) -> None:
        deadline = time.monotonic() + limit_s
        while not until():
            assert time.monotonic() < deadline, "not reached"
            try:
                self._step()
            except Exception as err:  # noqa: BLE001 - Flight has no common class; the deadline tells
                last = err
                assert time.monotonic() < deadline, last
                time.sleep(0.1)

    def _step(self) -> None:
        end = self._reader.ask("latest", start=self.at, wait_ms=300)["ts"]
        for name in NAMES if end > self.at else ():
            for row in self._reader.read(self.at, end, name).to_pylist():
                if row["_op"] == "delete":
                    self.rows[name].pop(row["id"], None)
                else:
                    self.rows[name][row["id"]] = row["v"]
        if end > self.at:
            self.at = end
            self._reader.ask("ack", ts=end)


async def stored(address: str, ts: int) -> dict[bytes, bytes]:
    async with PdClient.open(address) as pd, KvClient.open(pd) as kv:
        return dict(
            await kv.scan(record_key(ORDERS.id, 0), record_key(ORDERS.id, 1 << 40), ts, 10 * ROWS)
        )


def dump(cluster: Cluster, verb: str, *more: str) -> dict[str, Any]:
    found = cluster.cli("changefeed", verb, "-c", "shop", *more)
    assert isinstance(found, dict), found
    return found


def wait_ahead(cluster: Cluster) -> None:
    """Until rows were read that no reader has acknowledged."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        status = {each["table"]: each for each in dump(cluster, "dumpstatus")["status"]}[
            "shop.orders"
        ]
        if status["rows_read"] > status["rows_done"]:
            return
    raise TimeoutError(status)


def tables_file(directory: Path) -> str:
    documents = [
        f'{{"schema_name": "shop", "table_info": {table.to_json()}}}' for table in (ORDERS, EMPTY)
    ]
    path = directory / "tables.json"
    path.write_text(f"[{', '.join(documents)}]")
    return str(path)


def create(cluster: Cluster, directory: Path) -> int:
    made = cluster.cli(
        "changefeed",
        "create",
        "-c",
        "shop",
        "--sink-uri",
        "parquet:///lake",
        "--tables",
        tables_file(directory),
    )
    assert isinstance(made, dict), made
    return int(made["start_ts"])


@pytest.mark.timeout(180)
def test_rows_from_before_the_start_come_through_writers_and_a_kill(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        writer = Writer(cluster.pd)
        asyncio.set_event_loop(loop := asyncio.new_event_loop())
        client = tikv_client.TransactionClient.connect([cluster.pd])
        for first in range(0, ROWS, 500):
            writer.write(client, dict.fromkeys(range(first, first + 500), 0))
        target = Target(cluster, create(cluster, tmp_path))
        writer.start()
        try:
            assert dump(cluster, "dumpstart", "--rows-per-second", "100")["state"] == "running"
            target.follow(lambda: len(target.rows["shop.orders"]) > ROWS // 8)
            dumping = {each["table"]: each for each in dump(cluster, "dumpstatus")["status"]}[
                "shop.orders"
            ]
            assert 0.7 * ROWS < dumping["rows_estimated"] < 1.5 * ROWS
            wait_ahead(cluster)
            cluster.capture.kill()
            cluster.capture.start()
            target.follow(lambda: len(target.rows["shop.orders"]) > ROWS // 3)
            dump(cluster, "dumpupdate", "--rows-per-second", "1500")
            assert dump(cluster, "dumppause")["state"] == "paused"
            assert dump(cluster, "dumpresume")["state"] == "running"
            target.follow(lambda: dump(cluster, "dumpstatus")["state"] == "finished")
        finally:
            writer.stopped.set()
            writer.join()
        now = cluster.now()
        target.follow(lambda: target.at >= now)
        assert target.rows["shop.orders"] == writer.rows
        assert {*asyncio.run(stored(cluster.pd, now))} == {
            record_key(ORDERS.id, key) for key in writer.rows
        }
        assert target.rows["shop.empty"] == {}
        status = {each["table"]: each for each in dump(cluster, "dumpstatus")["status"]}
        assert {each["state"] for each in status.values()} == {"done"}
        assert status["shop.orders"]["rows_read"] == status["shop.orders"]["rows_done"] > ROWS // 2
        loop.close()
