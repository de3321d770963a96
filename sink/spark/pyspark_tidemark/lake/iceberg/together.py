"""One commit for all tables of a cut and its line in the manifest, where a REST catalog offers it
(`transactions/commit`): every engine that uses the catalog then sees whole cuts only.

The tables' transactions wait here, their files written, until the manifest commits. Then either
everything is visible or nothing: the request names, for each table, the snapshot that its
transaction began with.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import IllegalArgumentException, UnsupportedOperationException

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.iceberg.java_catalog import commit_exactly

_log = logging.getLogger(__name__)
_OFFERING = "RESTCatalog"
_REFUSALS = (SourceError, Py4JJavaError, IllegalArgumentException, UnsupportedOperationException)


@dataclass(frozen=True)
class Waiting:
    """A table's transaction, and what is to be done when it is visible."""

    identifier: Any
    transaction: Any
    done: Callable[[], None]


class Together:
    """What waits for the commit of a cut; any number of threads may add to it."""

    def __init__(self, classes: Any, java_catalog: Any) -> None:
        self.is_offered = str(java_catalog.getClass().getSimpleName()) == _OFFERING
        """Whether the catalog commits several tables at once, as far as is known yet: `first` finds
        out.
        """
        self._classes = classes
        self._java = java_catalog
        self._lock = threading.Lock()
        self._waiting: list[Waiting] = []

    def add(self, table: Waiting) -> int:
        """Let a table wait for `commit`; returns the id of its snapshot."""
        with self._lock:
            self._waiting.append(table)
        return int(table.transaction.currentMetadata().currentSnapshot().snapshotId())

    def first(self, identifier: Any, transaction: Any, what: str) -> int:
        """Commit one transaction in this way, or, if the catalog refuses that, as ever; returns the
        id of its snapshot.

        Raises:
            SourceError: those of `java_catalog.commit_exactly`.
        """
        if self.is_offered:
            try:
                return self._commit([identifier], [transaction], what)
            except _REFUSALS as err:
                if isinstance(err, SourceError) and err.code == "ErrTargetBusy":
                    raise
                self.is_offered = False
                _log.warning("%s commits each table of a cut by itself: %s", what, err)
        return commit_exactly(transaction, what)

    def commit(self, identifier: Any, transaction: Any, what: str) -> int:
        """Make a transaction and all that waits visible at once; returns the id of its snapshot.

        Raises:
            SourceError: those of `java_catalog.commit_exactly`.
        """
        with self._lock:
            tables, self._waiting = self._waiting, []
        if not tables:
            return commit_exactly(transaction, what)
        snapshot_id = self._commit(
            [identifier, *(table.identifier for table in tables)],
            [transaction, *(table.transaction for table in tables)],
            what,
        )
        for table in tables:
            table.done()
        return snapshot_id

    def _commit(self, identifiers: Sequence[Any], transactions: Sequence[Any], what: str) -> int:
        commits = self._classes.java.util.ArrayList()
        for identifier, transaction in zip(identifiers, transactions, strict=True):
            commits.add(
                self._classes.org.apache.iceberg.catalog.TableCommit.create(
                    identifier, transaction.startMetadata(), transaction.currentMetadata()
                )
            )
        # All or nothing: whether the first one is there says it of all.
        return commit_exactly(transactions[0], what, lambda: self._java.commitTransaction(commits))
