"""What a real TiDB wrote, DDLs and all, through captures with and without workers:
the same rows and cuts.
"""

import asyncio
import time

import pytest
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from tests.integration.capture.processes import Reader, patiently, running_cluster
from tests.integration.tidb.history import load, txns
from tests.unit.storage.tidb import vectors

pytestmark = [vectors.needed, pytest.mark.timeout(180)]
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


def read_all(cluster, start_ts, end_ts, *, kill_at=None):
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
        if kill_at is not None and len(seen) == kill_at:
            cluster.capture.kill()
            cluster.capture.start()
    return seen


def followed(cluster, start_ts, end_ts, *, kill_at=None):
    made = create(cluster, start_ts, filter=["*.*", "!vec.part*"])
    seen = read_all(cluster, start_ts, end_ts, kill_at=kill_at)
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


@pytest.fixture(scope="module")
def histories(tmp_path_factory):
    """Of a capture by itself, and of one with two workers that is killed on the way."""
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
        return alone, followed(cluster, start_ts, end_ts, kill_at=12)


def test_captures_with_and_without_workers_tell_the_same_ddls_and_rows(histories):
    (_, alone, _), (_, workers, _) = histories
    ddls = [[ddl for _, found, _ in seen for ddl in found] for seen in (alone, workers)]
    assert len(ddls[0]) > 15
    assert ddls[0] == ddls[1]
    assert by_table(alone) == by_table(workers)


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
