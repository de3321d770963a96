"""A dump's rounds between a capture and its worker:
what may be lost is known before anything counts.
"""

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tidemarkpb.v1 import worker_pb2 as pb

from server.capture.worker import wire
from server.capture.worker.dump_chunks import WorkerChunks
from server.capture.worker.host import Host
from server.capture.worker.placement import TablePlacement
from server.capture.worker.remote import ShareStatus
from server.capture.worker.service import round_read
from server.capture.worker.shared_tables import SharedTables
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
        self.status = ShareStatus(5)
        self._chunks: Any = chunks

    @property
    def ends(self) -> int:
        return self.status.ends

    def resolved_ts(self, _span: Span) -> int:
        return 42

    def dump(self, span: Span, pages: list[pb.DumpPage]) -> pb.DumpTableResponse:
        request = wire.dump_request("f", span, pages)
        sent = pb.DumpTableRequest.FromString(request.SerializeToString())
        answer = asyncio.run(round_read(self._chunks, sent))
        self.status.ended(answer.ends)
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
    list(share.status.absorb_in_steps(pb.ShareProgress(resolved_ts=50, checkpoint_ts=50, ends=4)))
    assert chunks.tables()[7].generation != read.generation
    with pytest.raises(TableAwayError):
        await chunks.read(8, [])


def test_a_mirror_knows_of_ends_when_it_knows_of_the_checkpoint_and_forgets_neither() -> None:
    status = ShareStatus(5)
    list(status.absorb_in_steps(pb.ShareProgress(checkpoint_ts=10, ends=2)))
    list(status.absorb_in_steps(pb.ShareProgress(checkpoint_ts=9, ends=1)))
    assert (status.ends, status.checkpoint_ts) == (2, 10)


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


class Keys:
    """A worker's side that reads keys of a store in some spans."""

    def __init__(self, stored: list[bytes]) -> None:
        self.ends, self.now = 0, 100
        self.stored = stored
        self.added: list[tuple[Span, bytes]] = []

    async def read(self, table_id: int, pages: list[Page], span: Span) -> RoundRead:
        assert table_id == span.table_id
        self.now += 1
        answers = []
        for page in pages:
            assert span.start_key <= page.begin < page.end <= span.end_key
            keys = [key for key in self.stored if page.begin <= key < page.end][: page.limit]
            self.added += [(span, key) for key in keys]
            last = keys[-1] if keys else b""
            answers.append(PageRead(len(keys), len(keys), last, len(keys) < page.limit, 0.1))
        return RoundRead(self.now, 0, tuple(answers))


WHOLE = Span(7, b"a", b"z")
LETTERS = st.sets(st.sampled_from([bytes((each,)) for each in range(ord("a"), ord("z"))]))


@given(
    LETTERS,
    LETTERS.map(lambda keys: sorted(keys - {b"a"})[:3]),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from([b"g", b"k", b"p"]),
)
async def test_chunks_of_a_split_table_have_each_row_once_wherever_the_parts_begin(
    stored: set[bytes], borders: list[bytes], limits: list[int], middle: bytes
) -> None:
    keys, everything = [b"a", *borders, b"z"], sorted(stored)
    spans = [Span(7, begin, end) for begin, end in pairwise(keys)]
    sides = [Keys(everything) for _ in spans]
    workers: list[Any] = [Worker(f"worker {number}") for number in range(len(spans))]
    placement = TablePlacement(workers, "f", [WHOLE])
    placement.reshape(WHOLE, dict(zip(spans, workers, strict=True)))
    shares: Any = {
        worker: Share(cast("Chunks", side)) for worker, side in zip(workers, sides, strict=True)
    }
    catalog: Any = SimpleNamespace(tables=(SimpleNamespace(span=WHOLE, name="shop.t"),))
    sink: Any = None
    chunks = WorkerChunks(SharedTables("f", catalog, placement, shares, sink))
    begins = {b"a": middle, middle: b"z"}
    cursors, rows = dict.fromkeys(begins, b""), 0
    for number in range(200):
        pages = {
            begin: Page(cursors[begin] or begin, end, limits[number % len(limits)])
            for begin, end in begins.items()
            if begin in cursors
        }
        if not pages:
            break
        read = await chunks.read(7, list(pages.values()))
        assert read.generation == chunks.tables()[7].generation
        assert read.ts == max(side.now for side in sides) or not any(p.rows for p in read.pages)
        for begin, answer in zip(pages, read.pages, strict=True):
            rows += answer.rows
            assert answer.rows <= pages[begin].limit
            if answer.ends:
                del cursors[begin]
            else:
                cursors[begin] = answer.last + b"\0"
    assert not cursors
    added = sorted(key for side in sides for _, key in side.added)
    assert (added, rows) == (everything, len(everything))
    assert all(span.contains(key) for side in sides for span, key in side.added)
