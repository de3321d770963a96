"""The Flight server's view of changefeeds, which the capture that owns them implements.

Calls come from the Flight server's threads and may wait; they must be safe to make from many
threads at once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa

from sink.versions import Ddl
from storage.model.errors import ConflictError, NotFoundError


class ChangefeedNotExistsError(NotFoundError):
    """No changefeed of that id."""

    code = "ErrChangeFeedNotExists"


class TableNotExistsError(NotFoundError):
    """The changefeed has no such table."""

    code = "ErrTableNotExists"


class ChangefeedMovedBackError(ConflictError):
    """The changefeed's checkpoint was moved back after the reader began."""

    code = "ErrChangefeedMovedBack"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDescription:
    """One table as readers see it; `table` is `schema.table`,
    `key` the columns that identify a row.
    """

    table: str
    table_id: int
    key: tuple[str, ...]
    schema: Any
    schema_ts: int
    """The commit_ts of the DDL that gave the schema; for the first one,
    where the changefeed began.
    """
    resolved_ts: int
    checkpoint_ts: int
    shard: tuple[str, str] | None = None
    """The table that it is merged into in the target, and the column of that with its name; None:
    it is not merged.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedDescription:
    """One changefeed; rows in `(checkpoint_ts, resolved_ts]` can be read.

    `ddls` are those from the asked ts on.
    """

    changefeed: str
    state: str
    sink_uri: str
    start_ts: int
    checkpoint_ts: int
    resolved_ts: int
    tables: tuple[TableDescription, ...] | None
    """None: those that the reader knows."""
    ddls: tuple[Ddl, ...] = ()
    target_ts: int = 0
    """Where the changefeed ends; 0: nowhere."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Ranges `(start_ts, end_ts]` that an operator chose not to deliver, ascending."""
    epoch: int = 0
    """How often its checkpoint was moved back."""
    kept_ts: int = 0
    """Where acknowledged history is kept: rows above it can be read, too; 0: it is not."""


@dataclass(frozen=True, slots=True)
class SliceEndpoint:
    """Rows of one table in `(start_ts, end_ts]`: a DoGet; sizes are estimates,
    `locations` better than the server's.
    """

    table: str
    start_ts: int
    end_ts: int
    rows: int
    bytes: int
    locations: tuple[str, ...] = ()


READY, RETRYING, FAILED, STOPPED = "ready", "retrying", "failed", "stopped"
REPORT_STATES: Final = (READY, RETRYING, FAILED, STOPPED)
COMMITS: Final = ("cut", "table")
"""All tables of a cut at once, or each by itself."""


@dataclass(frozen=True, slots=True)
class Report:
    """A report of the job that keeps a changefeed's lake, about itself."""

    state: str
    """One of `REPORT_STATES`: it applies cuts; it starts again soon; it has given up;
    it was stopped on purpose.
    """
    cut_ts: int = 0
    """The end of the newest cut in the lake; 0: not known."""
    code: str = ""
    """Of the error behind `retrying` and `failed`, without `TM:`."""
    message: str = ""
    commits: str = ""
    """What it commits in one step, one of `COMMITS`; empty: it did not say."""
    ui: str = ""
    """The address of its Spark's web UI; empty: it has none."""


@dataclass(frozen=True, slots=True)
class Poll:
    """How long a reader waits for something new."""

    wait_s: float
    idle_ms: int | None = None
    """While nothing changes, a cut without rows comes once the reader's position is so old; None:
    after some seconds.
    """


class Feeds(Protocol):
    """The changefeeds of a capture.

    Every method raises ChangefeedNotExistsError and TableNotExistsError for names that do not
    exist, and an UnavailableError while the changefeed does not run here.
    """

    def remote_action(self, changefeed: str) -> Callable[[str, bytes], bytes] | None:
        """Return a function that sends an action's name and body to the server that has the
        changefeed, and returns its answer; None: this server has it.
        """
        ...

    def describe(
        self,
        changefeed: str,
        ts: int | None = None,
        *,
        before: bool = False,
        known_ts: int | None = None,
        reader: str = "",
    ) -> FeedDescription:
        """State, positions, the tables in force above `ts` (None: the checkpoint_ts),
        and the DDLs from `ts` on.

        Whoever knows the tables above `known_ts` is not told them again if they are still the same.
        With the name of a `reader`, the checkpoint_ts is this reader's.

        Raises:
            RangeCleanedError: `ts` is below what is known.
        """
        ...

    def latest(
        self,
        changefeed: str,
        table: str | None,
        start_ts: int,
        max_rows: int | None,
        max_bytes: int | None,
        poll: Poll,
    ) -> int:
        """The end of the next cut after `start_ts` within the limits;
        `start_ts` if nothing is new within the time of `poll`.

        It never lies beyond the next DDL of the table, or of any.
        """
        ...

    def plan(
        self,
        changefeed: str,
        tables: Sequence[str] | None,
        start_ts: int,
        end_ts: int,
        slice_bytes: int | None = None,
    ) -> list[SliceEndpoint]:
        """The slices that hold the rows in `(start_ts, end_ts]`;
        waits a while for `end_ts` to be resolved.

        Raises:
            RangeCrossesDdlError: there is a DDL inside of the range.
        """
        ...

    def read(
        self, changefeed: str, table: str, start_ts: int, end_ts: int, *, before: bool = False
    ) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """The mounted rows in `(start_ts, end_ts]`, always the same ones;
        waits for `end_ts` to be resolved.

        Raises:
            RangeCrossesDdlError: there is a DDL of the table inside of the range.
            RangeCleanedError: `start_ts` was acknowledged too long ago.
            NotResolvedError: `end_ts` is not reached in time.
        """
        ...

    def ack(
        self,
        changefeed: str,
        table: str | None,
        ts: int,
        epoch: int | None = None,
        reader: str = "",
    ) -> int:
        """The `reader` (empty: one without a name) has everything up to `ts` of the table (None: of
        all); returns the changefeed's checkpoint_ts.

        `epoch` is the one that the reader was told when it began (None: it knows of none).

        Raises:
            ChangefeedMovedBackError: the changefeed has another epoch now. What this reader has
                must not move the checkpoint: others begin there.
        """
        ...

    def report(self, changefeed: str, report: Report) -> None:
        """Note what the changefeed's lake job says about itself; the last report counts."""
        ...
