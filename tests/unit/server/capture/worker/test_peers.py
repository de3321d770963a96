"""Which captures the owner divides tables among."""

import asyncio
from types import SimpleNamespace

import pytest

from server.capture.worker import peers as module
from server.capture.worker.local_share import LocalWorker
from server.capture.worker.peers import PeerAccess, Peers
from server.changefeed.captures import CaptureRecord
from server.rpc.credentials import SecurityConfig
from storage.tasks import background_tasks

VERSION = "1"


@pytest.fixture
async def port():
    """Of a listener that takes connections."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def record(name, port, version=VERSION):
    return CaptureRecord(name, f"127.0.0.1:{port}", f"127.0.0.1:{port}", version)


def looking(tmp_path, own=None):
    access = PeerAccess(SecurityConfig())
    own = own or (LocalWorker("a", None, None),)
    return Peers("a", tmp_path, access, executor=None, term=lambda: 1, own=own)


def names(peers):
    return [worker.id for worker in peers.workers()]


async def test_tables_are_divided_among_those_that_can_be_reached(tmp_path, port):
    peers = looking(tmp_path)
    assert names(peers) == ["a"]
    assert peers.workers()[0].location == ""
    await peers._look([record("a", port)])
    assert names(peers) == ["a"]
    assert peers.is_own(f"grpc://127.0.0.1:{port}")
    assert peers.is_own(peers.workers()[0].location)
    closed = record("d", 1)
    records = [record("a", port), record("b", port), record("c", port, "older"), closed]
    await peers._look(records)
    assert names(peers) == ["a", "b"]
    await peers._look([record("a", 1), record("b", port)])
    assert names(peers) == ["a", "b"], "it runs a share whether it reaches its own ports or not"
    assert peers.workers()[0].location == ""
    await peers._look([record("a", port)])
    assert names(peers) == ["a"]


async def test_an_owner_that_was_elected_just_now_knows_the_captures_before_it_divides(
    tmp_path, port, monkeypatch
):
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 3600)
    peers, is_owner = looking(tmp_path), False

    async def records():
        return [record("a", port), record("b", port)] if is_owner else []

    async with background_tasks(peers.run(records)):
        is_owner = True
        await peers.wait_known()
        assert names(peers) == ["a", "b"]


async def test_one_that_is_drained_gets_nothing_before_its_record_says_so(
    tmp_path, port, monkeypatch
):
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 3600)
    peers = looking(tmp_path)
    asked, answers = asyncio.Event(), asyncio.Queue()

    async def records():
        asked.set()
        return await answers.get()

    async def looked_up(*found):
        await asked.wait()
        asked.clear()
        answers.put_nowait([record(name, port) for name in found])
        peers._asked.set()
        await asked.wait()

    async with background_tasks(peers.run(records)):
        await looked_up("a", "b")
        assert names(peers) == ["a", "b"]
        # The look that is under way was asked before.
        peers.leave_out("b")
        assert names(peers) == ["a"]
        await looked_up("a", "b")
        assert names(peers) == ["a"]
        await looked_up("a")
        assert names(peers) == ["a"]
        await looked_up("a", "b")
        assert names(peers) == ["a", "b"], "it takes part again"


async def test_one_that_was_lost_is_left_out_longer_each_time(tmp_path, port, monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: now.s)
    peers = looking(tmp_path)
    records = [record("a", port), record("b", port)]
    await peers._look(records)
    _, lost = peers.workers()
    for left_out_s in (10, 20, 40):
        lost.lost()
        assert names(peers) == ["a"]
        now.s += left_out_s - 1
        assert names(peers) == ["a"]
        now.s += 2
        await peers._look(records)
        assert names(peers) == ["a", "b"]


async def test_worker_processes_take_the_place_of_their_own_capture(tmp_path, port):
    processes = (SimpleNamespace(name="worker 0"), SimpleNamespace(name="worker 1"))
    peers = looking(tmp_path, processes)
    assert peers.workers() == processes
    await peers._look([record("a", port), record("b", port)])
    assert [getattr(each, "name", "") for each in peers.workers()[:2]] == ["worker 0", "worker 1"]
    assert peers.workers()[2].record.id == "b"
