# ruff: noqa: B027 - a changelog has nothing to do where other targets change what they hold
"""Parquet changelogs as a target: every change of a table, one directory a cut,
`<root>/<database>/<table>/cut=<end_ts>`. Their connector reads up to a cut; they keep every change,
so there is no row to repair.

Where the files lie decides how a cut becomes complete:
- `ChangelogTarget`, on a local file system or a mounted one, where a rename is atomic. A directory
  `cut=…` is complete and durable: it is written beside, under a name that Spark's readers skip,
  synced and renamed. A repeated cut finds its directory and does nothing.
- `RemoteChangelog`, behind Hadoop's file systems. No directory is renamed, which an object store
  cannot do in one step: each cut is one file, created exclusively and whole. The cut is complete
  when its file is there, and it is there once, whichever driver wrote it.

Invariant: however large a cut is, one row group of it is in memory (`write_part`).
"""

import base64
import dataclasses
import io
import itertools
import re
import shutil
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JJavaError
from pyarrow.fs import FileSelector
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import LongType, StructField, StructType

from pyspark_tidemark.column_metadata import with_column_ids
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.changes import Changes, Counted
from pyspark_tidemark.lake.checksum import checksum, hexadecimal
from pyspark_tidemark.lake.cut_record import Shown
from pyspark_tidemark.lake.cut_tasks import Part, check_arrived, check_mounted
from pyspark_tidemark.lake.files import (
    Files,
    LocalFiles,
    file_system,
    parquet_file,
    repeating_columns,
    sync,
    sync_place,
)
from pyspark_tidemark.lake.format import APPEND
from pyspark_tidemark.lake.hadoop import HadoopFiles, move, remove
from pyspark_tidemark.lake.manifest import Manifest
from pyspark_tidemark.lake.schema import SchemaChange
from pyspark_tidemark.lake.shards import ShardRows
from pyspark_tidemark.lake.target import (
    Applied,
    Health,
    LakeConnector,
    Retention,
    StoredTable,
    Target,
    check_replaceable,
    rolled_back,
    table_path,
)

CUT = "cut="
"""Begins the name of a cut's directory."""
SINCE = "_since-"
"""Begins the name of a file that marks a ts: cuts up to it are those of an earlier table of the
same name.

It holds the new table's schema, as base64 of one IPC schema message: no cut may have it yet.
"""
PARTS = "part-{:05}.parquet"
PART = PARTS.format(0)
"""The file's name in its cut's directory, where the driver writes it."""
_BY_TASKS = "_written-"
"""Begins the name of a directory for what tasks write of a cut, which Spark's readers skip."""
_GROUP_BYTES = 32 << 20
_FIELD_ID = b"PARQUET:field_id"
_TS = re.compile("[0-9]+")


class Changelog(ABC):
    """The changelogs under one directory; each cut has the schema that the table had then."""

    empties_with_cut = False
    names_are_paths = True
    """A reader of cuts asks for the versions that they name."""

    @abstractmethod
    def position(self, table: TableMeta) -> int | None:
        """The end_ts of the newest cut."""

    @abstractmethod
    def create(self, changes: Changes) -> Applied:
        """As `apply`, also without a single row: the table can then be read."""

    def version(self, table: TableMeta) -> int:
        """The newest cut."""
        return self.position(table) or 0

    def check_continues(self, table: TableMeta, shown: Shown) -> None:
        """By the newest cut that is there; see `VersionedTarget`."""
        if self.version(table) < shown.version:
            raise rolled_back(table.name, f"Bring back the directories up to {CUT}{shown.version}")

    def schema(self, table: TableMeta) -> Any:
        """That of the newest cut, or of the table that has taken the name since."""
        replaced = marked_schema(self._files(table), self.version(table))
        return self._newest_schema(table) if replaced is None else replaced

    def storable(self, schema: Any) -> Any:
        """The format keeps all types of the captures."""
        return schema

    def apply(self, changes: Changes) -> Applied:
        """Write the cut."""
        return self.create(changes)

    def alter(self, table: TableMeta, change: SchemaChange) -> None:
        """Do nothing: the next cut is written with the new schema."""

    def rekey(self, table: TableMeta) -> None:
        """Do nothing: a changelog has no key."""

    def is_empty(self, table: TableMeta) -> bool:
        """Never: a changelog holds changes, and does not know which rows are left."""
        del table
        return False

    def truncate(self, table: TableMeta, ts: int) -> None:
        """Do nothing: a changelog keeps the rows of before."""

    def replace(self, table: TableMeta, ts: int, change: SchemaChange) -> None:  # noqa: ARG002 - each cut has its own
        """Mark from where on the name is another table's:
        readers at a cut leave out the cuts below it.
        """
        mark(self._files(table), ts, with_column_ids(table.schema, table.column_ids))

    def shards(self, table: TableMeta) -> set[str]:
        """None: a changelog holds changes, and does not know of which rows are left."""
        del table
        return set()

    def change_rows(self, table: TableMeta, steps: Sequence[ShardRows]) -> None:
        """Do nothing: a changelog keeps the rows of before."""

    def maintain(self, kept: Retention) -> Health | None:
        """Do nothing: a changelog is kept as it is."""

    def close(self) -> None:
        """Do nothing: no work goes on beside the cuts."""

    @abstractmethod
    def _files(self, table: TableMeta) -> Files:
        """The files in the table's directory."""

    @abstractmethod
    def _newest_schema(self, table: TableMeta) -> Any:
        """That of the newest cut."""


