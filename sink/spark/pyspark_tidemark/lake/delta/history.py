"""Modes `append` (every change is a row) and `scd2` (every version of a row,
with the time in which it was valid).
"""

from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from pyspark_tidemark.lake import spans
from pyspark_tidemark.lake.changes import DELETE, Changes
from pyspark_tidemark.lake.delta.endings import replaced, searched
from pyspark_tidemark.lake.delta.files import written
from pyspark_tidemark.lake.delta.log import Listing
from pyspark_tidemark.lake.delta.tables import Actions, DeltaTables
from pyspark_tidemark.lake.mode import IS_CURRENT, SCD2, VALID_FROM, VALID_TO, lake_columns
from pyspark_tidemark.lake.predicate import quoted
from pyspark_tidemark.lake.schema import fitted

MOST_SEARCHED_BYTES = 128 << 20
"""So much of a table the driver reads to find the versions that a cut ends;
more is work for executors.
"""


class Append:
    """A changelog: one append a cut, without a search for anything."""

    def __init__(self, tables: DeltaTables) -> None:
        self._tables = tables

    def create(self, changes: Changes) -> bool:
        """Append the first cut, also one without rows."""
        self._tables.create(changes, self._rows(changes))
        return True

    def apply(self, changes: Changes) -> bool:
        """Append a cut, without Spark if the driver may write the file."""
        if changes.in_arrow and self._tables.apply(
            changes,
            lambda listing: written(listing.layout, fitted(changes.arrow, listing.layout.schema)),
        ):
            return True
        self._tables.append(changes, self._rows(changes))
        return True

    def _rows(self, changes: Changes) -> Any:
        return (
            changes.arrow
            if changes.here
            else changes.frame(self._tables.session(changes.table.name))
        )


class History:
    """Versions of rows: a change ends its key's current version and begins the next;
    a delete only ends.
    """

    def __init__(self, tables: DeltaTables) -> None:
        self._tables = tables

    def create(self, changes: Changes) -> bool:
        """Append the first cut's versions."""
        key, columns = changes.table.key, self._columns(changes)
        if changes.here:
            rows = spans.versions(changes.arrow, key).select(columns)
        else:
            rows = versions(changes.frame(self._tables.session(changes.table.name)), key, columns)
        self._tables.create(changes, rows)
        return True

    def apply(self, changes: Changes) -> bool:
        """Apply a later cut, without Spark if the driver may write the files and what it must
        search is not much.
        """
        return (changes.in_arrow and self._by_driver(changes)) or self._merge(changes)

    def _by_driver(self, changes: Changes) -> bool:
        name, key = changes.table.name, changes.table.key
        listing = self._tables.listing(name)
        if listing is None:
            return False
        ends, inserted = spans.endings(changes.arrow, key)
        if sum(file.size for file in searched(listing.files.values(), ends)) > MOST_SEARCHED_BYTES:
            return False
        new = spans.versions(changes.arrow, key)

        def actions(current: Listing) -> Actions:
            again = self._tables.inserted.there(name, current, inserted.select(list(key)))
            still_open = inserted.join(
                again, keys=list(key), join_type="left semi", use_threads=False
            )
            return replaced(current, new, pa.concat_tables([ends, still_open]))

        return self._tables.apply(changes, actions)

    def _merge(self, changes: Changes) -> bool:
        """One MERGE: rows with a null for `_ends` match nothing and are inserted,
        the others end a version.
        """
        name, key, columns = changes.table.name, changes.table.key, self._columns(changes)
        frame = changes.frame(self._tables.session(name))
        new = versions(frame, key, columns).withColumn("_ends", F.lit(None).cast("long"))
        new.unionByName(endings(frame, key), allowMissingColumns=True).createOrReplaceTempView(
            "changes"
        )
        match = " AND ".join(f"t.{quoted(column)} = s.{quoted(column)}" for column in key)
        names = [quoted(column) for column in columns]
        with self._tables.fenced(changes) as session:
            session.sql(
                f"MERGE INTO {self._tables.sql_name(name)} t USING changes s "  # noqa: S608 - quoted
                f"ON {match} AND t.{IS_CURRENT} AND s._ends IS NOT NULL "
                f"WHEN MATCHED THEN UPDATE SET {VALID_TO} = s._ends, {IS_CURRENT} = false "
                f"WHEN NOT MATCHED AND s._ends IS NULL THEN INSERT ({', '.join(names)}) "
                f"VALUES ({', '.join(f's.{column}' for column in names)})"
            )
            session.catalog.dropTempView("changes")  # it may hold the rows
        return True

    @staticmethod
    def _columns(changes: Changes) -> list[str]:
        return lake_columns(changes.table, SCD2)


def versions(changes: DataFrame, key: tuple[str, ...], columns: list[str]) -> DataFrame:
    """The versions that changes begin; those that end at the commit_ts of their begin are left
    out.
    """
    order = Window.partitionBy(*[F.col(quoted(name)) for name in key]).orderBy("_commit_ts", "_seq")
    timed = (
        changes.withColumn(VALID_TO, F.lead("_commit_ts").over(order))
        .withColumn(VALID_FROM, F.col("_commit_ts"))
        .withColumn(IS_CURRENT, F.col(VALID_TO).isNull())
    )
    lasting = timed.where(
        f"_op <> '{DELETE}' AND ({VALID_TO} IS NULL OR {VALID_TO} > {VALID_FROM})"
    )
    return lasting.select(*[F.col(quoted(name)) for name in columns])


def endings(changes: DataFrame, key: tuple[str, ...]) -> DataFrame:
    """For each key when the version ends that may be there before; of an insert, too:
    only what matches is ended.
    """
    first = F.min(F.struct("_commit_ts", "_seq")).alias("_first")
    ended = changes.groupBy(*[F.col(quoted(name)) for name in key]).agg(first)
    return ended.select(
        *[F.col(quoted(name)) for name in key], F.col("_first._commit_ts").alias("_ends")
    )
