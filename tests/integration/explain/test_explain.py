"""`gc explain` on a real coordinator, store and capture: down to the lock,
and what its commands do.
"""

import asyncio
import json
import shlex
import subprocess
import time
import urllib.request
from contextlib import contextmanager

import grpc
import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb
from tidemarkpb.v1.explain_pb2 import ExplainGCRequest
from tidemarkpb.v1.explain_pb2_grpc import ExplainServiceStub

from server.demo.bank import ACCOUNTS, TRANSFERS
from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from storage.tidb.record import encode_record
from tests.integration.capture.processes import COMMAND, Reader, running_cluster

NEVER_S = (1 << 63) - 1
BANK = "ticdc-default-bank"
CHAIN_TO_THE_LOCK = ["service", "changefeed", "table", "region", "lock"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cluster")
    document = [
        {"schema_name": "bank", "table_info": json.loads(table.to_json())}
        for table in (ACCOUNTS, TRANSFERS)
    ]
    (directory / "tables.json").write_text(json.dumps(document))
    with running_cluster(directory) as running:
        flags = ("--sink-uri", "delta:///lake", "--tables", str(directory / "tables.json"))
        assert running.cli("changefeed", "create", "-c", "bank", *flags)["id"] == "bank"
        yield running


def hold(cluster, service_id, ts, ttl_s=3600):
    async def update():
        async with PdClient.open(cluster.pd) as pd:
            return await pd.update_service_gc_safe_point(service_id, ttl_s, ts)

    return asyncio.run(update())


@pytest.fixture
def caught_up(cluster):
    """A reader has taken everything up to now: what is not complete from now on is not its
    fault.
    """
    reader = Reader(cluster, "bank")
    end = reader.wait_resolved(cluster.now())
    reader.ask("ack", ts=end)
    deadline = time.monotonic() + 60
    while safepoint(cluster) != end - 1:  # nothing moves it in another test
        assert time.monotonic() < deadline
        time.sleep(0.1)


def safepoint(cluster):
    """What the changefeed holds GC at."""
    listed = http(cluster, "GET", "/pd/api/v1/gc/safepoint")[1]["service_gc_safe_points"]
    return next((it["safe_point"] for it in listed if it["service_id"] == BANK), None)


@pytest.fixture
def wanting(cluster):
    """GC wants to go on: its worker has asked for everything up to now."""
    held = hold(cluster, "gc_worker", cluster.now(), NEVER_S)
    assert held.service_id == BANK
    return held


@contextmanager
def open_transaction(cluster):
    """A client that prewrote and lives; at the end of the block somebody has ended it."""

    async def prewrite():
        key, value = encode_record(ACCOUNTS, {"id": 1, "owner": "a", "balance": 1, "updated_at": 0})
        async with PdClient.open(cluster.pd) as pd, KvClient.open(pd) as kv:
            start_ts = await pd.tso()
            mutation = kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=value)
            await kv.prewrite([mutation], primary=key, start_version=start_ts, lock_ttl_ms=600_000)
        return key, start_ts

    yield asyncio.run(prewrite())


def http(cluster, method, path):
    url = f"http://{cluster.coordinator.endpoints['http']}{path}"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, method=method), timeout=60
        ) as answer:
            return answer.status, json.load(answer)
    except urllib.request.HTTPError as err:
        with err:
            return err.code, json.load(err)


def explained(cluster, query=""):
    status, document = http(cluster, "GET", f"/tidemark/api/v1/gc/explain{query}")
    assert status == 200, document
    return document


