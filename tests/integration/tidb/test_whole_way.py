"""From a real TiDB's history to a Flight reader that alters its tables at each DDL:
by the change feed and by pumps.
"""

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.options import parse
from tipb import pump_pb2_grpc

from server.changefeed import keys
from server.rpc.client import connect
from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from storage.meta.client import open_meta
from tests.integration.capture.processes import Cluster, Reader, running_cluster
from tests.integration.lake.memory import MemoryLake
from tests.integration.tidb.history import load, txns
from tests.integration.tidb.pumps import FLAGS, Written
from tests.unit.storage.tidb import vectors

PLAIN = frozenset({"spk", "part", "upk", "cpk", "nopkuk", "nopkuk2", "gencol", "binpk", "arnd"})
"""Tables of integers, decimals and characters, whose values print as SELECT prints them."""
MERGED = ("vec.cpk", "vec.ncpk")
"""Tables of one key that a lake keeps as one."""
Rows = dict[tuple[Any, ...], dict[str, Any]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("whole")) as started:
        yield started


@pytest.fixture(scope="module")
def written(cluster: Cluster) -> None:
    """The store and a pump have everything."""
    flags = ["--coordinator", cluster.pd, "--data-dir", str(cluster.directory / "pump"), *FLAGS]
    pump = cluster.start("pump", *flags)
    asyncio.run(_write(cluster.pd, pump.endpoints["pump"]))


async def _write(coordinator: str, pump: str) -> None:
    async with PdClient.open(coordinator) as pd, KvClient.open(pd) as kv, connect(pump) as channel:
        await load(kv, txns())
        binlogs = [base64.b64decode(line["payload_b64"]) for line in vectors.lines("binlogs")]
        await Written([pump_pb2_grpc.PumpStub(channel)], pd).send(binlogs)


class Follower:
    """Reads cut by cut, as a lake job does, and never over a DDL."""

    def __init__(self, reader: Reader, ts: int) -> None:
        self.tables: dict[str, Rows] = {}
        self.reader = reader
        self._ts = ts

    def follow(self, upto_ts: int) -> None:
        """Bring everything up to `upto_ts`."""
        while self._ts < upto_ts:
            schemas = self.reader.ask("describe", ts=self._ts)
            self._alter(schemas)
            end = min(upto_ts, self.reader.ask("latest", start=self._ts, wait_ms=1000)["ts"])
            for table in schemas["tables"] if end > self._ts else ():
                self._apply(
                    table["table"],
                    table["key"],
                    self.reader.read(self._ts, end, table["table"]).to_pylist(),
                )
            self._ts = max(self._ts, end)

    def _alter(self, schemas: dict[str, Any]) -> None:
        for ddl in schemas["ddls"]:
            if ddl["ts"] == self._ts:
                for old, new in ddl["renamed"]:
                    self.tables[new] = self.tables.pop(old, {})
                for name in [*ddl["dropped"], *ddl["truncated"]]:
                    self.tables.pop(name, None)
        for table in schemas["tables"]:
            self.tables.setdefault(table["table"], {})

    def _apply(self, name: str, key: list[str], rows: list[dict[str, Any]]) -> None:
        state = self.tables[name]
        for row in rows:
            place = tuple(row[column] for column in key)
            if row["_op"] == "delete":
                del state[place]
            else:
                state[place] = row


@pytest.mark.parametrize("source", ["", "pump://"])
@pytest.mark.usefixtures("written")
def test_a_reader_that_alters_its_tables_has_after_each_step_what_select_gave(
    cluster: Cluster, source: str
) -> None:
    first, *rest = vectors.lines("steps")
    start_ts = first["ts_after"]  # a changefeed begins with a table
    name = "pumps" if source else "feed"
    created = cluster.cli(
        *(
            "changefeed",
            "create",
            "-c",
            name,
            "--sink-uri",
            "flight://",
            "--start-ts",
            str(start_ts),
        ),
        *(("--source-uri", source) if source else ()),
        *("--no-confirm", "--filter", "vec*.*", "--ignore-ineligible-table"),
    )
    assert isinstance(created, dict), created
    follower = Follower(Reader(cluster, name), start_ts)
    follower.reader.wait_resolved(start_ts + 1)
    compared = 0
    for step in rest:
        follower.follow(step["ts_after"])
        compared += _compare(follower.tables, step)
    assert compared > 10_000
    assert follower.reader.ask("describe", ts=rest[-1]["ts_after"])["ddls"] == []
    assert asyncio.run(registered(cluster.pd, name)) == bool(source)
    assert isinstance(cluster.cli("changefeed", "remove", "--no-confirm", "-c", name), dict)
    assert not asyncio.run(registered(cluster.pd, name)), "pumps wait for a reader that is gone"


