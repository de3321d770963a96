"""`tidemark cli gc …` against a real cluster: what it shows, what it refuses,
and what it says to do.
"""

import asyncio
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb
from tidemarkpb.v1 import gc_pb2
from tidemarkpb.v1.store_pb2 import GetStoreStatusRequest
from tidemarkpb.v1.store_pb2_grpc import StoreServiceStub

from gcsafepoint.worker.config import GCConfigError
from gcsafepoint.worker.delete_ranges import DeleteRangeError
from server.cli.cli import cli_parser
from server.cli.gc import GCRoundFailedError
from server.cli.remote import GCLeaderUnavailableError, Remote, RemoteError
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from storage.codec import encode_i64
from tests.integration.store.stubs import row_key


async def cli(cluster: Any, *words: str) -> Any:
    """The document of one command, and its text."""
    arguments = cli_parser().parse_args(["gc", *words])
    output = await arguments.command(Remote("", cluster.coordinator, SecurityConfig()), arguments)
    assert output.text(as_json=True)
    assert output.text(as_json=False)
    return output.document


async def test_the_status_names_leader_safepoint_and_blocker(cluster: Any, gc: Any) -> None:
    held = await cluster.now()
    await cluster.client.pd.update_service_gc_safe_point("ticdc-default-feed", 600, held)
    await cli(cluster, "run", "--wait")
    status = await cli(cluster, "status")
    assert status["leader"]["leads"]
    assert status["leader"]["desc"].startswith("host:")
    assert status["safe_point"] == status["gc_safe_point"] == held
    assert status["blocker"] == "the service ticdc-default-feed"
    assert "tidemark cli gc explain" in status["advice"]
    assert (status["round"]["result"], status["enabled"], status["mode"]) == (
        "done",
        True,
        "distributed",
    )
    again = await cli(cluster, "run", "--wait")
    assert (again["result"], again["blocker"]) == (
        "no new safepoint",
        "the service ticdc-default-feed",
    )


async def test_the_config_is_the_sql_table_and_is_set_online(cluster: Any, gc: Any) -> None:
    table = {row["VARIABLE_NAME"]: row for row in await cli(cluster, "config")}
    assert len(table) == 12
    assert table["tikv_gc_run_interval"]["VARIABLE_VALUE"] == "24h0m0s"
    assert "not for setting" in table["tikv_gc_leader_uuid"]["COMMENT"]
    set_ = await cli(
        cluster, "config", "set", "tikv_gc_life_time=1h", "gc.max-write-bytes-per-sec=10MB"
    )
    assert [row["VARIABLE_VALUE"] for row in set_] == ["1h0m0s", "10MiB"]
    async with connect(cluster.store) as channel:
        store = await StoreServiceStub(channel).GetStoreStatus(GetStoreStatusRequest())
    assert store.gc.max_write_bytes_per_sec == 10 << 20
    [row] = await cli(cluster, "config", "get", "tikv_gc_life_time")
    assert row["VARIABLE_VALUE"] == "1h0m0s"
    with pytest.raises(
        RemoteError, match=r"ErrGCConfig.*must be at least 1ms and at most 8760h0m0s"
    ):
        await cli(cluster, "config", "set", "tikv_gc_life_time=9000h")
    with pytest.raises(GCConfigError, match="did you mean tikv_gc_life_time"):
        await cli(cluster, "config", "get", "tikv_gc_lifetime")


async def test_a_dry_run_says_what_a_round_would_do_and_does_nothing(cluster: Any, gc: Any) -> None:
    start_ts = await cluster.now()
    lock = [kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=b"v") for key in (b"a", b"z")]
    await cluster.client.kv.prewrite(
        lock, primary=b"a", start_version=start_ts, lock_ttl_ms=600_000
    )
    request = gc_pb2.RegisterDeleteRangeRequest(
        job_id=7, element_id=1, start_key=b"h", end_key=b"i", ts=start_ts
    )
    await gc.RegisterDeleteRange(request)
    before = await cluster.client.pd.gc_safe_point()
    plan = await cli(cluster, "run", "--dry-run")
    assert plan["would"].startswith(
        "resolve 2 locks of 1 transactions in 4 regions, destroy 1 ranges, let the stores"
    )
    assert plan["safe_point"] > start_ts > plan["last_safe_point"] == before
    assert sorted(await cluster.locked_keys()) == [b"a", b"z"]
    assert await cluster.client.pd.gc_safe_point() == before
    [waiting] = await cli(cluster, "ranges")
    assert (waiting["job_id"], waiting["start_key"], waiting["state"], waiting["attempts"]) == (
        7,
        "68",
        "waiting",
        0,
    )
    await cli(cluster, "run", "--wait")
    [done] = await cli(cluster, "ranges", "--state", "done")
    assert (done["attempts"], done["redo_time"] > done["done_time"] > "2020") == (1, True)
    nothing = await cli(cluster, "run", "--dry-run")
    assert (nothing["locks"], nothing["ranges"]) == (0, [])


