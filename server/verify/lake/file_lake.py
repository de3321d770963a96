"""Lakes of files, read and repaired by Spark through the connectors of their formats.

A cut of the manifest names a version of each table. `LakeTable` is one table at one cut, as the
rows that were current there, whether the lake keeps rows, all changes, or all versions of a row.
`FileLake` answers questions about them.

Invariants of a repair:
1. The lake's lock is held, so no cut is applied meanwhile; the table holds nothing that the newest
   cut does not show.
2. The keys that differ go and the upstream's rows come in one commit: no version lacks them.
3. The rows' `_commit_ts` is the cut: changes of later cuts are larger, so they win. The table's
   fence stays as it is.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark_tidemark.digest import RangeChecksums
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.columns import map_in_arrow, quoted
from pyspark_tidemark.lake.cut_record import CutRecord, TableCut, versions_at
from pyspark_tidemark.lake.fold import fold_frame
from pyspark_tidemark.lake.format import APPEND, SCD2, SOFT_DELETE, UPSERT
from pyspark_tidemark.lake.iceberg.manifest import CatalogManifest
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.opening import kept_cuts, opened_lake
from pyspark_tidemark.lake.reading import table_frame
from pyspark_tidemark.lake.schema import VALID_FROM, VALID_TO
from pyspark_tidemark.lake.session import errors_only, open_session
from pyspark_tidemark.lake.soft_delete import IS_DELETED
from pyspark_tidemark.lake.target import Repair, StoredTable, open_connector
from pyspark_tidemark.sink_uri import SinkUri

from server.verify.lake.question import (
    Question,
    ShardPart,
    check_columns,
    key_schema,
    whole_extent,
)
from server.verify.spans import Extent

_IDLE_S: Final = 15.0
"""A job that runs claims a cut every ten seconds where this is asked, also while nothing changes,
unless its --idle-cut-seconds is longer.
"""


@dataclass(frozen=True, slots=True)
class LakeTable:
    """One table of the lake, at the cut of a question."""

    uri: SinkUri
    changefeed: str
    cuts: tuple[CutRecord, ...]
    question: Question

    @property
    def mode(self) -> str:
        """Return what the lake keeps of the table: rows, every change, or every version
        of a row.
        """
        mode = next(
            (record.mode for record in self.cuts if record.end_ts == self.question.ts), None
        )
        return mode or self.uri.mode("")

    @property
    def version(self) -> int | None:
        """The version that shows it at the cut; None: the lake has no such table there."""
        return versions_at(self.cuts, self.question.ts).get(self.question.name)

    @property
    def stored(self) -> StoredTable:
        """The table where it lies."""
        return StoredTable(self.uri, self.changefeed, self.question.name)

    def frame(self, spark: SparkSession) -> DataFrame | None:
        """The rows, in the columns of the upstream; None if there is no such table.

        Raises:
            SourceError: ErrVerifyColumns, the lake lacks columns; ErrCutExpired, its version is
                gone.
        """
        if self.version is None:
            return None
        question = self.question
        current = self._current(table_frame(spark, self.uri, self.cuts, question.name, question.ts))
        check_columns(question.name, question.schema.names, current.columns)
        if question.part is not None:
            current = current.where(_is_part(question.part))
        if question.spans is not None:
            current = current.where(question.spans.condition(quoted))
        return current.select(*[quoted(name) for name in question.schema.names])

    def _current(self, stored: DataFrame) -> DataFrame:
        ts = self.question.ts
        if self.mode == APPEND:
            # A TRUNCATE is no change of a row, so older changes must not be folded into rows.
            changes = stored.where(f"_commit_ts <= {ts} and _commit_ts > {self.question.since}")
            return fold_frame(changes, self.question.key).where("_op <> 'delete'")
        if self.mode == SCD2:
            return stored.where(f"{VALID_FROM} <= {ts} and coalesce({VALID_TO} > {ts}, true)")
        if self.mode == SOFT_DELETE:
            return stored.where(f"not {IS_DELETED}")
        return stored


class FileLake:
    """Implements `server.verify.lake.job.LakeSide`;
    the session is opened at the first question that needs it.
    """

    def __init__(
        self,
        uri: SinkUri,
        changefeed: str,
        directory: Path,
        *,
        manifest: FileManifest | CatalogManifest | None = None,
        session: SparkSession | None = None,
        cores: str = "*",
    ) -> None:
        """`manifest` is the lake's, open and so locked, for a repair;
        `cores` are how many read, `*` all.
        """
        self._uri = uri
        self._changefeed = changefeed
        self._directory = directory
        self._manifest = manifest
        self._session = session
        self._cores = cores
        self._cuts: list[CutRecord] = kept_cuts(uri, changefeed, lambda: self._spark)

    @classmethod
    @contextmanager
    def open(
        cls, uri: SinkUri, changefeed: str, directory: Path, *, locked: bool, cores: str = "*"
    ) -> Iterator["FileLake"]:
        """The lake for the block.

        Raises:
            SourceError: ErrTargetBusy, its job runs; ErrTargetForeign, ErrManifestCorrupt.
        """
        lake = cls(uri, changefeed, directory, cores=cores)
        with ExitStack() as stack:
            if locked:
                lake._manifest = stack.enter_context(
                    opened_lake(uri, changefeed, lambda: lake._spark, idle_s=_IDLE_S)
                )
                # Read again: its job may have ended a cut before the lock was ours.
                lake._cuts = lake._manifest.cuts()
            yield lake

    def cut(self, at: int | None) -> dict[str, Any]:
        """See `LakeSide.cut`."""
        cuts = [cut for cut in self._cuts if at is None or cut.end_ts <= at]
        if not cuts:
            why = (
                f"begins at {self._cuts[0].end_ts}; choose a later --at"
                if self._cuts
                else "has no cut yet, as its lake job has written nothing: `tidemark cli changefeed "
                "list` tells how the job is"
            )
            raise SourceError("ErrCutNotFound", f"the lake {self._uri.path} {why}")
        newest = cuts[-1]
        return {
            "cut": newest.end_ts,
            "mode": newest.mode or self._uri.mode(""),
            "beyond": {},
            "newest_only": False,
        }

    def extent(self, question: Question) -> Extent:
        """See `LakeSide.extent`; reads the column only."""
        frame = self._table(dataclasses.replace(question, schema=key_schema(question))).frame(
            self._spark
        )
        if frame is None:
            return Extent(0)
        column = F.col(quoted(question.span_column))
        rows, least, greatest = frame.agg(F.count("*"), F.min(column), F.max(column)).collect()[0]
        return whole_extent([(rows, least, greatest)])

    def range_checksums(self, question: Question) -> bytes:
        """See `LakeSide.range_checksums`."""
        range_checksums = RangeChecksums(question.ranges)
        frame = self._table(question).frame(self._spark)
        if frame is not None:
            # Each task holds the sums of all ranges: no more tasks than cores, however many files
            # the table has.
            few = frame.coalesce(self._spark.sparkContext.defaultParallelism)
            for row in map_in_arrow(few, question.summed, "leaves binary").toLocalIterator():
                range_checksums.merge(bytes(row.leaves))
        return range_checksums.to_bytes()

    def rows(self, question: Question) -> Any:
        """See `LakeSide.rows`."""
        frame = self._table(question).frame(self._spark)
        if frame is None:
            return question.answer_schema.empty_table()
        chosen = map_in_arrow(
            frame, question.chosen_rows, from_arrow_schema(question.answer_schema)
        )
        return chosen.toArrow().cast(question.answer_schema)

    def check_repair(self, question: Question) -> None:
        """See `LakeSide.check_repair`; it must hold no change that the newest cut does not show."""
        check_repair(self._spark, self._table(question), self._cuts[-1])

    def repair(self, question: Question, gone: Any, live: Any) -> int:
        """See `LakeSide.repair`."""
        assert self._manifest is not None, "a lake that is repaired is locked"
        version = repair_table(self._spark, self._table(question), gone, live)
        publish(self._manifest, question.name, version)
        self._cuts = self._manifest.cuts()
        return version

    @property
    def _spark(self) -> SparkSession:
        if self._session is None:
            self._session = open_session(
                master=f"local[{self._cores}]",
                driver_memory="1g",
                directory=self._directory,
                lake=self._uri.format,
                # It prints to the terminal of whoever verifies.
                extra=errors_only(self._directory.resolve()),
            )
        return self._session

    def _table(self, question: Question) -> LakeTable:
        return LakeTable(self._uri, self._changefeed, tuple(self._cuts), question)


def _is_part(part: ShardPart) -> Column:
    column = F.col(quoted(part.column))
    if part.others is None:
        return column == F.lit(part.shard)
    return column.isNull() | ~column.isin(*part.others)


def check_repair(spark: SparkSession, table: LakeTable, newest: CutRecord) -> None:
    """See that a table can be put right.

    Raises:
        SourceError: ErrRepairUnsupported, it has no rows to put right, only history, or has changes
            of no cut.
    """
    name, version = table.question.name, table.version
    if table.mode != UPSERT or version is None:
        raise SourceError(
            "ErrRepairUnsupported",
            f"table {name}: only tables of mode upsert are repaired in place, not histories; "
            "write others anew with a new changefeed",
        )
    assert table.question.ts == newest.end_ts, "the newest cut is what is repaired"

    changes = open_connector(table.uri.format).changes_after(spark, table.stored, version)
    if changes:
        raise SourceError(
            "ErrRepairUnsupported",
            f"table {name} has changes ({changes}) that no cut shows, of somebody else or of a "
            "cut that was not ended: "
            "start the lake's job, stop it when it has applied a cut, and verify again",
        )


def repair_table(spark: SparkSession, table: LakeTable, gone: Any, live: Any) -> int:
    """Remove keys, add rows (pyarrow.Tables); returns the new version, or snapshot id."""
    repair = Repair(table.question.ts, table.question.key, gone, live)
    return open_connector(table.uri.format).repair(spark, table.stored, repair)


def publish(manifest: FileManifest | CatalogManifest, table: str, version: int) -> None:
    """The newest cut once more, with the table's new version."""
    newest = manifest.last
    assert newest is not None, "a cut was compared"
    others = [item for item in newest.tables if item.table != table]
    rows = sum(item.rows for item in newest.tables if item.table == table)
    manifest.replace(dataclasses.replace(newest, tables=(*others, TableCut(table, rows, version))))
