"""The interface between the dump and the log's reader, in both directions.

The dump follows the log beside the changefeed, and opens and closes its windows (DBLog) at the
watermarks that it writes. One thread makes all calls of a `LogListener`, in the order of the log,
each after the event that ends a transaction (its XID), so a transaction without an end makes none.
After a restart the calls are made again from the checkpoint on.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from server.puller.source import TableChange
from storage.model.span import Span

WATERMARK_TABLE = "changefeed_dump_event"


class LogListener(Protocol):
    """Follows the log; it may block, and the log waits for it."""

    def changed(self, span: Span, keys: pa.BinaryArray) -> None:
        """Rows of a table changed: the canonical keys of their before- and after-images,
        in log order.

        The calls for all transactions between two calls of `watermark` come before the second one,
        never later.
        """
        ...

    def watermark(
        self, values: Mapping[str, object], commit_ts: int
    ) -> Sequence[tuple[Span, pa.RecordBatch]]:
        """A row of the watermark table was committed: its columns after the change, by name.

        Returns the rows (RAW_SCHEMA, all with this commit_ts) to add before anything is resolved up
        to `commit_ts`.
        """
        ...

    def xa_moved(self, xid: str, *, waits: bool) -> None:
        """An XA transaction waits for its commit from here on, or was committed;
        the xid as `hex,hex`.
        """
        ...

    def changed_schema(self, change: TableChange) -> None:
        """A DDL came into force; rows above its commit_ts have the new schema."""
        ...


@dataclass(frozen=True, slots=True)
class Reread:
    """Tables to read again, because a DDL changes rows beside the log: the names behind it by
    id, and the reasons by name.
    """

    commit_ts: int
    tables: Mapping[int, str]
    reasons: Mapping[str, str]


class TableCopier(Protocol):
    """Copies tables beside the log (the dump), and so brings rows that are in no event of it;
    called on the event loop.
    """

    async def copies(self, names: Collection[str]) -> bool:
        """Whether each of these tables (`schema.table`), which are new,
        will be copied with what it holds.
        """
        ...

    async def begin(self, start_ts: int) -> None:
        """The log is about to be read above `start_ts`: what was to be read again there,
        and is not complete, still is.

        Raises:
            UnavailableError: it cannot be looked up now.
        """
        ...

    async def reads_again(self, again: Reread) -> bool:
        """Read tables again by themselves, whether they were copied or not;
        durable when it returns.

        Until they are complete no cut is offered above the DDL. False, and nothing has changed: the
        changefeed is to stop instead.

        Raises:
            UnavailableError: it cannot be made durable now.
        """
        ...

    async def copies_anew(self, names: Collection[str]) -> bool:
        """Begin these tables anew: nothing that was copied of them counts; durable when it returns.

        False, and nothing has changed: one of them is not being copied.

        Raises:
            UnavailableError: it cannot be made durable now.
        """
        ...
