"""The sources of changefeeds, behind one interface: TiKV's change feed, pumps, or a MySQL-protocol
server.

There are two kinds. A source that is `per_table` pulls each table by itself, in any process, and
tells schema changes by a puller of their own. A log brings the changes of all tables, schema
changes among them, by one puller.

Invariants every source keeps:
1. A commit_ts is the same whenever the log is read again, and rows of a table above `start_ts` come
   again after a restart: nothing of a source is kept but what the metadata holds.
2. A schema change has a commit_ts; rows up to it have the old schema, rows above it the new one. A
   log reports it when all rows up to it were added, before the first row above it is added, and
   before any table is resolved up to it. A source that is per table reports it before it says
   `Catalog.resolve` up to it; no reader goes beyond that.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa

from server.changefeed.source import SourceUri
from server.changefeed.table import SourceTable, TableRecord
from server.puller.open_transactions import OpenTransactions
from server.puller.stream_timeout import SILENT_S
from server.puller.tikv.feed import EventFeeds
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from sink.holds import Holds
from storage.meta.meta import Meta
from storage.model.errors import TidemarkError
from storage.model.span import Span


@dataclass(frozen=True, slots=True)
class TableChange:
    """One DDL statement's effect on the tables of a changefeed; there is at most one for each
    commit_ts.
    """

    commit_ts: int
    query: str
    """The statement as the upstream has it."""
    tables: tuple[SourceTable, ...] = ()
    """Tables that are new, or have another schema, name or span, for rows above `commit_ts`."""
    dropped: tuple[str, ...] = ()
    """Names (`schema.table`) under which there are no rows above `commit_ts`."""
    truncated: tuple[str, ...] = ()
    """Names whose rows are all gone at `commit_ts`; the table goes on,
    under a new span where `tables` has one.
    """


class Rows(Protocol):
    """Receives changes. Both calls may block on memory or disk, so they are made outside of the
    event loop.
    """

    @property
    def executor(self) -> Executor:
        """A few threads of this changefeed alone, so that blocking work delays no other
        changefeed.
        """
        ...

    @property
    def open_transactions(self) -> OpenTransactions:
        """The store for rows of transactions that have not ended, within the changefeed's memory
        quota.
        """
        ...

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """Take changes of RAW_SCHEMA, in any order."""
        ...

    def resolve(self, span: Span, ts: int) -> None:
        """All changes of the table up to `ts` were added;
        for a table that has ended it is no error.
        """
        ...


class Catalog(Protocol):
    """The tables of a running changefeed; called on the event loop."""

    @property
    def holds(self) -> Holds:
        """Cuts that are withheld while tables are read again;
        a log tells it before the change is in force.
        """
        ...

    def wants(self, schema_name: str, table_name: str) -> bool:
        """Whether the changefeed's filter takes the table."""
        ...

    def wants_any_of(self, schema_name: str) -> bool:
        """Whether the filter may take a table of the schema, whatever its name."""
        ...

    def table(self, record: TableRecord, commit_ts: int | None = None) -> SourceTable | None:
        """The table of a record that a schema change brings; None:
        the changefeed does not want its rows.

        With the `commit_ts` of a change that is known already, as after a restart, it is the table
        as it is known.

        Raises:
            InvalidError: it cannot be read.
            TableIneligibleError: the changefeed wants it, but it cannot be replicated.
        """
        ...

    def known(self, commit_ts: int) -> Mapping[str, SourceTable] | None:
        """The tables right above a change that is known already, by name, as after a restart;
        None: it is news.

        What a statement alone does not tell must not be asked of the source once more then: it has
        gone on, and would tell of a later change.
        """
        ...

    async def change(self, change: TableChange) -> None:
        """Bring a schema change in force: new tables can be added to afterwards.

        Durable when it returns.

        Repeating one that is known already, as after a restart, changes nothing. Tables that the
        changefeed does not want are left out.

        Raises:
            TableIneligibleError: rows above the change could not be replicated.
        """
        ...

    async def refuse(self, ts: int, error: TidemarkError) -> NoReturn:
        """The change right above `ts` cannot be followed:
        raises `error` once everything up to `ts` is at the target.

        A log resolves its tables up to `ts` before it calls.
        """
        ...

    def resolve(self, ts: int) -> None:
        """Every schema change up to `ts` was reported,
        and no table goes beyond the last of these calls.

        Called by schema pullers, and by a log that has, or had, no tables, after these were
        resolved up to `ts`.
        """
        ...


