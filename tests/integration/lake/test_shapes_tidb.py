"""Routes, masks, hashed keys and left-out columns from a real TiDB's history in a store to Delta,
Iceberg and Parquet: each lake has what SELECT gave, shown so, through DDL.
"""

import asyncio
import hashlib
import hmac

import pytest

from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from tests.integration.capture.processes import running_cluster
from tests.integration.lake.kept import KeptLake
from tests.integration.tidb.history import load, txns
from tests.unit.storage.tidb import vectors

pytestmark = pytest.mark.timeout(500)
SALT = b"0123456789abcdef-of-shapes"
SHAPES = (
    *("--route", "vec.*=lake.tidb_{table}", "--mask", "vec.spk=s:mask.hash.SHA-256"),
    *("--mask", "vec.s*=v:mask.with.2.chars"),
    # `extra` comes later, and is built anew as `ex2`: no rule is about that name.
    *("--columns", "vec.spk=*,!ext*"),
)


async def _write(coordinator):
    async with PdClient.open(coordinator) as pd, KvClient.open(pd) as kv:
        await load(kv, txns())


def hashed(text):
    return hmac.new(SALT, text.encode(), hashlib.sha256).hexdigest()


@pytest.mark.parametrize("kind", ["delta", "iceberg", "parquet"])
def test_a_lake_shows_a_stores_rows_under_other_names_masked_and_without_a_renamed_column(
    spark, tmp_path, kind
):
    steps = vectors.lines("steps")
    first = next(step for step in steps if "vec.spk" in step["rows_after"])
    start_ts, last = first["ts_after"], steps[-1]
    assert not first["rows_after"]["vec.spk"]["rows"], "all rows are in the log"
    salt = tmp_path / "salt"
    salt.write_bytes(SALT)
    target = f"{kind}://{tmp_path}/{kind}"
    with running_cluster(tmp_path) as cluster:
        asyncio.run(_write(cluster.pd))
        made = cluster.cli(
            *("changefeed", "create", "-c", "shapes", "--sink-uri", target, "--filter", "vec.spk"),
            *("--start-ts", str(start_ts), "--no-confirm", "--salt-file", str(salt), *SHAPES),
        )
        assert isinstance(made, dict), made
        endpoint = f"grpc://{cluster.capture.endpoints['flight']}"
        lake = KeptLake(endpoint, "shapes", target, spark, tmp_path / "spark")
        lake.keep(lambda cut: cut.end_ts >= last["ts_after"])
        found = lake.tables()

    wanted = last["rows_after"]["vec.spk"]
    assert "ex2" in wanted["columns"]
    upstream = [dict(zip(wanted["columns"], row, strict=True)) for row in wanted["rows"]]
    shown = [
        {name: value for name, value in row.items() if name != "ex2"}
        | {"s": hashed(row["s"]), "v": None if row["v"] is None else "**"}
        for row in upstream
    ]
    assert list(found) == ["lake.tidb_spk"]
    assert in_order(found["lake.tidb_spk"]) == in_order(shown)
    assert len(shown) > 3
    assert any(row["v"] for row in shown)


def in_order(rows):
    return sorted(sorted((name, str(value)) for name, value in row.items()) for row in rows)
