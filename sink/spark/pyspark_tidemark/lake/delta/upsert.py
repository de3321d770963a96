"""Mode `upsert`: a table equals its upstream at each cut.

What the driver holds of a cut is written without Spark jobs: the files that may have its keys, by their statistics, are
searched for them, rows found are masked, the rows that live are one new file. What only executors hold is merged.
"""

from pyspark.sql import DataFrame

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.changes import DELETE, Changes
from pyspark_tidemark.lake.delta.files import without, written
from pyspark_tidemark.lake.delta.tables import PROPERTIES, DeltaTables
from pyspark_tidemark.lake.fold import Folded, fold, fold_frame
from pyspark_tidemark.lake.mode import lake_columns
from pyspark_tidemark.lake.predicate import quoted
from pyspark_tidemark.lake.schema import fitted

_TRIES = 5


class Upsert:
    """Applies cuts, and says after each whether it added files."""

    def __init__(self, tables: DeltaTables) -> None:
        self._tables = tables

    def forget(self, name: str) -> None:
        """The table was changed by somebody else."""
        self._tables.forget_listing(name)

    def create(self, changes: Changes) -> bool:
        """Apply the first cut of a table: nothing can be there, so the rows that live on are appended."""
        columns = lake_columns(changes.table)
        if changes.here:
            rows = fold(changes.arrow, changes.table.key).live.select(columns)
        else:
            last = fold_frame(changes.frame(self._tables.session(changes.table.name)), changes.table.key)
            rows = last.where(f"_op <> '{DELETE}'").select(*[quoted(name) for name in columns])
        self._tables.write(changes, rows, mode="append", **PROPERTIES)
        return True

    def apply(self, changes: Changes) -> bool:
        """Apply a later cut; returns whether the table has more files than before."""
        session = self._tables.session(changes.table.name)
        if not changes.here:
            return self._merge(changes, fold_frame(changes.frame(session), changes.table.key))
        folded = fold(changes.arrow, changes.table.key)
        if not len(folded.live) and not len(folded.known):
            return False
        return self._mask(changes, folded) or self._merge(
            changes, session.createDataFrame(folded.last, changes.spark_schema)
        )

    def _mask(self, changes: Changes, folded: Folded) -> bool:
        """One commit without Spark; False if only Delta may write to the table."""
        name = changes.table.name
        for _ in range(_TRIES):
            known = self._tables.listing(name)
            if known is None:
                return False
            actions = without(known.layout, known.files.values(), folded.known.select(list(changes.table.key)))
            actions += written(known.layout, fitted(folded.live, known.layout.schema))
            if self._tables.commit(changes, known, actions):
                return True
        raise SourceError("ErrTargetBusy", f"somebody else keeps writing to {name}", retryable=True)

    def _merge(self, changes: Changes, last: DataFrame) -> bool:
        last.createOrReplaceTempView("changes")
        name = changes.table.name
        columns = [quoted(column) for column in lake_columns(changes.table)]
        match = " AND ".join(f"t.{quoted(column)} = s.{quoted(column)}" for column in changes.table.key)
        statement = (
            f"MERGE INTO {self._tables.sql_name(name)} t "  # noqa: S608 - quoted
            f"USING changes s ON {match} "
            f"WHEN MATCHED AND s._commit_ts > t._commit_ts AND s._op = '{DELETE}' THEN DELETE "
            f"WHEN MATCHED AND s._commit_ts > t._commit_ts THEN UPDATE SET "
            f"{', '.join(f'{column} = s.{column}' for column in columns)} "
            f"WHEN NOT MATCHED AND s._op <> '{DELETE}' THEN INSERT ({', '.join(columns)}) "
            f"VALUES ({', '.join(f's.{column}' for column in columns)})"
        )
        with self._tables.fenced(changes) as session:
            session.sql(statement)
            session.catalog.dropTempView("changes")  # it may hold the rows
        return True
