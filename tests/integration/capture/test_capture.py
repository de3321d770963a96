"""Coordinator, store and capture as processes; tikv-client writes, an Arrow Flight client reads."""

import asyncio
import json
import random
import time

import pyarrow.flight as fl
import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.demo.bank import ACCOUNTS, TRANSFERS
from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from storage.tidb.record import encode_record
from tests.integration.capture.processes import Reader, patiently, run, running_cluster, split

tikv_client = pytest.importorskip("tikv_client")
ACCOUNTS_NAME = "bank.accounts"
TABLES = (ACCOUNTS, TRANSFERS)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cluster")
    document = [
        {"schema_name": "bank", "table_info": json.loads(table.to_json())} for table in TABLES
    ]
    (directory / "tables.json").write_text(json.dumps(document))
    with running_cluster(directory) as running:
        yield running


@pytest.fixture(scope="module")
def clients_loop():
    """tikv-client's synchronous face runs on whatever event loop the thread has."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def store(cluster, clients_loop):
    asyncio.set_event_loop(clients_loop)
    yield tikv_client.TransactionClient.connect([cluster.pd])
    asyncio.set_event_loop(None)


@pytest.fixture
def feed(cluster, request):
    """A changefeed of the test's own, its reader and its start."""
    changefeed = request.node.name.replace("_", "-")
    tables = [pb.Table(schema_name="bank", table_info_json=table.to_json()) for table in TABLES]
    create = pb.CreateChangefeedRequest(id=changefeed, sink_uri="delta:///lake", tables=tables)
    made = cluster.api("CreateChangefeed", create).changefeed
    assert made.state == pb.CHANGEFEED_STATE_NORMAL
    yield Reader(cluster, changefeed), changefeed, made.start_ts
    cluster.api("RemoveChangefeed", pb.RemoveChangefeedRequest(id=changefeed))


def account(identity, balance):
    return encode_record(
        ACCOUNTS,
        {"id": identity, "owner": f"owner {identity}", "balance": balance, "updated_at": 0},
    )


def write(store, *rows, pessimistic=False):
    """One transaction: (id, balance), balance None deletes."""
    txn = store.begin(pessimistic=pessimistic)
    for identity, balance in rows:
        key, value = account(identity, balance or 0)
        if balance is None:
            txn.delete(key)
        else:
            txn.put(key, value)
    txn.commit()


def changes(table):
    return [(row["_op"], row["id"], row["balance"]) for row in table.to_pylist()]


def test_each_committed_change_is_read_once_in_commit_order(cluster, store, feed):
    reader, _, start = feed
    write(store, (201, 10), (202, 20))
    write(store, (201, 11), pessimistic=True)
    write(store, (202, None))
    end = reader.wait_resolved(cluster.now())
    table = reader.read(start, end, ACCOUNTS_NAME)
    assert changes(table) == [
        ("insert", 201, 10),
        ("insert", 202, 20),
        ("update", 201, 11),
        ("delete", 202, 20),
    ]
    assert table["_seq"].to_pylist() == [0, 1, 0, 0]
    commits = table["_commit_ts"].to_pylist()
    assert commits == sorted(commits)
    assert reader.read(start, end, "bank.transfers").num_rows == 0


def test_a_plan_covers_the_tables_that_have_rows(cluster, store, feed):
    reader, _, start = feed
    txn = store.begin(pessimistic=False)
    for key, value in (
        account(5, 50),
        encode_record(TRANSFERS, {"id": 9, "src": 1, "dst": 2, "amount": 3}),
    ):
        txn.put(key, value)
    txn.commit()
    end = reader.wait_resolved(cluster.now())
    slices = reader.ask("plan", start=start, end=end)["slices"]
    assert {part["table"]: part["rows"] for part in slices} == {
        "bank.accounts": 1,
        "bank.transfers": 1,
    }


def test_acknowledging_moves_the_checkpoint_and_the_safepoint(cluster, store, feed):
    reader, changefeed, _ = feed
    write(store, (1, 12))
    end = reader.wait_resolved(cluster.now())
    assert reader.ask("ack", ts=end) == {"checkpoint_ts": end}
    assert cluster.cli("changefeed", "query", "-c", changefeed)["checkpoint_tso"] == end
    await_value(lambda: safepoint(cluster, changefeed), lambda value: value == end - 1)


def test_whether_the_target_has_all_and_how_fast_it_is_read_are_told(cluster, store, feed):
    reader, changefeed, start = feed
    asking = ("changefeed", "synced", "-c", changefeed)
    write(store, (7, 1), (8, 2))
    end = reader.wait_resolved(cluster.now())
    reader.ask("plan", start=start, end=end)
    reader.ask("ack", ts=end)
    told = cluster.http("GET", f"/api/v2/changefeeds/{changefeed}/synced")[1]
    assert (told["synced"], "the last change was taken" in told["info"]) == (False, True)
    assert cluster.cli(*asking)["last_synced_ts"] == end
    assert cluster.cli(*asking, "--synced-check-interval", "0s", "--wait", "10s")["synced"]
    told = cluster.cli("changefeed", "statistics", "-c", changefeed, "-I", "0.1")
    assert (told["count"], told["state"]) == (2, "normal")


