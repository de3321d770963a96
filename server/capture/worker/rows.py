"""What those who run shares hand out over Flight: the rows of their tables.

Everything else is asked of the owner.

A worker knows a share of a changefeed only: its own `latest` or `ack` would be wrong for the whole.
"""

from collections.abc import Iterator, Sequence

import pyarrow as pa

from server.capture.errors import ChangefeedNotRunningError
from server.capture.flight import READ_WAIT_S, Waiting
from server.capture.worker.errors import WorkerRowsOnlyError
from server.capture.worker.host import Host
from sink.before import schema_of
from sink.errors import TableNotFoundError
from sink.flight.feeds import FeedDescription, Report, Slice, TableNotExistsError


class Rows:
    """Implements `sink.flight.feeds.Feeds`, of which only `read` is for workers."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._waiting = Waiting()

    def close(self) -> None:
        """End all waiting."""
        self._waiting.close()

    def has(self, changefeed: str, table: str, start_ts: int, end_ts: int) -> bool:
        """Whether a share that serves here has the rows of a range."""
        try:
            hosted, _ = self._host.running(changefeed)
        except ChangefeedNotRunningError:
            return False
        versions = hosted.assignment.catalog.versions
        return versions.of_range(table, start_ts, end_ts) is not None

    def read(
        self, changefeed: str, table: str, start_ts: int, end_ts: int, *, before: bool = False
    ) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """See `Feeds.read`."""
        hosted, sink = self._host.running(changefeed)
        version = hosted.assignment.catalog.versions.of_range(table, start_ts, end_ts)
        if version is None:
            raise TableNotExistsError(
                f"this worker has no table {table!r} of changefeed {changefeed}; plan again"
            )
        try:
            self._waiting.resolved(sink, version.span, end_ts, READ_WAIT_S)
            return schema_of(version.mounter, before=before), sink.read(
                version.span, start_ts, end_ts, before=before
            )
        except TableNotFoundError as err:
            raise self._host.not_running(changefeed) from err

    def describe(
        self,
        changefeed: str,
        ts: int | None = None,
        *,
        before: bool = False,
        known_ts: int | None = None,
    ) -> FeedDescription:
        """Refused."""
        del ts, before, known_ts
        raise _rows_only(changefeed)

    def latest(
        self,
        changefeed: str,
        table: str | None,
        start_ts: int,
        max_rows: int | None,
        max_bytes: int | None,
        wait_s: float,
    ) -> int:
        """Refused."""
        del table, start_ts, max_rows, max_bytes, wait_s
        raise _rows_only(changefeed)

    def plan(
        self,
        changefeed: str,
        tables: Sequence[str] | None,
        start_ts: int,
        end_ts: int,
        slice_bytes: int | None = None,
    ) -> list[Slice]:
        """Refused."""
        del tables, start_ts, end_ts, slice_bytes
        raise _rows_only(changefeed)

    def ack(self, changefeed: str, table: str | None, ts: int, epoch: int | None = None) -> int:
        """Refused."""
        del table, ts, epoch
        raise _rows_only(changefeed)

    def report(self, changefeed: str, report: Report) -> None:
        """Refused."""
        del report
        raise _rows_only(changefeed)


def _rows_only(changefeed: str) -> WorkerRowsOnlyError:
    return WorkerRowsOnlyError(
        "a worker hands out rows only; ask the capture's own Flight address about changefeed "
        f"{changefeed}"
    )