@pytest.mark.parametrize("source", ["", "pump://"])
@pytest.mark.usefixtures("written")
def test_a_lake_has_what_a_change_of_type_made_of_rows_that_nobody_wrote_again(
    cluster: Cluster, source: str
) -> None:
    """INT becomes VARCHAR under another name; the lake alters its table by column identities."""
    steps = vectors.lines("steps")
    name, start_ts, last = f"lake{len(source)}", steps[11]["ts_after"], steps[-1]
    created = cluster.cli(
        *(
            "changefeed",
            "create",
            "-c",
            name,
            "--sink-uri",
            "delta:///lake",
            "--start-ts",
            str(start_ts),
        ),
        *(("--source-uri", source) if source else ()),
        *("--no-confirm", "--filter", "vec.spk", "--filter", "vec.ints"),
        *(part for name in MERGED for part in ("--filter", name)),
        *(part for name in MERGED for part in ("--route", f"{name}=lake.pk{{shard=_shard}}")),
    )
    assert isinstance(created, dict), created
    options = {
        "endpoint": f"grpc://{cluster.capture.endpoints['flight']}",
        "changefeed": name,
        "cuts": "true",
    }
    Reader(cluster, name).wait_resolved(last["ts_after"])
    lake = MemoryLake(Changefeed(parse(options)), start_ts)
    while lake.at_ts < last["ts_after"]:
        lake.follow(wait_ms=1000)
    wanted = last["rows_after"]["vec.spk"]
    found = lake.target.tables["vec.spk"].rows.values()
    assert sorted([_text(row[column]) for column in wanted["columns"]] for row in found) == sorted(
        wanted["rows"]
    )
    assert "ex2" in wanted["columns"]
    for name in MERGED:
        wanted = last["rows_after"][name]
        shard = [
            row for row in lake.target.tables["lake.pk"].rows.values() if row["_shard"] == name
        ]
        found = sorted([_text(row[column]) for column in wanted["columns"]] for row in shard)
        assert found == sorted(wanted["rows"])
        assert found
    cluster.cli("changefeed", "remove", "--no-confirm", "-c", created["id"])


async def registered(coordinator: str, changefeed: str) -> bool:
    """Whether pumps know of the changefeed."""
    async with open_meta(f"etcd://{coordinator}", connect) as meta:
        return await meta.get(keys.drainer(changefeed)) is not None


def _compare(tables: dict[str, Rows], step: dict[str, Any]) -> int:
    compared = 0
    for name, result in step["rows_after"].items():
        if name not in tables:
            assert name in {"vec.nopk", "vec.nopkuk"}, name  # no key: left out
            continue
        found = list(tables[name].values())
        count = (
            int(result["aggregate"][0][0]) if "aggregate" in result else len(result["rows"] or [])
        )
        assert len(found) == count, (step["name"], name)
        if name.split(".")[1] in PLAIN:
            wanted = [
                dict(zip(result["columns"], row, strict=True)) for row in result["rows"] or []
            ]
            assert _texts(found) == _texts(wanted), (step["name"], name)
        compared += count
    return compared


def _texts(rows: list[dict[str, Any]]) -> list[str]:
    """Columns that no reader has to fill by itself, as text."""
    return sorted(
        str({name: _text(it) for name, it in row.items() if name in {"id", "a", "s", "v", "ex2"}})
        for row in rows
    )


def _text(value: Any) -> str | None:
    return f"0x{value.hex()}" if isinstance(value, bytes) else None if value is None else str(value)
