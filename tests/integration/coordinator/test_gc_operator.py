"""GC state of a coordinator process in a real etcd,
under an operator's etcdctl and a wall clock that jumped.
"""

import asyncio
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from server.rpc.pd import PdClient
from tests.integration.coordinator.topology import a_region, a_store

NEVER_S = (1 << 63) - 1
TEN_DAYS_S = 864_000


def etcdctl(etcd: str, *arguments: str) -> str:
    done = subprocess.run(
        ["etcdctl", "--endpoints", etcd, *arguments],
        env={**os.environ, "ETCDCTL_API": "3"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def value(etcd: str, key: str) -> str:
    return etcdctl(etcd, "get", "--print-value-only", key)


async def test_an_operator_reads_and_edits_what_pd_would_have_written(
    start: Any, etcd: str
) -> None:
    coordinator = await asyncio.to_thread(start, f"etcd://{etcd}")
    async with PdClient.open(coordinator.address) as pd:
        await pd.bootstrap(a_store(), a_region())
        root = f"/pd/{pd.cluster_id}/gc"
        await pd.update_service_gc_safe_point("ticdc-a", 3600, 50)
        await pd.update_service_gc_safe_point("gc_worker", NEVER_S, 80)
        await pd.update_gc_safe_point(47)
        stored = json.loads(value(etcd, f"{root}/safe_point/service/ticdc-a"))
        assert abs(stored.pop("expired_at") - time.time() - 3600) < 200
        assert stored == {"service_id": "ticdc-a", "safe_point": 50}
        assert value(etcd, f"{root}/safe_point") == "2f"
        assert value(etcd, "/tidb/store/gcworker/saved_safe_point") == "50"
        etcdctl(etcd, "del", f"{root}/safe_point/service/ticdc-a")
        async with asyncio.timeout(60):
            while (await pd.update_service_gc_safe_point("probe", 0, 0)).service_id != "gc_worker":
                pass
        etcdctl(etcd, "put", "/tidb/server/minstartts/10.0.0.1:10080", "60")
        minimum = await pd.update_service_gc_safe_point("gc_worker", NEVER_S, 90)
        assert (minimum.service_id, minimum.safe_point) == ("tidb_min_start_ts_10.0.0.1:10080", 60)


async def test_a_wall_clock_that_jumped_while_nobody_led_expires_nobody(
    start: Any, etcd: str
) -> None:
    """Ten days are taken off what the first leader wrote:
    to the second one its clock has jumped ten days ahead.
    """
    first = await asyncio.to_thread(start, f"etcd://{etcd}")
    async with PdClient.open(first.address) as pd:
        await pd.bootstrap(a_store(), a_region())
        root = f"/pd/{pd.cluster_id}/gc"
        await pd.update_service_gc_safe_point("ticdc-a", 600, 50)
    first.kill()
    service = f"{root}/safe_point/service/ticdc-a"
    stored = json.loads(value(etcd, service))
    stored["expired_at"] -= TEN_DAYS_S
    etcdctl(etcd, "put", service, json.dumps(stored))
    etcdctl(
        etcd,
        "put",
        f"/tidemark{root}/clock",
        str(int(value(etcd, f"/tidemark{root}/clock")) - TEN_DAYS_S),
    )
    second = await asyncio.to_thread(start, f"etcd://{etcd}")
    async with PdClient.open(second.address) as pd:
        minimum = await pd.update_service_gc_safe_point("gc_worker", NEVER_S, 80)
        assert (minimum.service_id, minimum.safe_point) == ("ticdc-a", 50)
        assert 500 <= minimum.ttl_s <= 615


def test_an_unknown_compatibility_is_one_clear_error(refused: Any, tmp_path: Path) -> None:
    ended = refused(
        "--addr", "127.0.0.1:0", "--metadata", f"leveldb:{tmp_path}", "--gc-compat", "pd-8"
    )
    shown = [line for line in ended.stderr.splitlines() if line and not line.startswith("{")]
    assert ended.returncode == 1
    assert shown == ["[TM:ErrGcCompat] --gc-compat 'pd-8' must be one of classic, pd-9"]
