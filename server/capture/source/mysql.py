"""MySQL and MariaDB as sources of changefeeds: `mysql://user@host:port…` (see `options`)."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import pyarrow as pa

from server.changefeed.source import Check, SourceUri
from server.changefeed.table import SourceTable, TableIneligibleError, TableRecord, taken
from server.dump.job import DumpRecords
from server.dump.mysql.engine import DumpEngine
from server.dump.mysql.listener import DumpListener
from server.dump.puller import DumpingPuller
from server.puller.mysql.catalogue_check import CatalogueCheck
from server.puller.mysql.ddl.definition import Definition
from server.puller.mysql.listener import LogListener
from server.puller.mysql.log.opening import beginning, oldest
from server.puller.mysql.log.read_server import ReadServerRecord
from server.puller.mysql.log.saved_positions import PositionStore, TimeLimitsRecord
from server.puller.mysql.log.stream import random_server_id
from server.puller.mysql.puller import LogPuller, OddTimes, Upstream
from server.puller.mysql.session.catalogue import read_definitions
from server.puller.mysql.session.connection import QueryThreads, log_in
from server.puller.mysql.session.errors import MySqlUnavailableError
from server.puller.mysql.session.options import MySqlOptions
from server.puller.mysql.session.preflight import check_source
from server.puller.mysql.tables import new_id, record_of
from server.puller.mysql.transaction.open_transaction import Torn
from server.puller.source import Catalog, Puller, Rows, Source, SourceContext
from sink.mysql_mounter import MysqlMounter
from storage.meta.meta import Meta
from storage.model.errors import InvalidError
from storage.model.span import Span
from storage.mysql.schema import ColumnUnsupportedError, Table
from storage.tidb.document import TableInfoError

T = TypeVar("T")
_ASKERS: Final = 2
_LOOKS_MAX: Final = 5
_SECOND_S: Final = 1.1


class MySqlSource:
    """Implements `server.puller.source.Source` for one changefeed."""

    keeps_history = False
    per_table = False

    def __init__(self, changefeed: str, options: MySqlOptions, meta: Meta) -> None:
        self._changefeed = changefeed
        self._options = options
        self._meta = meta
        self._torn: Torn = {}
        self._odd_times = OddTimes()
        self._catalogue = CatalogueCheck(changefeed, options)
        self._asking = QueryThreads(_ASKERS, f"asks {changefeed}")
        self.listener: LogListener | None = None
        """Follows the log for pullers made from now on, in place of their dump."""

    @property
    def warnings(self) -> Sequence[str]:
        """See `Source.warnings`."""
        return (*self._odd_times.warnings, *self._catalogue.warnings)

    async def now(self) -> int:
        """See `Source.now`; saves the log's position for it."""
        begins = await self._ask(beginning, self._options)
        record = TimeLimitsRecord(self._meta, self._changefeed)
        if await record.load() is None:
            await record.save(begins.time_limits)
        if begins.server:
            read_server = ReadServerRecord(self._meta, self._changefeed)
            await read_server.load()
            await read_server.note(begins.server, begins.saved_position.ts)
        await PositionStore(self._meta, self._changefeed).put(begins.saved_position)
        return begins.ts

    async def check_start(self, ts: int) -> None:
        """See `Source.check_start`; raises LogPurgedError."""
        if not await PositionStore(self._meta, self._changefeed).has_position(ts):
            await self._ask(oldest, self._options, ts)

    async def snapshot(self, ts: int, before: Sequence[TableRecord] = ()) -> Sequence[TableRecord]:
        """See `Source.snapshot`: tables as they are now;
        what the log does to them after `ts` is found in the log.
        """
        definitions = await self._ask(self._definitions)
        if not before:
            return [record_of(each, place + 1) for place, each in enumerate(definitions)]
        return _all_continued(definitions, before, ts)

    async def present(self, before: Sequence[TableRecord]) -> tuple[int, Sequence[TableRecord]]:
        """See `Source.present`."""
        definitions = await self._ask(self._definitions)
        for _ in range(_LOOKS_MAX):
            begins = await self._ask(beginning, self._options)
            # A log has seconds: what is committed within this one may get a commit_ts below `ts`.
            # So the tables must be the same when it is over.
            await asyncio.sleep(_SECOND_S)
            earlier, definitions = definitions, await self._ask(self._definitions)
            if definitions == earlier:
                return begins.ts, _all_continued(definitions, before, begins.ts)
        raise MySqlUnavailableError(
            "the server's tables are being changed all the time: try again when no DDL runs"
        )

    def table(self, record: TableRecord, before: TableRecord | None = None) -> SourceTable:
        """See `Source.table`: the record says itself which columns are which."""
        del before
        return mysql_table(record, force_replicate=self._options.force_replicate)

    def pullers(
        self, tables: Sequence[SourceTable], start_ts: int, rows: Rows, catalog: Catalog
    ) -> Sequence[Puller]:
        """See `Source.pullers`: one for all."""
        if self.listener is not None:
            upstream = Upstream(
                self._changefeed,
                self._options,
                self._meta,
                self.listener,
                self._torn,
                odd_times=self._odd_times,
            )
            return [LogPuller(tables, start_ts, upstream, rows, catalog)]
        listener = DumpListener(self._changefeed, tables, catalog.holds)
        engine = DumpEngine(
            self._changefeed, self._options, DumpRecords(self._meta, self._changefeed), listener
        )
        upstream = Upstream(
            self._changefeed,
            self._options,
            self._meta,
            listener,
            self._torn,
            engine.copying,
            self._odd_times,
            self._catalogue,
        )
        log = LogPuller(tables, start_ts, upstream, rows, catalog)
        return [DumpingPuller(log, engine)]

    def schema_puller(
        self, start_ts: int, catalog: Catalog, *, dumps: bool = True
    ) -> Puller | None:
        """See `Source.schema_puller`: the log brings them."""
        del start_ts, catalog, dumps
        return None

    async def _ask(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._asking, function, *arguments)

    def _definitions(self) -> list[Definition]:
        with log_in(self._options) as session:
            definitions = read_definitions(session)
        return [definitions[name] for name in sorted(definitions)]


