"""`tidemark cli verify`, but for the command line: a changefeed's lake against its upstream at one cut."""

from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from server.capture.changefeed import ChangefeedInfo
from server.spark.keep import LAKES, is_lake
from server.verify.catalog import changefeed_info, tables_at
from server.verify.comparison import Comparison, Progress, TableReport, Wish
from server.verify.errors import VerifyUnsupportedError
from server.verify.lake.process import Lake
from server.verify.notes import notes_of
from server.verify.upstream.upstream import Cluster, open_upstream


@dataclass(frozen=True, slots=True)
class Request:
    """What to compare, and what to do where it differs."""

    changefeed: str
    table: str | None = None
    at: int | None = None
    wish: Wish = field(default_factory=Wish)


@dataclass(frozen=True, slots=True)
class Report:
    """All tables at one cut."""

    changefeed: str
    cut: int
    tables: list[TableReport]
    mode: str = ""
    """What the lake keeps: rows, changes, or versions of rows, of which the current rows were compared."""

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
        lake = await stack.enter_async_context(Lake.open(info.sink_uri, info.id, locked=locked))
        cut = await lake.cut(request.at)
        tables = await tables_at(cluster.meta, info, cut, request.table)
        if wish.repair:
            for table in tables:
                await lake.check_repair(table)
        notes = await notes_of(cluster.meta, info, cut, tables)
        upstream = await stack.enter_async_context(open_upstream(cluster, info, tables))
        compared = [await Comparison(upstream, lake, table, wish, progress).run() for table in tables]
    for report in compared:
        report.note = "" if report.equal else notes.get(report.table, "")
    return Report(info.id, cut.ts, compared, cut.mode)


def check_sink(info: ChangefeedInfo) -> None:
    """See that there is a lake to compare.

    Raises:
        VerifyUnsupportedError: somebody else keeps what the changefeed's readers take.
    """
    if not is_lake(info.sink_uri):
        kind = info.sink_uri.partition(":")[0]
        raise VerifyUnsupportedError(
            f"the sink of changefeed {info.id} is {kind}://, whose rows are kept by a reader of its own; "
            f"what can be compared is a lake: {', '.join(LAKES)}"
        )
