"""Mode `upsert`: a table equals its upstream at each cut.

What the driver holds of a cut is written without Spark jobs: the files that may have its keys, by
their statistics, are searched for them, rows found are masked, the rows that live are one new file.
What only executors hold is merged, or appended if no file may have its keys. Inserts are searched
for, too (`key_index`): a key that is there already is replaced.
"""

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from pyspark_tidemark.lake.changes import DELETE, INSERT, Changes
from pyspark_tidemark.lake.delta.files import all_removed, without, written
from pyspark_tidemark.lake.delta.log import Listing
from pyspark_tidemark.lake.delta.tables import Actions, DeltaTables
from pyspark_tidemark.lake.fold import Folded, fold, fold_frame, met_keys
from pyspark_tidemark.lake.mode import lake_columns
from pyspark_tidemark.lake.predicate import quoted
from pyspark_tidemark.lake.ranges import any_near
from pyspark_tidemark.lake.schema import fitted


class Upsert:
    """Applies cuts, and says after each whether it added files."""

    def __init__(self, tables: DeltaTables) -> None:
        self._tables = tables

    def create(self, changes: Changes) -> bool:
        """Apply the first cut of a table: nothing can be there,
        so the rows that live on are appended.
        """
        if changes.here:
            rows = fold(changes.arrow, changes.table.key).live.select(lake_columns(changes.table))
        else:
            last = fold_frame(
                changes.frame(self._tables.session(changes.table.name)), changes.table.key
            )
            rows = _live(last, changes)
        self._tables.create(changes, rows)
        return True

    def apply(self, changes: Changes) -> bool:
        """Apply a later cut; returns whether the table has more files than before."""
        if changes.emptied:
            return self._replace(changes)
        name, key = changes.table.name, changes.table.key
        listing = self._tables.listing(name)
        if not changes.in_arrow or (listing is None and not changes.here):
            return self._by_tasks(changes, listing)
        folded = fold(changes.arrow, key)
        if not len(folded.last):
            return False
        if self._tables.apply(changes, lambda current: self._actions(name, current, folded, key)):
            return True
        return self._merge(
            changes, self._tables.session(name).createDataFrame(folded.last, changes.spark_schema)
        )

    def _replace(self, changes: Changes) -> bool:
        """Put the rows of the cut in the place of all that the table holds, in one version."""
        name, key = changes.table.name, changes.table.key
        self._tables.inserted.replacing(name, 0)
        if changes.in_arrow:
            live = fold(changes.arrow, key).live

            def made(listing: Listing) -> Actions:
                rows = fitted(live, listing.layout.schema)
                return all_removed(listing.files.values()) + written(listing.layout, rows)

            if self._tables.apply(changes, made):
                return True
        last = fold_frame(changes.frame(self._tables.session(name)), key)
        self._tables.overwrite(changes, _live(last, changes))
        return True

    def _by_tasks(self, changes: Changes, listing: Listing | None) -> bool:
        """A large cut: an append if no file holds one of its keys, as of most of a dump's,
        else a MERGE.
        """
        name, key = changes.table.name, changes.table.key
        last = fold_frame(changes.frame(self._tables.session(name)), key)
        if listing is None:
            return self._merge(changes, last)
        updated, inserted = _may_meet(last, key, listing)
        again = self._inserted_again(name, last, key) if inserted else 0
        if updated or again:
            self._merge(changes, last)
        else:
            self._tables.append(changes, _live(last, changes))
        self._tables.inserted.replacing(name, again)
        return True

    def _inserted_again(self, name: str, last: DataFrame, key: Sequence[str]) -> int:
        """How many of the keys that a large cut inserts the table has already."""
        columns = [F.col(quoted(column)) for column in key]
        table = (
            self._tables.session(name)
            .read.format("delta")
            .load(self._tables.path(name))
            .select(*columns)
        )
        inserted = last.where(f"_first_op = '{INSERT}'").select(*columns)
        return met_keys(table, inserted, key)

    def _merge(self, changes: Changes, last: DataFrame) -> bool:
        last.createOrReplaceTempView("changes")
        name = changes.table.name
        columns = [quoted(column) for column in lake_columns(changes.table)]
        match = " AND ".join(
            f"t.{quoted(column)} = s.{quoted(column)}" for column in changes.table.key
        )
        statement = (
            f"MERGE INTO {self._tables.sql_name(name)} t "  # noqa: S608 - quoted
            f"USING changes s ON {match} WHEN MATCHED AND s._commit_ts > t._commit_ts AND s._op = "
            f"'{DELETE}' THEN DELETE WHEN MATCHED AND s._commit_ts > t._commit_ts THEN UPDATE SET "
            f"{', '.join(f'{column} = s.{column}' for column in columns)} WHEN NOT MATCHED AND "
            f"s._op <> '{DELETE}' THEN INSERT ({', '.join(columns)}) VALUES "
            f"({', '.join(f's.{column}' for column in columns)})"
        )
        with self._tables.fenced(changes) as session:
            session.sql(statement)
            session.catalog.dropTempView("changes")  # it may hold the rows
        return True

    def _actions(self, name: str, listing: Listing, folded: Folded, key: Sequence[str]) -> Actions:
        """Rows masked in the files that hold them, and one new file."""
        again = self._tables.inserted.there(name, listing, folded.new.select(list(key)))
        keys = pa.concat_tables([folded.known.select(list(key)), again])
        gone = without(listing.layout, listing.files.values(), keys)
        return gone + written(listing.layout, fitted(folded.live, listing.layout.schema))


def _live(last: DataFrame, changes: Changes) -> DataFrame:
    """The rows that the table must hold after a cut."""
    return last.where(f"_op <> '{DELETE}'").select(
        *[quoted(name) for name in lake_columns(changes.table)]
    )


def _may_meet(last: DataFrame, key: Sequence[str], listing: Listing) -> tuple[bool, bool]:
    """Whether a file may hold a key that may have been there, and one that is inserted;
    reads the changes once.
    """
    is_new = F.col("_first_op") == INSERT
    columns = [F.when(of, F.col(quoted(name))) for of in (~is_new, is_new) for name in key]
    counts = [F.count_if(~is_new), F.count_if(is_new)]
    aggregates = last.agg(*counts, *map(F.min, columns), *map(F.max, columns)).collect()[0]
    lows, highs = aggregates[2 : 2 + len(columns)], aggregates[2 + len(columns) :]
    files = [file.bounds for file in listing.files.values()]
    return (
        aggregates[0] > 0 and any_near(key, lows[: len(key)], highs[: len(key)], files),
        aggregates[1] > 0 and any_near(key, lows[len(key) :], highs[len(key) :], files),
    )
