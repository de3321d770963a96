"""`binlog.Pump` over real sockets and files, with the binlogs of a real TiDB."""

import asyncio
import base64
import gzip
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
from tidemarkpb.v1 import pump_pb2 as stream_pb2
from tidemarkpb.v1 import pump_pb2_grpc as stream_grpc
from tipb import binlog_pb2, pump_pb2, pump_pb2_grpc

from server.pump.registry import ONLINE, PAUSED, Node
from server.pump.service import Admission, BinlogPump, PumpService, WriteBinlogCalls
from server.pump.upkeep import DiskWatch
from server.rpc.client import connect
from server.rpc.server import RpcServer
from storage.pump.binlog import fake
from storage.pump.storage import PumpStorage, open_pump_storage
from storage.vfs import RealFS

CLUSTER_ID = 7710419005281151504
TIDB = Path(__file__).parents[2] / "golden" / "tidb" / "binlogs.jsonl.gz"
SERVICE = pump_pb2.DESCRIPTOR.services_by_name["Pump"]
STREAMS = stream_pb2.DESCRIPTOR.services_by_name["PumpService"]


@dataclass
class Pump:
    storage: PumpStorage
    node: Node
    disk: DiskWatch
    stub: "pump_pb2_grpc.PumpAsyncStub"
    address: str

    async def write(self, payload: bytes, cluster_id: int = CLUSTER_ID) -> None:
        answer = await self.stub.WriteBinlog(
            pump_pb2.WriteBinlogReq(clusterID=cluster_id, payload=payload)
        )
        assert answer.errmsg == ""

    async def refusal(self, payload: bytes, cluster_id: int = CLUSTER_ID) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.write(payload, cluster_id)
        assert caught.value.code() == grpc.StatusCode.UNKNOWN
        return str(caught.value.details())

    async def pull(self, last_ts: int, until_ts: int) -> list[bytes]:
        request = pump_pb2.PullBinlogReq(
            clusterID=CLUSTER_ID, startFrom=pump_pb2.Pos(offset=last_ts)
        )
        stream = self.stub.PullBinlogs(request)
        payloads: list[bytes] = []
        async for answer in stream:
            payloads.append(answer.entity.payload)
            if binlog_pb2.Binlog.FromString(payloads[-1]).commit_ts >= until_ts:
                break
        stream.cancel()
        return payloads


@asynccontextmanager
async def started(directory: Path, segment_bytes: int = 1 << 20) -> AsyncIterator[Pump]:
    async with open_pump_storage(RealFS(), directory, segment_bytes=segment_bytes) as storage:
        node = Node("test", "127.0.0.1:0", ONLINE)
        disk = DiskWatch(RealFS(), directory, 0)
        admission = Admission(storage, CLUSTER_ID, node, disk)
        service = BinlogPump(storage, admission)
        server = RpcServer()
        calls = WriteBinlogCalls(storage, admission)
        server.add_service(SERVICE, service, queues={"WriteBinlog": calls})
        server.add_service(STREAMS, PumpService(storage, admission))
        async with server.listen("127.0.0.1:0") as address, connect(address) as channel:
            try:
                yield Pump(storage, node, disk, pump_pb2_grpc.PumpStub(channel), address)
            finally:
                storage.end_pulls()


def tidb_rows() -> list[dict]:
    with gzip.open(TIDB, "rt") as lines:
        return [json.loads(line) for line in lines]


def payload_of(row: dict) -> bytes:
    return base64.b64decode(row["payload_b64"])


def encoded(**fields: object) -> bytes:
    return binlog_pb2.Binlog(**fields).SerializeToString()


def check_joined(payloads: list[bytes], rows: list[dict]) -> None:
    """Each payload is its commit binlog, with the rows of the prewrite,
    as the summaries of the vectors say.
    """
    prewrites = {row["start_ts"]: row for row in rows if row["tp"] == "Prewrite"}
    commits = sorted(
        (row for row in rows if row["tp"] == "Commit"), key=lambda row: row["commit_ts"]
    )
    assert len(payloads) == len(commits) == 129
    for payload, commit in zip(payloads, commits, strict=True):
        found = binlog_pb2.Binlog.FromString(payload)
        source = prewrites[commit["start_ts"]]
        assert (found.tp, found.start_ts, found.commit_ts) == (
            1,
            commit["start_ts"],
            commit["commit_ts"],
        )
        assert found.prewrite_key.hex() == source["prewrite_key"]
        assert found.ddl_query.decode() == source["ddl_query"]
        assert (found.ddl_job_id, found.ddl_schema_state) == (
            source["ddl_job_id"],
            source["ddl_schema_state"],
        )
        assert (
            found.prewrite_value == binlog_pb2.Binlog.FromString(payload_of(source)).prewrite_value
        )
        check_rows(
            binlog_pb2.PrewriteValue.FromString(found.prewrite_value), source.get("prewrite_value")
        )


