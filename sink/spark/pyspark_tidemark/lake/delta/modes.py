"""How each mode writes a cut of a Delta table: `upsert`, `append` (every change is a row), `scd2`
(every version of a row, with the time in which it was valid).

What the driver holds of a cut is written without Spark jobs: the files that may have its keys, by
their statistics, are searched for them, rows found are masked, the rows that live are one new file.
What only executors hold is merged, or appended if no file may have its keys. Inserts are searched
for, too (`inserted`): a key that is there already is replaced.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from pyspark_tidemark.lake.changes import DELETE, INSERT, Changes
from pyspark_tidemark.lake.columns import quoted
from pyspark_tidemark.lake.cut_tasks import TaskWriter
from pyspark_tidemark.lake.delta.files import (
    all_removed,
    meeting,
    written,
)
from pyspark_tidemark.lake.delta.log import Listing
from pyspark_tidemark.lake.delta.masking import (
    VersionChanges,
    ended_and_begun,
    masked_and_added,
    searched,
)
from pyspark_tidemark.lake.delta.tables import Actions, DeltaTables
from pyspark_tidemark.lake.delta.task_writers import (
    ChangesWriter,
    HistoryWriter,
    UpsertWriter,
    actions_of,
    made_for,
)
from pyspark_tidemark.lake.fold import (
    ENDS,
    FIRST_OP,
    Folded,
    endings_frame,
    fold,
    fold_frame,
    met_keys,
    versions,
    versions_frame,
)
from pyspark_tidemark.lake.format import APPEND, SCD2, UPSERT
from pyspark_tidemark.lake.keys import KEPT_BYTES, ColumnCache
from pyspark_tidemark.lake.ranges import any_near
from pyspark_tidemark.lake.schema import IS_CURRENT, VALID_TO, fitted, lake_columns, lake_schema

MOST_SEARCHED_BYTES = 128 << 20
"""So much of a table the driver reads to find the versions that a cut ends, or writes anew where
there are no deletion vectors; more is work for executors.
"""

MOST_SENT_FILES = 20_000
"""Up to so many files of a table are described to a task, in about a KB each: Spark takes 128 MiB
in a message.
"""


class Writer(ABC):
    """Writes cuts in one mode; each call returns whether the table has more files than before."""

    def __init__(self, tables: DeltaTables) -> None:
        self._tables = tables

    @abstractmethod
    def create(self, changes: Changes) -> bool:
        """Apply a table's first cut, unless tasks have made its files."""

    def apply(self, changes: Changes) -> bool:
        """Apply a later cut: commit what tasks have made of it, or write it here."""
        if changes.by_tasks is None:
            return self._write(changes)
        if self._tables.apply(changes, lambda current: self._made(changes, current)):
            return True
        # By now only Delta may write to the table.
        return self._write(changes.read_again)

    @abstractmethod
    def task_writer(self, changes: Changes, *, is_new: bool) -> TaskWriter | None:
        """See `TaskTarget`."""

    @abstractmethod
    def _made(self, changes: Changes, current: Listing) -> Actions:
        """The actions that tasks have made for the version that the table has, or others for it."""

    @abstractmethod
    def _write(self, changes: Changes) -> bool:
        """Apply a later cut of which tasks have made nothing."""


