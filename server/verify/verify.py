"""`tidemark cli verify`, but for the command line:
a changefeed's lake against its upstream at one cut.

`verify` opens the lake, which says at which cut it is compared, then the upstream at that cut, and
compares one table after the other. An audit (`server.spark.auditor`) does the same again and again,
with a few ranges of keys each time.

What it finds is in two places: the `Report`, with notes on what may explain a difference although
nothing went wrong; and `AuditRecords`, where a difference that an audit has found stands until the
table is found right.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Final

from pyspark_tidemark.lake.format import APPEND

from server.capture.audit import Finding
from server.changefeed import keys
from server.changefeed.info import LAKES, ChangefeedInfo, lake_format
from server.dump.job import DumpRecords, Job
from server.dump.progress import TableProgress, TableState
from server.verify.catalog import LakeCut, Table, changefeed_info, tables_at
from server.verify.comparison import Comparison, TableReport, VerifyOptions
from server.verify.errors import VerifyUnsupportedError
from server.verify.lake.client import Lake
from server.verify.progress import LAKE, UPSTREAM, Progress
from server.verify.spans import KeySpans, Sample
from server.verify.upstream import Cluster, Upstream, open_upstream
from storage.meta.meta import Compare, Delete, Meta, Put

Choose = Callable[[Lake, LakeCut, Sequence[Table]], Awaitable[Sequence[Table]]]
"""Which of a lake's tables are compared at a cut, with their `spans`."""

_CHANGELOG: Final = (
    "the lake keeps changes, from which current rows were made; a change of all rows at once "
    "(TRUNCATE TABLE) is not among them, so rows from before one may be told as only in the lake"
)


@dataclass(frozen=True, slots=True)
class Request:
    """A request of `verify`: what to compare, and how to treat differences."""

    changefeed: str
    table: str | None = None
    at: int | None = None
    options: VerifyOptions = field(default_factory=VerifyOptions)
    choose: "Choose | None" = None
    """Chooses the tables and their keys; None: all, or those of the options' sample."""
    on_report: "Callable[[TableReport], Awaitable[None]] | None" = None
    """Called with each table's report when it has been compared."""
    gently: bool = False
    """Whether to spare other work: the lake is read by one core at low priority, and the source in
    short reads.
    """


@dataclass(frozen=True, slots=True)
class Report:
    """All tables at one cut."""

    changefeed: str
    cut: int
    tables: list[TableReport]
    mode: str = ""
    """The lake's mode: rows, changes, or versions of rows; of the last two the current rows were
    compared.
    """
    seed: int | None = None
    """The seed of the sample; None: all rows were compared."""

    @property
    def equal(self) -> bool:
        """Whether all tables are equal."""
        return all(table.equal for table in self.tables)


async def verify(cluster: Cluster, request: Request, progress: Progress) -> Report:
    """Compare a changefeed's lake with its upstream at the newest cut,
    or at the newest up to `request.at`.

    Raises:
        VerifyChangefeedError, VerifyUnsupportedError, VerifyHistoryError, VerifyMovedError,
        VerifyBehindError,
        VerifyLakeError: they cannot be compared.
    """
    info, options = await changefeed_info(cluster.meta, request.changefeed), request.options
    check_sink(info)
    async with AsyncExitStack() as stack:
        # The lake's lock keeps its job from applying a cut: what is repaired is what was compared.
        locked = options.repair and not options.dry_run
        lake = await stack.enter_async_context(
            Lake.open(info.sink_uri, info.id, locked=locked, gently=request.gently)
        )
        progress.enter("opening the lake and looking up its cut")
        with progress.awaiting(LAKE):
            cut = await lake.cut(request.at)

        progress.enter(f"looking up the tables at cut {cut.ts}")
        tables = await _tables(cluster.meta, info, lake, cut, request)
        if not tables:
            return Report(info.id, cut.ts, [], cut.mode)
        notes = await table_notes(cluster.meta, info, cut, tables)

        progress.enter(f"opening the source at cut {cut.ts}")
        with progress.awaiting(UPSTREAM):
            upstream = await stack.enter_async_context(
                open_upstream(cluster, info, tables, gently=request.gently)
            )
        progress.begin_tables(len(tables))
        records, reports = AuditRecords(cluster.meta, info.id), []
        for table in tables:
            report = await _compare(upstream, lake, table, options, progress)
            report.note = "" if report.equal else notes.get(report.table, "")
            reports.append(report)
            if report.is_right:
                await records.remove(report.table, report.ts)
            if request.on_report is not None:
                await request.on_report(report)
            progress.end_table()
        progress.enter("closing lake and source")
    return Report(
        info.id, cut.ts, reports, cut.mode, None if options.sample is None else options.sample.seed
    )


async def _tables(
    meta: Meta, info: ChangefeedInfo, lake: Lake, cut: LakeCut, request: Request
) -> list[Table]:
    tables = await tables_at(meta, info, cut, request.table)
    if request.choose is not None:
        tables = list(await request.choose(lake, cut, tables))
    if request.options.repair:
        # Before hours of comparing: a table that cannot be repaired is refused at once.
        for table in tables:
            await lake.check_repair(table)
    return tables


