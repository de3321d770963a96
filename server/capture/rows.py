"""Where pullers' changes go: the sorter, as long as the table is there and the puller is the one
that brings it.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

import pyarrow as pa

from server.puller.tikv.open_transactions import OpenTransactions
from sorter import Sorter
from sorter.errors import TableNotFoundError
from storage.model.errors import ClosedError
from storage.model.span import Span


class SorterRows:
    """Implements `server.puller.source.Rows`; what still comes for a table that was let go is not
    ours.
    """

    def __init__(
        self, sorter: Sorter, executor: Executor, open_transactions: OpenTransactions | None = None
    ) -> None:
        """Without `open_transactions` a source keeps them all in memory."""
        self.sorter = sorter
        self.executor = executor
        self.open_transactions = open_transactions or OpenTransactions()
        self.ended: dict[Span, int] = {}
        """Tables that end, and where."""

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """See `Rows.add`."""
        try:
            self.sorter.add(span, batch)
        except TableNotFoundError:
            if span not in self.ended:
                raise

    def resolve(self, span: Span, ts: int) -> None:
        """See `Rows.resolve`."""
        try:
            self.sorter.resolve(span, ts)
        except TableNotFoundError:
            if span not in self.ended:
                raise


class Gate:
    """Implements `server.puller.source.Rows` for one puller, until it is closed:
    a late call of it changes nothing.

    A puller that is cancelled may have a call under way in a thread. Its promise that a table is
    complete would be wrong for the table that is added anew.
    """

    def __init__(self, rows: SorterRows) -> None:
        self.executor = rows.executor
        self.open_transactions = rows.open_transactions
        self._rows = rows
        self._under_way = threading.Lock()
        self._closed = False

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """See `Rows.add`."""
        with self._passing():
            self._rows.add(span, batch)

    def resolve(self, span: Span, ts: int) -> None:
        """See `Rows.resolve`."""
        with self._passing():
            self._rows.resolve(span, ts)

    def close(self) -> None:
        """Let no more calls through; one may be under way."""
        self._closed = True

    def drain(self) -> None:
        """Wait for the call under way; one that waits for room ends when its table is removed."""
        with self._under_way:
            return

    @contextmanager
    def _passing(self) -> Iterator[None]:
        with self._under_way:
            if self._closed:
                raise ClosedError("this table is pulled by another puller by now")
            try:
                yield
            except TableNotFoundError:
                if not self._closed:
                    raise
