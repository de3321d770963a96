"""Commits of Iceberg tables: exactly on top of what was read, or not at all.

Iceberg's own commits read the table once more before they are made, and would go on top of what
somebody else has committed since the position was read. Here the updates of a transaction are put
together in memory, and the result replaces the metadata that the transaction began with: a catalog
refuses that if there is any other by then. Nothing is tried twice. A commit whose answer was lost
is looked for by the id of its snapshot.
"""

from typing import Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.iceberg.java_catalog import kind, translated

_LOST = "CommitFailedException"


def commit(transaction: Any, what: str) -> int:
    """Make what a transaction has gathered visible; returns the id of its snapshot.

    Raises:
        SourceError: ErrTargetBusy, somebody else has committed since the transaction began; those
            of the catalog `what`.
    """
    operations, changed = transaction.underlyingOps(), transaction.currentMetadata()
    snapshot_id = int(changed.currentSnapshot().snapshotId())
    try:
        operations.commit(transaction.startMetadata(), changed)
    except Py4JJavaError as err:
        if _is_there(operations, snapshot_id):
            return snapshot_id
        if kind(err) == _LOST:
            raise SourceError(
                "ErrTargetBusy",
                f"somebody else writes to this Iceberg table: {err.java_exception.getMessage()}",
                retryable=True,
            ) from None
        error = translated(err, what)
        if error is None:
            raise
        raise error from None
    return snapshot_id


def _is_there(operations: Any, snapshot_id: int) -> bool:
    try:
        return operations.refresh().snapshot(snapshot_id) is not None
    except Py4JJavaError:
        return False