def check_rows(value: binlog_pb2.PrewriteValue, summary: dict | None) -> None:
    if not isinstance(summary, dict) or "mutations" not in summary:
        return
    for mutation, expected in zip(value.mutations, summary["mutations"], strict=True):
        assert mutation.table_id == expected["table_id"]
        for field in ("inserted_rows", "updated_rows", "deleted_rows"):
            if expected.get(field):
                assert [row.hex() for row in getattr(mutation, field)] == expected[field]


async def test_every_binlog_of_a_real_tidb_comes_back_in_commit_order_with_its_rows(
    tmp_path: Path,
) -> None:
    rows = tidb_rows()
    last_ts = max(row["commit_ts"] for row in rows)
    async with started(tmp_path) as pump:
        for row in rows:
            await pump.write(payload_of(row))
        check_joined(await pump.pull(0, last_ts), rows)
        assert pump.storage.all_matched
        middle = sorted(row["commit_ts"] for row in rows if row["tp"] == "Commit")[60]
        assert len(await pump.pull(middle, last_ts)) == 129 - 61


async def test_a_restart_serves_the_same_binlogs(tmp_path: Path) -> None:
    rows = tidb_rows()
    last_ts = max(row["commit_ts"] for row in rows)
    async with started(tmp_path, segment_bytes=100_000) as pump:
        for row in rows[:150]:
            await pump.write(payload_of(row))
    async with started(tmp_path, segment_bytes=100_000) as pump:
        for row in rows[150:]:
            await pump.write(payload_of(row))
        check_joined(await pump.pull(0, last_ts), rows)


async def test_outcomes_that_arrive_late_and_out_of_order_change_nothing(tmp_path: Path) -> None:
    """All prewrites first, then the outcomes shuffled: still in commit order, still complete."""
    rows = tidb_rows()
    outcomes = [row for row in rows if row["tp"] != "Prewrite"]
    random.Random(4).shuffle(outcomes)
    last_ts = max(row["commit_ts"] for row in rows)
    async with started(tmp_path) as pump:
        for row in [row for row in rows if row["tp"] == "Prewrite"] + outcomes:
            await pump.write(payload_of(row))
        check_joined(await pump.pull(0, last_ts), rows)


async def write_pair(pump: Pump, start_ts: int) -> None:
    await pump.write(encoded(tp=0, start_ts=start_ts, prewrite_value=b"v%d" % start_ts))
    await pump.write(encoded(tp=1, start_ts=start_ts, commit_ts=start_ts + 4))


async def test_many_writers_share_the_log_and_every_pair_is_served(tmp_path: Path) -> None:
    async with started(tmp_path) as pump:
        async with asyncio.TaskGroup() as tasks:
            for number in range(200):
                tasks.create_task(write_pair(pump, 10 * number + 1))
        await pump.write(fake(5000))
        payloads = await pump.pull(0, 5000)
    found = [binlog_pb2.Binlog.FromString(payload) for payload in payloads]
    assert [message.commit_ts for message in found] == [
        *(10 * number + 5 for number in range(200)),
        5000,
    ]
    assert all(message.prewrite_value == b"v%d" % message.start_ts for message in found[:-1])


async def test_refusals_are_the_ones_of_the_original(tmp_path: Path) -> None:
    async with started(tmp_path) as pump:
        await pump.write(b"")
        assert (
            await pump.refusal(b"", cluster_id=5) == f"cluster ID are mismatch, 5 vs {CLUSTER_ID}"
        )
        assert "unexpected EOF" in await pump.refusal(b"\x22\x7fgarbage")
        assert "commit_ts 3 not after start_ts 4" in await pump.refusal(
            encoded(tp=1, start_ts=4, commit_ts=3)
        )
        pump.node.state = PAUSED
        assert await pump.refusal(encoded(tp=0, start_ts=4)) == "no online: paused"
        await pump.write(encoded(tp=1, start_ts=4, commit_ts=9))
        await pump.write(b"")
        with pytest.raises(grpc.aio.AioRpcError, match="cluster ID are mismatch, 6 vs"):
            await anext(aiter(pump.stub.PullBinlogs(pump_pb2.PullBinlogReq(clusterID=6))))


async def test_a_request_that_is_no_message_is_refused_alone(tmp_path: Path) -> None:
    async with started(tmp_path) as pump, connect(pump.address) as channel:
        raw = channel.unary_unary("/binlog.Pump/WriteBinlog")
        with pytest.raises(grpc.aio.AioRpcError, match="failed to unmarshal"):
            await raw(b"\x0a\xff")
        await pump.write(encoded(tp=0, start_ts=4))


