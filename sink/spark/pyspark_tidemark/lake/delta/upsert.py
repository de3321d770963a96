"""Mode `upsert`: a table equals its upstream at each cut.

What the driver holds of a cut is written without Spark jobs: the files that may have its keys, by their statistics, are
searched for them, rows found are masked, the rows that live are one new file. What only executors hold is merged, or
appended if no file may have its keys.
"""

from collections.abc import Sequence
from decimal import Decimal

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from pyspark_tidemark.lake.changes import DELETE, INSERT, Changes
from pyspark_tidemark.lake.delta.files import without, written
from pyspark_tidemark.lake.delta.log import Listing
from pyspark_tidemark.lake.delta.tables import PROPERTIES, Actions, DeltaTables
from pyspark_tidemark.lake.fold import Folded, fold, fold_frame
from pyspark_tidemark.lake.mode import lake_columns
from pyspark_tidemark.lake.predicate import quoted
from pyspark_tidemark.lake.ranges import near
from pyspark_tidemark.lake.schema import fitted


class Upsert:
    """Applies cuts, and says after each whether it added files."""

    def __init__(self, tables: DeltaTables) -> None:
        self._tables = tables

    def create(self, changes: Changes) -> bool:
        """Apply the first cut of a table: nothing can be there, so the rows that live on are appended."""
        if changes.here:
            rows = fold(changes.arrow, changes.table.key).live.select(lake_columns(changes.table))
        else:
            last = fold_frame(changes.frame(self._tables.session(changes.table.name)), changes.table.key)
            rows = _live(last, changes)
        self._tables.write(changes, rows, mode="append", **PROPERTIES)
        return True

    def apply(self, changes: Changes) -> bool:
        """Apply a later cut; returns whether the table has more files than before."""
        name, key = changes.table.name, changes.table.key
        known = self._tables.listing(name)
        if not changes.in_arrow or (known is None and not changes.here):
            return self._by_tasks(changes, known)
        folded = fold(changes.arrow, key)
        if not len(folded.live) and not len(folded.known):
            return False
        if self._tables.apply(changes, lambda found: _actions(found, folded, key)):
            return True
        return self._merge(changes, self._tables.session(name).createDataFrame(folded.last, changes.spark_schema))

    def _by_tasks(self, changes: Changes, known: Listing | None) -> bool:
        """A large cut: an append if no file may hold one of its keys, as of most of a dump's, else a MERGE."""
        last = fold_frame(changes.frame(self._tables.session(changes.table.name)), changes.table.key)
        if known is None or _may_meet(last, changes.table.key, known):
            return self._merge(changes, last)
        self._tables.write(changes, _live(last, changes), mode="append")
        return True

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


def _actions(known: Listing, folded: Folded, key: Sequence[str]) -> Actions:
    """Rows masked in the files that hold them, and one new file."""
    gone = without(known.layout, known.files.values(), folded.known.select(list(key)))
    return gone + written(known.layout, fitted(folded.live, known.layout.schema))


def _live(last: DataFrame, changes: Changes) -> DataFrame:
    """The rows that the table must hold after a cut."""
    return last.where(f"_op <> '{DELETE}'").select(*[quoted(name) for name in lake_columns(changes.table)])


def _may_meet(last: DataFrame, key: Sequence[str], known: Listing) -> bool:
    """Whether a file may hold one of the keys that may have been there before; reads the changes once."""
    columns = [F.col(quoted(name)) for name in key]
    ends = last.where(f"_first_op <> '{INSERT}'").agg(*map(F.min, columns), *map(F.max, columns)).collect()[0]
    if ends[0] is None:
        return False
    pairs = zip(key, ends[: len(key)], ends[len(key) :], strict=True)
    extent = {name: (low, high) for name, low, high in pairs if isinstance(low, int | Decimal | str)}
    return any(near(extent, file.bounds) for file in known.files.values())
