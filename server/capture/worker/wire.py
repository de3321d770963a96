"""Values of the worker contract as messages and back; missing bounds and tables mean all."""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError
from tidemarkpb.v1 import changefeed_pb2
from tidemarkpb.v1 import worker_pb2 as pb

from server.capture import long_lived
from server.capture.catalog import FeedCatalog, TableReader, TablesRead
from server.capture.cut import CutPart, PackedExtent
from server.capture.processor import Assignment
from server.capture.traffic import Traffic
from server.capture.worker.share import ShareStart
from server.changefeed.filter import TableFilter
from server.changefeed.history import History, SchemaChange
from server.changefeed.table import SourceTable, TableRecord
from server.changefeed.terms import Terms
from server.dump.cluster.chunks import Page, PageRead
from server.puller.source import Source, TableChange
from sink.cut import Bounds, Slice
from storage.model.errors import CorruptError
from storage.model.span import Span
from storage.tidb.document import read_document

_PACKING_LEVEL: Final = 1
PACKED_TABLES_MIN: Final = 1000
"""Fewer go as they are."""


def table_message(table: SourceTable) -> changefeed_pb2.Table:
    """A table as the changefeed's record has it."""
    return changefeed_pb2.Table(
        schema_name=table.record.schema_name, table_info_json=table.record.table_info_json
    )


def table_record(message: changefeed_pb2.Table) -> TableRecord:
    """Parse the message of `table_message`."""
    return TableRecord(message.schema_name, read_document(message.table_info_json))


def packed_tables(tables: Iterable[SourceTable]) -> bytes:
    """Very many tables, for `RunRequest.packed_tables`; texts of tables are much alike."""
    message = pb.RunRequest(tables=map(table_message, tables))
    return zlib.compress(message.SerializeToString(), _PACKING_LEVEL)


def tables_of(request: pb.RunRequest) -> Iterator[TableRecord]:
    """The tables of a request, packed or not.

    Raises:
        CorruptError: what is packed is something else.
    """
    yield from map(table_record, request.tables)
    if request.packed_tables:
        try:
            packed = pb.RunRequest.FromString(zlib.decompress(request.packed_tables))
        except (zlib.error, DecodeError) as err:
            raise CorruptError(f"the tables of a share cannot be read: {err}") from err
        yield from map(table_record, packed.tables)


def assignment(request: pb.RunRequest, source: Source) -> Assignment:
    """A share, whose tables its capture has chosen and keeps."""
    start = SchemaChange(request.checkpoint_ts, tables=tuple(tables_of(request)))
    history = History([start, *map(_stored, request.changes)])
    catalog = _catalog(request.changefeed, source, history)
    return Assignment(
        request.changefeed,
        source,
        catalog,
        request.checkpoint_ts,
        request.target_ts,
        keep_ts=request.keep_ts,
        limited=request.limited,
    )


def share_assignment(
    start: ShareStart, source: Source, target_ts: int, *, limited: bool
) -> Assignment:
    """The same for a share of this process, of values."""
    tables = tuple(table.record for table in start.tables)
    history = History(
        [SchemaChange(start.start_ts, tables=tables), *map(_as_stored, start.changes)]
    )
    read = [*start.tables, *(table for each in start.changes for table in each.tables)]
    catalog = _catalog(start.changefeed, TablesRead(read, source), history)
    return Assignment(
        start.changefeed,
        source,
        catalog,
        start.start_ts,
        target_ts,
        keep_ts=start.keep_ts,
        limited=limited,
    )


def _catalog(changefeed: str, source: TableReader, history: History) -> FeedCatalog:
    # The owner has chosen the tables: a share takes all that it is given, by whatever filter.
    terms = Terms(changefeed, TableFilter(["*.*"]))
    [start_ts, *_] = (change.commit_ts for change in history)
    with long_lived.building_tables(sum(len(change.tables) for change in history)):
        return FeedCatalog(terms, source, history, start_ts, _kept_elsewhere)


def change_message(change: TableChange) -> pb.ShareChange:
    """A schema change, for the worker that has its tables."""
    return pb.ShareChange(
        commit_ts=change.commit_ts,
        query=change.query,
        tables=map(table_message, change.tables),
        dropped=change.dropped,
        truncated=change.truncated,
    )


def change_of(message: pb.ShareChange, source: Source) -> TableChange:
    """Parse the message of `change_message`."""
    tables = tuple(source.table(table_record(table)) for table in message.tables)
    return TableChange(
        message.commit_ts, message.query, tables, tuple(message.dropped), tuple(message.truncated)
    )


def span_message(span: Span) -> pb.TableSpan:
    """A span as a message."""
    return pb.TableSpan(table_id=span.table_id, start_key=span.start_key, end_key=span.end_key)


def span_of(message: pb.TableSpan) -> Span:
    """Parse the message of `span_message`."""
    return Span(message.table_id, message.start_key, message.end_key)


def traffic_message(traffic: Mapping[Span, Traffic]) -> pb.ShareTraffic:
    """Build the message of the traffic of tables."""
    return pb.ShareTraffic(
        tables=[
            pb.TableTraffic(span=span_message(span), **each._asdict())
            for span, each in traffic.items()
        ]
    )


