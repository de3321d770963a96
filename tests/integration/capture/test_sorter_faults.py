"""A running capture whose sorter's disk is damaged or full: named, nothing lost,
and going on by itself.
"""

import contextlib
import os
import time
from pathlib import Path

import pyarrow.flight as fl
import pytest
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.changefeed.view import stuck_warnings
from server.demo.bank import ACCOUNTS
from storage.tidb.record import encode_record
from tests.integration.capture.processes import Reader, running_cluster, transaction_client
from tests.small_disk import small_disk

pytest.importorskip("tikv_client")
NAME = "bank.accounts"
ROWS, ROW_BYTES, TRANSACTIONS = 20, 20_000, 12
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """The capture's own."""
    with small_disk(tmp_path_factory.mktemp("disk") / "small", "48m") as path:
        yield path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, disk):
    """Its capture has so little memory that most rows are on disk, and read from there."""
    flags = ("--memory-quota-bytes", str(4 << 20), "--data-dir", str(disk))
    with running_cluster(tmp_path_factory.mktemp("cluster"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def store(cluster):
    with transaction_client(cluster) as client:
        yield client


@pytest.fixture
def changefeed(cluster, request):
    identity = request.node.name.replace("_", "-").replace("[", "-").replace("]", "")
    tables = [pb.Table(schema_name="bank", table_info_json=ACCOUNTS.to_json())]
    create = pb.CreateChangefeedRequest(id=identity, sink_uri="delta:///lake", tables=tables)
    yield cluster.api("CreateChangefeed", create).changefeed
    cluster.api("RemoveChangefeed", pb.RemoveChangefeedRequest(id=identity))


def write(store, transactions):
    """Each changes all rows; returns what a reader must see."""
    expected = []
    for number in range(transactions):
        txn = store.begin(pessimistic=False)
        for identity in range(ROWS):
            row = {"id": identity, "owner": "x" * ROW_BYTES, "balance": number, "updated_at": 0}
            txn.put(*encode_record(ACCOUNTS, row))
            expected.append((identity, number))
        txn.commit()
    return expected


def seen(table):
    return list(zip(table["id"].to_pylist(), table["balance"].to_pylist(), strict=True))


def wait_for(get):
    """Ask until it gives something."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if found := get():
            return found
        time.sleep(0.1)
    raise TimeoutError(f"not after {LIMIT_S} s")


def flip(segment: Path) -> None:
    """One bit in each stretch of some kilobytes."""
    with segment.open("r+b") as file:
        for place in range(4096, segment.stat().st_size, 16 << 10):
            file.seek(place)
            octet = file.read(1)[0]
            file.seek(place)
            file.write(bytes([octet ^ 1]))


def tear(segment: Path) -> None:
    os.truncate(segment, segment.stat().st_size // 3)


@pytest.mark.parametrize("damage", [flip, tear], ids=["flipped", "torn"])
def test_a_damaged_table_is_pulled_again_from_its_checkpoint(
    cluster, store, disk, changefeed, damage
):
    reader = Reader(cluster, changefeed.id)
    first = write(store, 2)
    checkpoint = reader.wait_resolved(cluster.now())
    assert seen(reader.read(changefeed.start_ts, checkpoint, NAME)) == first
    reader.ask("ack", ts=checkpoint)
    expected = write(store, TRANSACTIONS)
    end = reader.wait_resolved(cluster.now(), LIMIT_S)
    before = reader.read(checkpoint, end, NAME)
    assert seen(before) == expected
    damaged = 0
    for segment in disk.glob(f"**/{changefeed.id}/*/segments/*"):
        with contextlib.suppress(FileNotFoundError):  # its rows were all acknowledged
            damaged += segment.stat().st_size
            damage(segment)
    assert damaged > ROWS * ROW_BYTES
    with pytest.raises(
        fl.FlightError, match=f"ErrSorterBlockCorrupt.*table {ACCOUNTS.id}, commit_ts"
    ):
        reader.read(checkpoint, end, NAME)
    log = cluster.capture.log
    wait_for(
        lambda: any(
            changefeed.id in line and "pulled again" in line
            for line in log.read_text().splitlines()
        )
    )

    def again():
        with contextlib.suppress(fl.FlightError):  # not yet as far
            return reader.read(checkpoint, end, NAME)

    assert wait_for(again).equals(before)
    wait_for(lambda: cluster.cli("changefeed", "query", "-c", changefeed.id)["state"] == "normal")
    assert reader.ask("ack", ts=end) == {"checkpoint_ts": end}


def test_a_full_disk_pauses_the_feed_which_says_so_and_goes_on_when_there_is_room(
    cluster, store, disk, changefeed
):
    reader, filler = Reader(cluster, changefeed.id), disk / "filler"
    reader.wait_resolved(cluster.now())
    fill(filler)
    expected = write(store, TRANSACTIONS)
    last_ts = cluster.now()

    def holding():
        query = pb.QueryChangefeedRequest(id=changefeed.id)
        return cluster.api("QueryChangefeed", query).changefeed

    def still_full():  # what another test's changefeed gives back is taken, too
        fill(filler)
        return found if (found := holding()).holding.waiting else None

    paused = wait_for(still_full)
    assert "No space left" in paused.holding.disk_error
    assert paused.state == pb.CHANGEFEED_STATE_NORMAL
    assert "No space left" in stuck_warnings(paused)[0]
    assert paused.resolved_ts < last_ts
    assert paused.holding.sorter_memory_bytes < 4 << 20
    filler.unlink()
    end = reader.wait_resolved(last_ts, LIMIT_S)
    assert seen(reader.read(changefeed.start_ts, end, NAME)) == expected
    wait_for(lambda: not holding().holding.disk_error)


def fill(path: Path) -> None:
    """Take all room there is."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