class Upsert(Writer):
    """Keeps a table equal to its upstream at each cut."""

    def __init__(self, tables: DeltaTables) -> None:
        super().__init__(tables)
        self._key_columns = ColumnCache(KEPT_BYTES)

    def create(self, changes: Changes) -> bool:
        """Apply the first cut of a table: no row can be there, so those that live are appended."""
        name, key = changes.table.name, changes.table.key
        if self._tables.reads_for_new(changes):
            rows = fold(changes.arrow, key).live.select(lake_columns(changes.table))
        else:
            frame = changes.frame(self._tables.session(name))
            rows = _live(fold_frame(frame, key), changes)
        self._tables.create(changes, rows)
        return True

    def apply(self, changes: Changes) -> bool:
        """See `Writer`; a cut without rows needs no version."""
        made = changes.by_tasks
        if made is not None and not made.counted.rows and not changes.emptied:
            return False
        return super().apply(changes)

    def _write(self, changes: Changes) -> bool:
        if changes.emptied:
            return self._replace(changes)
        name, key = changes.table.name, changes.table.key
        listing = self._tables.listing(name)
        if not changes.in_arrow or (listing is None and not changes.here):
            return self._by_tasks(changes, listing)
        folded = fold(changes.arrow, key)
        if not len(folded.last):
            return False
        if not _rewrites_much(listing, folded.existing.select(list(key))) and self._tables.apply(
            changes, lambda current: self._actions(name, current, folded, key)
        ):
            return True
        return self._merge(
            changes, self._tables.session(name).createDataFrame(folded.last, changes.spark_schema)
        )

    def task_writer(self, changes: Changes, *, is_new: bool) -> TaskWriter | None:
        """One for a cut that a task can hold, of a table whose rows can be masked without Spark."""
        listing = listing_for_task(self._tables, changes, UPSERT, is_new=is_new)
        return None if listing is None else UpsertWriter(listing, is_new or changes.emptied)

    def _made(self, changes: Changes, current: Listing) -> Actions:
        name, key = changes.table.name, changes.table.key
        made = made_for(changes, current)
        if not made:
            return self._actions(name, current, fold(changes.arrow, key), key)
        self._tables.inserted.replacing(name, sum(part.replaced for part in made))
        emptied = all_removed(current.files.values()) if changes.emptied else []
        return [*emptied, *actions_of(made)]

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
        # Without a listing nothing is known of the files: only Delta may write to the table.
        if listing is None:
            return self._merge(changes, last)
        updated, inserted = _may_meet(last, key, listing)
        again = self._inserted_again(name, last, key) if inserted else 0
        if updated or again:
            self._merge(changes, last)
        else:
            self._tables.append(changes, _live(last, changes))
        # After the commit: one that failed has replaced nothing.
        self._tables.inserted.replacing(name, again)
        return True

    def _inserted_again(self, name: str, last: DataFrame, key: Sequence[str]) -> int:
        """How many of the keys that a large cut inserts the table has already."""
        columns = [F.col(quoted(column)) for column in key]
        reader = self._tables.session(name).read.format("delta")
        table = reader.load(self._tables.path(name)).select(*columns)
        inserted = last.where(F.col(quoted(FIRST_OP)) == INSERT).select(*columns)
        return met_keys(table, inserted, key)

    def _merge(self, changes: Changes, last: DataFrame) -> bool:
        """One MERGE, guarded by `_commit_ts`: an older change never goes over a newer row."""
        name = changes.table.name
        live = F.col("_op") != DELETE
        last = self._tables.partitionable(name, last, is_written=live)
        last.createOrReplaceTempView("changes")
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
        with self._tables.fenced(changes, is_repeatable=True) as session:
            session.sql(statement)
            # The view may hold the rows of the cut.
            session.catalog.dropTempView("changes")
        return True

    def _actions(self, name: str, listing: Listing, folded: Folded, key: Sequence[str]) -> Actions:
        searched = self._tables.inserted, self._key_columns
        return masked_and_added(name, listing, folded, key, searched)


def listing_for_task(
    tables: DeltaTables, changes: Changes, mode: str, *, is_new: bool
) -> Listing | None:
    """The version on top of which a task may mask and add rows; None: the task could not hold the
    cut or the table's description, or rows cannot be masked without Spark.
    """
    if not changes.in_one_task:
        return None
    if is_new:
        return tables.begin(changes, lake_schema(changes.table, mode))
    listing = tables.listing(changes.table.name)
    if listing is None or not listing.layout.vectors or len(listing.files) > MOST_SENT_FILES:
        return None
    return listing


def _rewrites_much(listing: Listing | None, keys: Any) -> bool:
    """Whether files without deletion vectors would have to be written anew, and are large."""
    if listing is None or listing.layout.vectors:
        return False
    met = meeting(listing.files.values(), keys)
    return sum(file.size for file in met) > MOST_SEARCHED_BYTES


def _live(last: DataFrame, changes: Changes) -> DataFrame:
    """The rows that the table must hold after a cut."""
    return last.where(f"_op <> '{DELETE}'").select(
        *[quoted(name) for name in lake_columns(changes.table)]
    )


def _may_meet(last: DataFrame, key: Sequence[str], listing: Listing) -> tuple[bool, bool]:
    """Whether a file may hold a key that may have been there, and one that is inserted."""
    # One aggregation for both: executors read the changes from the captures each time.
    is_new = F.col(quoted(FIRST_OP)) == INSERT
    columns = [F.when(of, F.col(quoted(name))) for of in (~is_new, is_new) for name in key]
    counts = [F.count_if(~is_new), F.count_if(is_new)]
    aggregates = last.agg(*counts, *map(F.min, columns), *map(F.max, columns)).collect()[0]

    updates, inserts = aggregates[:2]
    lows, highs = aggregates[2 : 2 + len(columns)], aggregates[2 + len(columns) :]
    width = len(key)
    files = [file.bounds for file in listing.files.values()]
    meets_updated = updates > 0 and any_near(key, lows[:width], highs[:width], files)
    meets_inserted = inserts > 0 and any_near(key, lows[width:], highs[width:], files)
    return meets_updated, meets_inserted