def traffic_of(message: pb.ShareTraffic) -> dict[Span, Traffic]:
    """Parse the message of `traffic_message`."""
    return {
        span_of(each.span): Traffic(each.rows_per_s, each.bytes_per_s) for each in message.tables
    }


def extents_request(
    changefeed: str, start_ts: int, upper_ts: int, bounds: Bounds
) -> pb.ExtentsRequest:
    """Ask for a part of a cut."""
    return pb.ExtentsRequest(
        changefeed=changefeed,
        start_ts=start_ts,
        upper_ts=upper_ts,
        max_rows=bounds.max_rows,
        max_bytes=bounds.max_bytes,
    )


def bounds_of(request: pb.ExtentsRequest | pb.CutTableRequest) -> Bounds:
    """The bounds in a request."""
    return Bounds(
        request.max_rows if request.HasField("max_rows") else None,
        request.max_bytes if request.HasField("max_bytes") else None,
    )


def plan_of(request: pb.PlanTablesRequest) -> tuple[list[Span] | None, int, int, int | None]:
    """The tables, the range, and the size of slices."""
    spans = None if request.all_tables else list(map(span_of, request.spans))
    return (
        spans,
        request.start_ts,
        request.end_ts,
        request.slice_bytes if request.HasField("slice_bytes") else None,
    )


def plan_message(slices: Iterable[Slice]) -> pb.PlanTablesResponse:
    """A plan as a message."""
    plans = [
        pb.TablePlan(
            rows=each.rows,
            bytes=each.bytes,
            span=span_message(each.span),
            start_ts=each.start_ts,
            end_ts=each.end_ts,
        )
        for each in slices
    ]
    return pb.PlanTablesResponse(plans=plans)


def slices_of(message: pb.PlanTablesResponse) -> list[Slice]:
    """Parse the message of `plan_message`."""
    return [
        Slice(span_of(each.span), each.start_ts, each.end_ts, each.rows, each.bytes)
        for each in message.plans
    ]


def part_message(part: CutPart) -> pb.ExtentsResponse:
    """A part of a cut as a message."""
    extents = [
        pb.RowExtent(
            rows=extent.rows,
            bytes=extent.bytes,
            commit_ts=extent.commit_ts.astype("<u8").tobytes(),
            counts=extent.counts.astype("<i8").tobytes(),
        )
        for extent in part.extents
    ]
    return pb.ExtentsResponse(end_ts=part.end_ts, extents=extents)


def part_of(message: pb.ExtentsResponse) -> CutPart:
    """Parse the message of `part_message`.

    Raises:
        CorruptError: an extent is none.
    """
    return CutPart(message.end_ts, tuple(map(_extent, message.extents)))


def dump_request(changefeed: str, span: Span, pages: Iterable[pb.DumpPage]) -> pb.DumpTableRequest:
    """Ask for a round of a dump."""
    return pb.DumpTableRequest(
        changefeed=changefeed, table_id=span.table_id, pages=pages, span=span_message(span)
    )


def page_message(page: Page) -> pb.DumpPage:
    """Keys of a table that a round of a dump is to read."""
    return pb.DumpPage(begin=page.begin, end=page.end, limit=page.limit)


def page_of(message: pb.DumpPage) -> Page:
    """Parse the message of `page_message`."""
    return Page(message.begin, message.end, message.limit)


def dumped_page_message(page: PageRead) -> pb.DumpedPage:
    """Build the message of a page's result: how much was read, and up to which key; the rows stay
    at the worker.
    """
    return pb.DumpedPage(
        rows=page.rows,
        size_bytes=page.size_bytes,
        last=page.last,
        ends=page.ends,
        seconds=page.seconds,
    )


def dumped_page_of(message: pb.DumpedPage) -> PageRead:
    """Parse the message of `dumped_page_message`."""
    return PageRead(message.rows, message.size_bytes, message.last, message.ends, message.seconds)


def _stored(message: pb.ShareChange) -> SchemaChange:
    tables = tuple(map(table_record, message.tables))
    return SchemaChange(
        message.commit_ts, message.query, tables, tuple(message.dropped), tuple(message.truncated)
    )


def _as_stored(change: TableChange) -> SchemaChange:
    return SchemaChange(
        change.commit_ts,
        change.query,
        tuple(table.record for table in change.tables),
        change.dropped,
        change.truncated,
    )


async def _kept_elsewhere(change: SchemaChange) -> None:
    del change


def _extent(message: pb.RowExtent) -> PackedExtent:
    if not message.rows or not message.commit_ts or len(message.commit_ts) != len(message.counts):
        raise CorruptError("a worker process sent an extent without rows, or with unequal columns")
    try:
        commit_ts, counts = (
            np.frombuffer(message.commit_ts, "<u8"),
            np.frombuffer(message.counts, "<i8"),
        )
    except ValueError as err:
        raise CorruptError(f"a worker process sent an extent that cannot be read: {err}") from err
    return PackedExtent(message.rows, message.bytes, commit_ts, counts)
