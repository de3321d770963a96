"""A table of a lake of files as rows at a cut, whatever it keeps: rows, every change, or every version of a row."""

from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark_tidemark.lake.cuts import CutRecord, versions_at
from pyspark_tidemark.lake.fold import fold_frame
from pyspark_tidemark.lake.mode import APPEND, SCD2, VALID_FROM, VALID_TO
from pyspark_tidemark.lake.predicate import quoted
from pyspark_tidemark.lake.reading import table_frame
from pyspark_tidemark.lake.target import table_path
from pyspark_tidemark.sink_uri import SinkUri

from server.verify.lake.question import Question, check_columns


@dataclass(frozen=True, slots=True)
class LakeTable:
    """One table of the lake, at a cut."""

    uri: SinkUri
    changefeed: str
    cuts: tuple[CutRecord, ...]
    asked: Question

    @property
    def mode(self) -> str:
        """What the lake keeps of it."""
        mode = next((record.mode for record in self.cuts if record.end_ts == self.asked.ts), None)
        return mode or self.uri.mode("")

    @property
    def version(self) -> int | None:
        """What shows it at the cut; None: the lake has no such table there."""
        return versions_at(self.cuts, self.asked.ts).get(self.asked.name)

    @property
    def path(self) -> str:
        """Its directory."""
        return table_path(self.uri.path, self.asked.name)

    def frame(self, spark: SparkSession) -> DataFrame | None:
        """The rows, in the columns of the upstream; None if there is no such table.

        Raises:
            SourceError: ErrVerifyColumns, the lake lacks columns; ErrCutExpired, its version is gone.
        """
        if self.version is None:
            return None
        found = self._current(table_frame(spark, self.uri, self.cuts, self.asked.name, self.asked.ts))
        check_columns(self.asked.name, self.asked.schema.names, found.columns)
        if self.asked.spans is not None:
            found = found.where(self.asked.spans.condition(quoted))
        return found.select(*[quoted(name) for name in self.asked.schema.names])

    def _current(self, stored: DataFrame) -> DataFrame:
        ts = self.asked.ts
        if self.mode == APPEND:
            changes = stored.where(f"_commit_ts <= {ts} and _commit_ts > {self.asked.since}")
            return fold_frame(changes, self.asked.key).where("_op <> 'delete'")
        if self.mode == SCD2:
            return stored.where(f"{VALID_FROM} <= {ts} and coalesce({VALID_TO} > {ts}, true)")
        return stored