async def test_a_low_disk_takes_heartbeats_only_and_recovers(tmp_path: Path) -> None:
    async with started(tmp_path) as pump:
        pump.disk.stop_write_at_bytes = 1 << 60
        expected = (
            f"no available space, available: {pump.disk.available_bytes}, "
            f"StopWriteAtAvailableSpace: {1 << 60}"
        )
        for payload in (b"", encoded(tp=0, start_ts=4), encoded(tp=1, start_ts=4, commit_ts=5)):
            assert await pump.refusal(payload) == expected
        await pump.write(fake(7))
        assert len(await pump.pull(0, 7)) == 1
        pump.disk.stop_write_at_bytes = 0
        await pump.write(encoded(tp=0, start_ts=8))


async def test_too_many_prewrites_without_an_outcome_stop_prewrites_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.pump.index.WAITING_BYTES", 200 << 20)
    async with started(tmp_path) as pump:
        for start_ts in (1, 2):
            await pump.write(encoded(tp=0, start_ts=start_ts))
        async with asyncio.timeout(60):
            while len(await pump.storage.oldest_waiting(2)) < 2:  # noqa: ASYNC110 - indexing has no event
                await asyncio.sleep(0)
        assert "[TM:ErrPrewritesFull]" in await pump.refusal(encoded(tp=0, start_ts=3))
        await pump.write(encoded(tp=1, start_ts=1, commit_ts=5))
        await pump.write(encoded(tp=2, start_ts=2))
        await pump.pull(0, 5)
        await pump.write(encoded(tp=0, start_ts=3))


async def test_a_reader_of_purged_binlogs_is_refused_with_a_reason(tmp_path: Path) -> None:
    async with started(tmp_path) as pump:
        await write_pair(pump, 1)
        await pump.write(fake(100))
        await pump.pull(0, 100)
        keys = 0
        async with asyncio.timeout(60):
            while pump.storage.gc_ts < 50:
                keys += (await pump.storage.gc(50)).keys
                await asyncio.sleep(0.01)
        assert keys == 2
        with pytest.raises(grpc.aio.AioRpcError, match="ErrBinlogPurged"):
            await pump.pull(10, 100)
        assert len(await pump.pull(0, 100)) == 1


def batch(*payloads: bytes, cluster_id: int = CLUSTER_ID) -> stream_pb2.WriteBinlogsRequest:
    return stream_pb2.WriteBinlogsRequest(cluster_id=cluster_id, payloads=payloads)


async def test_a_stream_of_batches_is_acknowledged_by_sequence_and_served_as_usual(
    tmp_path: Path,
) -> None:
    async with started(tmp_path) as pump, connect(pump.address) as channel:
        stream = stream_grpc.PumpServiceStub(channel).WriteBinlogs()
        for first in (1, 1001):
            starts = range(first, first + 1000, 10)
            await stream.write(
                batch(*(encoded(tp=0, start_ts=ts, prewrite_value=b"v") for ts in starts))
            )
            await stream.write(
                batch(*(encoded(tp=1, start_ts=ts, commit_ts=ts + 5) for ts in starts))
            )
        answers = [await stream.read() for _ in range(4)]
        assert [answer.acknowledged for answer in answers] == [100, 200, 300, 400]
        assert not any(answer.refused for answer in answers)
        assert len(await pump.pull(0, 1996)) == 200
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def test_a_bad_binlog_of_a_batch_is_refused_alone_and_named(tmp_path: Path) -> None:
    async with started(tmp_path) as pump, connect(pump.address) as channel:
        stream = stream_grpc.PumpServiceStub(channel).WriteBinlogs()
        await stream.write(
            batch(b"", encoded(tp=0, start_ts=4), encoded(tp=1, start_ts=4, commit_ts=3))
        )
        await stream.write(batch(b"\x22\x7fgarbage", encoded(tp=1, start_ts=4, commit_ts=5)))
        first, second = await stream.read(), await stream.read()
        assert [(item.sequence, item.message) for item in first.refused] == [
            (3, "[TM:ErrBinlogInvalid] commit binlog with commit_ts 3 not after start_ts 4")
        ]
        assert (second.acknowledged, [item.sequence for item in second.refused]) == (5, [4])
        assert len(await pump.pull(0, 5)) == 1
        await stream.write(batch(cluster_id=9))
        with pytest.raises(grpc.aio.AioRpcError, match="cluster ID are mismatch, 9 vs"):
            await stream.read()