def await_chain(cluster, kinds, limit_s=120.0):
    """The lowest blocker, as soon as its chain is of these kinds."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        blocker = explained(cluster)["blockers"][0]
        if [link["kind"] for link in blocker["chain"]] == kinds:
            return blocker
        time.sleep(0.3)
    raise AssertionError(blocker)


def run_command(cluster, text, *more):
    """A command as the explanation gave it."""
    words = shlex.split(text)
    assert words[:2] == ["tidemark", "cli"], text
    return cluster.cli(*words[2:], *more)


def test_the_chain_names_the_lock_and_its_command_ends_it(cluster, caught_up, wanting):
    with open_transaction(cluster) as (key, start_ts):
        deadline = time.monotonic() + 60
        while (blocker := await_chain(cluster, CHAIN_TO_THE_LOCK))["chain"][3]["ts"] < start_ts - 1:
            assert time.monotonic() < deadline, "the region follows up to the lock"
        service, changefeed, table, region, lock = blocker["chain"]
        assert blocker["blocks"]
        assert (blocker["id"], service["state"]) == (BANK, "renewed")
        assert 86_000 < service["ttl_left_seconds"] <= 86_400
        [capture] = cluster.cli("capture", "list")
        assert changefeed["owner"] == f"capture {capture['id']} at {capture['address']}"
        assert table["name"] == "bank.accounts"
        assert region["owner"] == f"store {cluster.store.endpoints['store']}"
        # the region may have been further when the lock came
        assert await_chain(cluster, CHAIN_TO_THE_LOCK)["chain"][3]["ts"] == region["ts"], (
            "but goes on no more"
        )
        assert (lock["ts"], lock["state"], lock["owner"]) == (
            start_ts,
            "live",
            f"primary key {key.hex()}",
        )
        assert 500 < lock["ttl_left_seconds"] < 600
        shown = run_command(cluster, lock["commands"][0], "--dry-run")
        assert shown["dry_run"]
        assert "ErrNotConfirmed" in run_command(cluster, lock["commands"][0])
        assert run_command(cluster, lock["commands"][0], "--yes")["outcome"] == "rolled back"
    assert "ErrLockUnknown" in run_command(cluster, lock["commands"][0], "--yes")
    deadline = time.monotonic() + 60
    while explained(cluster)["blockers"][0]["chain"][-1]["kind"] == "lock":
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_thinking_a_blocker_away_names_the_next(cluster, wanting):
    hold(cluster, "br-1", wanting.safe_point + 1)
    try:
        one = explained(cluster, "?what_if=remove:bank")["what_if"]
        assert (one["removed"], one["min_safe_point_id"], one["history_given_up"]) == (
            [BANK],
            "br-1",
            ["bank"],
        )
        both = cluster.cli("gc", "explain", "--what-if", "remove=bank,br-1")["what_if"]
        assert (both["min_safe_point_id"], both["blocked"]) == ("gc_worker", False)
        status, error = http(cluster, "GET", "/tidemark/api/v1/gc/explain?what_if=remove:bnk")
        assert (status, error["error_code"]) == (404, "TM:ErrBlockerUnknown")
        assert "did you mean" in error["error_msg"]
        assert http(cluster, "GET", "/tidemark/api/v1/gc/explain?what_if=bank")[0] == 400
        # nothing was changed
        assert explained(cluster)["min_safe_point_id"] == BANK
    finally:
        hold(cluster, "br-1", 0, 0)


def test_grpc_http_and_the_command_line_tell_the_same(cluster, wanting):
    def stable(document):
        return [
            (
                blocker["id"],
                int(blocker.get("safe_point", 0)),
                [link["kind"] for link in blocker["chain"]][:2],
            )
            for blocker in document["blockers"]
        ]

    over_http = explained(cluster)
    by_cli = cluster.cli("gc", "explain")
    with grpc.insecure_channel(cluster.pd) as channel:
        over_grpc = ExplainServiceStub(channel).ExplainGC(ExplainGCRequest(), timeout=60)
    assert stable(over_http) == stable(by_cli)
    assert [it[0] for it in stable(over_http)] == [it.id for it in over_grpc.blockers]
    assert set(over_http) == set(by_cli)
    assert set(over_http["blockers"][0]["chain"][0]) == set(by_cli["blockers"][0]["chain"][0])


def test_people_read_a_tree(cluster, wanting):
    flags = [
        "cli",
        "--server",
        cluster.capture.endpoints["capture"],
        "--pd",
        cluster.pd,
        "gc",
        "explain",
    ]
    done = subprocess.run(
        [*COMMAND, *flags], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith("GC is held at ")
    assert f"1. {BANK} blocks GC" in done.stdout
    assert "└─ changefeed bank [normal]" in done.stdout


def test_a_paused_changefeed_says_when_its_history_ends_and_is_resumed_by_its_command(
    cluster, wanting
):
    assert cluster.cli("changefeed", "pause", "-c", "bank")["state"] == "stopped"
    service, changefeed = await_chain(cluster, ["service", "changefeed"])["chain"]
    assert (service["state"], changefeed["state"]) == ("stopped", "stopped")
    assert service["history_lost_at"] > service["expires_at"] > ""
    assert run_command(cluster, changefeed["commands"][0])["state"] == "normal"


def test_an_orphan_is_told_apart_and_deleted_by_its_command(cluster, wanting):
    hold(cluster, "ticdc-default-gone", wanting.safe_point)
    [orphan] = [it for it in explained(cluster)["blockers"] if it["id"] == "ticdc-default-gone"]
    [link] = orphan["chain"]
    assert link["state"] == "orphan"
    assert "ErrNotConfirmed" in run_command(cluster, link["commands"][0])
    assert run_command(cluster, link["commands"][0], "--dry-run")["state"] == "orphan"
    assert run_command(cluster, link["commands"][0], "--yes")["deleted"] == "ticdc-default-gone"
    assert "ErrServiceUnknown" in run_command(cluster, link["commands"][0], "--yes")


def test_the_safe_point_of_a_changefeed_is_not_deleted_by_the_way(cluster, wanting):
    refused = cluster.cli("service-gc-safepoint", "delete", BANK)
    assert "ErrNotConfirmed" in refused
    assert "exists and is renewed" in refused
    assert "ErrServiceFixed" in cluster.cli("service-gc-safepoint", "delete", "gc_worker", "--yes")
    listed = cluster.cli("service-gc-safepoint")
    assert [it["service_id"] for it in listed["service_gc_safe_points"]] == [BANK, "gc_worker"]


def test_http_has_pds_shape_and_texts(cluster, wanting):
    hold(cluster, "br/odd id", wanting.safe_point)
    status, listed = http(cluster, "GET", "/pd/api/v1/gc/safepoint")
    assert status == 200
    assert set(listed) == {"service_gc_safe_points", "min_service_gc_safe_point", "gc_safe_point"}
    assert listed["min_service_gc_safe_point"] == wanting.safe_point
    assert {frozenset(it) for it in listed["service_gc_safe_points"]} == {
        frozenset(("service_id", "expired_at", "safe_point"))
    }
    deleted = http(cluster, "DELETE", "/pd/api/v1/gc/safepoint/br%2Fodd%20id")
    assert deleted == (200, "Delete service GC safepoint successfully.")
    left = [
        it["service_id"]
        for it in http(cluster, "GET", "/pd/api/v1/gc/safepoint")[1]["service_gc_safe_points"]
    ]
    assert left == [BANK, "gc_worker"]
    refused = http(cluster, "DELETE", "/pd/api/v1/gc/safepoint/gc_worker")
    assert refused == (500, "cannot remove service safe point of gc_worker")


def test_what_the_alerts_go_by_is_there(cluster, wanting):
    with urllib.request.urlopen(
        f"http://{cluster.coordinator.endpoints['http']}/metrics", timeout=60
    ) as answer:
        lines = answer.read().decode().splitlines()
    [line] = [
        line
        for line in lines
        if line.startswith("pd_gc_barrier_timestamp_seconds{") and f'"{BANK}"' in line
    ]
    assert float(line.rpartition(" ")[2]) == (wanting.safe_point >> 18) / 1000


def test_gc_states_are_shown_as_pd_ctl_shows_them(cluster, wanting):
    hold(cluster, "br-2", wanting.safe_point + 5, 3000)
    hold(cluster, "native_br", wanting.safe_point + 6, 3000)  # becomes a barrier of all keyspaces
    try:
        state = cluster.cli("gc-state", "keyspace", "null")
        assert (state["requested_keyspace_id"], state["effective_keyspace_id"]) == (
            0xFFFFFFFF,
            0xFFFFFFFF,
        )
        assert [it["barrier_id"] for it in state["gc_barriers"]] == [BANK, "br-2"]
        [shared] = state["global_gc_barriers"]
        assert (shared["barrier_id"], shared["barrier_ts"]) == ("native_br", wanting.safe_point + 6)
        assert "global_gc_barriers" not in cluster.cli(
            "gc-state", "keyspace", "0", "--exclude-global-barriers"
        )
        every = cluster.cli("gc-state", "all")
        assert every["global_gc_barriers"] == [
            shared | {"ttl_seconds": every["global_gc_barriers"][0]["ttl_seconds"]}
        ]
        assert [it["keyspace_id"] for it in every["gc_states"]] == [0, 0xFFFFFFFF]
        assert "ErrInternal" not in cluster.cli("gc-state", "keyspace", "77")
        [link] = next(it for it in explained(cluster)["blockers"] if it["id"] == "native_br")[
            "chain"
        ]
        assert (link["kind"], link["owner"]) == ("global_barrier", "BR")
    finally:
        for service_id in ("br-2", "native_br"):
            hold(cluster, service_id, 0, 0)


def test_a_dead_capture_is_named(cluster, wanting):
    cluster.capture.kill()
    try:
        _, changefeed, capture = await_chain(cluster, ["service", "changefeed", "capture"])["chain"]
        assert changefeed["state"] == "dead"
        assert capture["state"] == "owner, silent"
        assert capture["owner"] == cluster.capture.endpoints["capture"]
        assert explained(cluster)["problems"]
    finally:
        cluster.capture.start()
        deadline = time.monotonic() + 120
        while (
            explained(cluster)["blockers"][0]["chain"][1]["state"] != "normal"
            or len(cluster.cli("capture", "list")) > 1
        ):
            assert time.monotonic() < deadline, "the next test finds all well"
            time.sleep(0.3)
