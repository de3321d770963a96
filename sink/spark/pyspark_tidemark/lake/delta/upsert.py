"""Mode `upsert`: a table equals its upstream at each cut, by the cheapest of the commits that come to the same."""

from typing import Any

from pyspark.sql import DataFrame

from pyspark_tidemark.lake.changes import DELETE, Changes
from pyspark_tidemark.lake.delta.tables import PROPERTIES, DeltaTables
from pyspark_tidemark.lake.fold import Folded, fold, fold_frame
from pyspark_tidemark.lake.mirror import SMALL_ROWS, Mirror
from pyspark_tidemark.lake.mode import lake_columns, lake_schema
from pyspark_tidemark.lake.predicate import any_of, quoted

_SMALL_BYTES = 4 << 20


class Upsert:
    """Applies cuts; keeps small tables' rows in memory, and says after each commit whether it added files."""

    def __init__(self, tables: DeltaTables) -> None:
        self._tables = tables
        self._mirrors: dict[str, Mirror | None] = {}

    def forget(self, name: str) -> None:
        """The table was changed by somebody else."""
        self._mirrors.pop(name, None)

    def create(self, changes: Changes) -> bool:
        """Apply the first cut of a table: nothing can be there, so the rows that live on are appended."""
        if changes.here:
            empty = Mirror(lake_schema(changes.table).empty_table(), changes.table.key)
            mirror = empty.after(fold(changes.arrow, changes.table.key))
            return self._commit(changes, mirror.rows, mode="append", mirror=mirror, **PROPERTIES)
        last = fold_frame(changes.frame(self._tables.session(changes.table.name)), changes.table.key)
        live = last.where(f"_op <> '{DELETE}'").select(*[quoted(name) for name in lake_columns(changes.table)])
        return self._commit(changes, live, mode="append", mirror=None, **PROPERTIES)

    def apply(self, changes: Changes) -> bool:
        """Apply a later cut; returns whether the table has more files than before."""
        session = self._tables.session(changes.table.name)
        if not changes.here:
            return self._merge(changes, fold_frame(changes.frame(session), changes.table.key))
        folded = fold(changes.arrow, changes.table.key)
        live = folded.live.select(lake_columns(changes.table))
        if not len(live) and not len(folded.known):
            return False
        mirror = self._mirror(changes)
        after = mirror.after(folded) if mirror is not None else None
        if not len(folded.known):
            return self._commit(changes, live, mode="append", mirror=after)
        if after is not None:
            return self._commit(changes, after.rows, mode="overwrite", mirror=after)
        condition = _keys_of(folded, changes.table.key) if changes.few else None
        if condition is not None:
            return self._commit(changes, live, mode="overwrite", mirror=None, replaceWhere=condition)
        return self._merge(changes, session.createDataFrame(folded.last, changes.spark_schema))

    def _commit(self, changes: Changes, rows: Any, *, mode: str, mirror: Mirror | None, **options: str) -> bool:
        self._tables.write(changes, rows, mode=mode, **options)
        self._keep(changes.table.name, mirror)
        return mode == "append" or mirror is None

    def _merge(self, changes: Changes, last: DataFrame) -> bool:
        last.createOrReplaceTempView("changes")
        name = changes.table.name
        columns = [quoted(column) for column in lake_columns(changes.table)]
        match = " AND ".join(f"t.{quoted(column)} = s.{quoted(column)}" for column in changes.table.key)
        statement = (
            f"MERGE INTO {self._tables.sql_name(name)} t "  # noqa: S608 - quoted
            f"USING changes s ON {match} "
            f"WHEN MATCHED AND s._commit_ts > t._commit_ts AND s._op = '{DELETE}' THEN DELETE "
            f"WHEN MATCHED AND s._commit_ts > t._commit_ts THEN UPDATE SET "
            f"{', '.join(f'{column} = s.{column}' for column in columns)} "
            f"WHEN NOT MATCHED AND s._op <> '{DELETE}' THEN INSERT ({', '.join(columns)}) "
            f"VALUES ({', '.join(f's.{column}' for column in columns)})"
        )
        with self._tables.fenced(changes) as session:
            session.sql(statement)
            session.catalog.dropTempView("changes")  # it may hold the rows
        self._keep(name, None)
        return True

    def _keep(self, name: str, mirror: Mirror | None) -> None:
        self._mirrors[name] = mirror if mirror is not None and mirror.small else None

    def _mirror(self, changes: Changes) -> Mirror | None:
        """What the table holds, if that is little; read from it at the first call."""
        name = changes.table.name
        if name not in self._mirrors:
            self._mirrors[name] = self._read(changes)
        return self._mirrors[name]

    def _read(self, changes: Changes) -> Mirror | None:
        name = changes.table.name
        if self._tables.snapshot(name).sizeInBytes() > _SMALL_BYTES:
            return None
        schema = lake_schema(changes.table)
        frame = self._tables.session(name).read.format("delta").load(self._tables.path(name))
        rows = frame.limit(SMALL_ROWS + 1).toArrow().select(schema.names).cast(schema)
        mirror = Mirror(rows, changes.table.key)
        return mirror if mirror.small else None


def _keys_of(folded: Folded, key: tuple[str, ...]) -> str | None:
    if len(key) != 1:
        return None
    return any_of(key[0], folded.known[key[0]].to_pylist())
