"""Delta tables that equal their upstream at every cut: one Delta commit a table and cut, fenced by the cut's end.

Invariants:
1. A commit carries the Delta transaction (`tidemark:<changefeed>`, end_ts): Delta itself refuses it a second time, and
   a table says up to where it has been applied. The fence belongs to the changefeed's time, not to Spark's batch
   numbers, so it also holds when a checkpoint directory is lost.
2. A table changes from one cut to the next in one commit; no version shows half a cut.
Why not one MERGE for all: docs/design/0007-lake-apply.md.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.changes import DELETE, Changes, lake_columns, lake_schema
from pyspark_tidemark.lake.fold import fold, fold_frame
from pyspark_tidemark.lake.predicate import any_of, quoted
from pyspark_tidemark.lake.target import Applied, table_path

_PROPERTIES = {"delta.enableDeletionVectors": "true", "delta.checkpointInterval": "50"}
_FENCE = "spark.databricks.delta.write."


class DeltaTarget:
    """The Delta tables under one directory, `<root>/<database>/<table>`."""

    def __init__(self, spark: SparkSession, root: str, changefeed: str, *, compact_every: int) -> None:
        self._spark = spark
        self._root = root
        self._app_id = f"tidemark:{changefeed}"
        self._compact_every = compact_every
        self._commits: dict[str, int] = {}
        self._sessions: dict[str, SparkSession] = {}
        self._lock = threading.Lock()

    def position(self, table: TableMeta) -> int | None:
        """The end_ts up to which `table` is applied; None if it does not exist yet.

        Raises:
            SourceError: ErrTargetForeign, the table was not written by this changefeed; ErrTableNoKey.
        """
        if not table.key:
            raise SourceError("ErrTableNoKey", f"{table.name} has no key to merge by; use a parquet:// target for it")
        snapshot = self._snapshot(table)
        if snapshot.version() < 0:
            return None
        found = snapshot.transactions().get(self._app_id)
        if not found.isDefined():
            raise SourceError(
                "ErrTargetForeign",
                f"{table_path(self._root, table.name)} exists, but not by this changefeed; choose another --target",
            )
        return int(found.get())

    def version(self, table: TableMeta) -> int:
        """The newest Delta version."""
        return int(self._snapshot(table).version())

    def create(self, changes: Changes) -> Applied:
        """Apply the first cut of a table: nothing can be there, so the rows that live on are appended."""
        return self._commit(changes, self._live(changes), mode="append", **_PROPERTIES)

    def apply(self, changes: Changes) -> Applied:
        """Apply one cut to a table: append what is new; else replace the known keys; else MERGE."""
        if not changes.few:
            return self._merge(changes, fold_frame(changes.frame(self._session(changes)), changes.table.key))
        folded = fold(changes.arrow(), changes.table.key)
        if not len(folded.last):
            return Applied(changes.rows, self.version(changes.table))
        live = self._frame(changes, folded.live)
        if not len(folded.known):
            return self._commit(changes, live, mode="append")
        key = changes.table.key
        condition = any_of(key[0], folded.known[key[0]].to_pylist()) if len(key) == 1 else None
        if condition is not None:
            return self._commit(changes, live, mode="overwrite", replaceWhere=condition)
        last = self._session(changes).createDataFrame(folded.last, schema=changes.spark_schema).coalesce(1)
        return self._merge(changes, last)

    def maintain(self) -> None:
        """Between cuts: compact each table that has seen enough commits since the last time."""
        for name, commits in list(self._commits.items()):
            if 0 < self._compact_every <= commits:
                self._sessions[name].sql(f"OPTIMIZE delta.{quoted(table_path(self._root, name))}")
                self._commits[name] = 0

    def _live(self, changes: Changes) -> DataFrame:
        if changes.few:
            return self._frame(changes, fold(changes.arrow(), changes.table.key).live)
        last = fold_frame(changes.frame(self._session(changes)), changes.table.key)
        return last.where(f"_op <> '{DELETE}'").select(*[quoted(name) for name in lake_columns(changes.table)])

    def _frame(self, changes: Changes, rows: Any) -> DataFrame:
        held = rows.select(lake_columns(changes.table))
        return self._session(changes).createDataFrame(held, schema=lake_schema(changes.table)).coalesce(1)

    def _commit(self, changes: Changes, rows: DataFrame, *, mode: str, **options: str) -> Applied:
        with self._fenced(changes):
            rows.write.format("delta").mode(mode).options(**options).save(table_path(self._root, changes.table.name))
        return self._applied(changes)

    def _merge(self, changes: Changes, last: DataFrame) -> Applied:
        last.createOrReplaceTempView("changes")
        columns = [quoted(name) for name in lake_columns(changes.table)]
        match = " AND ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in changes.table.key)
        with self._fenced(changes):
            self._session(changes).sql(
                f"MERGE INTO delta.{quoted(table_path(self._root, changes.table.name))} t "  # noqa: S608 - quoted
                f"USING changes s ON {match} "
                f"WHEN MATCHED AND s._commit_ts > t._commit_ts AND s._op = '{DELETE}' THEN DELETE "
                f"WHEN MATCHED AND s._commit_ts > t._commit_ts THEN UPDATE SET "
                f"{', '.join(f'{name} = s.{name}' for name in columns)} "
                f"WHEN NOT MATCHED AND s._op <> '{DELETE}' THEN INSERT ({', '.join(columns)}) "
                f"VALUES ({', '.join(f's.{name}' for name in columns)})"
            )
        return self._applied(changes)

    @contextmanager
    def _fenced(self, changes: Changes) -> Iterator[None]:
        conf = self._session(changes).conf
        conf.set(f"{_FENCE}txnAppId", self._app_id)
        conf.set(f"{_FENCE}txnVersion", str(changes.end_ts))
        try:
            yield
        finally:
            conf.unset(f"{_FENCE}txnAppId")
            conf.unset(f"{_FENCE}txnVersion")

    def _applied(self, changes: Changes) -> Applied:
        with self._lock:
            self._commits[changes.table.name] = self._commits.get(changes.table.name, 0) + 1
        return Applied(changes.rows, self.version(changes.table))

    def _session(self, changes: Changes) -> SparkSession:
        """A table's own session: the fence is session configuration, and tables are written in parallel."""
        with self._lock:
            if changes.table.name not in self._sessions:
                self._sessions[changes.table.name] = self._spark.newSession()
            return self._sessions[changes.table.name]

    def _snapshot(self, table: TableMeta) -> Any:
        jvm: Any = self._spark._jvm  # noqa: SLF001 - Delta has no Python call for a table's transactions
        path = table_path(self._root, table.name)
        session = self._spark._jsparkSession  # noqa: SLF001 - see above
        return jvm.org.apache.spark.sql.delta.DeltaLog.forTable(session, path).unsafeVolatileSnapshot()
