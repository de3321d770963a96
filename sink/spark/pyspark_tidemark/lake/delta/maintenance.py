"""The maintenance of Delta tables between cuts: compaction after so many commits, and removal of
old files (VACUUM).

Each call does one table's compaction or vacuum, so that no cut waits for long. The driver joins
small files, about as many bytes as a cut has; Delta's OPTIMIZE, which is slow to begin, rewrites
only full files with many masked rows; a table is vacuumed at most once an hour.

What is due follows from the table's version and the time of day, not from how long this process has
run: otherwise a job that is often restarted would never get to it.
"""

import logging
import math
import time
import zlib
from datetime import UTC, datetime

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.classic.dataframe import DataFrame

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake import compaction
from pyspark_tidemark.lake.delta.files import by_partition, joined
from pyspark_tidemark.lake.delta.tables import DeltaTables
from pyspark_tidemark.lake.target import Health, Retention

_log = logging.getLogger(__name__)

VACUUM_EVERY_S = 3600.0
VACUUM_MARGIN_S = 3600.0
"""Files are kept this much longer than they must be: the clocks of this machine and of the log's
file system differ.
"""
_TRIES = 3
_SETTINGS = {
    "spark.databricks.delta.optimize.maxFileSize": str(128 << 20),
    "spark.databricks.delta.optimize.minFileSize": str(64 << 20),
    # The manifest says which versions are kept, not Delta's week.
    "spark.databricks.delta.retentionDurationCheck.enabled": "false",
    "spark.databricks.delta.vacuum.parallelDelete.enabled": "false",
    # Otherwise listing a large table is ten thousand tasks.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
}


class Maintenance:
    """Counts commits that added files, and does the most urgent table's work."""

    def __init__(self, tables: DeltaTables, compact_every: int) -> None:
        self._tables = tables
        self._compact_every = compact_every
        self._soon = max(1, compact_every // 4)
        """After this many commits a compaction goes on that was too much for one time."""
        self._commits: dict[str, int] = {}
        self._vacuum_at: dict[str, float] = {}
        """When each table is vacuumed next, by the clock."""

    def committed(self, name: str, version: int, *, grown: bool) -> None:
        """Count a commit to a table, which made a version; one that added no file begins the count
        anew.
        """
        before = self._commits.get(name)
        if before is None:
            before = max(0, version - 1) % max(1, self._compact_every)
            self._vacuum_at[name] = _next_vacuum(name)
        self._commits[name] = before + 1 if grown else 0

    def forget(self, name: str) -> None:
        """The table is gone."""
        self._commits.pop(name, None)
        self._vacuum_at.pop(name, None)

    def run(self, kept: Retention) -> Health | None:
        """One table's compaction, and else one table's vacuum, if any is due."""
        try:
            return self._next(kept)
        except (SourceError, PySparkException, Py4JError, pa.ArrowException, OSError) as err:
            # Maintenance only makes reads cheaper: cuts go on without it. If somebody else has
            # removed or rolled back the table, the next cut of it fails with that.
            _log.warning("maintenance failed and will be tried again: %s", err)
            return None

    def _next(self, kept: Retention) -> Health | None:
        name = max(self._commits, key=lambda table: self._commits[table], default=None)
        if name is not None and 0 < self._compact_every <= self._commits[name]:
            # Before it begins, as it may fail: the others have their turn before the next try.
            self._commits[name] = self._compact_every - self._soon
            if self.compact(name):
                self._commits[name] = 0
            return health(self._tables, name)
        name = min(self._vacuum_at, key=lambda table: self._vacuum_at[table], default=None)
        if name is None or not self._compact_every or time.time() < self._vacuum_at[name]:
            return None
        self._vacuum_at[name] = _next_vacuum(name)
        self.vacuum(name, kept)
        return health(self._tables, name)

    def compact(self, name: str) -> bool:
        """Make few files of many, and leave masked rows out; no reader sees another row.

        Returns whether nothing is left to do.
        """
        for _ in range(_TRIES):
            listing = self._tables.listing(name)
            if listing is None:
                break
            groups = [
                group
                for files in by_partition(listing.files.values())
                for group in compaction.chosen(files)
            ]
            parts = compaction.affordable(groups)
            actions = [action for files in parts for action in joined(listing.layout, files)]
            if not actions or self._tables.rewrite(name, listing, actions):
                if compaction.too_large(groups):
                    break
                return sum(map(len, parts)) == sum(map(len, groups))
        else:
            # Somebody else commits again and again: the next time.
            return False
        self._sql(name, f"OPTIMIZE {self._tables.sql_name(name)}")
        return True

    def vacuum(self, name: str, kept: Retention) -> None:
        """Remove files that no kept cut shows; Delta takes whole hours."""
        retention_s = self.retention_s(name, kept)
        if retention_s is not None:
            self._sql(
                name,
                f"VACUUM {self._tables.sql_name(name)} RETAIN {math.ceil(retention_s / 3600)} "
                "HOURS",
            )

    def retention_s(self, name: str, kept: Retention) -> float | None:
        """For how long a file stays that was taken out of the table; None: for ever, as the log
        does not say since when.
        """
        # VACUUM goes by the time when a file was taken out, and a compaction takes out files that
        # the cut before it shows. So all that was taken out since the oldest version of a kept cut
        # stays, however old that version is.
        oldest = min(kept.versions(name), default=None)
        shown_since = kept.horizon if oldest is None else self._tables.committed_at(name, oldest)
        if shown_since is None:
            return None
        return (
            datetime.now(UTC) - min(kept.horizon, shown_since)
        ).total_seconds() + VACUUM_MARGIN_S

    def _sql(self, name: str, statement: str) -> None:
        session = self._tables.session(name)
        for setting, value in _SETTINGS.items():
            session.conf.set(setting, value)
        self._tables.sql(name, statement)


def _next_vacuum(name: str) -> float:
    """When the hour of a table ends: each has its own ones, whenever the job has started."""
    offset = zlib.crc32(name.encode()) % VACUUM_EVERY_S
    return ((time.time() - offset) // VACUUM_EVERY_S + 1) * VACUUM_EVERY_S + offset


def health(tables: DeltaTables, name: str) -> Health:
    """Files, and rows that deletion vectors mask, of the newest version."""
    listing = tables.listing(name)
    if listing is not None:
        return compaction.health(listing.files.values())
    files = DataFrame(tables.snapshot(name).allFiles().toDF(), tables.session(name))
    counts = files.agg(
        F.count("*"),
        F.count_if(F.col("size") < compaction.SMALL_FILE_BYTES),
        F.sum(F.get_json_object("stats", "$.numRecords").cast("long")),
        F.sum("deletionVector.cardinality"),
    ).collect()[0]
    return Health(*[int(count or 0) for count in counts])
