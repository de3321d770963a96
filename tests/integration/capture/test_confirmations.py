"""Verbs that change a changefeed say in short what they did; all fields come where they are
asked for.
"""

import asyncio
import json
import subprocess

import pytest

from server.changefeed.captures import OtherClusterError
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from server.spark import keep
from server.spark.config import KeepConfig
from tests.integration.capture.many_tables import NAMES, TABLES
from tests.integration.capture.processes import COMMAND, running_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("confirmations")) as running:
        yield running


def test_what_a_verb_has_done_is_said_in_short(cluster):
    tables = cluster.directory / "tables.json"
    rows = [{"schema_name": "many", "table_info": json.loads(each.to_json())} for each in TABLES]
    tables.write_text(json.dumps(rows))

    def said(verb, *flags):
        flags = ("--server", cluster.capture.endpoints["capture"], "changefeed", verb, *flags)
        command = [*COMMAND, "cli", *flags, "-c", "feed"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.splitlines()

    create = ("create", "--sink-uri", "parquet:///lake/feed", "--tables", str(tables))
    made, since, state = said(*create)
    assert (
        made == f"changefeed feed is created: 4 tables ({', '.join(NAMES)}) → parquet:///lake/feed"
    )
    assert since.endswith("older rows come by tidemark cli changefeed dumpstart -c feed")
    assert state == "its state: tidemark cli changefeed query -c feed"
    assert said("pause")[0].startswith("changefeed feed is paused at 20")
    assert "state: stopped" in said("pause", "--verbose")
    assert said("resume")[0].startswith("changefeed feed is normal, and goes on from 20")
    assert said("add-reader", "--reader", "etl")[0].startswith(
        "reader etl of changefeed feed begins at 20"
    )
    assert said("update", "--retain", "1h") == ["changefeed feed is updated"]
    assert said("remove-reader", "--reader", "etl", "--yes") == [
        "reader etl of changefeed feed is removed"
    ]
    assert json.loads(said("pause", "--json")[0])["state"] == "stopped"
    assert said("remove", "--yes") == [
        "changefeed feed is removed; the tables at parquet:///lake/feed stay as they are"
    ]


def test_neither_a_command_nor_lake_jobs_mix_two_clusters(cluster, monkeypatch):
    # Calls to daemons do not take the web's proxy.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    capture = cluster.capture.endpoints["capture"]
    other = cluster.start("coordinator", "--metadata", f"leveldb:{cluster.directory / 'other'}")
    elsewhere = other.endpoints["coordinator"]

    def listed(*flags):
        command = [*COMMAND, "cli", *flags, "--json", "capture", "list"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return [each["address"] for each in json.loads(done.stdout or "[]")] or done.stderr

    assert listed("--pd", cluster.pd) == listed("--server", capture) == [capture]
    assert "[TM:ErrOtherCluster]" in listed("--pd", elsewhere, "--server", capture)
    assert f"no capture is registered at the coordinator {elsewhere}" in listed("--pd", elsewhere)

    async def check(coordinator):
        config, security = KeepConfig(capture=capture, coordinator=coordinator), SecurityConfig()
        async with connect(capture, security) as channel:
            supervisor = keep.LakeJobSupervisor(config, security, channel, asyncio.TaskGroup())
            await supervisor.check_cluster()

    monkeypatch.setattr(keep, "_POLL_SECONDS", 0)
    asyncio.run(check(cluster.pd))
    with pytest.raises(OtherClusterError, match=r"does not belong .* with --coordinator"):
        asyncio.run(check(elsewhere))
