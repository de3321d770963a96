"""What a changefeed replicates from: TiKV's change feed, pumps, or a MySQL-protocol server, behind one face.

Invariants every source keeps:
1. A commit_ts is the same whenever the log is read again, and rows of a table above `start_ts` come again after a
   restart: nothing of a source is kept but what the metadata holds.
2. A schema change has a commit_ts; rows up to it have the old schema, rows above it the new one. It is reported before
   the first row above it is added, and before any table is resolved up to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from server.puller.table import SourceTable, TableRecord
from storage.model.span import Span


@dataclass(frozen=True, slots=True)
class TableChange:
    """What one DDL statement did to the tables of a changefeed."""

    commit_ts: int
    query: str
    """The statement as the upstream has it."""
    tables: tuple[SourceTable, ...] = ()
    """Tables that are new, or have another schema, name or span, for rows above `commit_ts`."""
    dropped: tuple[str, ...] = ()
    """Names (`schema.table`) under which there are no rows above `commit_ts`."""
    truncated: tuple[str, ...] = ()
    """Names whose rows are all gone at `commit_ts`; the table goes on, under a new span where `tables` has one."""


class Rows(Protocol):
    """Where changes go; both calls may block, on memory or disk, and are made outside of the event loop."""

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """Take changes of RAW_SCHEMA, in any order."""
        ...

    def resolve(self, span: Span, ts: int) -> None:
        """All changes of the table up to `ts` were added."""
        ...


class Catalog(Protocol):
    """The tables of a running changefeed."""

    async def change(self, change: TableChange) -> None:
        """Bring a schema change in force: new tables can be added to afterwards. Durable when it returns.

        Repeating one that is known already, as after a restart, changes nothing.
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
            TidemarkError: one that trying again from the checkpoint may help against, or that says why it cannot.
        """
        ...


class Source(Protocol):
    """One upstream of one changefeed."""

    @property
    def keeps_history(self) -> bool:
        """Whether its history is kept by a service GC safepoint at the coordinator."""
        ...

    async def now(self) -> int:
        """A ts that everything committed before this call is at or below: where a changefeed starts by default."""
        ...

    async def snapshot(self, ts: int) -> Sequence[TableRecord]:
        """All user tables as of `ts`, whatever the changefeed's filter says."""
        ...

    def table(self, record: TableRecord) -> SourceTable:
        """Read a record.

        Raises:
            InvalidError: it cannot be read.
            TableIneligibleError: the table cannot be replicated; the message says why.
        """
        ...

    def pullers(self, tables: Sequence[SourceTable], start_ts: int, rows: Rows, catalog: Catalog) -> Sequence[Puller]:
        """What brings the changes of `tables` above `start_ts`."""
        ...
