"""What a row of the cluster costs one, two and three captures that share its tables:
`python -m tests.bench.captures --captures 1 2 3`.

Coordinator, store and captures are real processes. Twelve tables have a key, four integers and a
text of a hundred bytes; rows of all are committed, 2,000 a transaction, while a reader takes every
cut as Spark does, each table's rows from the capture that has them, and acknowledges it. Prints one
JSON line: by the number of captures rows a second by the clock, CPU µs a row of all captures
together and of the busiest one (which bounds the rate where each has a core), and the owner's part;
without what the captures take while nothing is committed, which is beside it, in CPU ms a second:
where the clock is slow, as on a busy machine, that would be the most of it.
"""

import argparse
import asyncio
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tidemarkpb.v1 import changefeed_pb2 as pb

from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from storage.tidb.record import encode_record
from storage.tidb.schema import Column, TableInfo
from tests.bench.cluster_dump import committed, cpu_s
from tests.integration.capture.processes import Cluster, Daemon, Reader, patiently, running_cluster

_BATCH = 2000
_TEXT = "x" * 100
_WAIT_S = 120.0
_IDLE_S = 10.0
_COLUMNS = [*(Column.bigint(name) for name in ("id", "a", "b", "c", "d"))]
TABLES = [
    TableInfo.build(910 + n, f"t{n}", [*_COLUMNS, Column.varchar("text", 200)]) for n in range(12)
]


async def written(coordinator: str, rows: int) -> None:
    """Commit rows, one table after the other."""
    async with PdClient.open(coordinator) as pd, KvClient.open(pd) as kv:
        for number, first in enumerate(range(0, rows, _BATCH)):
            table = TABLES[number % len(TABLES)]
            values = [
                {"id": n, "a": n, "b": n * 7, "c": n % 100, "d": -n, "text": _TEXT}
                for n in range(first, min(first + _BATCH, rows))
            ]
            await committed(pd, kv, [encode_record(table, each) for each in values])


class Following:
    """A reader of everything."""

    def __init__(self, cluster: Cluster, start_ts: int) -> None:
        self.rows = 0
        self._reader, self._at = Reader(cluster, "bench"), start_ts

    def step(self) -> None:
        """Take a cut, and acknowledge it."""
        end = patiently(self._reader.ask, "latest", start=self._at, wait_ms=500)["ts"]
        if end == self._at:
            return
        parts = patiently(self._reader.ask, "plan", start=self._at, end=end)["slices"]
        for part in parts:
            if part["rows"]:
                where = part["locations"][0]
                self.rows += self._reader.read(self._at, end, part["table"], where).num_rows
        patiently(self._reader.ask, "ack", ts=end)
        self._at = end


def divided(cluster: Cluster, captures: int) -> None:
    """Wait until all captures have tables."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        tables = cluster.api("QueryChangefeed", pb.QueryChangefeedRequest(id="bench"))
        places = {table.capture for table in tables.changefeed.tables}
        if len(places) == captures:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the tables are at {len(places)} captures, not at {captures}")
        time.sleep(0.1)


def idle_cpu(daemons: list[Daemon], reader: Following) -> list[float]:
    """The CPU seconds a second of each while a reader asks, and nothing is committed."""
    before, begin = [cpu_s(each.process.pid) for each in daemons], time.monotonic()
    while time.monotonic() < begin + _IDLE_S:
        reader.step()
    seconds = time.monotonic() - begin
    return [
        (cpu_s(each.process.pid) - was) / seconds for each, was in zip(daemons, before, strict=True)
    ]


def run(captures: int, rows: int, directory: Path) -> dict[str, float]:
    """The figures of one cluster."""
    with running_cluster(directory) as cluster:
        daemons: list[Daemon] = [cluster.capture]
        for number in range(1, captures):
            place = str(directory / f"capture-{number}")
            daemons.append(
                cluster.start("capture", "--coordinator", cluster.pd, "--data-dir", place)
            )
        tables = [pb.Table(schema_name="shop", table_info_json=each.to_json()) for each in TABLES]
        request = pb.CreateChangefeedRequest(id="bench", sink_uri="flight://", tables=tables)
        reader = Following(cluster, cluster.api("CreateChangefeed", request).changefeed.start_ts)
        divided(cluster, captures)
        idle = idle_cpu(daemons, reader)
        before = [cpu_s(each.process.pid) for each in daemons]
        begin = time.monotonic()
        writer = threading.Thread(target=asyncio.run, args=(written(cluster.pd, rows),))
        writer.start()
        while reader.rows < rows:
            reader.step()
        seconds = time.monotonic() - begin
        writer.join()
        spent = [
            (cpu_s(each.process.pid) - was - share * seconds) / rows * 1e6
            for each, was, share in zip(daemons, before, idle, strict=True)
        ]
        assert reader.rows == rows
    return {
        "per_s": round(rows / seconds),
        "cpu_us_per_op": round(sum(spent), 1),
        "busiest_cpu_us": round(max(spent), 1),
        "owner_cpu_us": round(spent[0], 1),
        "idle_cpu_ms_a_s": [round(share * 1e3) for share in idle],
    }


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captures", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", type=int, default=240_000)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    figures: dict[int, list[dict[str, Any]]] = {}
    for captures in args.captures * args.rounds:
        with tempfile.TemporaryDirectory() as directory:
            figures.setdefault(captures, []).append(run(captures, args.rows, Path(directory)))
    print(json.dumps({"name": "captures", "rows": args.rows, "by_captures": figures}))


if __name__ == "__main__":
    main()
