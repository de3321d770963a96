"""Coordinator, store and capture as processes; tikv-client writes, an Arrow Flight client reads."""

import json
import random

import pytest

from server.demo.bank import ACCOUNTS, TABLES, TRANSFERS
from storage.tidb.record import encode_record
from tests.integration.capture.processes import Reader, running_cluster

tikv_client = pytest.importorskip("tikv_client")
ACCOUNTS_NAME = "bank.accounts"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cluster")
    document = [{"schema_name": "bank", "table_info": json.loads(table.to_json())} for table in TABLES]
    (directory / "tables.json").write_text(json.dumps(document))
    with running_cluster(directory) as running:
        yield running


@pytest.fixture
def store(cluster):
    return tikv_client.TransactionClient.connect([cluster.pd])


@pytest.fixture
def feed(cluster, request):
    """A changefeed of the test's own, and its reader."""
    changefeed = request.node.name.split("[")[0].replace("_", "-")[:60].strip("-")
    made = create(cluster, changefeed)
    assert made["state"] == "normal"
    yield Reader(cluster, changefeed), changefeed, made["start_ts"]
    cluster.cli("changefeed", "remove", "-c", changefeed, "--no-confirm")


def create(cluster, changefeed, *flags):
    tables = str(cluster.directory / "tables.json")
    return cluster.cli(
        "changefeed", "create", "-c", changefeed, "--sink-uri", "delta:///lake", "--tables", tables, *flags
    )


def account(identity, balance):
    return encode_record(ACCOUNTS, {"id": identity, "owner": f"owner {identity}", "balance": balance, "updated_at": 0})


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


def now(cluster):
    return cluster.cli("tso", "query")["tso"]


def changes(table):
    return [(row["_op"], row["id"], row["balance"]) for row in table.to_pylist()]


def test_each_committed_change_is_read_once_in_commit_order(cluster, store, feed):
    reader, _, start = feed
    write(store, (201, 10), (202, 20))
    write(store, (201, 11), pessimistic=True)
    write(store, (202, None))
    end = reader.wait_resolved(now(cluster))
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
    for key, value in (account(5, 50), encode_record(TRANSFERS, {"id": 9, "src": 1, "dst": 2, "amount": 3})):
        txn.put(key, value)
    txn.commit()
    end = reader.wait_resolved(now(cluster))
    slices = reader.ask("plan", start=start, end=end)["slices"]
    assert {part["table"]: part["rows"] for part in slices} == {"bank.accounts": 1, "bank.transfers": 1}


def test_acknowledging_moves_the_checkpoint_and_the_safepoint(cluster, store, feed):
    reader, changefeed, _ = feed
    write(store, (1, 12))
    end = reader.wait_resolved(now(cluster))
    assert reader.ask("ack", ts=end) == {"checkpoint_ts": end}
    shown = await_value(
        lambda: cluster.cli("changefeed", "query", "-c", changefeed)["checkpoint_tso"], lambda value: value == end
    )
    assert shown == end
    await_value(lambda: safepoint(cluster, changefeed), lambda value: value == end - 1)


def test_after_kill_9_the_same_range_gives_the_same_rows(cluster, store, feed):
    reader, changefeed, _ = feed
    draw = random.Random(20261121)
    for number in range(60):
        write(store, *[(draw.randrange(100), number) for _ in range(draw.randrange(1, 4))])
    middle = reader.wait_resolved(now(cluster))
    reader.ask("ack", ts=middle)
    for number in range(60):
        write(store, *[(draw.randrange(100), number) for _ in range(draw.randrange(1, 4))], pessimistic=number % 2 == 0)
    end = reader.wait_resolved(now(cluster))
    before = reader.read(middle, end, ACCOUNTS_NAME)
    await_value(lambda: safepoint(cluster, changefeed), lambda value: value == middle - 1)
    cluster.capture.kill()
    cluster.capture.start()
    assert reader.ask("describe")["checkpoint_ts"] == middle
    assert reader.read(middle, end, ACCOUNTS_NAME).equals(before)


def test_a_restarted_store_only_delays(cluster, store, feed):
    reader, _, start = feed
    write(store, (207, 1))
    reader.wait_resolved(now(cluster))
    assert cluster.store.terminate() == 0
    cluster.store.start()
    write(tikv_client.TransactionClient.connect([cluster.pd]), (207, 2))
    end = reader.wait_resolved(now(cluster))
    assert changes(reader.read(start, end, ACCOUNTS_NAME)) == [("insert", 207, 1), ("update", 207, 2)]


def test_a_changefeed_starts_again_where_it_was_paused(cluster, store, feed):
    reader, changefeed, start = feed
    assert cluster.cli("changefeed", "pause", "-c", changefeed)["state"] == "stopped"
    write(store, (8, 80))
    assert safepoint(cluster, changefeed) == start - 1
    assert cluster.cli("changefeed", "resume", "-c", changefeed)["state"] == "normal"
    end = reader.wait_resolved(now(cluster))
    assert changes(reader.read(start, end, ACCOUNTS_NAME))[-1][1:] == (8, 80)


def test_removing_asks_first_and_gives_the_safepoint_up(cluster):
    create(cluster, "doomed")
    assert "ErrNotConfirmed" in cluster.cli("changefeed", "remove", "-c", "doomed")
    assert cluster.cli("changefeed", "remove", "-c", "doomed", "--dry-run")["dry_run"]
    assert cluster.cli("changefeed", "remove", "-c", "doomed", "--no-confirm")["removed"]
    assert safepoint(cluster, "doomed") is None
    assert cluster.cli("changefeed", "query", "-c", "doomed").startswith("[TM:ErrChangeFeedNotExists]")


def test_captures_are_listed_with_their_owner(cluster):
    [capture] = cluster.cli("capture", "list")
    assert capture["is-owner"]
    assert capture["address"] == cluster.capture.endpoints["capture"]


def test_the_capture_drains_at_sigterm(cluster):
    assert cluster.capture.terminate() == 0
    cluster.capture.start()


def safepoint(cluster, changefeed):
    services = cluster.cli("gc", "safepoint")["service_gc_safe_points"]
    return next((s["safe_point"] for s in services if s["service_id"] == f"ticdc-default-{changefeed}"), None)


def await_value(get, accept):
    """Ask until the value is there; each question takes a process, so this does not spin."""
    for _ in range(40):
        value = get()
        if accept(value):
            return value
    raise TimeoutError(f"last seen: {value}")
