"""Lakes of files, in Spark: Delta, Iceberg and Parquet tables at the version that the manifest names for a cut."""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark_tidemark.digest import Leaves
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.changes import map_in_arrow
from pyspark_tidemark.lake.cuts import CutRecord
from pyspark_tidemark.lake.manifest import FileManifest, cuts_in
from pyspark_tidemark.lake.predicate import quoted
from pyspark_tidemark.lake.session import open_session
from pyspark_tidemark.lake.targets import cut_files, opened_files
from pyspark_tidemark.sink_uri import SinkUri

from server.verify.lake.files import repair
from server.verify.lake.files.table import LakeTable
from server.verify.lake.question import Question, key_schema, whole_extent
from server.verify.spans import Extent

_IDLE_S = 10.0
"""A job that runs claims a cut every three seconds, also while nothing changes."""


class FileLake:
    """Implements `server.verify.lake.job.LakeSide`; the session is opened at the first question that needs it."""

    def __init__(
        self,
        uri: SinkUri,
        changefeed: str,
        directory: Path,
        *,
        manifest: FileManifest | None = None,
        session: SparkSession | None = None,
        cores: str = "*",
    ) -> None:
        """`manifest` is the lake's, open and so locked, for whoever repairs; `cores` are how many read, `*` all."""
        self._uri = uri
        self._changefeed = changefeed
        self._directory = directory
        self._manifest = manifest
        self._session = session
        self._cores = cores
        self._cuts: list[CutRecord] = cuts_in(cut_files(uri, lambda: self._spark))

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
                lake._manifest = stack.enter_context(opened_files(uri, changefeed, lambda: lake._spark, idle_s=_IDLE_S))
                lake._cuts = lake._manifest.cuts()
            yield lake

    def cut(self, at: int | None) -> dict[str, Any]:
        """See `LakeSide.cut`."""
        found = [cut for cut in self._cuts if at is None or cut.end_ts <= at]
        if not found:
            begins = f"begins at {self._cuts[0].end_ts}" if self._cuts else "has no cut yet"
            raise SourceError("ErrCutNotFound", f"the lake {self._uri.path} {begins}; choose a later --at")
        mode = found[-1].mode or self._uri.mode("")
        return {"cut": found[-1].end_ts, "mode": mode, "beyond": {}, "newest_only": False}

    def extent(self, question: Question) -> Extent:
        """See `LakeSide.extent`; reads the column only."""
        frame = self._table(dataclasses.replace(question, schema=key_schema(question))).frame(self._spark)
        if frame is None:
            return Extent(0)
        column = F.col(quoted(question.key[0]))
        rows, least, greatest = frame.agg(F.count("*"), F.min(column), F.max(column)).collect()[0]
        return whole_extent([(rows, least, greatest)])

    def leaves(self, question: Question) -> bytes:
        """See `LakeSide.leaves`; as many tasks as cores, since each of them holds sums of all ranges."""
        leaves = Leaves(question.ranges)
        frame = self._table(question).frame(self._spark)
        if frame is not None:
            few = frame.coalesce(self._spark.sparkContext.defaultParallelism)
            for row in map_in_arrow(few, question.summed, "leaves binary").toLocalIterator():
                leaves.merge(bytes(row.leaves))
        return leaves.to_bytes()

    def rows(self, question: Question) -> Any:
        """See `LakeSide.rows`."""
        frame = self._table(question).frame(self._spark)
        if frame is None:
            return question.answer_schema.empty_table()
        chosen = map_in_arrow(frame, question.chosen_rows, from_arrow_schema(question.answer_schema))
        return chosen.toArrow().cast(question.answer_schema)

    def check_repair(self, question: Question) -> None:
        """See `LakeSide.check_repair`."""
        table, newest = self._table(question), self._cuts[-1]
        repair.check(self._spark, table, newest)

    def repair(self, question: Question, gone: Any, live: Any) -> int:
        """See `LakeSide.repair`."""
        assert self._manifest is not None, "a lake that is repaired is locked"
        version = repair.repair(self._spark, self._table(question), gone, live)
        repair.publish(self._manifest, question.name, version)
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
                extra={},
            )
        return self._session

    def _table(self, question: Question) -> LakeTable:
        return LakeTable(self._uri, self._changefeed, tuple(self._cuts), question)
