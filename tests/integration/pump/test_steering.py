"""A pump is steered: by HTTP and by the CLI, from online to paused or offline,
with readers that are slow.
"""

import asyncio
import json
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tipb import binlog_pb2

from server.rpc.client import connect
from storage.meta.client import open_meta
from tests.integration.pump.test_daemon import (
    FAST,
    Client,
    Daemon,
    client_of,
    entry_of,
    pump_argv,
    started,
)

DRAINER = b"/tidb-binlog/v1/drainers/d1"


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[str]:
    metadata = f"leveldb:{tmp_path / 'metadata'}"
    argv = ("coordinator", "--addr", "127.0.0.1:0", "--metadata", metadata, "--cluster-id", "4242")
    async with started(*argv) as daemon:
        yield daemon.endpoints["coordinator"]


async def asked(daemon: Daemon, method: str, path: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://{daemon.endpoints['http']}{path}", method=method)

    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as err:
            return err.code, err.read().decode()

    return await asyncio.to_thread(ask)


async def cli(coordinator: str, *argv: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "server.cli.main", "cli", "--pd", coordinator, "--json", "pump", *argv),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode or 0, (out or err).decode()


async def drainer_at(coordinator: str, max_commit_ts: int) -> None:
    entry = {"nodeId": "d1", "host": "127.0.0.1:1", "state": "online", "maxCommitTS": max_commit_ts}
    async with open_meta(f"etcd://{coordinator}", connect) as meta:
        await meta.put(DRAINER, json.dumps(entry).encode())


async def test_status_binlogs_and_gc_are_on_the_http_port(coordinator: str, tmp_path: Path) -> None:
    async with (
        started(*pump_argv(coordinator, tmp_path / "pump", *FAST)) as pump,
        client_of(pump) as client,
    ):
        rows = binlog_pb2.PrewriteValue(schema_version=7).SerializeToString()
        await client.write(
            binlog_pb2.Binlog(tp=0, start_ts=10, prewrite_value=rows).SerializeToString()
        )
        await client.write(binlog_pb2.Binlog(tp=1, start_ts=10, commit_ts=15).SerializeToString())
        await anext(client.pull(10))
        entry = await entry_of(coordinator)
        status = json.loads((await asked(pump, "GET", "/status"))[1])
        assert (status["StatusMap"][entry["nodeId"]]["state"], status["ErrMsg"]) == ("online", "")
        assert status["CommitTS"] >= 15
        assert await asked(pump, "GET", "/debug/binlog/15") == (
            200,
            "tp: Commit start_ts: 10 commit_ts: 15\n",
        )
        assert (
            "PrewriteValue: \nschema_version: 7"
            in (await asked(pump, "GET", "/debug/binlog/10"))[1]
        )
        assert (await asked(pump, "GET", "/debug/binlog/11"))[0] == 404
        for tail in ("x", "-1", "9223372036854775808", "9" * 5000, "%FF", ""):
            assert (await asked(pump, "GET", f"/debug/binlog/{tail}"))[0] == 400, tail
        assert (await asked(pump, "GET", "/debug/binlog/9223372036854775807"))[0] == 404
        await client.write(
            binlog_pb2.Binlog(tp=0, start_ts=20, prewrite_value=b"\xff\xffrows").SerializeToString()
        )
        await client.write(binlog_pb2.Binlog(tp=1, start_ts=20, commit_ts=25).SerializeToString())
        await anext(client.pull(24))
        status, text = await asked(pump, "GET", "/debug/binlog/20")
        assert (status, text.splitlines()[-1]) == (
            200,
            "not a binlog.PrewriteValue, 6 bytes: ffff726f7773",
        )
        assert json.loads((await asked(pump, "POST", "/debug/gc/trigger"))[1])["overtaken"] == 0


async def test_a_paused_pump_ends_and_what_cannot_be_done_is_said(
    coordinator: str, tmp_path: Path
) -> None:
    async with started(*pump_argv(coordinator, tmp_path / "pump", *FAST)) as pump:
        name = (await entry_of(coordinator))["nodeId"]
        assert "not exists" in (await asked(pump, "PUT", "/state/other/pause"))[1]
        assert "invalid action jump" in (await asked(pump, "PUT", f"/state/{name}/jump"))[1]
        assert "[TM:ErrPumpUnknown]" in (await cli(coordinator, "pause", "--node-id", "other"))[1]
        status, text = await asked(pump, "PUT", f"/state/{name}/pause")
        assert (status, json.loads(text)["message"]) == (200, "apply action pause success!")
        assert await asyncio.wait_for(pump.process.wait(), 60) == 0
    assert (await entry_of(coordinator))["state"] == "paused"
    code, listed = await cli(coordinator, "pumps")
    assert (code, [pump["state"] for pump in json.loads(listed)]) == (0, ["paused"])
    assert (await cli(coordinator, "update-pump", "--node-id", name, "--state", "offline"))[0] == 0
    assert (await entry_of(coordinator))["state"] == "offline"


async def wait_state(coordinator: str, state: str) -> None:
    async with asyncio.timeout(60):
        while (await entry_of(coordinator))["state"] != state:  # noqa: ASYNC110 - the registry is asked, as by users
            await asyncio.sleep(0.05)


async def refusal(client: Client) -> str:
    with pytest.raises(Exception, match="no online") as caught:
        await client.write(binlog_pb2.Binlog(tp=0, start_ts=30).SerializeToString())
    return str(caught.value)


async def test_a_closed_pump_takes_outcomes_and_waits_for_its_drainers(
    coordinator: str, tmp_path: Path
) -> None:
    await drainer_at(coordinator, 5)
    async with (
        started(*pump_argv(coordinator, tmp_path / "pump", *FAST)) as pump,
        client_of(pump) as client,
    ):
        await client.write(binlog_pb2.Binlog(tp=0, start_ts=10).SerializeToString())
        name = (await entry_of(coordinator))["nodeId"]
        assert (
            json.loads((await cli(coordinator, "offline", "--node-id", name))[1])["state"]
            == "closing"
        )
        assert "no online: closing" in await refusal(client)
        assert (
            "this pump's state is closing" in (await asked(pump, "PUT", f"/state/{name}/pause"))[1]
        )
        await client.write(binlog_pb2.Binlog(tp=1, start_ts=10, commit_ts=15).SerializeToString())
        assert (await anext(client.pull())).commit_ts == 15
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pump.process.wait(), 1.2)
        await drainer_at(coordinator, 1 << 62)
        assert await asyncio.wait_for(pump.process.wait(), 60) == 0
    assert (await entry_of(coordinator))["state"] == "offline"