def _all_continued(
    definitions: Sequence[Definition], before: Sequence[TableRecord], ts: int
) -> list[TableRecord]:
    earlier = {(each.schema_name, each.table_name): Table.parse(each.table_info) for each in before}
    return [_continued(each, earlier.get(each.name), ts) for each in definitions]


def _continued(definition: Definition, before: Table | None, ts: int) -> TableRecord:
    """The record of a table at `ts`, with the identities that it and its columns had before."""
    if before is None:
        return record_of(replace(definition, matched_by_names=True), new_id(ts, definition.name))
    return record_of(definition.identified(before, before.free_column_id), before.id)


def mysql_table(record: TableRecord, *, force_replicate: bool = False) -> SourceTable:
    """Read a record; with `force_replicate` that of a table without a key, too.

    Raises:
        InvalidError: it is none of ours.
        TableIneligibleError: the table cannot be replicated; the message says why.
    """
    reason = record.table_info.get("ineligible")
    if reason:
        raise TableIneligibleError(f"{record.name} cannot be replicated: {reason}")
    table = Table.parse(record.table_info)
    if not (table.primary_key or force_replicate):
        raise TableIneligibleError(
            f"{record.name} has neither a primary key nor a unique key over NOT NULL columns, so "
            "its rows cannot be told apart: give it one (ALTER TABLE … ADD PRIMARY KEY), or take "
            "its changes as a changelog by --force-replicate"
        )
    try:
        mounter = MysqlMounter(table, record.schema_name)
        return SourceTable(record, Span(table.id, b"", b""), taken(record, mounter))
    except ColumnUnsupportedError as err:
        raise TableIneligibleError(f"{record.name} cannot be replicated: {err.message}") from err
    except (pa.ArrowException, ArithmeticError, LookupError, TypeError, ValueError) as err:
        raise TableInfoError(
            f"the record of {record.name}: a column has no type that rows could have: {err}"
        ) from err


def mysql_source(changefeed: str, uri: SourceUri, context: SourceContext) -> Source:
    """The factory of the scheme `mysql`; raises SourceUriError."""
    if context.meta is None:
        raise InvalidError("a mysql:// source runs in the capture itself, not in a worker")
    return MySqlSource(changefeed, MySqlOptions.of(uri), context.meta)


def check_mysql(
    uri: SourceUri,
    rules: tuple[str, ...],
    read: Callable[[TableRecord], object],
    *,
    target: str,
    write: bool,
) -> Iterator[Check]:
    """All checks of the first server that answers: see `preflight.check_source`; blocks."""
    options = MySqlOptions.of(uri)
    server_id = options.server_id or random_server_id()
    return check_source(options, rules, server_id, read, target=target, write=write)
