"""What is gathered when captures are silent, records are broken, or nothing is there;
the metadata is the real one.
"""

import asyncio
from types import SimpleNamespace

import grpc.aio
import pytest
from tidemarkpb.v1 import capture_pb2 as pb
from tidemarkpb.v1.capture_pb2_grpc import (
    CaptureServiceServicer,
    add_CaptureServiceServicer_to_server,
)

from gcsafepoint.worker.records import LAST_RUN_TIME, LEADER_DESC
from server.changefeed import keys
from server.changefeed.captures import CaptureRecord
from server.changefeed.info import ChangefeedInfo, status_json
from server.coordinator import explain_service
from server.coordinator.explain_service import gather
from server.rpc.client import connect
from tests.unit.gcsafepoint.explain.situations import view


class Capture(CaptureServiceServicer):
    def __init__(self, answers):
        self._answers = answers

    async def GetBlockers(self, request, context):
        await self._answers.wait()
        region = pb.RegionBlockers(region_id=7, resolved_ts=9, store="s:1")
        region.locks.add(start_ts=10, primary=b"p", key=b"k", ttl_ms=3000, kind="put")
        table = pb.TableBlockers(
            name="bank.t", table_id=1, checkpoint_ts=5, resolved_ts=9, regions=[region]
        )
        return pb.GetBlockersResponse(
            changefeeds=[pb.ChangefeedBlockers(changefeed="bank", tables=[table])]
        )


@pytest.fixture
async def capture(meta):
    """A listening capture that owns the changefeeds, and answers while `answers` is set."""
    answers = asyncio.Event()
    answers.set()
    server = grpc.aio.server()
    add_CaptureServiceServicer_to_server(Capture(answers), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await meta.put(keys.capture("c1"), CaptureRecord("c1", address, "").to_json())
    await meta.put(keys.OWNER, b"c1")
    yield SimpleNamespace(address=address, answers=answers)
    await server.stop(None)


async def a_feed(meta, name="bank"):
    info = ChangefeedInfo(
        id=name, sink_uri="delta:///x", start_ts=3, target_ts=0, create_time="", tables=()
    )
    await meta.put(keys.info(name), info.to_json())
    await meta.put(keys.status(name), status_json(5))


async def situation(meta):
    return await gather(view(), meta, connect)


async def test_what_the_capture_tells_is_in_the_situation(meta, capture):
    await a_feed(meta)
    found = await situation(meta)
    feed = found.feeds["bank"]
    assert (feed.checkpoint_ts, feed.capture) == (5, f"c1 at {capture.address}")
    [lock] = feed.tables[0].regions[0].locks
    assert (lock.start_ts, lock.primary, lock.key) == (10, "70", "6b")
    assert found.captures[0].is_owner
    assert not found.problems


async def test_a_silent_capture_costs_little_time_and_is_a_finding(meta, capture, monkeypatch):
    monkeypatch.setattr(explain_service, "ANSWER_SECONDS", 0.05)
    await a_feed(meta)
    capture.answers.clear()
    found = await situation(meta)
    assert found.feeds["bank"].capture == ""
    assert found.captures[0].problem == "no answer within 0.05 s"
    assert found.problems == ("capture c1: no answer within 0.05 s",)
    capture.answers.set()


async def test_a_capture_that_is_gone_and_one_whose_record_is_broken_are_findings(meta):
    await meta.put(keys.capture("gone"), CaptureRecord("gone", "127.0.0.1:1", "").to_json())
    await meta.put(keys.capture("broken"), b"{")
    problems = {capture.id: capture.problem for capture in (await situation(meta)).captures}
    assert problems["gone"].startswith("UNAVAILABLE")
    assert problems["broken"] == "its record in the metadata cannot be read"


async def test_a_broken_record_of_a_changefeed_hides_no_other(meta):
    await a_feed(meta)
    await meta.put(keys.info("broken"), b"{")
    found = await situation(meta)
    assert found.feeds["broken"].state == "unreadable"
    assert found.feeds["bank"].state == "normal"
    assert "changefeed broken" in found.problems[0]


async def test_the_gc_workers_records_are_read(meta):
    await meta.put(LEADER_DESC.encode(), b"host:a")
    await meta.put(LAST_RUN_TIME.encode(), b"20261121-10:00:00 +0000")
    await meta.put(b"/tidemark/default/gc/tikv_gc_life_time", b"1h0m0s")
    worker = (await situation(meta)).worker
    assert (worker.leader, worker.life_time_ms, worker.enabled) == ("host:a", 3_600_000, True)
    await meta.put(b"/tidemark/default/gc/tikv_gc_life_time", b"soon")
    assert "cannot be read" in (await situation(meta)).worker.problem
