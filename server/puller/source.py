"""The sources of changefeeds, behind one interface: TiKV's change feed, pumps, or a MySQL-protocol
server.

There are two kinds. A source that is `per_table` has a puller for each table, which may run in any
process, and one more for schema changes. A log has one puller, which brings the changes of all
tables, schema changes included.

Invariants that every source keeps:
1. A change has the same commit_ts whenever it is read again, and rows of a table above `start_ts`
   come again after a restart: only the metadata keeps anything of a source.
2. A schema change has a commit_ts; rows up to it have the old schema, rows above it the new one. A
   log reports a schema change when all rows up to it were added, before the first row above it is
   added, and before any table is resolved up to it. A source that is per table reports it before it
   calls `Catalog.resolve` with its ts; no reader goes beyond that.
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
        """Note that all changes of the table up to `ts` were added; it is no error if the table has
        ended.
        """
        ...


class Catalog(Protocol):
    """The tables of a running changefeed; called on the event loop."""

    @property
    def holds(self) -> Holds:
        """The cuts that are withheld while tables are read again; a log updates them before the
        change is in force.
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

        If `commit_ts` is that of a known change, which comes again after a restart, it is the known
        table.

        Raises:
            InvalidError: it cannot be read.
            TableIneligibleError: the changefeed wants it, but it cannot be replicated.
        """
        ...

    def known(self, commit_ts: int) -> Mapping[str, SourceTable] | None:
        """The tables right above a known change, which comes again after a restart, by name; None:
        the change is new.

        For a known change, what its statement does not say must not be read from the source's
        catalogue: that is of now, and may include later changes.
        """
        ...

    async def change(self, change: TableChange) -> None:
        """Bring a schema change in force, durably; afterwards rows of its new tables can be added.

        A known change, which comes again after a restart, changes nothing. Tables that the
        changefeed does not want are left out.

        Raises:
            TableIneligibleError: rows above the change could not be replicated.
        """
        ...

    async def refuse(self, ts: int, error: TidemarkError) -> NoReturn:
        """Stop at a change right above `ts` that cannot be followed: raises `error` once everything
        up to `ts` is at the target.

        A log must have resolved its tables up to `ts` before.
        """
        ...

    def resolve(self, ts: int) -> None:
        """Note that every schema change up to `ts` was reported; no table goes beyond the last
        `ts`.

        Schema pullers call it, and a log that has, or had, no tables, after resolving these up to
        `ts`.
        """
        ...


class Puller(Protocol):
    """Brings the changes of some tables, from a checkpoint on, until cancelled."""

    @property
    def resolved_ts(self) -> int:
        """The least resolved_ts of its tables."""
        ...

    async def run(self) -> None:
        """Pull until cancelled.

        Raises:
            TidemarkError: the source fails; its kind says whether trying again from the checkpoint
                may help.
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
        """The log that the others wait for."""
        ...


class Source(Protocol):
    """The upstream of one changefeed. It is made without I/O, and has connections open only while a
    call or a puller runs.
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
        """A ts at or above the commit_ts of everything committed before this call: the default
        start of a changefeed.
        """
        ...

    async def check_start(self, ts: int) -> None:
        """Check that the source still has the changes above `ts`; for sources without
        `keeps_history`.

        Raises:
            NotFoundError: some are gone.
        """
        ...

    async def snapshot(self, ts: int, before: Sequence[TableRecord] = ()) -> Sequence[TableRecord]:
        """All user tables as of `ts`, whatever the changefeed's filter says.

        `before` are the tables known so far. If it is the source that gives tables and columns
        their identities, tables of the same names keep theirs.
        """
        ...

    async def present(self, before: Sequence[TableRecord]) -> tuple[int, Sequence[TableRecord]]:
        """The present ts, and all user tables exactly as of it; `before` as in `snapshot`.

        Unlike `now`, it saves no position from which a changefeed could start.

        Raises:
            UnavailableError: its tables are being changed all the time.
        """
        ...

    def table(self, record: TableRecord, before: TableRecord | None = None) -> SourceTable:
        """Make the table of a record. `before` is the record's former version, from which columns
        keep their identities.

        Raises:
            InvalidError: the record cannot be read.
            TableIneligibleError: the table cannot be replicated; the message says why.
        """
        ...

    def pullers(
        self, tables: Sequence[SourceTable], start_ts: int, rows: Rows, catalog: Catalog
    ) -> Sequence[Puller]:
        """The pullers that bring the changes of `tables` above `start_ts`.

        Of a source that is per table, it is called again for each new table, and returns one puller
        for each. The puller of a log follows new tables by its own schema changes. `tables` are
        those in force at `start_ts`.
        """
        ...

    def schema_puller(
        self, start_ts: int, catalog: Catalog, *, dumps: bool = True
    ) -> Puller | None:
        """The puller that reports the schema changes above `start_ts` of a source that is per
        table; None: it has none. Unless `dumps` is False, it also runs the dump of the tables that
        this process pulls.
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
