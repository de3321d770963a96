"""The Delta tables under one directory, by name: their listings, and commits with the fence, by
Spark or without it.

The fence is a Delta transaction (`txn`) with the changefeed as its application and a cut's end_ts
as its version: the end_ts up to which the table has its changes.

Invariant: a table's cached listing is dropped after every commit by Spark, and after every failed
commit of ours, so that the table is read again.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, DataFrameWriter, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from pyspark_tidemark.column_metadata import COLUMN_ID, with_column_ids, without_metadata
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.jvm import java_classes
from pyspark_tidemark.lake.changes import Changes
from pyspark_tidemark.lake.columns import quoted
from pyspark_tidemark.lake.delta.checkpoints import CHECKPOINT_EVERY, Checkpoints
from pyspark_tidemark.lake.delta.files import written
from pyspark_tidemark.lake.delta.frames import identified, partitioned, without_null_texts
from pyspark_tidemark.lake.delta.inserted import Inserted
from pyspark_tidemark.lake.delta.log import (
    Listing,
    check_whole,
    commit,
    commit_file,
    commit_info,
    commit_on_disk,
    commits_between,
    committed_at,
    continues,
    fence,
    in_commit_timestamp,
    listing,
    positions,
    replayed,
    settle,
    settle_checkpoint,
    version_of,
)
from pyspark_tidemark.lake.delta.partitions import check_columns, fault_of
from pyspark_tidemark.lake.delta.protocol import MAPPING, VECTORS, creation, needs_mapping
from pyspark_tidemark.lake.delta.task_writers import actions_of, made_for
from pyspark_tidemark.lake.files import RESTORE
from pyspark_tidemark.lake.partitioning import IDENTITY, PartitionField, PartitionRules
from pyspark_tidemark.lake.target import removed, rolled_back, table_path

# Of plans over a few thousand rows, which cost more to compile than to interpret.
_FEW_ROWS_SETTINGS = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
_FENCE = "spark.databricks.delta.write."
_TRIES = 5
_UNSETTLED_MOST = 8
"""Versions that one cut can put into a table: its rows, columns, a compaction."""
_ALTERED = "CHANGE COLUMNS"
COMPACTED = "COMPACT"
"""What the history calls a version with the same rows in other files."""
_COLUMN_ID = COLUMN_ID.decode()
_KEEPS_POSITIONS = "delta.setTransactionRetentionDuration"
"""How long Delta remembers the transactions of applications; for ever by default."""
Actions = Sequence[Mapping[str, Any]]


def app_id(changefeed: str) -> str:
    """The application whose transactions say which cuts of a changefeed a table has."""
    return f"tidemark:{changefeed}"


class DeltaTables:
    """The way to Delta of one changefeed's lake, by table name."""

    def __init__(
        self,
        spark: SparkSession,
        root: str,
        changefeed: str,
        *,
        soft_delete: bool = False,
        deletion_vectors: bool = True,
        partition_rules: PartitionRules | None = None,
    ) -> None:
        """`deletion_vectors` and `partition_rules` are for tables that are made; others go on as
        they are.
        """
        self._partition_rules = partition_rules or PartitionRules()
        self._properties = {
            VECTORS: str(deletion_vectors).lower(),
            "delta.checkpointInterval": str(CHECKPOINT_EVERY),
        }
        self._spark = spark
        self._classes = java_classes(spark)
        self._root = root
        self._app_id = app_id(changefeed)
        self._sessions: dict[str, SparkSession] = {}
        self._listings: dict[str, Listing | None] = {}
        self._positioned = set[str]()
        """The tables that were asked for their positions, in this life of the job."""
        self._newest: dict[str, int] = {}
        """The newest version of each table that is known to go on from what the cuts show."""
        self._commit_files: dict[str, tuple[int, tuple[int, int, int] | None]] = {}
        """A version of each table, and what tells its file in the log from another one."""
        self._begun: dict[str, Actions] = {}
        """What makes tables whose first version is yet to be committed."""
        self._lock = threading.Lock()
        self._checkpoints = Checkpoints(spark, self._checkpoint)
        self.inserted = Inserted(soft_delete=soft_delete)

    def path(self, name: str) -> str:
        """The table's directory."""
        return table_path(self._root, name)

    def sql_name(self, name: str) -> str:
        """The table in a statement."""
        return f"delta.{quoted(self.path(name))}"

    def session(self, name: str) -> SparkSession:
        """A table's own session."""
        # The fence is configuration of a session, and tables are written in parallel.
        with self._lock:
            if name not in self._sessions:
                self._sessions[name] = self._spark.newSession()
            return self._sessions[name]

    def sql(self, name: str, statement: str) -> None:
        """Let Spark change the table."""
        with self._settled(name):
            self.session(name).sql(statement)
        self.forget_listing(name)

    def save(self, name: str, writer: DataFrameWriter) -> None:
        """Let Spark write the table."""
        with self._settled(name):
            writer.save(self.path(name))
        self.forget_listing(name)

    def snapshot(self, name: str) -> Any:
        """Delta's own snapshot object, current."""
        none = self._classes.scala.Option.empty()
        return self._log(name).update(False, none, none)  # noqa: FBT003 - Scala's signature: staleness is acceptable

    def settle(self) -> None:
        """Wait for checkpoints that are being written beside the cuts."""
        self._checkpoints.settle()

    def forget(self, name: str) -> None:
        """Let Delta forget a table, whose directory was moved or removed."""
        path = self._classes.org.apache.hadoop.fs.Path(self.path(name))
        self._deltas.invalidateCache(self._spark._jsparkSession, path)  # noqa: SLF001 - Delta has no Python call for a table's transactions
        self._listings.pop(name, None)
        self._newest.pop(name, None)
        self._commit_files.pop(name, None)
        with self._lock:
            # In the JVM a session is some hundred KB of settings and catalogs.
            self._sessions.pop(name, None)
        self._checkpoints.forget(name)

    @property
    def _is_local(self) -> bool:
        return "://" not in self._root

    @property
    def _deltas(self) -> Any:
        return self._classes.org.apache.spark.sql.delta.DeltaLog

    def _log(self, name: str) -> Any:
        return self._deltas.forTable(self._spark._jsparkSession, self.path(name))  # noqa: SLF001 - Delta has no Python call for a table's transactions

    def version(self, name: str) -> int:
        """The newest Delta version; -1 if there is no table."""
        current = self._listings.get(name)
        return int(self.snapshot(name).version()) if current is None else current.version

    def check_continues(self, name: str, version: int) -> None:
        """Check that the table shows what it showed at `version`, or what came after that.

        Raises:
            SourceError: ErrTableRemoved, ErrTableRolledBack.
        """
        newest = self.version(name)
        if newest < 0:
            raise removed(name)
        is_continued = newest == version
        if newest > version:
            after = commits_between(self._log(name), self._classes, version + 1, newest)
            is_continued = continues(version, after)
        if not is_continued:
            raise rolled_back(
                name, f"RESTORE TABLE {self.sql_name(name)} TO VERSION AS OF {version}"
            )
        self._newest[name] = max(newest, self._newest.get(name, newest))

    def committed_at(self, name: str, version: int) -> datetime | None:
        """When a version was written; None: the log does not go back so far."""
        return committed_at(self._log(name), self._classes, version)

    def schema(self, name: str) -> Any:
        """The pyarrow.Schema of the newest version, with the identities of its columns."""
        current = self.listing(name)
        text = (
            self.snapshot(name).schema().json()
            if current is None
            else current.metadata["schemaString"]
        )
        fields = json.loads(text)
        ids = {
            field["name"]: field["metadata"][_COLUMN_ID]
            for field in fields["fields"]
            if _COLUMN_ID in field["metadata"]
        }
        return with_column_ids(to_arrow_schema(StructType.fromJson(fields), timezone="UTC"), ids)

    def position(self, name: str) -> int | None:
        """The end_ts in the table's transactions; None if there is no table.

        Raises:
            SourceError: ErrTargetForeign, the table was not written by this changefeed, or is
            another one of it.
        """
        if self._is_local and not Path(self.path(name), "_delta_log").is_dir():
            return None
        current = self.listing(name)
        snapshot = self.snapshot(name) if current is None else None
        if snapshot is not None and snapshot.version() < 0:
            return None
        by_app = positions(snapshot) if current is None else current.positions
        if self._is_local and name not in self._positioned:
            # A job that died has perhaps put them there, and not yet made them durable.
            settle(self.path(name), max(-1, self.version(name) - _UNSETTLED_MOST))
            self._positioned.add(name)
        if self._app_id not in by_app:
            raise self._unknown(name, snapshot)
        self._check_name(name, by_app)
        return by_app[self._app_id]

    def _unknown(self, name: str, snapshot: Any) -> SourceError:
        """The error for a table that does not say which cuts of this changefeed it has; `snapshot`
        is Delta's, None where all that the table asks for is known here.
        """
        if snapshot is not None:
            kept = version_of(snapshot)[1]["configuration"].get(_KEEPS_POSITIONS)
            if kept is not None:
                return SourceError(
                    "ErrTargetForeign",
                    f"somebody has set {_KEEPS_POSITIONS} of {name} to {kept!r}, and so Delta has "
                    f"forgotten which cuts the table has: ALTER TABLE {self.sql_name(name)} UNSET "
                    f"TBLPROPERTIES ('{_KEEPS_POSITIONS}'), then start the job again; if that does "
                    "not help, create a new changefeed with a new target",
                )
        return SourceError(
            "ErrTargetForeign",
            f"{self.path(name)} exists, but not by this changefeed; choose another --target",
        )

    def _check_name(self, name: str, by_app: Mapping[str, int]) -> None:
        names = [each for each in by_app if each.startswith(self._app_id_of_name(""))]
        if names and self._app_id_of_name(name) not in names:
            others = ", ".join(each.removeprefix(self._app_id_of_name("")) for each in names)
            raise SourceError(
                "ErrTargetForeign",
                f"{self.path(name)} is not {name}, but {others}: somebody else has put it there. "
                "Bring the table back as it was, then start the job again; or create a new "
                "changefeed with a new target",
            )

    def _app_id_of_name(self, name: str) -> str:
        """The application whose transaction says that a table of this lake has, or had, a name."""
        return f"{self._app_id}:table:{name}"

    def add_name(self, name: str, new: str) -> None:
        """Commit that the table gets another name, before its directory moves; harmless when
        repeated.
        """
        names = [fence(self._app_id_of_name(each), 0) for each in (name, new)]
        self.alter(name, lambda *_: names)

    def reads_for_new(self, changes: Changes) -> bool:
        """Whether this process reads the first cut of a table: Spark, which takes less than Arrow,
        gets no rows of a table on a disk of this machine.
        """
        return changes.in_arrow if self._is_local else changes.here

    def create(self, changes: Changes, rows: Any) -> None:
        """Make the table, with its first rows (pyarrow.Table or DataFrame) and the identities of
        its columns.

        Raises:
            SourceError: ErrTargetBusy.
        """
        if self._is_local and isinstance(rows, pa.Table):
            self._begin(changes, rows)
            return
        name = changes.table.name
        frame = identified(self._frame(changes, rows), changes.table.column_ids)
        mapping = MAPPING if needs_mapping(frame.columns) else {}
        columns = self._partitions_to_make(name, to_arrow_schema(frame.schema, timezone="UTC"))
        with self.fenced(changes):
            writer = partitioned(frame, columns).options(**self._properties | mapping)
            writer.mode("append").save(self.path(name))

    def begin(self, changes: Changes, schema: Any) -> Listing | None:
        """What the first version of a table with the columns of `schema` will show before it has
        rows, which are then written into its directory; `create_made` commits them.

        None: only Delta may write to the table.
        """
        if not self._is_local:
            return None
        name = changes.table.name
        nothing = Listing.before_the_first(self.path(name))
        columns = self._partitions_to_make(name, schema)
        ids = changes.table.column_ids
        made = creation(without_metadata(schema), ids, self._properties, columns)
        made.append(fence(self._app_id_of_name(name), 0))
        Path(self.path(name), "_delta_log").mkdir(parents=True, exist_ok=True)
        self._begun[name] = made
        return nothing.after(made)

    def create_made(self, changes: Changes) -> None:
        """Make the table that was begun, with the files that tasks have written.

        Raises:
            SourceError: ErrTargetBusy, ErrTargetUnusable.
        """
        begun = Listing.before_the_first(self.path(changes.table.name)).after(
            self._begun[changes.table.name]
        )
        self._make(changes, actions_of(made_for(changes, begun)))

    def _begin(self, changes: Changes, rows: Any) -> None:
        """Make the table without Spark: its first version has protocol, metadata and rows."""
        begun = self.begin(changes, rows.schema)
        assert begun is not None, "on other file systems Spark makes tables"
        self._make(changes, written(begun.layout, rows))

    def _make(self, changes: Changes, rows: Actions) -> None:
        name = changes.table.name
        nothing, made = Listing.before_the_first(self.path(name)), self._begun.pop(name)
        if not self.commit(changes, nothing, [*made, *rows]):
            raise SourceError("ErrTargetBusy", f"somebody else makes {name}", retryable=True)

    def append(self, changes: Changes, rows: Any) -> None:
        """Commit rows (pyarrow.Table or DataFrame), fenced by the cut's end."""
        self._write(changes, self._frame(changes, rows))

    def overwrite(self, changes: Changes, rows: DataFrame) -> None:
        """Commit rows in the place of all that the table holds, fenced by the cut's end."""
        self._write(changes, rows, "overwrite")

    def _frame(self, changes: Changes, rows: Any) -> Any:
        if not isinstance(rows, pa.Table):
            return rows
        session = self.session(changes.table.name)
        return session.createDataFrame(rows, from_arrow_schema(rows.schema)).coalesce(1)

    def _write(self, changes: Changes, frame: DataFrame, mode: str = "append") -> None:
        name = changes.table.name
        with self.fenced(changes, is_repeatable=mode == "overwrite"):
            rows = self.partitionable(name, frame)
            rows.write.format("delta").mode(mode).save(self.path(name))

    def check_partitions(self, name: str) -> None:
        """Check that the table is partitioned as its rule says, if it has one. A column of the rule
        that the table has not may have got another name since, or be one of an earlier table.

        Raises:
            SourceError: ErrPartitionUnsupported.
        """
        rule = self._partition_rules.of(name)
        if not rule:
            return
        there, schema = self._partition_columns(name), self.schema(name)
        possible = [field.column for field in rule if not fault_of(field, schema)]
        is_whole = len(possible) == len(rule)
        if set(possible) - set(there) or (is_whole and set(there) != set(possible)):
            raise SourceError(
                "ErrPartitionUnsupported",
                f"{name} is partitioned by {', '.join(there) or 'no column'}, and partition-by "
                f"says {', '.join(map(str, rule))}: a Delta table keeps the partitions that it was made "
                "with. Take the rule back, or start a new changefeed and target",
            )

    def _partitions_to_make(self, name: str, schema: Any) -> list[str]:
        fields = self._partition_rules.of(name)
        check_columns(name, fields, schema)
        return [field.column for field in fields]

    def partitions_anew(self, name: str, schema: Any) -> list[str]:
        """The columns that are to partition a table which is another one now, with the columns of
        `schema` (pyarrow.Schema): those of its rule, or else those of before, if it has them.
        """
        fields = self._partition_rules.of(name) or tuple(
            PartitionField(IDENTITY, column) for column in self._partition_columns(name)
        )
        return [field.column for field in fields if not fault_of(field, schema)]

    def partitionable(
        self, name: str, frame: DataFrame, *, is_written: Column | None = None
    ) -> DataFrame:
        """See `without_null_texts`."""
        return without_null_texts(frame, self._partition_columns(name), is_written)

    def _partition_columns(self, name: str) -> Sequence[str]:
        current = self.listing(name)
        if current is not None:
            return current.layout.partitions
        # As it was seen last: the columns change with another table only.
        metadata = json.loads(self._log(name).unsafeVolatileSnapshot().metadata().json())
        return list(metadata["metaData"]["partitionColumns"])

    def alter(
        self, name: str, evolved: Callable[[Mapping[str, Any], Mapping[str, Any]], Actions]
    ) -> None:
        """Commit what `evolved` makes of the newest version's metadata and protocol;
        the rows stay as they are.

        Raises:
            SourceError: ErrTargetBusy.
        """
        # Somebody may meanwhile have asked for what only Delta knows: then nothing is changed yet.
        if self.listing(name) is not None:
            is_changed = self.change(
                name, lambda current: evolved(current.metadata, current.protocol)
            )
            if is_changed or self.listing(name) is not None:
                return
        snapshot = self.snapshot(name)
        version, metadata, protocol = version_of(snapshot)
        info = commit_info(_ALTERED, {}, version)
        info["commitInfo"] |= in_commit_timestamp(metadata, int(snapshot.timestamp()))
        actions = [info, *evolved(metadata, protocol)]
        if len(actions) > 1 and not self._commit(name, version + 1, actions):
            raise SourceError(
                "ErrTargetBusy", f"somebody else keeps writing to {name}", retryable=True
            )

    def change(self, name: str, made: Callable[[Listing], Actions]) -> bool:
        """Commit other columns without Spark, by the actions `made` from the newest version,
        and again if somebody else was faster.

        False: only Delta may write to the table, or `made` commits nothing.

        Raises:
            SourceError: ErrTargetBusy.
        """
        for _ in range(_TRIES):
            current = self.listing(name)
            actions = made(current) if current is not None else ()
            if current is None or not actions:
                return False
            if self._put(name, current, [commit_info(_ALTERED, {}, current.version), *actions]):
                return True
        raise SourceError("ErrTargetBusy", f"somebody else keeps writing to {name}", retryable=True)

    def listing(self, name: str) -> Listing | None:
        """What the table's newest version shows; None if only Delta may write to the table.

        On other file systems than the local one that is every table: pyarrow would need credentials
        of its own.
        """
        current = self._listings.get(name)
        if (current is None or not current.fresh) and self._is_local:
            path = self.path(name)
            current = replayed(path)
            if current is None:
                if name not in self._positioned:
                    check_whole(path)
                current = listing(self._spark, self.snapshot(name), path)
            self._listings[name] = current
            if current is not None:
                self._commit_files[name] = current.version, commit_file(path, current.version)
        return current

    def forget_listing(self, name: str) -> None:
        """Read the table again when it is used next: somebody else has changed it."""
        self._listings.pop(name, None)

    def apply(self, changes: Changes, made: Callable[[Listing], Actions]) -> bool:
        """Commit a cut without Spark, by the actions `made` from the newest version,
        and again if somebody else has committed meanwhile.

        False: only Delta may write to the table.

        Raises:
            SourceError: ErrTargetBusy.
        """
        name = changes.table.name
        for _ in range(_TRIES):
            current = self.listing(name)
            if current is None:
                return False
            try:
                actions = made(current)
            except FileNotFoundError as err:
                # Of a table that was removed, or restored from a copy.
                self.forget_listing(name)
                self.check_continues(name, current.version)
                self._check_unapplied(changes)
                newest = self.listing(name)
                if newest is not None and newest.version == current.version:
                    raise SourceError(
                        "ErrLakeDamaged", f"{name} needs a file that is gone ({err}): {RESTORE}"
                    ) from None
                # Or somebody else has rewritten the table's files, and removed those of before.
                continue
            if self.commit(changes, current, actions):
                return True
        raise SourceError("ErrTargetBusy", f"somebody else keeps writing to {name}", retryable=True)

    def commit(self, changes: Changes, current: Listing, actions: Actions) -> bool:
        """Put a version on top of `current`, fenced by the cut's end; False if somebody else was
        faster.

        Raises:
            SourceError: ErrTargetBusy, that was this cut, or another one that begins before its
                end; ErrTargetSchema, that was other columns.
        """
        name = changes.table.name
        info = commit_info("CUT", {"end_ts": str(changes.end_ts)}, current.version)
        if self._put(name, current, [info, fence(self._app_id, changes.end_ts), *actions]):
            return True
        self._check_unapplied(changes)
        self._check_same_columns(name, current)
        return False

    def _check_same_columns(self, name: str, current: Listing) -> None:
        """Check that nobody else has changed columns since `current`: made anew for others, a cut
        would lack values, or write nulls.

        Raises:
            SourceError: ErrTargetSchema.
        """
        newest = self.listing(name)
        if current.version < 0 or newest is None:
            return
        others = newest.layout.physical.items() ^ current.layout.physical.items()
        if others:
            raise SourceError(
                "ErrTargetSchema",
                f"somebody else has changed columns of {name} "
                f"({', '.join(sorted({column for column, _ in others}))}): bring the table back as it "
                "was, then start the job again; else create a new changefeed with a new target",
            )

    def _check_unapplied(self, changes: Changes) -> None:
        """Check that nobody else has applied the cut: made anew from a newer version, its changes
        would be applied twice.
        """
        name = changes.table.name
        if (self.position(name) or 0) > changes.start_ts:
            raise SourceError(
                "ErrTargetBusy",
                f"another job has applied changes of this cut to {name}",
                retryable=True,
            )

    def rewrite(self, name: str, current: Listing, actions: Actions) -> bool:
        """Put a version with the same rows on top of `current`; False if somebody else was faster.

        It applies no cut, so it has no fence.
        """
        return self._put(name, current, [commit_info(COMPACTED, {}, current.version), *actions])

    def _put(self, name: str, current: Listing, actions: Actions) -> bool:
        version = current.version + 1
        if not self._follows(name, current.version) or not self._commit(name, version, actions):
            self._listings.pop(name, None)
            if current.version >= 0:
                self.check_continues(name, current.version)
            return False
        self._listings[name] = current.after(actions)
        self._newest[name] = version
        self._commit_files[name] = version, commit_file(self.path(name), version)
        self._checkpoints.committed(name, version)
        return True

    def _commit(self, name: str, version: int, actions: Actions) -> bool:
        done = commit_on_disk(self.path(name), version, actions) if self._is_local else None
        if done is None:
            done = commit(self._log(name), self._classes, version, actions)
            if done and self._is_local:
                settle(self.path(name), version - 1)
        return done

    def _follows(self, name: str, version: int) -> bool:
        """Whether the log still has the file of a version that was read or written here: a version
        beside another table's log would belong to that table.
        """
        committed, file = self._commit_files.get(name, (-1, None))
        if committed != version or file is None:
            return True
        return commit_file(self.path(name), version) == file

    @contextmanager
    def _settled(self, name: str) -> Iterator[None]:
        """What Spark commits meanwhile is durable after it, on a disk of this machine."""
        before = self.version(name) if self._is_local else 0
        yield
        if self._is_local:
            settle(self.path(name), before)

    def _checkpoint(self, name: str) -> None:
        """Spare readers the log before the newest version, and remove its part that is older than
        the log's retention.
        """
        snapshot = self.snapshot(name)
        self._log(name).checkpointAndCleanUpDeltaLog(snapshot, self._classes.scala.Option.empty())
        if self._is_local:
            settle_checkpoint(self.path(name), int(snapshot.version()))

    @contextmanager
    def fenced(self, changes: Changes, *, is_repeatable: bool = False) -> Iterator[SparkSession]:
        """The table's session, in which commits are Delta's transaction of this cut.

        What `is_repeatable` leaves rows as they are that have its changes already.

        Raises:
            SourceError: ErrTableRolledBack, ErrTargetForeign.
        """
        session = self.session(changes.table.name)
        settings = {f"{_FENCE}txnAppId": self._app_id, f"{_FENCE}txnVersion": str(changes.end_ts)}
        settings |= _FEW_ROWS_SETTINGS if changes.few else {}
        for name, value in settings.items():
            session.conf.set(name, value)
        try:
            with self._settled(changes.table.name):
                yield session
            self._check_alone(changes, is_repeatable=is_repeatable)
        finally:
            # Spark has committed, or may have. And the session's next statement may be no cut: a
            # transaction of this one would be skipped as done.
            self._listings.pop(changes.table.name, None)
            for name in settings:
                session.conf.unset(name)

    def _check_alone(self, changes: Changes, *, is_repeatable: bool) -> None:
        """Check that a cut that Spark has applied is on top of what was known of the table.

        Raises:
            SourceError: ErrTableRolledBack; ErrTargetForeign, a part of it is there twice.
        """
        name, written = changes.table.name, self._newest.get(changes.table.name)
        self._listings.pop(name, None)
        newest = self.version(name)
        if written is not None and newest != written + 1:
            self.check_continues(name, written)
            between = commits_between(self._log(name), self._classes, written + 1, newest)
            ends = [
                int(action["txn"]["version"])
                for _, actions in between
                for action in actions
                if action.get("txn", {}).get("appId") == self._app_id
            ]
            # Delta itself refuses the same cut, and a longer one. A shorter one, of a job that was
            # given up for dead, is below what Spark has committed here.
            if not is_repeatable and any(changes.start_ts < end < changes.end_ts for end in ends):
                raise SourceError(
                    "ErrTargetForeign",
                    f"another job, which was taken for dead, has written changes of this cut to "
                    f"{name}, and they are there twice: start a new changefeed and target",
                )
        self._newest[name] = newest
