"""Dumps of tables that workers pull: the capture runs the job, workers read and add the chunks."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from tidemarkpb.v1 import worker_pb2 as pb

from server.capture.catalog import FeedCatalog
from server.capture.worker.pool import Worker
from server.capture.worker.remote import RemoteShare
from server.dump.cluster.chunks import (
    LocalChunks,
    Page,
    PageRead,
    Pulled,
    RoundRead,
    TableAwayError,
)
from storage.model.span import Span


class WorkerChunks:
    """Implements `server.dump.cluster.chunks.Chunks` over the shares that run, on the event loop.

    A share tells how often a puller of it has ended. If another one did, too much is read again,
    never too little.
    """

    def __init__(
        self,
        catalog: FeedCatalog,
        shares: Mapping[Worker, RemoteShare],
        owner: Callable[[Span], Worker],
    ) -> None:
        self._catalog = catalog
        self._shares = shares
        self._owner = owner

    def tables(self) -> Mapping[int, Pulled]:
        """See `Chunks.tables`."""
        pulled: dict[int, Pulled] = {}
        for table in self._catalog.tables:
            worker = self._owner(table.span)
            share = self._shares[worker]
            generation = (worker.name, share.mirror.ends, table.span)
            pulled[table.span.table_id] = Pulled(table, generation, share.resolved_ts(table.span))
        return pulled

    async def read(self, table_id: int, pages: Sequence[Page]) -> RoundRead:
        """See `Chunks.read`."""
        table = next(
            (each for each in self._catalog.tables if each.span.table_id == table_id), None
        )
        if table is None:
            raise TableAwayError(f"table {table_id} is gone")
        worker = self._owner(table.span)
        share = self._shares[worker]
        answer = await asyncio.to_thread(share.dump, table_id, list(map(_page_message, pages)))
        share.mirror.ended(answer.ends)
        generation = (worker.name, answer.ends, table.span)
        return RoundRead(answer.ts, generation, tuple(map(_page_of, answer.pages)))


async def round_read(chunks: LocalChunks, request: pb.DumpTableRequest) -> pb.DumpTableResponse:
    """The worker's side; raises as `LocalChunks.read`."""
    pages = [Page(page.begin, page.end, page.limit) for page in request.pages]
    read = await chunks.read(request.table_id, pages)
    return pb.DumpTableResponse(ts=read.ts, ends=chunks.ends, pages=map(_read_message, read.pages))


def _page_message(page: Page) -> pb.DumpPage:
    return pb.DumpPage(begin=page.begin, end=page.end, limit=page.limit)


def _read_message(page: PageRead) -> pb.DumpedPage:
    return pb.DumpedPage(
        rows=page.rows,
        size_bytes=page.size_bytes,
        last=page.last,
        ends=page.ends,
        seconds=page.seconds,
    )


def _page_of(message: pb.DumpedPage) -> PageRead:
    return PageRead(message.rows, message.size_bytes, message.last, message.ends, message.seconds)
