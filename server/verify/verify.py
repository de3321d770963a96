"""`tidemark cli verify`, but for the command line: a changefeed's lake against its upstream at one cut."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from server.changefeed.info import LAKES, ChangefeedInfo, lake_format
from server.verify.audit.records import AuditRecords
from server.verify.catalog import LakeCut, Table, changefeed_info, tables_at
from server.verify.comparison import Comparison, TableReport, Wish
from server.verify.errors import VerifyUnsupportedError
from server.verify.lake.process import Lake
from server.verify.notes import notes_of
from server.verify.progress import LAKE, UPSTREAM, Progress
from server.verify.spans import KeySpans, Sample, span_column
from server.verify.upstream.upstream import Cluster, open_upstream

Choose = Callable[[Lake, LakeCut, Sequence[Table]], Awaitable[Sequence[Table]]]
"""Which of a lake's tables are compared at a cut, with their `spans`."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to compare, and what to do where it differs."""

    changefeed: str
    table: str | None = None
    at: int | None = None
    wish: Wish = field(default_factory=Wish)
    choose: "Choose | None" = None
    """Which tables, and which of their keys; None: all, or what the wish's sample takes."""
    on_report: "Callable[[TableReport], Awaitable[None]] | None" = None
    """Told of each table when it has been compared."""
    gently: bool = False
    """Whether nobody should notice: the lake is read by one core, behind all else, and the source in short reads."""


@dataclass(frozen=True, slots=True)
class Report:
    """All tables at one cut."""

    changefeed: str
    cut: int
    tables: list[TableReport]
    mode: str = ""
    """What the lake keeps: rows, changes, or versions of rows, of which the current rows were compared."""
    seed: int | None = None
    """Of the sample; None: all rows were compared."""

    @property
    def equal(self) -> bool:
        """Whether all are."""
        return all(table.equal for table in self.tables)


async def verify(cluster: Cluster, request: Request, progress: Progress) -> Report:
    """Compare a changefeed's lake with its upstream at the newest cut, or at the newest up to `request.at`.

    Raises:
        VerifyChangefeedError, VerifyUnsupportedError, VerifyHistoryError, VerifyMovedError, VerifyBehindError,
        VerifyLakeError: they cannot be compared.
    """
    info, wish = await changefeed_info(cluster.meta, request.changefeed), request.wish
    check_sink(info)
    async with AsyncExitStack() as stack:
        locked = wish.repair and not wish.dry_run
        lake = await stack.enter_async_context(Lake.open(info.sink_uri, info.id, locked=locked, gently=request.gently))
        progress.enter("the lake's reader is started and finds the cut")
        with progress.awaiting(LAKE):
            cut = await lake.cut(request.at)
        progress.enter(f"the tables at cut {cut.ts} are looked up")
        tables = await tables_at(cluster.meta, info, cut, request.table)
        if request.choose is not None:
            tables = list(await request.choose(lake, cut, tables))
        if wish.repair:
            for table in tables:
                await lake.check_repair(table)
        if not tables:
            return Report(info.id, cut.ts, [], cut.mode)
        notes = await notes_of(cluster.meta, info, cut, tables)
        progress.enter(f"the upstream is opened at cut {cut.ts}")
        with progress.awaiting(UPSTREAM):
            upstream = await stack.enter_async_context(open_upstream(cluster, info, tables, gently=request.gently))
        progress.begin_tables(len(tables))
        compared = []
        records = AuditRecords(cluster.meta, info.id)
        for table in tables:
            chosen = table if wish.sample is None else await _sampled(lake, table, wish.sample, progress)
            report = await Comparison(upstream, lake, chosen, wish, progress).run()
            report.note = "" if report.equal else notes.get(report.table, "")
            compared.append(report)
            if report.is_right:
                await records.mended(report.table, report.ts)
            if request.on_report is not None:
                await request.on_report(report)
            progress.end_table()
        progress.enter("what was opened is closed")
    return Report(info.id, cut.ts, compared, cut.mode, None if wish.sample is None else wish.sample.seed)


async def _sampled(lake: Lake, table: Table, sample: Sample, progress: Progress) -> Table:
    """The table with some ranges of its keys; all of it, if its keys have no ranges."""
    column = span_column(table.key, table.schema)
    if column is None:
        return table
    progress.enter("the lake's keys are counted, to choose ranges", table.name)
    with progress.awaiting(LAKE):
        extent = await lake.extent(table)
    return replace(table, spans=KeySpans(column, tuple(sample.of(table.name, extent.slots()))))


def check_sink(info: ChangefeedInfo) -> None:
    """See that there is a lake to compare.

    Raises:
        VerifyUnsupportedError: somebody else keeps what the changefeed's readers take.
    """
    if info.secret_advice:
        raise VerifyUnsupportedError(info.secret_advice)
    if not lake_format(info.sink_uri):
        kind = info.sink_uri.partition(":")[0]
        raise VerifyUnsupportedError(
            f"the sink of changefeed {info.id} is {kind}://, whose rows are kept by a reader of its own; "
            f"what can be compared is a lake: {', '.join(LAKES)}"
        )