class Append(Writer):
    """Keeps a changelog: one append a cut, without a search for any key."""

    def create(self, changes: Changes) -> bool:
        """Append the first cut, also one without rows."""
        here = self._tables.reads_for_new(changes)
        self._tables.create(changes, changes.arrow if here else self._rows(changes))
        return True

    def _made(self, changes: Changes, current: Listing) -> Actions:
        return actions_of(made_for(changes, current))

    def _write(self, changes: Changes) -> bool:
        """Append a cut, without Spark if the driver may write the file."""
        if changes.in_arrow and self._tables.apply(
            changes,
            lambda listing: written(listing.layout, fitted(changes.arrow, listing.layout.schema)),
        ):
            return True
        self._tables.append(changes, self._rows(changes))
        return True

    def task_writer(self, changes: Changes, *, is_new: bool) -> TaskWriter | None:
        """One for every table that is written without Spark."""
        name = changes.table.name
        if is_new:
            listing = self._tables.begin(changes, lake_schema(changes.table, APPEND))
        else:
            listing = self._tables.listing(name)
        return None if listing is None else ChangesWriter(listing.layout)

    def _rows(self, changes: Changes) -> Any:
        if changes.here:
            return changes.arrow
        return changes.frame(self._tables.session(changes.table.name))


class History(Writer):
    """Keeps versions of rows: a change ends its key's current version and begins the next;
    a delete only ends one.

    Ended versions get files of their own, so that the search for current ones does not grow with
    the history.
    """

    def create(self, changes: Changes) -> bool:
        """Append the first cut's versions."""
        key, columns = changes.table.key, lake_columns(changes.table, SCD2)
        if self._tables.reads_for_new(changes):
            rows = versions(changes.arrow, key).select(columns)
        else:
            frame = changes.frame(self._tables.session(changes.table.name))
            rows = versions_frame(frame, key, columns)
        self._tables.create(changes, rows)
        return True

    def _write(self, changes: Changes) -> bool:
        """Apply a later cut, without Spark if the driver may write the files and what it must
        search is not much.
        """
        return (changes.in_arrow and self._by_driver(changes)) or self._merge(changes)

    def task_writer(self, changes: Changes, *, is_new: bool) -> TaskWriter | None:
        """One for a cut that a task can hold, of a table whose rows can be masked without Spark."""
        listing = listing_for_task(self._tables, changes, SCD2, is_new=is_new)
        return None if listing is None else HistoryWriter(listing, is_new)

    def _made(self, changes: Changes, current: Listing) -> Actions:
        name = changes.table.name
        made = made_for(changes, current)
        if not made:
            return self._ended_and_begun(
                name, current, VersionChanges(changes.arrow, changes.table.key)
            )
        self._tables.inserted.replacing(name, sum(part.replaced for part in made))
        return actions_of(made)

    def _by_driver(self, changes: Changes) -> bool:
        name = changes.table.name
        listing = self._tables.listing(name)
        if listing is None:
            return False
        cut = VersionChanges(changes.arrow, changes.table.key)
        met = searched(listing.files.values(), cut.ends)
        if sum(file.size for file in met) > MOST_SEARCHED_BYTES:
            return False
        return self._tables.apply(
            changes, lambda current: self._ended_and_begun(name, current, cut)
        )

    def _ended_and_begun(self, name: str, current: Listing, cut: VersionChanges) -> Actions:
        return ended_and_begun(name, current, cut, self._tables.inserted)

    def _merge(self, changes: Changes) -> bool:
        """One MERGE: rows with a null for ENDS match nothing and are inserted,
        the others end a version.

        MERGE updates or inserts for each row of its source, never both; so a change comes as two.
        """
        name, key, columns = (
            changes.table.name,
            changes.table.key,
            lake_columns(changes.table, SCD2),
        )
        frame = changes.frame(self._tables.session(name))
        new = versions_frame(frame, key, columns).withColumn(ENDS, F.lit(None).cast("long"))
        rows = new.unionByName(endings_frame(frame, key), allowMissingColumns=True)
        self._tables.partitionable(name, rows).createOrReplaceTempView("changes")
        match = " AND ".join(f"t.{quoted(column)} = s.{quoted(column)}" for column in key)
        names, ends = [quoted(column) for column in columns], f"s.{quoted(ENDS)}"
        with self._tables.fenced(changes) as session:
            session.sql(
                f"MERGE INTO {self._tables.sql_name(name)} t USING changes s "  # noqa: S608 - quoted
                f"ON {match} AND t.{IS_CURRENT} AND {ends} IS NOT NULL "
                f"WHEN MATCHED THEN UPDATE SET {VALID_TO} = {ends}, {IS_CURRENT} = false "
                f"WHEN NOT MATCHED AND {ends} IS NULL THEN INSERT ({', '.join(names)}) "
                f"VALUES ({', '.join(f's.{column}' for column in names)})"
            )
            # The view may hold the rows of the cut.
            session.catalog.dropTempView("changes")
        return True