def test_after_kill_9_the_same_range_gives_the_same_rows(cluster, store, feed):
    reader, changefeed, _ = feed
    draw = random.Random(20261121)
    for number in range(60):
        write(store, *[(draw.randrange(100), number) for _ in range(draw.randrange(1, 4))])
    middle = reader.wait_resolved(cluster.now())
    reader.ask("ack", ts=middle)
    for number in range(60):
        write(
            store,
            *[(draw.randrange(100), number) for _ in range(draw.randrange(1, 4))],
            pessimistic=number % 2 == 0,
        )
    end = reader.wait_resolved(cluster.now())
    before = reader.read(middle, end, ACCOUNTS_NAME)
    await_value(lambda: safepoint(cluster, changefeed), lambda value: value == middle - 1)
    cluster.capture.kill()
    cluster.capture.start()
    assert patiently(reader.ask, "describe")["checkpoint_ts"] == middle
    assert patiently(reader.read, middle, end, ACCOUNTS_NAME).equals(before)


def test_a_restarted_store_only_delays(cluster, store, feed):
    reader, _, start = feed
    write(store, (207, 1))
    reader.wait_resolved(cluster.now())
    assert cluster.store.terminate() == 0
    cluster.store.start()
    write(tikv_client.TransactionClient.connect([cluster.pd]), (207, 2))
    end = reader.wait_resolved(cluster.now())
    assert changes(reader.read(start, end, ACCOUNTS_NAME)) == [
        ("insert", 207, 1),
        ("update", 207, 2),
    ]


def test_a_changefeed_starts_again_where_it_was_paused(cluster, store, feed):
    reader, changefeed, start = feed
    assert cluster.cli("changefeed", "pause", "-c", changefeed)["state"] == "stopped"
    write(store, (8, 80))
    assert safepoint(cluster, changefeed) == start - 1
    assert cluster.cli("changefeed", "resume", "-c", changefeed)["state"] == "normal"
    end = reader.wait_resolved(cluster.now())
    assert changes(reader.read(start, end, ACCOUNTS_NAME))[-1][1:] == (8, 80)


def test_a_dead_clients_lock_does_not_stop_the_changefeed(cluster, store, feed):
    reader, _, start = feed
    run(leave_a_lock(cluster.pd, 301))
    write(store, (302, 1))
    locked = cluster.now()
    end = reader.wait_resolved(locked)
    assert changes(reader.read(start, end, ACCOUNTS_NAME)) == [("insert", 302, 1)]


def test_a_split_loses_and_repeats_nothing(cluster, store, feed):
    reader, _, start = feed
    write(store, (401, 1), (499, 1))
    run(split(cluster.pd, account(450, 0)[0]))
    write(store, (401, 2), (499, 2))
    end = reader.wait_resolved(cluster.now())
    assert [
        (op, identity, balance)
        for op, identity, balance in changes(reader.read(start, end, ACCOUNTS_NAME))
    ] == [
        ("insert", 401, 1),
        ("insert", 499, 1),
        ("update", 401, 2),
        ("update", 499, 2),
    ]


def test_a_reader_learns_why_it_gets_nothing(cluster, store, feed):
    reader, changefeed, start = feed
    with pytest.raises(fl.FlightServerError, match="ErrTableNotExists"):
        reader.read(start, start, "bank.none")
    write(store, (501, 1))
    first = reader.wait_resolved(cluster.now())
    reader.ask("ack", ts=first)
    reader.ask("ack", ts=reader.wait_resolved(cluster.now()))
    with pytest.raises(fl.FlightServerError, match="ErrRangeCleaned"):
        reader.read(start, first, ACCOUNTS_NAME)
    cluster.cli("changefeed", "pause", "-c", changefeed)
    with pytest.raises(fl.FlightUnavailableError, match="ErrChangefeedNotRunning"):
        reader.ask("latest", start=start)


def test_removing_asks_first_and_gives_the_safepoint_up(cluster):
    tables = str(cluster.directory / "tables.json")
    flags = ("-c", "doomed", "--sink-uri", "delta:///lake", "--tables", tables)
    assert cluster.cli("changefeed", "create", *flags)["id"] == "doomed"
    assert "ErrNotConfirmed" in cluster.cli("changefeed", "remove", "-c", "doomed")
    assert cluster.cli("changefeed", "remove", "-c", "doomed", "--dry-run")["dry_run"]
    assert cluster.cli("changefeed", "remove", "-c", "doomed", "--no-confirm")["removed"]
    assert safepoint(cluster, "doomed") is None
    assert cluster.cli("changefeed", "query", "-c", "doomed").startswith(
        "[TM:ErrChangeFeedNotExists]"
    )


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--source-uri", "mysql://u:geheim@db", "--filter", "shop.*"], "ErrSourceURIInvalid"),
        (["--source-uri", "oracle://db", "--filter", "shop.*"], "there are no oracle:// sources"),
        (["--filter", "shop"], "ErrFilterRuleInvalid"),
        (["--filter", "nothing.*"], "the filter takes none"),
        ([], "name them by --filter"),
    ],
)
def test_what_cannot_be_replicated_is_refused_with_a_name_and_a_way_out(cluster, flags, refusal):
    told = cluster.cli(
        "changefeed", "create", "-c", "refused", "--sink-uri", "delta:///lake", *flags
    )
    assert refusal in told
    assert "geheim" not in told
    assert "ErrChangeFeedNotExists" in cluster.cli("changefeed", "query", "-c", "refused")
    assert "creating" not in str(cluster.cli("gc", "safepoint"))