async def _compare(
    upstream: Upstream, lake: Lake, table: Table, options: VerifyOptions, progress: Progress
) -> TableReport:
    if options.sample is not None:
        table = await _sampled(lake, table, options.sample, progress)
    return await Comparison(upstream, lake, table, options, progress).run()


async def _sampled(lake: Lake, table: Table, sample: Sample, progress: Progress) -> Table:
    """The table with some ranges of its keys; all of it, if its keys have no ranges."""
    column = table.span_column
    if column is None:
        return table
    progress.enter("counting the lake's keys, to choose ranges", table.name)
    with progress.awaiting(LAKE):
        extent = await lake.extent(table)
    return replace(table, spans=KeySpans(column, tuple(sample.of(table.name, extent.slots()))))


def check_sink(info: ChangefeedInfo) -> None:
    """Check that the changefeed's sink is a lake that can be compared.

    Raises:
        VerifyUnsupportedError: it is not, as the changefeed's readers are not ours.
    """
    if info.secret_advice:
        raise VerifyUnsupportedError(info.secret_advice)
    if not lake_format(info.sink_uri):
        kind = info.sink_uri.partition(":")[0]
        raise VerifyUnsupportedError(
            f"the sink of changefeed {info.id} is {kind}://, whose rows are kept by a reader of "
            f"its own; what can be compared is a lake: {', '.join(LAKES)}"
        )


async def table_notes(
    meta: Meta, info: ChangefeedInfo, cut: LakeCut, tables: Sequence[Table]
) -> Mapping[str, str]:
    """Return for each table a possible explanation of differences; empty: none."""
    records = DumpRecords(meta, info.id)
    job = await records.job()
    dumps = {each.name: each for each in await records.tables(job)} if job is not None else {}
    dump_notes = {table.name: dump_note(table, job, dumps.get(table.name)) for table in tables}
    changelog = _CHANGELOG if cut.mode == APPEND else ""
    return {name: "; ".join(filter(None, (note, changelog))) for name, note in dump_notes.items()}


def dump_note(table: Table, job: Job | None, dump: TableProgress | None) -> str:
    """Return how the table's dump may explain rows that only the upstream has. Pure."""
    if job is None or not job.takes(table.name):
        return "the table was not dumped: rows that are older than the changefeed are only upstream"
    if dump is None or not dump.state.is_over or dump.high_ts > table.ts:
        return (
            "its dump had not ended at the cut: rows that it had not brought yet are only upstream"
        )
    if dump.state is not TableState.DONE:
        return f"its dump ended as {dump.state.value}: rows that it did not bring are only upstream"
    if table.name in job.where:
        return f"it was dumped where {job.where[table.name]}: other rows are only upstream"
    return ""


class AuditRecords:
    """The records of one changefeed's audits in the metadata.

    Every call is durable. Calls need no owner's fence, since any process that compares lakes may
    write; once the changefeed is removed they do nothing.
    """

    def __init__(self, meta: Meta, changefeed: str) -> None:
        self._meta = meta
        self._changefeed = changefeed

    async def findings(self) -> dict[str, Finding]:
        """Return the findings by table.

        Raises:
            CorruptError: a record cannot be read.
        """
        # The key that is the prefix itself holds the time of `save_on_time`.
        prefix = keys.audit(self._changefeed)
        pairs = [pair for pair in await self._meta.get_prefix(prefix) if pair.key != prefix]
        return {each.table: each for each in (Finding.from_json(pair.value) for pair in pairs)}

    async def save(self, finding: Finding) -> None:
        """Save a finding, merged with the earlier one of the table."""
        await self._change(finding.table, finding.with_earlier_spans)

    async def remove(self, table: str, ts: int) -> None:
        """Remove the finding of a table that was found right at a cut; one of a later cut stays."""
        await self._change(table, lambda before: before if before and before.ts > ts else None)

    async def save_on_time(self, time: str) -> None:
        """Save the time, RFC 3339, at which all that was due had been compared."""
        on_time = Put(keys.audit(self._changefeed), time.encode())
        await self._meta.txn([self._exists], [on_time])

    async def _change(self, table: str, change: Callable[[Finding | None], Finding | None]) -> None:
        """Put what `change` makes of a table's finding in its place; None: there is none."""
        key = keys.audit_finding(self._changefeed, table)
        while True:
            pair = await self._meta.get(key)
            before = None if pair is None else Finding.from_json(pair.value)
            after = change(before)
            if after == before:
                return
            # An audit and somebody's `verify` may both write.
            is_same = Compare.unchanged(key, 0 if pair is None else pair.mod_revision)
            op = Delete(key) if after is None else Put(key, after.to_json())
            if (await self._meta.txn([self._exists, is_same], [op])).succeeded:
                return
            if not (await self._meta.txn([self._exists], ())).succeeded:
                return

    @property
    def _exists(self) -> Compare:
        # Nothing is written after the changefeed's removal: nobody would ever delete it.
        return Compare(keys.info(self._changefeed), "version", ">", 0)