async def test_a_row_of_gc_delete_range_is_registered_and_destroyed(
    cluster: Any, gc: Any, tmp_path: Path
) -> None:
    del gc  # it runs
    start, end = (b"t" + encode_i64(table) for table in (90, 91))
    keys = [row_key(90, handle) for handle in range(3)]
    await cluster.put(*((key, b"v") for key in keys))
    drop_ts = await cluster.now()
    rows = tmp_path / "rows.tsv"
    rows.write_text(f"112\t90\t{start.hex()}\t{end.hex()}\t{drop_ts}\n")
    [shown] = await cli(cluster, "ranges", "add", "--rows", str(rows), "--dry-run")
    assert (shown["job_id"], shown["element_id"], shown["state"], shown["dry_run"]) == (
        112,
        90,
        "waiting",
        True,
    )
    assert await cli(cluster, "ranges", "list") == []
    for _ in range(2):  # the same row again is no error
        await cli(cluster, "ranges", "add", "--rows", str(rows))
    [waiting] = await cli(cluster, "ranges")
    assert (waiting["start_key"], waiting["end_key"], waiting["ts"]) == (
        start.hex(),
        end.hex(),
        drop_ts,
    )
    await cli(cluster, "run", "--wait")
    [done] = await cli(cluster, "ranges", "--state", "done")
    assert done["element_id"] == 90
    now_ts = await cluster.now()
    assert [await cluster.client.kv.get(key, now_ts) for key in keys] == [None, None, None]
    flags = [
        "--job",
        "112",
        "--element",
        "90",
        "--start-key",
        start.hex(),
        "--end-key",
        start.hex() + "ff",
    ]
    with pytest.raises(DeleteRangeError, match="job 112 element 90 has another range already"):
        await cli(cluster, "ranges", "add", *flags, "--ts", str(drop_ts))


async def test_a_range_is_taken_back_before_it_is_due_and_its_keys_stay(
    cluster: Any, gc: Any
) -> None:
    del gc  # it runs
    start, end = (b"t" + encode_i64(table) for table in (90, 92))
    keys = [row_key(table, 1) for table in (90, 91)]
    await cluster.put(*((key, b"v") for key in keys))
    drop_ts = await cluster.now()
    keys_of = [
        "--start-key",
        start.hex(),
        "--end-key",
        (b"t" + encode_i64(91)).hex(),
        "--ts",
        str(drop_ts),
    ]
    await cli(cluster, "ranges", "add", "--job", "112", "--element", "90", *keys_of)
    keys_of = [
        "--start-key",
        (b"t" + encode_i64(91)).hex(),
        "--end-key",
        end.hex(),
        "--ts",
        str(drop_ts),
    ]
    await cli(cluster, "ranges", "add", "--job", "112", "--element", "91", *keys_of)
    one = ("ranges", "remove", "--job", "112", "--element", "90")
    [shown] = await cli(cluster, *one, "--dry-run")
    assert (shown["element_id"], shown["state"], shown["dry_run"]) == (90, "waiting", True)
    assert len(await cli(cluster, "ranges")) == 2
    [removed] = await cli(cluster, *one)
    assert (removed["element_id"], removed["start_key"], removed["state"]) == (
        90,
        start.hex(),
        "removed",
    )
    with pytest.raises(DeleteRangeError, match="job 112 element 90 has no range"):
        await cli(cluster, *one)
    await cli(cluster, "run", "--wait")
    with pytest.raises(DeleteRangeError, match="job 112 element 91 was destroyed"):
        await cli(cluster, "ranges", "remove", "--job", "112", "--element", "91")
    now_ts = await cluster.now()
    assert [await cluster.client.kv.get(key, now_ts) for key in keys] == [b"v", None]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--job", "1"], "a range needs --job, --element, --start-key"),
        (["--rows", "/nowhere"], "cannot read /nowhere"),
        (["--rows", "-", "--job", "1"], "give --rows alone"),
        (
            ["--job", "1", "--element", "2", "--start-key", "6d", "--end-key", "6e", "--ts", "5"],
            "no range of a table",
        ),
        (
            ["--job", "1", "--element", "2", "--start-key", "xx", "--end-key", "6e", "--ts", "5"],
            "no row of mysql",
        ),
        (
            ["--job", "1", "--element", "2", "--start-key", "74", "--end-key", "75", "--ts", "5"],
            "no range of a table",
        ),
        (
            ["--job", "1", "--element", "2", "--start-key", "75", "--end-key", "74", "--ts", "5"],
            "is empty or has no end",
        ),
        (
            ["--job", "1", "--element", "2", "--start-key", "74", "--end-key", "75", "--ts", "0"],
            "needs the timestamp",
        ),
    ],
)
async def test_what_is_no_range_of_a_table_is_refused(
    cluster: Any, flags: list[str], text: str
) -> None:
    with pytest.raises(DeleteRangeError, match=text):
        await cli(cluster, "ranges", "add", *flags)
    assert await cli(cluster, "ranges") == []


