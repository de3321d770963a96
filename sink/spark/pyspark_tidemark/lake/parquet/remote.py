"""A Parquet changelog behind Hadoop's file systems: one file a table and cut,
`…/cut=<end_ts>/part-00000.parquet`.

Invariant: the file is created exclusively and whole, so a cut is complete when its file is there,
and it is there once, whichever driver wrote it. No directory is renamed, which an object store
cannot do in one step. The driver writes it: into memory, or through a file of its own where the cut
is large.
"""

import io
import tempfile
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.changes import Changes, Counted
from pyspark_tidemark.lake.directory import move, remove
from pyspark_tidemark.lake.hadoop import HadoopFiles
from pyspark_tidemark.lake.mode import APPEND
from pyspark_tidemark.lake.parquet.changelog import CUT, Changelog
from pyspark_tidemark.lake.parquet.part import PART, read_columns, write_part
from pyspark_tidemark.lake.target import Applied, check_replaceable, table_path


class RemoteChangelog(Changelog):
    """Where Hadoop's file systems reach."""

    def __init__(self, spark: SparkSession, root: str, scratch: Path) -> None:
        """Large cuts pass through files under `scratch`."""
        self._spark = spark
        self._root = root
        self._scratch = scratch

    def position(self, table: TableMeta) -> int | None:
        """The end_ts of the newest cut whose file is there."""
        ends = sorted(
            (
                int(name.removeprefix(CUT))
                for name in self._files(table).names()
                if name.startswith(CUT)
            ),
            reverse=True,
        )
        return next((end_ts for end_ts in ends if PART in self._files(table, end_ts).names()), None)

    def create(self, changes: Changes) -> Applied:
        """Write the cut's file, also without a single row: the table can then be read."""
        files = self._files(changes.table, changes.end_ts)
        counted = self._create(changes, files) if changes.here else self._upload(changes, files)
        return Applied(counted.rows, changes.end_ts, counted.checksum)

    def drop(self, table: TableMeta) -> None:
        """Remove the table's directory."""
        remove(self._spark, table_path(self._root, table.name))

    def rename(self, old: TableMeta, new: TableMeta) -> None:
        """Rename the table's directory, where that is one step; raises as `move`."""
        if self.position(old) is not None and self.position(new) is not None:
            check_replaceable(APPEND, new.name)
        move(self._spark, table_path(self._root, old.name), table_path(self._root, new.name))

    def _files(self, table: TableMeta, end_ts: int | None = None) -> HadoopFiles:
        path = table_path(self._root, table.name)
        return HadoopFiles(self._spark, path if end_ts is None else f"{path}/{CUT}{end_ts}")

    def _newest_schema(self, table: TableMeta) -> Any:
        with tempfile.TemporaryDirectory(dir=self._scratch) as directory:
            local = Path(directory) / PART
            self._files(table, self.version(table)).download(PART, local)
            return read_columns(local)

    @staticmethod
    def _create(changes: Changes, files: HadoopFiles) -> Counted:
        content = io.BytesIO()
        counted = write_part(changes, content)
        files.create_bytes(PART, content.getvalue())
        return counted

    def _upload(self, changes: Changes, files: HadoopFiles) -> Counted:
        with tempfile.TemporaryDirectory(dir=self._scratch) as directory:
            local = Path(directory) / PART
            counted = write_part(changes, local)
            files.upload(PART, local)
            return counted