class ChangelogTarget(Changelog):
    """Changelogs on a local file system, or a mounted one."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._spark = spark
        self._root = root

    def position(self, table: TableMeta) -> int | None:
        """The end_ts of the newest cut directory."""
        names = [entry.name for entry in self._directory(table).glob(f"{CUT}*")]
        return max(timestamps(names, CUT, table.name), default=None)

    def create(self, changes: Changes) -> Applied:
        """Write the cut's directory, also without a single row: the table can then be read."""
        final = self._directory(changes.table) / f"{CUT}{changes.end_ts}"
        counted = changes.counted(self._spark) if final.exists() else self._write(changes, final)
        return Applied(counted.rows, changes.end_ts, counted.checksum)

    def task_writer(self, changes: Changes, *, is_new: bool) -> "PartWriter":
        """See `TaskTarget`; files that another try has left go."""
        del is_new
        directory = self._by_tasks(changes)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        return PartWriter(str(directory))

    def drop(self, table: TableMeta) -> None:
        """Remove the table's directory."""
        shutil.rmtree(self._directory(table), ignore_errors=True)

    def rename(self, old: TableMeta, new: TableMeta) -> None:
        """Rename the table's directory."""
        source, target = self._directory(old), self._directory(new)
        if not source.exists():
            return
        if target.exists():
            check_replaceable(APPEND, new.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        sync(target.parent)

    def _files(self, table: TableMeta) -> LocalFiles:
        return LocalFiles(self._directory(table))

    def _newest_schema(self, table: TableMeta) -> Any:
        newest = self._directory(table) / f"{CUT}{self.version(table)}"
        return read_columns(next(iter(sorted(newest.glob("*.parquet")))))

    def _write(self, changes: Changes, final: Path) -> Counted:
        # An earlier try may have died in here: it begins anew.
        staged = final.with_name(f"_staged-{changes.end_ts}")
        shutil.rmtree(staged, ignore_errors=True)
        if changes.by_tasks is not None:
            staged.mkdir()
            counted = changes.by_tasks.counted
            self._take(changes, staged)
        elif changes.in_arrow:
            staged.mkdir(parents=True)
            counted = write_part(changes, staged / PART)
        else:
            changes.frame(self._spark).write.parquet(str(staged))
            counted = changes.counted(self._spark)
        # The manifest acknowledges the cut to the changefeed, which then cleans its rows: files
        # and names have to be on the disk before the rename makes them a cut.
        for path in (*staged.iterdir(), staged):
            sync(path)
        staged.rename(final)
        # The table's own name and its database's may be new as well, made in this life or the last.
        sync(final.parent)
        sync_place(str(final.parent))
        return counted

    def _take(self, changes: Changes, staged: Path) -> None:
        """Move the files that tasks say they have written, and no others, into the cut."""
        # A task that Spark has given up may still write beside them. It finds no directory then.
        directory = self._by_tasks(changes)
        assert changes.by_tasks is not None
        for number, (name, size) in enumerate(changes.by_tasks.parts):
            check_arrived(directory / name, size)
            (directory / name).rename(staged / PARTS.format(number))
        shutil.rmtree(directory, ignore_errors=True)

    def _by_tasks(self, changes: Changes) -> Path:
        return self._directory(changes.table) / f"{_BY_TASKS}{changes.end_ts}"

    def _directory(self, table: TableMeta) -> Path:
        return Path(table_path(self._root, table.name))


@dataclasses.dataclass(frozen=True)
class PartWriter:
    """Implements `TaskWriter`: one file of a cut, by its name in `directory`, and its size."""

    directory: str
    is_divisible = True

    def write(self, changes: Changes) -> Part:
        """See `TaskWriter`."""
        check_mounted(self.directory)
        path = Path(self.directory) / f"{uuid.uuid4()}.parquet"
        counted = write_part(changes, path)
        return Part(counted.rows, int(counted.checksum, 16), (path.name, path.stat().st_size))


class RemoteChangelog(Changelog):
    """Changelogs where Hadoop's file systems reach: one file a table and cut.

    The driver writes it: into memory, or through a file of its own where the cut is large.
    """

    def __init__(self, spark: SparkSession, root: str, scratch: Path) -> None:
        """Large cuts pass through files under `scratch`."""
        self._spark = spark
        self._root = root
        self._scratch = scratch

    def position(self, table: TableMeta) -> int | None:
        """The end_ts of the newest cut whose file is there."""
        ends = timestamps(self._files(table).names(), CUT, table.name)
        # A directory shows before its file does: who died in between has written no cut.
        return next(
            (ts for ts in reversed(ends) if PART in self._files(table, ts).names()),
            None,
        )

    def create(self, changes: Changes) -> Applied:
        """Write the cut's file, also without a single row: the table can then be read."""
        files = self._files(changes.table, changes.end_ts)
        write = self._write_from_memory if changes.here else self._write_from_file
        counted = write(changes, files)
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

    # Below, a file that is there already stays: whoever wrote it wrote the same rows, since the
    # manifest gives a cut that was begun the same end.

    def _write_from_memory(self, changes: Changes, files: HadoopFiles) -> Counted:
        content = io.BytesIO()
        counted = write_part(changes, content)
        files.create_bytes(PART, content.getvalue())
        return counted

    def _write_from_file(self, changes: Changes, files: HadoopFiles) -> Counted:
        with tempfile.TemporaryDirectory(dir=self._scratch) as directory:
            local = Path(directory) / PART
            counted = write_part(changes, local)
            files.upload(PART, local)
            return counted


class ParquetConnector(LakeConnector):
    """Implements `LakeConnector`; a version is a cut's end."""

    def open_target(self, arguments: Arguments, spark: SparkSession, manifest: Manifest) -> Target:
        """See `LakeConnector`."""
        del manifest
        root = arguments.target.path
        if arguments.target.is_remote:
            return RemoteChangelog(spark, root, arguments.checkpoint_dir)
        return ChangelogTarget(spark, root)

    def read(self, spark: SparkSession, table: StoredTable, version: int) -> DataFrame:
        """See `LakeConnector`; the changes up to the version."""
        path = table.path
        files = HadoopFiles(spark, path) if table.uri.is_remote else LocalFiles(Path(path))
        names = files.names()
        # Below the newest mark the name was another table's, whose rows are not those of this one.
        marks = timestamps(names, SINCE, table.name)
        since = max((ts for ts in marks if ts < version), default=-1)
        cuts = timestamps(names, CUT, table.name)
        chosen = [ts for ts in cuts if since < ts <= version]
        if not chosen:
            raise SourceError(
                "ErrCutExpired",
                f"{table.name} has no cut up to {version} any more: it was dropped above that; "
                "choose a later ts",
            )
        parts = [f"{path}/{CUT}{ts}" for ts in chosen] if marks else [path]
        reader = spark.read.option("basePath", path)
        try:
            frame = reader.option("mergeSchema", "true").parquet(*parts)
        except (PySparkException, Py4JJavaError) as err:
            # Spark merges equal types only, and a column may have been widened between two cuts.
            if "CANNOT_MERGE" not in str(err):
                raise
            widest = _widest(path, chosen)
            frame = spark.read.schema(widest).option("basePath", path).parquet(*parts)
        return frame.where(f"cut <= {version}").drop("cut")


def _widest(path: str, chosen: Sequence[int]) -> StructType:
    """All columns of some cuts of a changelog, with types that hold the values of all of them.

    Raises:
        SourceError: ErrSchemaIncompatible.
    """
    system, root = file_system(path)
    files = [file.path for file in system.get_file_info(FileSelector(root, recursive=True))]
    cuts = {f"{CUT}{ts}" for ts in chosen}
    parts = [path for path in files if Path(path).parent.name in cuts and path.endswith(".parquet")]
    schemas = [_columns(part, system) for part in parts]
    try:
        widest = pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as err:
        raise SourceError(
            "ErrSchemaIncompatible",
            f"a column of {path} has types in different cuts that do not fit together ({err}); "
            f"read the directories {CUT}… by themselves",
        ) from None
    return StructType([*from_arrow_schema(widest), StructField("cut", LongType())])


def write_part(changes: Changes, file: Any) -> Counted:
    """Write all rows of a cut, or none, to a path or a binary file; they come in commit order."""
    rows, total = 0, 0
    schema, groups = with_field_ids(changes.table), _row_groups(changes)
    first = list(itertools.islice(groups, 1))
    repeating = repeating_columns(first[0]) if first else []
    groups = itertools.chain(first, groups)
    del first  # it must not stay in memory beside the others
    with pq.ParquetWriter(file, schema, use_dictionary=repeating) as writer:
        for group in groups:
            writer.write_table(group)
            group_rows, group_sum = checksum([group])
            rows, total = rows + group_rows, total + group_sum
    return Counted(rows, hexadecimal(total))


def with_field_ids(table: TableMeta) -> Any:
    """The columns of a table with their identities as Parquet's field ids,
    which readers may choose columns by.
    """
    return pa.schema(
        [
            field.with_metadata({_FIELD_ID: str(table.column_ids[field.name])})
            if field.name in table.column_ids
            else field
            for field in table.schema
        ]
    )


def read_columns(file: Any) -> Any:
    """The pyarrow.Schema of a file, with the identities of its columns."""
    schema = _columns(file)
    ids = {
        field.name: int(field.metadata[_FIELD_ID])
        for field in schema
        if field.metadata and _FIELD_ID in field.metadata
    }
    # Parquet says -1 of a column without an id.
    return with_column_ids(schema, {name: number for name, number in ids.items() if number >= 0})


def _columns(file: Any, system: Any = None) -> Any:
    with parquet_file(system, file) as opened:
        return opened.schema_arrow.remove_metadata()


def _row_groups(changes: Changes) -> Iterator[Any]:
    pending, size = [], 0
    for batch in changes.batches():
        pending.append(batch)
        size += batch.nbytes
        if size >= _GROUP_BYTES:
            yield pa.Table.from_batches(pending)
            pending, size = [], 0
    if pending:
        yield pa.Table.from_batches(pending)


def timestamps(names: Iterable[str], prefix: str, table: str = "") -> list[int]:
    """The ts in the names that begin with `prefix`, ascending.

    Raises:
        SourceError: ErrTargetForeign, a name has another ending, as nothing of ours has.
    """
    matching = [name for name in names if name.startswith(prefix)]
    # As `int` reads them, also `1_0` and digits of other scripts would be numbers.
    strange = [name for name in matching if not _TS.fullmatch(name.removeprefix(prefix))]
    if strange:
        raise SourceError(
            "ErrTargetForeign",
            f"the changelog of {table or 'a table'} holds {strange[0]!r}, which this changefeed did "
            "not make, and readers take for a cut: move it to another directory, then start again",
        )
    return sorted(int(name.removeprefix(prefix)) for name in matching)


def mark(files: Files, ts: int, schema: Any) -> None:
    """Note that the name is another table's above `ts`, with `schema`;
    durable when it returns, harmless when repeated.
    """
    files.create(f"{SINCE}{ts}", base64.b64encode(schema.serialize().to_pybytes()).decode())


def marked_schema(files: Files, newest_cut: int) -> Any:
    """The schema of the table that has taken the name at or above `newest_cut`;
    None if there is none.
    """
    marks = timestamps(files.names(), SINCE)
    if not marks or marks[-1] < newest_cut:
        return None
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(files.read(f"{SINCE}{marks[-1]}"))))
