"""The chunks of a dump whose tables are divided among workers: the capture runs the dump's job, and
the workers that pull the tables read and add the chunks.
"""

import asyncio
from collections.abc import Hashable, Mapping, Sequence

from server.capture.worker import wire
from server.capture.worker.pool import Worker
from server.capture.worker.share import WorkerShare
from server.capture.worker.shared_tables import SharedTables
from server.changefeed.table import SourceTable
from server.dump.cluster.chunks import (
    Page,
    PageRead,
    Pulled,
    RoundRead,
    TableAwayError,
)
from sorter.errors import TableNotFoundError
from storage.model.span import KeyRange, Span

_NO_ROWS = PageRead(0, 0, b"", ends=True, seconds=0.0)


class WorkerChunks:
    """Implements `server.dump.cluster.chunks.Chunks` over the shares that run, on the event loop.

    A share tells how often a puller of it has ended. If another one did, too much is read again,
    never too little.
    """

    def __init__(self, tables: SharedTables) -> None:
        self._tables = tables

    def tables(self) -> Mapping[int, Pulled]:
        """See `Chunks.tables`."""
        pulled: dict[int, Pulled] = {}
        for table in self._tables.catalog.tables:
            spans = self._spans(table)
            try:
                generation = tuple(map(self._generation, spans))
                resolved_ts = min(self._share_of(span)[1].resolved_ts(span) for span in spans)
            except (TableAwayError, TableNotFoundError):
                continue  # the change that brings it is on its way to the share
            pulled[table.span.table_id] = Pulled(table, generation, resolved_ts)
        return pulled

    async def read(self, table_id: int, pages: Sequence[Page]) -> RoundRead:
        """See `Chunks.read`; of a table that is split one part is read after the other."""
        table = next(
            (each for each in self._tables.catalog.tables if each.span.table_id == table_id), None
        )
        if table is None:
            raise TableAwayError(f"table {table_id} is gone")
        spans = self._spans(table)
        generation: dict[Span, Hashable] = {span: self._generation(span) for span in spans}
        ts, read = 0, list[PageRead | None]([None] * len(pages))
        for span in spans:
            inside = {
                number: part
                for number, page in enumerate(pages)
                if (part := _within(page, read[number], span if len(spans) > 1 else None))
            }
            if not inside:
                continue
            answer = await self._read(span, list(inside.values()))
            ts, generation[span] = max(ts, answer.ts), answer.generation
            for number, page_read in zip(inside, answer.pages, strict=True):
                read[number] = _continued(read[number], page_read)
        # Whoever asked compares it: with other parts meanwhile, all of it is read again.
        parts = tuple(generation[span] for span in spans)
        return RoundRead(ts, parts, tuple(page or _NO_ROWS for page in read))

    async def _read(self, span: Span, pages: Sequence[Page]) -> RoundRead:
        worker, share = self._share_of(span)
        messages = list(map(wire.page_message, pages))
        answer = await asyncio.to_thread(share.dump, span, messages)
        generation = (worker.name, answer.ends, span)
        return RoundRead(answer.ts, generation, tuple(map(wire.dumped_page_of, answer.pages)))

    def _spans(self, table: SourceTable) -> tuple[Span, ...]:
        placement = self._tables.placement
        spans = placement.parts(table.span)
        if spans == (table.span,):
            placement.worker(table.span)  # one that has just come is placed here
        return spans

    def _share_of(self, span: Span) -> tuple[Worker, WorkerShare]:
        worker = self._tables.placement.find(span)
        if worker is None:
            raise TableAwayError(
                f"table {span.table_id} is being split, put together or begun; its chunk is read "
                "later"
            )
        return worker, self._tables.shares[worker]

    def _generation(self, span: Span) -> tuple[str, int, Span]:
        worker, share = self._share_of(span)
        return worker.name, share.ends, span


def _within(page: Page, read: PageRead | None, span: Span | None) -> Page | None:
    """Return the part of a page to read from one part of the table (None: from the whole table),
    after what the preceding parts returned; None: nothing.
    """
    if span is None:
        return page
    keys = KeyRange(span.start_key, span.end_key).clip(KeyRange(page.begin, page.end))
    limit = page.limit - (read.rows if read else 0)
    return Page(keys.start_key, keys.end_key, limit) if keys and limit > 0 else None


def _continued(read: PageRead | None, more: PageRead) -> PageRead:
    """A page of which a further part was read: it ends where all of its parts do."""
    if read is None:
        return more
    return PageRead(
        read.rows + more.rows,
        read.size_bytes + more.size_bytes,
        more.last or read.last,
        more.ends,
        read.seconds + more.seconds,
    )
