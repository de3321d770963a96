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

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.changes import DELETE, Changes, lake_columns, lake_schema
from pyspark_tidemark.lake.fold import Folded, fold, fold_frame
from pyspark_tidemark.lake.mirror import SMALL_ROWS, Mirror
from pyspark_tidemark.lake.predicate import any_of, quoted
from pyspark_tidemark.lake.target import Applied, table_path

_PROPERTIES = {"delta.enableDeletionVectors": "true", "delta.checkpointInterval": "50"}
_SMALL_BYTES = 4 << 20
_FEW = {  # plans over a few thousand rows: compiling them costs more than interpreting them
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
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
        self._mirrors: dict[str, Mirror | None] = {}
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
        if changes.few:
            empty = Mirror(lake_schema(changes.table).empty_table(), changes.table.key)
            mirror = empty.after(fold(changes.arrow(), changes.table.key))
            return self._commit(changes, mirror.rows, mode="append", mirror=mirror, **_PROPERTIES)
        last = fold_frame(changes.frame(self._session(changes.table)), changes.table.key)
        live = last.where(f"_op <> '{DELETE}'").select(*[quoted(name) for name in lake_columns(changes.table)])
        return self._commit(changes, live, mode="append", mirror=None, **_PROPERTIES)

    def apply(self, changes: Changes) -> Applied:
        """Apply one cut to a table, by the cheapest of the ways that come to the same."""
        if not changes.few:
            return self._merge(changes, fold_frame(changes.frame(self._session(changes.table)), changes.table.key))
        folded = fold(changes.arrow(), changes.table.key)
        live = folded.live.select(lake_columns(changes.table))
        if not len(live) and not len(folded.known):
            return Applied(changes.rows, self.version(changes.table))
        mirror = self._mirror(changes.table)
        after = mirror.after(folded) if mirror is not None else None
        if not len(folded.known):
            return self._commit(changes, live, mode="append", mirror=after)
        if after is not None:
            return self._commit(changes, after.rows, mode="overwrite", mirror=after)
        condition = _keys_of(folded, changes.table.key)
        if condition is not None:
            return self._commit(changes, live, mode="overwrite", mirror=None, replaceWhere=condition)
        return self._merge(changes, self._session(changes.table).createDataFrame(folded.last, changes.spark_schema))

    def maintain(self) -> None:
        """Between cuts: compact each table that has seen enough commits since the last time."""
        for name, commits in list(self._commits.items()):
            if 0 < self._compact_every <= commits:
                self._sessions[name].sql(f"OPTIMIZE delta.{quoted(table_path(self._root, name))}")
                self._commits[name] = 0

    def _commit(self, changes: Changes, rows: Any, *, mode: str, mirror: Mirror | None, **options: str) -> Applied:
        table = changes.table
        if isinstance(rows, pa.Table):
            rows = self._session(table).createDataFrame(rows, from_arrow_schema(rows.schema)).coalesce(1)
        with self._fenced(changes):
            rows.write.format("delta").mode(mode).options(**options).save(table_path(self._root, table.name))
        rewritten = mode == "overwrite" and mirror is not None
        return self._applied(changes, mirror, commits=0 if rewritten else self._commits.get(table.name, 0) + 1)

    def _merge(self, changes: Changes, last: DataFrame) -> Applied:
        last.createOrReplaceTempView("changes")
        columns = [quoted(name) for name in lake_columns(changes.table)]
        match = " AND ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in changes.table.key)
        with self._fenced(changes):
            self._session(changes.table).sql(
                f"MERGE INTO delta.{quoted(table_path(self._root, changes.table.name))} t "  # noqa: S608 - quoted
                f"USING changes s ON {match} "
                f"WHEN MATCHED AND s._commit_ts > t._commit_ts AND s._op = '{DELETE}' THEN DELETE "
                f"WHEN MATCHED AND s._commit_ts > t._commit_ts THEN UPDATE SET "
                f"{', '.join(f'{name} = s.{name}' for name in columns)} "
                f"WHEN NOT MATCHED AND s._op <> '{DELETE}' THEN INSERT ({', '.join(columns)}) "
                f"VALUES ({', '.join(f's.{name}' for name in columns)})"
            )
        return self._applied(changes, None, commits=self._commits.get(changes.table.name, 0) + 1)

    @contextmanager
    def _fenced(self, changes: Changes) -> Iterator[None]:
        conf = self._session(changes.table).conf
        settings = {f"{_FENCE}txnAppId": self._app_id, f"{_FENCE}txnVersion": str(changes.end_ts)}
        settings |= _FEW if changes.few else {}
        for name, value in settings.items():
            conf.set(name, value)
        try:
            yield
        finally:
            for name in settings:
                conf.unset(name)

    def _applied(self, changes: Changes, mirror: Mirror | None, *, commits: int) -> Applied:
        name = changes.table.name
        self._mirrors[name] = mirror if mirror is not None and mirror.small else None
        self._commits[name] = commits
        return Applied(changes.rows, self.version(changes.table))

    def _mirror(self, table: TableMeta) -> Mirror | None:
        """What the table holds, if that is little; read from it at the first call."""
        if table.name not in self._mirrors:
            self._mirrors[table.name] = self._read(table)
        return self._mirrors[table.name]

    def _read(self, table: TableMeta) -> Mirror | None:
        if self._snapshot(table).sizeInBytes() > _SMALL_BYTES:
            return None
        frame = self._session(table).read.format("delta").load(table_path(self._root, table.name))
        mirror = Mirror(frame.limit(SMALL_ROWS + 1).toArrow().cast(lake_schema(table)), table.key)
        return mirror if mirror.small else None

    def _session(self, table: TableMeta) -> SparkSession:
        """A table's own session: the fence is session configuration, and tables are written in parallel."""
        with self._lock:
            if table.name not in self._sessions:
                self._sessions[table.name] = self._spark.newSession()
            return self._sessions[table.name]

    def _snapshot(self, table: TableMeta) -> Any:
        jvm: Any = self._spark._jvm  # noqa: SLF001 - Delta has no Python call for a table's transactions
        path = table_path(self._root, table.name)
        session = self._spark._jsparkSession  # noqa: SLF001 - see above
        return jvm.org.apache.spark.sql.delta.DeltaLog.forTable(session, path).unsafeVolatileSnapshot()


def _keys_of(folded: Folded, key: tuple[str, ...]) -> str | None:
    if len(key) != 1:
        return None
    return any_of(key[0], folded.known[key[0]].to_pylist())