class Puller(Protocol):
    """Brings the changes of some tables, from a checkpoint on, until cancelled."""

    @property
    def resolved_ts(self) -> int:
        """The least of its tables."""
        ...

    async def run(self) -> None:
        """Pull until cancelled.

        Raises:
            TidemarkError: one that trying again from the checkpoint may help against, or that says
                why it cannot.
        """
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """One of several logs that a puller merges, and how far it has sent."""

    name: str
    address: str
    position_ts: int


@runtime_checkable
class Merging(Protocol):
    """A puller that merges several logs."""

    @property
    def slowest_peer(self) -> Peer | None:
        """The one that the others wait for."""
        ...


class Source(Protocol):
    """One upstream of one changefeed; made without I/O,
    and holds nothing open but while a call or a puller runs.
    """

    @property
    def keeps_history(self) -> bool:
        """Whether a service GC safepoint at the coordinator keeps its history."""
        ...

    @property
    def per_table(self) -> bool:
        """Whether each table has its own puller, which starts and ends by itself; else one puller
        serves all.
        """
        ...

    @property
    def warnings(self) -> Sequence[str]:
        """Warnings about the upstream, shown with the changefeed; usually none."""
        ...

    async def now(self) -> int:
        """A ts that everything committed before this call is at or below:
        where a changefeed starts by default.
        """
        ...

    async def check_start(self, ts: int) -> None:
        """See that a source that does not `keeps_history` still has the changes above `ts`.

        Raises:
            NotFoundError: some are gone.
        """
        ...

    async def snapshot(self, ts: int, before: Sequence[TableRecord] = ()) -> Sequence[TableRecord]:
        """All user tables as of `ts`, whatever the changefeed's filter says.

        `before` are tables as they were known so far: where the source itself gives tables and
        columns their identities, those of these names keep them.
        """
        ...

    async def present(self, before: Sequence[TableRecord]) -> tuple[int, Sequence[TableRecord]]:
        """A ts of now, and all user tables as of it, exactly; `before` as of `snapshot`.

        Nothing is kept for a changefeed that could start there.

        Raises:
            UnavailableError: its tables are being changed all the time.
        """
        ...

    def table(self, record: TableRecord, before: TableRecord | None = None) -> SourceTable:
        """Read a record; `before` is the version of the table that it follows:
        columns keep the identities they had.

        Raises:
            InvalidError: the record cannot be read.
            TableIneligibleError: the table cannot be replicated; the message says why.
        """
        ...

    def pullers(
        self, tables: Sequence[SourceTable], start_ts: int, rows: Rows, catalog: Catalog
    ) -> Sequence[Puller]:
        """The pullers that bring the changes of `tables` above `start_ts`.

        A source that is per table is asked again for each new table, and gives one puller for each;
        a log takes up the tables that its own schema changes bring. `tables` are those in force at
        `start_ts`.
        """
        ...

    def schema_puller(
        self, start_ts: int, catalog: Catalog, *, dumps: bool = True
    ) -> Puller | None:
        """The puller that reports the schema changes above `start_ts` of a source that is per
        table; None: there are none. Where the source is dumped, the dump of the tables that this
        process pulls is beside it, unless `dumps` is False.
        """
        ...


@dataclass(frozen=True, slots=True)
class SourceContext:
    """The parts of a process that its sources use."""

    pd: PdClient
    feeds: EventFeeds
    kv: KvClient
    meta: Meta | None = None
    """None in a worker process, where sources that are per table run only."""
    security: SecurityConfig | None = None
    """The credentials for connections to the cluster's daemons."""
    stream_silence_s: float = SILENT_S
    """How long a pump's stream may be silent."""


SourceFactory: TypeAlias = Callable[[str, SourceUri, SourceContext], Source]
"""Makes a source from a changefeed's id and its source URI; raises SourceUriError."""


@runtime_checkable
class Splittable(Protocol):
    """A source whose tables can be split by their keys."""

    def can_split(self, table: SourceTable) -> bool:
        """Whether the rows of the table's parts, put together, are those of the whole table."""
        ...

    async def regions(self, start_key: bytes, end_key: bytes) -> Sequence[bytes]:
        """Return the region bounds within a range of keys, ascending; tables are split there.

        Raises:
            UnavailableError: the coordinator does not answer.
        """
        ...

    def part(self, table: SourceTable, span: Span) -> SourceTable:
        """The part of a table in a range of its keys, as a table of its own."""
        ...
