"""What a real TiDB wrote, DDLs and all, through captures with and without workers:
the same rows and cuts.
"""

import asyncio
import random
import threading
import time
from contextlib import contextmanager

import grpc
import pytest
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from tests.integration.capture.processes import Reader, patiently, running_cluster
from tests.integration.tidb.history import load, txns
from tests.unit.storage.tidb import vectors

pytestmark = [vectors.needed, pytest.mark.timeout(300)]
FEED = "vectors"


async def filled(address):
    async with PdClient.open(address) as pd, KvClient.open(pd) as kv:
        await load(kv, txns())


def create(cluster, start_ts, **members):
    request = pb.CreateChangefeedRequest(
        id=FEED,
        sink_uri="delta:///lake",
        start_ts=start_ts,
        ignore_ineligible_table=True,
        **members,
    )
    return cluster.api("CreateChangefeed", request).changefeed


def one_cut(reader, start, end):
    """Its DDLs, and the rows of each table."""
    slices = reader.ask("plan", start=start, end=end)["slices"]
    rows = {
        part["table"]: reader.read(start, end, part["table"]) for part in slices if part["rows"]
    }
    return [
        ddl for ddl in reader.ask("describe", ts=start)["ddls"] if start < ddl["ts"] <= end
    ], rows


def read_all(cluster, start_ts, end_ts, *, kill_at=None, after_cut=lambda: None):
    """Every cut up to `end_ts`: its end, the DDLs there, and the rows of each table."""
    reader, seen, at_ts = Reader(cluster, FEED), [], start_ts
    while at_ts < end_ts:
        next_ts = patiently(reader.ask, "latest", start=at_ts, wait_ms=5000)["ts"]
        if next_ts == at_ts:
            continue
        end = min(next_ts, end_ts)
        ddls, rows = patiently(one_cut, reader, at_ts, end)
        seen.append((end, ddls, rows))
        patiently(reader.ask, "ack", ts=end)
        at_ts = end
        after_cut()
        if kill_at is not None and len(seen) == kill_at:
            cluster.capture.kill()
            cluster.capture.start()
    return seen


def followed(cluster, start_ts, end_ts, **how):
    made = create(cluster, start_ts, filter=["*.*", "!vec.part*"])
    seen = read_all(cluster, start_ts, end_ts, **how)
    shown = replicating(cluster)
    cluster.api("RemoveChangefeed", pb.RemoveChangefeedRequest(id=FEED))
    return made, seen, shown


def replicating(cluster):
    """What a query shows once all tables are followed."""
    deadline = time.monotonic() + 120
    while True:
        shown = cluster.cli("changefeed", "query", "-c", FEED)
        if {table["state"] for table in shown["tables"]} == {
            "replicating"
        } or time.monotonic() > deadline:
            return shown


class Mover(threading.Thread):
    """Moves one table after the other to another capture or worker process."""

    def __init__(self, cluster):
        super().__init__()
        self.cluster, self.moved, self.ending = cluster, 0, threading.Event()
        self.tried = threading.Semaphore(0)
        """Released at each try, so that reading cannot be over before anything has moved."""

    def run(self):
        dice = random.Random(7)
        while not self.ending.is_set():
            shown = self.cluster.cli("changefeed", "query", "-c", FEED)
            # It is not there yet, or no more.
            tables = shown.get("tables", ()) if isinstance(shown, dict) else ()
            for table in dice.sample(tables, len(tables)):
                other = {"worker-0": "worker-1"}.get(table.get("capture"), "worker-0")
                request = pb.MoveTableRequest(id=FEED, table=table["table"], capture=other)
                try:
                    self.cluster.api("MoveTable", request)
                    self.moved += 1
                except grpc.RpcError as err:
                    assert err.code() is not grpc.StatusCode.UNKNOWN, err.details()  # noqa: PT017 - as it comes
                self.tried.release()
                if self.ending.is_set():
                    return


@contextmanager
def moving(cluster):
    """Tables move all the time, for the block."""
    mover = Mover(cluster)
    mover.start()
    try:
        yield mover
    finally:
        mover.ending.set()
        mover.join()


@pytest.fixture(scope="module")
def histories(tmp_path_factory):
    """Of a capture by itself, of one with two workers that is killed on the way, and of one whose
    tables move between its workers.
    """
    steps, directory = vectors.lines("steps"), tmp_path_factory.mktemp("ddl")
    start_ts, end_ts = steps[2]["ts_after"], steps[-1]["ts_after"]
    with running_cluster(directory) as cluster:
        asyncio.run(filled(cluster.pd))
        alone = followed(cluster, start_ts, end_ts)
        assert cluster.capture.terminate() == 0
        flags = (
            "--coordinator",
            cluster.pd,
            "--data-dir",
            str(directory / "workers"),
            "--workers",
            "2",
        )
        cluster.capture = cluster.start("capture", *flags)
        workers = followed(cluster, start_ts, end_ts, kill_at=12)
        with moving(cluster) as mover:
            wait = mover.tried.acquire
            moved = followed(cluster, start_ts, end_ts, after_cut=lambda: wait(timeout=3))
        print(f"{mover.moved} moves")
        assert mover.moved > 5
        return alone, workers, moved


def test_captures_with_and_without_workers_tell_the_same_ddls_and_rows(histories):
    alone, *others = (seen for _, seen, _ in histories)
    ddls = [ddl for _, found, _ in alone for ddl in found]
    assert len(ddls) > 15
    for other in others:
        assert [ddl for _, found, _ in other for ddl in found] == ddls
        assert by_table(other) == by_table(alone)


def test_no_cut_goes_beyond_a_ddl(histories):
    for _, seen, _ in histories:
        for end, ddls, _ in seen:
            assert [ddl["ts"] for ddl in ddls] in ([], [end])


def test_query_shows_the_filter_the_tables_and_the_last_ddls(histories):
    for made, _, shown in histories:
        assert list(made.filter) == shown["filter"] == ["*.*", "!vec.part*"]
        assert {table["state"] for table in shown["tables"]} == {"replicating"}
        assert shown["ddls"]
        assert all(ddl["query"] for ddl in shown["ddls"])


def by_table(seen):
    """The rows of each table in order, wherever cuts were made."""
    found = {}
    for _, _, rows in seen:
        for name, table in rows.items():
            found.setdefault(name, []).extend(table.to_pylist())
    return found
