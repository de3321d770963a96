"""The Flight server of a worker: serves the rows of the worker's shares.

A worker process serves those only (`ShareFeeds`). The Flight port of a capture serves the
changefeeds that it runs, passes calls for others on, and serves the rows of the shares that it runs
for the owner (`CaptureFeeds`). A worker knows a share of a changefeed only: its own `latest` or
`ack` would be wrong for the whole, so everything but rows is asked of the owner.
"""

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from server.capture.errors import ChangefeedNotRunningError
from server.capture.flight import READ_WAIT_S, FlightWaits, OwnerFeeds
from server.capture.maintainers import Maintainers
from server.capture.routing import FlightForwarder
from server.capture.worker.host import Host
from sink.flight.feeds import FeedDescription, Poll, Report, SliceEndpoint, TableNotExistsError
from sink.mounter import schema_of
from sorter.errors import TableNotFoundError
from storage.model.errors import InvalidError


class WorkerRowsOnlyError(InvalidError):
    """A worker's Flight port serves rows only; other requests go to the capture."""

    code = "ErrWorkerRowsOnly"


class ShareFeeds:
    """Implements `sink.flight.feeds.Feeds`, of which only `read` is for workers."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._waiting = FlightWaits()

    def close(self) -> None:
        """End all waiting."""
        self._waiting.close()

    def remote_action(self, changefeed: str) -> None:
        """Return None: workers forward nothing."""

    def has(self, changefeed: str, table: str, start_ts: int, end_ts: int) -> bool:
        """Whether a share in this worker has the rows of a range."""
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
        reader: str = "",
    ) -> FeedDescription:
        """Refused."""
        del ts, before, known_ts, reader
        raise _rows_only(changefeed)

    def latest(
        self,
        changefeed: str,
        table: str | None,
        start_ts: int,
        max_rows: int | None,
        max_bytes: int | None,
        poll: Poll,
    ) -> int:
        """Refused."""
        del table, start_ts, max_rows, max_bytes, poll
        raise _rows_only(changefeed)

    def plan(
        self,
        changefeed: str,
        tables: Sequence[str] | None,
        start_ts: int,
        end_ts: int,
        slice_bytes: int | None = None,
    ) -> list[SliceEndpoint]:
        """Refused."""
        del tables, start_ts, end_ts, slice_bytes
        raise _rows_only(changefeed)

    def ack(
        self,
        changefeed: str,
        table: str | None,
        ts: int,
        epoch: int | None = None,
        reader: str = "",
    ) -> int:
        """Refused."""
        del table, ts, epoch, reader
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


class CaptureFeeds(OwnerFeeds):
    """Implements `sink.flight.feeds.Feeds`; `is_own` tells whether a location is this port."""

    def __init__(
        self,
        maintainers: Maintainers,
        rows: ShareFeeds,
        is_own: Callable[[str], bool],
        forwarder: FlightForwarder,
    ) -> None:
        super().__init__(maintainers)
        self._maintainers = maintainers
        self._rows = rows
        self._is_own = is_own
        self._forwarder = forwarder

    def close(self) -> None:
        """End all waiting."""
        super().close()
        self._rows.close()

    def remote_action(self, changefeed: str) -> Callable[[str, bytes], bytes] | None:
        """See `Feeds.remote_action`."""
        if self._maintainers.has(changefeed):
            return None
        return self._forwarder.remote_action(changefeed)

    def _check_held(self) -> None:
        self._maintainers.check_held()

    def read(
        self, changefeed: str, table: str, start_ts: int, end_ts: int, *, before: bool = False
    ) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """See `Feeds.read`: of a share if the table is placed on this capture."""
        if self._is_shared(changefeed, table, start_ts, end_ts):
            return self._rows.read(changefeed, table, start_ts, end_ts, before=before)
        if not self._maintainers.has(changefeed):
            rows = self._forwarder.read(changefeed, table, start_ts, end_ts, before=before)
            if rows is not None:
                return rows
        return super().read(changefeed, table, start_ts, end_ts, before=before)

    def _is_shared(self, changefeed: str, table: str, start_ts: int, end_ts: int) -> bool:
        feed = self._maintainers.owner.feeds.get(changefeed)
        if feed is None:
            return self._rows.has(changefeed, table, start_ts, end_ts)
        # A share that an earlier owner started may still be here, and gets no further: what this
        # owner has placed decides, not what is found here.
        version = feed.catalog.versions.of_range(table, start_ts, end_ts)
        return version is not None and any(
            map(self._is_own, feed.processor.locations(version.span))
        )
