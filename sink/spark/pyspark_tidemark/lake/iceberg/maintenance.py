"""The maintenance of Iceberg tables: data files are joined, without their deleted rows
(`rewriting`), and old snapshots are expired.

The work runs in a thread of its own while cuts go on, on one table at a time. Counts begin with the
commits that the table has already: otherwise a job that is often restarted would never get to it.
"""

import logging
import threading
import time
from concurrent.futures import Future
from typing import Any, NamedTuple

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.jvm import java_items
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.rewriting import Rewriting, WholeRewriting
from pyspark_tidemark.lake.session import SparkThreads
from pyspark_tidemark.lake.target import Health, Retention

_log = logging.getLogger(__name__)

SMALL_FILE_BYTES = 16 << 20
_EXPIRE_EVERY_COMMITS = 16
MOST_SNAPSHOTS = 500
"""Each commit writes the list of all snapshots anew, so it must not grow with the retention."""
_REST = 5.0
"""A rewrite begins no sooner than this many times the last one's duration after it."""
_RETRY_S = 60.0
"""What failed is not tried again sooner."""


class _Running(NamedTuple):
    """The work on one table, and what it was begun for."""

    table: str
    commits: int
    deletes: int
    outcome: Future[Health]


class Maintenance:
    """Counts commits, and does the most urgent table's work in the background."""

    def __init__(
        self,
        spark: SparkSession,
        catalog: Catalog,
        committing: threading.Lock,
        compact_every: int,
        *,
        vectors: bool,
    ) -> None:
        """With `vectors`, deletion vectors say which rows are gone, else equality deletes."""
        self._spark = spark
        self._catalog = catalog
        self._committing = committing
        self._compact_every = compact_every
        self._vectors = vectors
        self._rewriting = Rewriting(spark, catalog, committing)
        self._whole_rewriting = WholeRewriting(spark, catalog, committing)
        self._deletes: dict[str, int] = {}
        self._commits: dict[str, int] = {}
        self._pool = SparkThreads(spark, 1, "iceberg-maintenance")
        self._running: _Running | None = None
        self._not_before = 0.0
        self._failed: set[str] = set()
        """Tables whose last work failed: all others come before them."""

    def committed(self, name: str, table: Any, *, deletes: bool) -> None:
        """A cut was committed to a table (Iceberg's Java)."""
        if name not in self._commits:
            before = max(0, self._catalog.commits(table) - 1)
            self._commits[name] = before % max(1, self._compact_every)
            self._deletes[name] = int(self._catalog.has_equality_deletes(table))
        self._commits[name] += 1
        self._deletes[name] += deletes

    def forget(self, name: str) -> None:
        """The table is gone."""
        self._commits.pop(name, None)
        self._deletes.pop(name, None)
        self._failed.discard(name)

    def run(self, kept: Retention) -> Health | None:
        """Begin the next piece of work if none is running; returns the result of one that ended."""
        if self._running is not None:
            if not self._running.outcome.done():
                return None
            done, self._running = self._running, None
            return self._ended(done)
        if not self._compact_every or time.monotonic() < self._not_before:
            return None
        due = [name for name, commits in self._commits.items() if commits >= self._compact_every]
        if due:
            name = max(due, key=lambda table: (table not in self._failed, self._commits[table]))
            commits, deletes = self._commits[name], self._deletes.get(name, 0)
            # Before the work begins: cuts that come meanwhile count for the next time.
            self._commits[name] = self._deletes[name] = 0
            outcome = self._pool.submit(self._work, name, kept, has_deletes=deletes > 0)
            self._running = _Running(name, commits, deletes, outcome)
        return None

    def close(self) -> None:
        """Wait for the work that is running."""
        self._pool.shutdown(wait=True)

    def _ended(self, done: _Running) -> Health | None:
        """The health of the table; None if the work failed, which is then due as before."""
        try:
            health = done.outcome.result()
        except (SourceError, PySparkException, Py4JError, pa.ArrowException, OSError) as err:
            # Maintenance only makes reads cheaper: cuts go on without it.
            _log.warning("maintenance failed and will be tried again: %s", err)
        else:
            self._failed.discard(done.table)
            return health
        self._not_before = time.monotonic() + _RETRY_S
        # A table that was dropped meanwhile has no counts.
        if done.table in self._commits:
            self._failed.add(done.table)
            self._commits[done.table] += done.commits
            self._deletes[done.table] += done.deletes
        return None

    def _work(self, name: str, kept: Retention, *, has_deletes: bool) -> Health:
        began = time.monotonic()
        # The table may have been dropped since the work was asked for.
        table = self._catalog.load(name)
        if table is None:
            self.forget(name)
            return Health()
        # With vectors, many small files become few in tables without deletes, too.
        if has_deletes or self._has_vectors(table):
            self.rewrite(name)
        self.expire(name, kept)
        self._not_before = time.monotonic() + _REST * (time.monotonic() - began)
        return self.health(name)

    def rewrite(self, name: str) -> None:
        """Replace data files by fewer ones with the rows that live."""
        has_vectors = self._has_vectors(self._catalog.existing(name))
        rewriting = self._rewriting if has_vectors else self._whole_rewriting
        rewriting.run(name)

    def _has_vectors(self, table: Any) -> bool:
        return self._vectors and self._catalog.knows_vectors(table)

    def expire(self, name: str, kept: Retention) -> None:
        """Forget the snapshots that no kept cut shows, with the files that only they need."""
        # A cut is in the manifest only when all of its tables are written: until then no kept cut
        # names the newest one's snapshots.
        table = self._catalog.existing(name)
        snapshots = [int(snapshot.snapshotId()) for snapshot in java_items(table.snapshots())]
        kept_ids = self._catalog.newest_cut(table)
        # Read after the snapshots, of which it may then show all but the newest; and while cuts go
        # on, as there may be very many.
        kept_ids |= kept.versions(name) & set(snapshots[-MOST_SNAPSHOTS:])
        with self._committing:
            table = self._catalog.existing(name)
            kept_ids |= self._catalog.newest_cut(table) | self._catalog.marked(table)
            there = {int(snapshot.snapshotId()) for snapshot in java_items(table.snapshots())}
            expired = [each for each in snapshots if each in there - kept_ids]
            if len(expired) < _EXPIRE_EVERY_COMMITS:
                return
            self._catalog.expire(table, expired)

    def health(self, name: str) -> Health:
        """Files, and rows that vectors and equality deletes mask, of the current snapshot."""
        table = self._catalog.existing(name)
        summary: Any = table.currentSnapshot().summary()
        tasks = self._catalog.planned(table.newScan())
        small = sum(task.file().fileSizeInBytes() < SMALL_FILE_BYTES for task in tasks)
        deleted = sum(
            int(summary.get(f"total-{kind}-deletes") or 0) for kind in ("position", "equality")
        )
        return Health(len(tasks), small, int(summary.get("total-records") or 0), deleted)