async def test_the_history_tells_of_every_round(cluster: Any, gc: Any, until: Any) -> None:
    begun = await cli(cluster, "run")

    async def ended() -> bool:
        newest = (await cli(cluster, "history", "-n", "1"))[0]
        return bool(newest["id"] == begun["id"] and newest["result"] != "running")

    await until(ended)
    [newest] = await cli(cluster, "history", "-n", "1")
    assert (newest["result"], newest["regions"], newest["phase"]) == ("done", 4, "ended")
    assert list(newest["phase_seconds"]) == ["prepare", "resolve locks", "delete ranges", "do gc"]
    rounds = await cli(cluster, "history")
    assert [it["id"] for it in rounds] == sorted((it["id"] for it in rounds), reverse=True)
    listed = (await gc.ListRounds(gc_pb2.ListRoundsRequest(limit=1))).rounds
    assert [it.id for it in listed] == [begun["id"]]


async def test_gc_that_is_off_says_how_to_switch_it_on(cluster: Any, gc: Any) -> None:
    await cli(cluster, "config", "set", "tikv_gc_enable=false")
    with pytest.raises(GCRoundFailedError, match="set tikv_gc_enable to true"):
        await cli(cluster, "run", "--wait")
    status = await cli(cluster, "status")
    assert (status["enabled"], status["next_run_time"]) == (False, "")
    assert "tidemark cli gc config set tikv_gc_enable=true" in status["advice"]
    assert "refuse" in (await cli(cluster, "run", "--dry-run"))["would"]


async def test_without_a_worker_the_records_still_answer_and_say_what_is_missing(
    cluster: Any,
) -> None:
    status = await cli(cluster, "status")
    assert status["leader"] is None
    assert "start one with `tidemark gc-worker`" in status["advice"]
    assert len(await cli(cluster, "config")) == 12
    with pytest.raises(GCLeaderUnavailableError, match="start one with `tidemark gc-worker`"):
        await cli(cluster, "run")
    failed = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "server.cli.main", "cli", "--pd", cluster.coordinator, "gc", "run"),
        stderr=PIPE,
    )
    _, stderr = await failed.communicate()
    assert (failed.returncode, stderr.startswith(b"[TM:ErrGCLeaderUnavailable] ")) == (1, True)


async def test_a_dead_leader_is_named_with_the_end_of_its_lease(cluster: Any, until: Any) -> None:
    doomed = await cluster.worker()
    service = await cluster.service(doomed)

    async def leads() -> bool:
        return bool((await service.GetGCStatus(gc_pb2.GetGCStatusRequest())).leader.is_self)

    await until(leads)
    await doomed.kill()
    with pytest.raises(
        GCLeaderUnavailableError, match=r"does not answer at .*; its lease ends \d{8}-"
    ):
        await cli(cluster, "run")
