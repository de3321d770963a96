"""What a capture's Flight port hands out: its changefeeds while it is the owner,
and the rows of the shares that it runs for whoever is.
"""

from collections.abc import Callable, Iterator

import pyarrow as pa

from server.capture.flight import OwnerFeeds
from server.capture.owner import Owner
from server.capture.worker.rows import Rows


class CaptureFeeds(OwnerFeeds):
    """Implements `sink.flight.feeds.Feeds`; `is_own` tells whether a location is this port."""

    def __init__(self, owner: Owner, rows: Rows, is_own: Callable[[str], bool]) -> None:
        super().__init__(owner)
        self._rows = rows
        self._is_own = is_own

    def close(self) -> None:
        """End all waiting."""
        super().close()
        self._rows.close()

    def read(
        self, changefeed: str, table: str, start_ts: int, end_ts: int, *, before: bool = False
    ) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """See `Feeds.read`: of a share if the table is dealt to this capture."""
        if self._is_shared(changefeed, table, start_ts, end_ts):
            return self._rows.read(changefeed, table, start_ts, end_ts, before=before)
        return super().read(changefeed, table, start_ts, end_ts, before=before)

    def _is_shared(self, changefeed: str, table: str, start_ts: int, end_ts: int) -> bool:
        feed = self._owner.feeds.get(changefeed)
        if feed is None:
            return self._rows.has(changefeed, table, start_ts, end_ts)
        # a share may still be here that an owner before us has started, and that gets no further
        version = feed.catalog.versions.of_range(table, start_ts, end_ts)
        return version is not None and any(
            map(self._is_own, feed.processor.locations(version.span))
        )
