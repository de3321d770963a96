"""A dump's rounds between a capture and its worker:
what may be lost is known before anything counts.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tidemarkpb.v1 import worker_pb2 as pb

from server.capture.worker import wire
from server.capture.worker.combined import SharedTables, WorkerChunks
from server.capture.worker.host import Host
from server.capture.worker.placement import TablePlacement
from server.capture.worker.remote import Mirror
from server.capture.worker.service import round_read
from server.dump.cluster.chunks import Page, PageRead, RoundRead, TableAwayError
from storage.model.span import Span

SPAN = Span(7, b"a", b"b")
TABLE: Any = SimpleNamespace(span=SPAN, name="shop.t")
READ = PageRead(2, 20, b"k", ends=True, seconds=0.5)


class Chunks:
    """A worker's, of one table."""

    def __init__(self) -> None:
        self.ends = 3
        self.asked: list[tuple[int, list[Page]]] = []

    async def read(self, table_id: int, pages: list[Page], span: Span) -> RoundRead:
        assert span.table_id == table_id
        self.asked.append((table_id, pages))
        return RoundRead(99, "the worker's own", (READ,))


class Share:
    """Asks the worker's side, as over the wire."""

    def __init__(self, chunks: Chunks) -> None:
        self.mirror = Mirror(5)
        self._chunks: Any = chunks

    @property
    def ends(self) -> int:
        return self.mirror.ends

    def resolved_ts(self, _span: Span) -> int:
        return 42

    def dump(self, span: Span, pages: list[pb.DumpPage]) -> pb.DumpTableResponse:
        request = wire.dump_request("f", span, pages)
        sent = pb.DumpTableRequest.FromString(request.SerializeToString())
        answer = asyncio.run(round_read(self._chunks, sent))
        self.mirror.ended(answer.ends)
        return answer


class Worker:
    """One of several."""

    def __init__(self, name: str) -> None:
        self.name = name


async def test_a_round_counts_only_for_the_generation_in_which_it_was_added() -> None:
    worker_chunks = Chunks()
    share = Share(worker_chunks)
    worker: Any = Worker("worker 1")
    catalog: Any = SimpleNamespace(tables=(TABLE,))
    shares: Any = {worker: share}
    placement: Any = TablePlacement([worker], "f")
    sink: Any = None
    chunks = WorkerChunks(SharedTables("f", catalog, placement, shares, sink))
    before = chunks.tables()[7]
    assert (before.table, before.resolved_ts) == (TABLE, 42)
    read = await chunks.read(7, [Page(b"a", b"b", 10)])
    assert worker_chunks.asked == [(7, [Page(b"a", b"b", 10)])]
    assert (read.ts, read.pages) == (99, (READ,))
    assert read.generation != before.generation, "pullers have ended there that were not known of"
    assert read.generation == chunks.tables()[7].generation
    assert (await chunks.read(7, [])).generation == read.generation
    share.mirror.absorb(pb.ShareProgress(resolved_ts=50, checkpoint_ts=50, ends=4))
    assert chunks.tables()[7].generation != read.generation
    with pytest.raises(TableAwayError):
        await chunks.read(8, [])


def test_a_mirror_knows_of_ends_when_it_knows_of_the_checkpoint_and_forgets_neither() -> None:
    mirror = Mirror(5)
    mirror.absorb(pb.ShareProgress(checkpoint_ts=10, ends=2))
    mirror.absorb(pb.ShareProgress(checkpoint_ts=9, ends=1))
    assert (mirror.ends, mirror.checkpoint_ts) == (2, 10)


async def test_a_round_comes_to_its_end_even_if_nobody_waits_for_it() -> None:
    ended = asyncio.Event()
    go_on = asyncio.Event()

    async def work() -> str:
        await go_on.wait()
        ended.set()
        return "done"

    async def refused() -> str:
        raise TableAwayError("not here")

    make: Any = None
    async with asyncio.TaskGroup() as tasks:
        host = Host(tasks, make)
        asking = tasks.create_task(host.run_to_end(work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asking.cancel()
        go_on.set()
        with pytest.raises(TableAwayError):
            await host.run_to_end(refused())
    assert ended.is_set()