async def test_a_closed_pump_whose_readers_do_not_come_is_paused_in_the_end(
    coordinator: str, tmp_path: Path
) -> None:
    await drainer_at(coordinator, 5)
    argv = pump_argv(coordinator, tmp_path / "pump", *FAST, "--close-seconds", "0.7")
    async with started(*argv) as pump:
        name = (await entry_of(coordinator))["nodeId"]
        assert (await asked(pump, "PUT", f"/state/{name}/close"))[0] == 200
        await wait_state(coordinator, "paused")
        assert await asyncio.wait_for(pump.process.wait(), 60) == 0


async def test_gc_stays_behind_a_registered_drainer_until_it_is_taken_offline(
    coordinator: str, tmp_path: Path
) -> None:
    await drainer_at(coordinator, 5)
    argv = pump_argv(coordinator, tmp_path / "pump", *FAST, "--gc-retention-seconds", "1")
    async with started(*argv) as pump:
        await asyncio.sleep(2)  # until a heartbeat is older than the retention
        assert json.loads((await asked(pump, "POST", "/debug/gc/trigger"))[1])["keys"] == 0
        assert (await cli(coordinator, "update-drainer", "--node-id", "d1", "--state", "offline"))[
            0
        ] == 0
        async with asyncio.timeout(60):
            while not json.loads((await asked(pump, "POST", "/debug/gc/trigger"))[1])["keys"]:  # noqa: ASYNC110 - asked, as by users
                await asyncio.sleep(0.1)
    code, listed = await cli(coordinator, "drainers")
    assert (code, [drainer["state"] for drainer in json.loads(listed)]) == (0, ["offline"])
