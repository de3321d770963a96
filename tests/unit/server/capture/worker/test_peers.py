"""Which captures the owner divides tables among, and when it divides them anew."""

import asyncio
from types import SimpleNamespace

import pytest

from server.capture.membership import CaptureRecord
from server.capture.worker import peers as module
from server.capture.worker import processor
from server.capture.worker.peers import PeerAccess, Peers
from server.capture.worker.processor import RebalancingProcessor
from server.rpc.credentials import SecurityConfig
from storage.model.errors import UnavailableError
from storage.tasks import beside

VERSION = "1"


@pytest.fixture
async def port():
    """Of a listener that takes connections."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def record(name, port, version=VERSION):
    return CaptureRecord(name, f"127.0.0.1:{port}", f"127.0.0.1:{port}", version)


def looking(tmp_path, own=()):
    access = PeerAccess(SecurityConfig())
    return Peers("a", tmp_path, access, executor=None, term=lambda: 1, own=own)


def names(peers):
    return [worker.record.id for worker in peers.workers()]


async def test_tables_are_divided_among_those_that_can_be_reached(tmp_path, port):
    peers = looking(tmp_path)
    await peers._look([record("a", port)])
    assert peers.workers() == ()
    assert peers.is_own(f"grpc://127.0.0.1:{port}")
    closed = record("d", 1)
    records = [record("a", port), record("b", port), record("c", port, "older"), closed]
    await peers._look(records)
    assert names(peers) == ["a", "b"]
    await peers._look([record("a", port)])
    assert peers.workers() == ()


async def test_one_that_was_lost_is_left_out_longer_each_time(tmp_path, port, monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: now.s)
    peers = looking(tmp_path)
    records = [record("a", port), record("b", port)]
    await peers._look(records)
    _, lost = peers.workers()
    for left_out_s in (10, 20, 40):
        lost.lost()
        assert peers.workers() == ()
        now.s += left_out_s - 1
        assert peers.workers() == ()
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


class Inner:
    """A processor that stands still; fails with `error`, if there is one."""

    sink = None

    def __init__(self, log, kind, assignment):
        self.start_ts = assignment.checkpoint_ts
        self._log, self._kind = log, kind
        self.error = None

    async def run(self):
        self._log.append((self._kind, self.start_ts))
        self.start_ts += 1
        if self.error:
            raise self.error
        await asyncio.Event().wait()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(processor, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(processor, "_SETTLED_S", 0.01)


def spreading(workers, log):
    def made(kind):
        return lambda assignment: Inner(log, kind, assignment)

    assignment = processor.Assignment("feed", None, None, 1000)
    return RebalancingProcessor(lambda: tuple(workers), made("here"), made("divided"), assignment)


@pytest.mark.usefixtures("quick")
async def test_it_goes_on_at_its_checkpoint_when_workers_come_and_go():
    log, workers = [], []
    processor = spreading(workers, log)
    async with asyncio.timeout(30), beside(processor.run()):
        for changed, expected in (
            ([], [("here", 1000)]),
            ([SimpleNamespace(name="b")], [("here", 1000), ("divided", 1001)]),
            ([], [("here", 1000), ("divided", 1001), ("here", 1002)]),
        ):
            workers[:] = changed
            while log != expected:  # noqa: ASYNC110 - the processor tells nobody
                await asyncio.sleep(0.001)


@pytest.mark.usefixtures("quick")
async def test_an_error_is_the_runners_to_judge():
    log = []
    processor = spreading([], log)
    processor._here = lambda assignment: failing(log, assignment)
    with pytest.raises(ExceptionGroup) as raised:
        await processor.run()
    assert raised.group_contains(UnavailableError)
    assert processor.start_ts == 1001


def failing(log, assignment):
    inner = Inner(log, "here", assignment)
    inner.error = UnavailableError("gone")
    return inner