def test_captures_are_listed_with_their_owner(cluster):
    [capture] = await_value(
        lambda: cluster.cli("capture", "list"), one_owner
    )  # one that was killed may still be there
    assert capture["is-owner"]
    assert capture["address"] == cluster.capture.endpoints["capture"]


def test_scripts_written_for_ticdcs_http_api_work_on_the_same_port(cluster):
    feed = "/api/v2/changefeeds/scripted"
    tables = [{"schema_name": "bank", "table_info": json.loads(ACCOUNTS.to_json())}]
    body = {"changefeed_id": "scripted", "sink_uri": "delta:///lake", "tables": tables}
    status, checked = cluster.http("POST", "/api/v2/verify_table", body)
    assert (status, checked["eligible_tables"][0]["table_name"]) == (200, "accounts")
    status, made = cluster.http("POST", "/api/v2/changefeeds", body)
    assert (status, made["id"], made["state"]) == (200, "scripted", "normal")
    status, answer = cluster.http("POST", "/api/v2/changefeeds", body)
    assert (status, answer["error_code"]) == (400, "CDC:ErrChangeFeedAlreadyExists")
    assert cluster.http("POST", f"{feed}/pause") == (200, {})
    assert cluster.http("GET", f"{feed}/status")[1]["state"] == "stopped"
    assert cluster.http("POST", f"{feed}/resume", {}) == (200, {})
    assert cluster.http("GET", feed)[1]["state"] == "normal"
    [capture] = cluster.http("GET", "/api/v2/captures")[1]["items"]
    assert cluster.http("GET", "/api/v2/status")[1]["id"] == capture["id"]
    assert cluster.http("POST", "/api/v2/tso", {})[1]["timestamp"] > 0
    assert cluster.http("DELETE", feed, Origin="http://elsewhere.example")[0] == 403
    assert cluster.http("DELETE", feed) == (200, {})
    assert cluster.http("DELETE", feed) == (200, {})
    assert cluster.http("GET", feed)[1]["error_code"] == "CDC:ErrChangeFeedNotExists"


def test_a_second_capture_asks_the_owner_and_takes_over_when_it_dies(cluster, store, feed):
    reader, changefeed, start = feed
    write(store, (601, 1))
    end = reader.wait_resolved(cluster.now())
    before = reader.read(start, end, ACCOUNTS_NAME)
    first, second = cluster.capture, cluster.another_capture()
    third = str(cluster.directory / "third")
    query = pb.QueryChangefeedRequest(id=changefeed)
    assert cluster.api("QueryChangefeed", query, second).changefeed.id == changefeed
    path = f"/api/v2/changefeeds/{changefeed}"
    assert cluster.http("GET", path, capture=second)[1]["id"] == changefeed
    status, answer = cluster.http("GET", f"{path}x", capture=second)
    assert (status, answer["error_code"]) == (400, "CDC:ErrChangeFeedNotExists")
    same = ("--advertise-addr", first.endpoints["capture"])
    with pytest.raises(AssertionError, match="ErrCaptureAddressTaken"):
        cluster.start("capture", "--coordinator", cluster.pd, "--data-dir", third, *same)
    first.kill()
    cluster.capture = second
    assert [
        capture["is-owner"]
        for capture in await_value(lambda: cluster.cli("capture", "list"), one_owner)
    ] == [True]
    assert patiently(reader.read, start, end, ACCOUNTS_NAME).equals(before)


def test_the_capture_drains_at_sigterm(cluster):
    assert cluster.capture.terminate() == 0
    cluster.capture.start()


async def leave_a_lock(pd_addr, identity):
    """A client prewrites and dies; its lock's TTL ends soon."""
    key, value = account(identity, 1)
    async with PdClient.open(pd_addr) as pd, KvClient.open(pd) as kv:
        mutation = kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=value)
        await kv.prewrite([mutation], primary=key, start_version=await pd.tso(), lock_ttl_ms=100)


def one_owner(captures):
    return len(captures) == 1 and captures[0]["is-owner"]


def safepoint(cluster, changefeed):
    services = cluster.cli("gc", "safepoint")["service_gc_safe_points"]
    return next(
        (s["safe_point"] for s in services if s["service_id"] == f"ticdc-default-{changefeed}"),
        None,
    )


def await_value(get, accept):
    """Ask until the value is there, for longer than a dead capture holds its lease;
    each question takes a process.
    """
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        value = get()
        if accept(value):
            return value
    raise TimeoutError(f"last seen: {value}")
