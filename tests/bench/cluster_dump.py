"""A dump of a table of the cluster into a followed change feed:
rows per CPU-second of the capture, and the feed's lag.

Coordinator, store and capture are real processes. The table has a key, four integers and a text of
a hundred bytes. A reader takes every cut as Spark does, rows and all, so the capture's CPU is that
of reading the store, sorting, mounting and serving. Beside it a row of another table is written
every 50 ms; its lag is from the answer of its commit to the cut that has it, before the dump and
during it.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from kvproto import kvrpcpb_pb2 as kvrpcpb
from tidemarkpb.v1 import dump_pb2 as pb
from tidemarkpb.v1.dump_pb2_grpc import DumpServiceStub

from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from storage.tidb.cell import Value
from storage.tidb.record import encode_record
from storage.tidb.schema import Column, TableInfo
from tests.integration.capture.processes import Cluster, Reader, running_cluster

_BEAT_S = 0.05
_BATCH = 2000
_TEXT = "x" * 100
ORDERS = TableInfo.build(
    900,
    "orders",
    [*(Column.bigint(name) for name in ("id", "a", "b", "c", "d")), Column.varchar("text", 200)],
)
BEAT = TableInfo.build(901, "beat", [Column.bigint("id"), Column.bigint("v")])


@dataclass
class Beats:
    """Rows written until told to stop: when each was committed, at which commit_ts,
    and when it was in a cut.
    """

    coordinator: str
    committed: list[tuple[int, float]] = field(default_factory=list)
    lags_ms: list[float] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Write."""
        asyncio.run(self._write())

    async def _write(self) -> None:
        async with PdClient.open(self.coordinator) as pd, KvClient.open(pd) as kv:
            number = 0
            while not self.ended.is_set():
                number += 1
                commit_ts = await committed(
                    pd, kv, [encode_record(BEAT, {"id": number, "v": number})]
                )
                self.committed.append((commit_ts, time.monotonic()))
                await asyncio.sleep(_BEAT_S)

    def arrived(self, ts: int) -> None:
        """A cut up to `ts` is there."""
        now = time.monotonic()
        while self.committed and self.committed[0][0] <= ts:
            self.lags_ms.append(1000 * (now - self.committed.pop(0)[1]))

    def taken(self) -> dict[str, float]:
        """The lags since the last call."""
        lags, self.lags_ms = sorted(self.lags_ms), []
        return {
            "p50_ms": round(statistics.median(lags), 1),
            "p99_ms": round(lags[int(len(lags) * 0.99)], 1),
        }


async def committed(pd: PdClient, kv: KvClient, rows: list[tuple[bytes, bytes]]) -> int:
    """One transaction; returns its commit_ts."""
    start_ts = await pd.tso()
    mutations = [kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=value) for key, value in rows]
    keys = [key for key, _ in rows]
    await kv.prewrite(mutations, primary=keys[0], start_version=start_ts, lock_ttl_ms=20_000)
    commit_ts = await pd.tso()
    await kv.commit(keys[:1], start_ts, commit_ts)
    await kv.commit(keys, start_ts, commit_ts)
    return commit_ts


async def filled(coordinator: str, rows: int) -> None:
    """The table."""
    async with PdClient.open(coordinator) as pd, KvClient.open(pd) as kv:
        for first in range(0, rows, _BATCH):
            numbers = range(first, min(first + _BATCH, rows))
            values: list[dict[str, Value]]
            values = [
                {"id": n, "a": n, "b": n * 7, "c": n % 100, "d": -n, "text": _TEXT} for n in numbers
            ]
            await committed(pd, kv, [encode_record(ORDERS, each) for each in values])


def cpu_s(pid: int) -> float:
    """Of a process and its children that live."""
    found = 0.0
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            parts = (directory / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(directory.name) == pid or int(parts[1]) == pid:
            found += (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")
    return found


class Following:
    """A reader of everything."""

    def __init__(self, cluster: Cluster, beats: Beats, start_ts: int) -> None:
        self.rows = 0
        self._reader, self._beats, self._at = Reader(cluster, "bench"), beats, start_ts

    def step(self) -> None:
        """Take a cut."""
        end = self._reader.ask("latest", start=self._at, wait_ms=1000)["ts"]
        if end == self._at:
            return
        self._beats.arrived(end)
        for part in self._reader.ask("plan", start=self._at, end=end)["slices"]:
            if part["rows"] and part["table"] == "shop.orders":
                self.rows += self._reader.read(
                    self._at, end, part["table"], part["locations"][0]
                ).num_rows
        self._reader.ask("ack", ts=end)
        self._at = end


def measured(cluster: Cluster, directory: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """Beats alone, then beside a dump."""
    asyncio.run(filled(cluster.pd, arguments.rows))
    tables = [
        f'{{"schema_name": "shop", "table_info": {table.to_json()}}}' for table in (ORDERS, BEAT)
    ]
    (directory / "tables.json").write_text(f"[{', '.join(tables)}]")
    create = ("changefeed", "create", "-c", "bench", "--sink-uri", "parquet:///lake")
    start_ts = int(cluster.cli(*create, "--tables", str(directory / "tables.json"))["start_ts"])
    beats = Beats(cluster.pd)
    writing = threading.Thread(target=beats.run)
    writing.start()
    following = Following(cluster, beats, start_ts)
    following.step()
    began, cpu = time.monotonic(), cpu_s(cluster.capture.process.pid)
    while time.monotonic() < began + arguments.before_s:
        following.step()
    idle = (cpu_s(cluster.capture.process.pid) - cpu) / (time.monotonic() - began)
    before, began, cpu = beats.taken(), time.monotonic(), cpu_s(cluster.capture.process.pid)
    with grpc.insecure_channel(cluster.capture.endpoints["capture"]) as channel:
        stub = DumpServiceStub(channel)
        request = pb.StartDumpRequest(
            changefeed_id="bench", tables=["shop.orders"], parallel=arguments.parallel
        )
        stub.StartDump(request, timeout=30)
        while following.rows < arguments.rows:
            following.step()
        wall, used = time.monotonic() - began, cpu_s(cluster.capture.process.pid) - cpu
        status = stub.GetDumpStatus(
            pb.GetDumpStatusRequest(changefeed_id="bench"), timeout=30
        ).status[0]
    during = beats.taken()
    beats.ended.set()
    writing.join()
    return {
        "rows": following.rows,
        "rows_per_cpu_s": round(following.rows / used),
        "rows_per_s": round(following.rows / wall),
        "cores_before": round(idle, 2),
        "chunks": status.chunks_done,
        "rows_estimated": status.rows_estimated,
        "lag_before": before,
        "lag_during": during,
    }


def _flags(arguments: argparse.Namespace) -> list[str]:
    return ["--workers", str(arguments.workers)]


def main() -> None:
    """Fill the table, then dump it; prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--before-s", type=float, default=5.0, help="how long the lag is measured before the dump"
    )
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as made,
        running_cluster(Path(made), *_flags(arguments)) as cluster,
    ):
        result = measured(cluster, Path(made), arguments)
    options = {"parallel": arguments.parallel, "workers": arguments.workers}
    print(json.dumps({"bench": "cluster_dump", **options, **result}))


if __name__ == "__main__":
    main()
