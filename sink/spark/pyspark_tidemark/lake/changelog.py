"""A Parquet changelog: every change of a table, one directory a cut, `<root>/<database>/<table>/cut=<end_ts>`.

Invariant: a directory `cut=…` is complete. It is written beside, under a name that Spark's readers skip, and renamed;
a repeated cut finds its directory and does nothing.
"""

import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.changes import Changes
from pyspark_tidemark.lake.target import Applied, table_path

_CUT = "cut="


class ChangelogTarget:
    """The changelogs under one directory."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._spark = spark
        self._root = root

    def position(self, table: TableMeta) -> int | None:
        """The end_ts of the newest cut directory."""
        directory = Path(table_path(self._root, table.name))
        if not directory.is_dir():
            return None
        cuts = [int(entry.name.removeprefix(_CUT)) for entry in directory.iterdir() if entry.name.startswith(_CUT)]
        return max(cuts, default=None)

    def version(self, table: TableMeta) -> int:
        """The newest cut."""
        return self.position(table) or 0

    def create(self, changes: Changes) -> Applied:
        """As `apply`, also without a single row: the table can then be read."""
        directory = Path(table_path(self._root, changes.table.name))
        final = directory / f"{_CUT}{changes.end_ts}"
        if not final.exists():
            staged = directory / f"_staged-{changes.end_ts}"
            shutil.rmtree(staged, ignore_errors=True)
            if changes.few:
                _write(changes, staged)
            else:
                changes.frame(self._spark).write.parquet(str(staged))
            staged.rename(final)
        return Applied(changes.rows, changes.end_ts)

    def apply(self, changes: Changes) -> Applied:
        """Write the cut's directory."""
        return self.create(changes)

    def maintain(self) -> None:
        """Nothing: a changelog is kept as it is."""


def _write(changes: Changes, directory: Path) -> None:
    """A few rows need no Spark job."""
    directory.mkdir(parents=True)
    with (directory / "part-00000.parquet").open("wb") as file:
        pq.write_table(changes.arrow(), file)
        file.flush()
        os.fsync(file.fileno())
