"""All of a cluster's table schemas at one moment,
moved on by its DDL jobs in the order of their commit_ts. Pure.

Invariants:
1. It begins with the meta keys as of a timestamp, never with a replay from the first job.
2. A job that was applied already, or whose effect the meta keys show already, changes nothing.
3. A change names what the job does to rows beyond the schema: removed tables, emptied ones, removed
   partitions. A job that brings rows into a table without writing them cannot be followed by row
   changes; `Change.moved` says why.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from storage.model.errors import CorruptError
from storage.model.system_schemas import OF_TIDB
from storage.tidb.ddl import Action, Document, Job, decode_schema_key
from storage.tidb.document import TableHead, TableInfoError, read_document, table_head

REMOVED: Final = "tidemark_removed"
"""Member of a TableInfo: `{"ts", "partition_ids"}`,
partitions whose rows went when this schema came in force at ts.
"""
MODIFIED: Final = "tidemark_modified"
"""Member of a TableInfo: `{"ts", "alone", "added"}`,
the DDL that brought it at ts may have built columns anew.

`alone`: one, and did nothing else; `added`: so many of its new columns hold their defaults in older
rows.
"""
FORMER_ID: Final = "tidemark_former_id"
"""Member of a TableInfo: the id that the table had before the DDL that brought this schema."""
_NEW_ID_KINDS: Final = frozenset({11, 71, 72})
"""Jobs that give a table another id: TRUNCATE, PARTITION BY, REMOVE PARTITIONING."""
_DROPS = frozenset({Action.DROP_TABLE, Action.DROP_VIEW, Action.DROP_SEQUENCE})
_UNWRITTEN_ROWS = {
    Action.EXCHANGE_PARTITION: "EXCHANGE PARTITION moves rows between tables without writing them",
    Action.RECOVER_TABLE: "a recovered table comes with rows that nobody writes again",
    Action.RECOVER_SCHEMA: "a recovered database comes with rows that nobody writes again",
    Action.FLASHBACK_CLUSTER: "FLASHBACK CLUSTER changes rows back without telling their old values",
    Action.REPAIR_TABLE: "a repaired table has its rows read with another schema",
    Action.REFRESH_META: "BR brings tables, and rows that nobody writes again",
    Action.ALTER_TABLE_SOFT_DELETE: "with SOFTDELETE, a DELETE leaves the row there",
    Action.ALTER_SCHEMA_SOFT_DELETE: "with SOFTDELETE, a DELETE leaves the row there",
}
_WITHOUT_TABLE_INFO = frozenset(
    {Action.UNKNOWN, Action.REFRESH_META, Action.ALTER_SCHEMA_SOFT_DELETE, Action.REPAIR_TABLE}
)
"""Jobs that may change tables without having their TableInfo."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table; `info` is TiDB's TableInfo as a JSON value,
    `head` the members that every table must have.
    """

    schema_id: int
    schema_name: str
    info: Document
    head: TableHead = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises TableInfoError: the table cannot be told from others."""
        object.__setattr__(self, "head", table_head(self.info))

    @property
    def id(self) -> int:
        """The table's id, which is not that of a partition."""
        return self.head.id

    @property
    def table_name(self) -> str:
        """Its name within its database."""
        return self.head.name.text

    @property
    def name(self) -> str:
        """`schema.table`."""
        return f"{self.schema_name}.{self.table_name}"

    @property
    def partition_ids(self) -> tuple[int, ...]:
        """The ids of its partitions; none if it is not partitioned."""
        return self.head.partition_ids

    @property
    def has_rows(self) -> bool:
        """Whether it is neither a view nor a sequence."""
        return self.head.has_rows


@dataclass(frozen=True, slots=True)
class Change:
    """The effect of one job."""

    commit_ts: int
    query: str
    tables: tuple[Table, ...] = ()
    """Tables in their new form: new ones, and those with another schema, name, id,
    or set of partitions.
    """
    dropped: tuple[Table, ...] = ()
    """Tables that are not there any more under their name."""
    truncated: tuple[Table, ...] = ()
    """Tables (the new form) whose old rows are gone."""
    moved: str = ""
    """Why the rows of `tables` after this change cannot be known from row changes; empty:
    they can.
    """
    database: str = ""
    """The database whose tables it is about, where it does not name them; empty: without `tables`
    it may be about any.
    """


class SchemaHistory:
    """The tables in force above `ts`; `apply` moves it on."""

    def __init__(self, ts: int, databases: Mapping[int, str], tables: Iterable[Table]) -> None:
        self.ts = ts
        self._databases = dict(databases)
        self._tables = {table.id: table for table in tables}
        self._applied: set[int] = set()

    @classmethod
    def of_meta(cls, ts: int, pairs: Iterable[tuple[bytes, bytes]]) -> "SchemaHistory":
        """Read the meta keys as they were at `ts`.

        Raises:
            CorruptError: they are not what TiDB writes.
        """
        databases: dict[int, str] = {}
        infos: list[tuple[int, Document]] = []
        for key, value in pairs:
            schema_key = decode_schema_key(key)
            if schema_key is None:
                continue
            if schema_key.table_id:
                infos.append((schema_key.database_id, _document(key, value)))
            else:
                databases[schema_key.database_id] = _database_name(
                    _document(key, value), f"the meta key {key.hex()}"
                )
        return cls(
            ts,
            databases,
            [Table(number, databases.get(number, ""), info) for number, info in infos],
        )

    def __iter__(self) -> Iterator[Table]:
        """Every table of users, views and sequences left out, by name."""
        tables = filter(_belongs_to_users, self._tables.values())
        return iter(sorted(tables, key=lambda table: table.name))

    def databases(self) -> Iterator[tuple[int, str]]:
        """Ids and names of all databases."""
        return iter(self._databases.items())

    def table(self, table_id: int) -> Table | None:
        """The table of that id, or None."""
        return self._tables.get(table_id)

    def skip(self, job_ids: Iterable[int]) -> None:
        """Take these jobs as applied: the meta keys show their effect."""
        self._applied.update(job_ids)

    def apply(self, job: Job, commit_ts: int, *, late: bool = False) -> Change | None:
        """Apply a job; None: it changes no table of users, or was applied before.

        `late`: users may have seen its effect before `commit_ts`.

        Raises:
            CorruptError: it does not follow what is known: a job before it was missed.
        """
        if not job.is_done or job.id in self._applied:
            return None
        if commit_ts < self.ts:
            raise CorruptError(
                f"DDL job {job.id} came in force at {commit_ts}, but schemas are known up to "
                f"{self.ts}"
            )
        self._applied.add(job.id)
        self.ts = commit_ts
        change = self._change(job if not late else replace(job, added_columns=0), commit_ts)
        return change if change and (change.tables or change.dropped or change.moved) else None

    def _change(self, job: Job, commit_ts: int) -> Change | None:
        match job.action:
            case Action.CREATE_SCHEMA | Action.MODIFY_SCHEMA_CHARSET:
                self._databases[job.schema_id] = _database_name(
                    job.database or {}, f"DDL job {job.id} at {commit_ts}"
                )
                return None
            case Action.DROP_SCHEMA:
                self._databases.pop(job.schema_id, None)
                gone = [
                    table.id for table in self._tables.values() if table.schema_id == job.schema_id
                ]
                return Change(commit_ts, job.query, dropped=self._remove(*gone))
            case action if action in _DROPS:
                return Change(commit_ts, job.query, dropped=self._remove(job.table_id))
            case Action.TRUNCATE_TABLE:
                return self._truncate(job, commit_ts)
            case Action.RECOVER_SCHEMA:
                return self._flashback_database(job, commit_ts)
        tables = tuple(self._replacements(job, commit_ts))
        if job.action is Action.EXCHANGE_PARTITION:
            tables = self._exchange(job)
        moved = self._why_rows_unknown(job, tables)
        if job.action in _WITHOUT_TABLE_INFO and not tables:
            tables = self._tables_concerned(job)
            moved = moved if tables or job.schema_id not in self._databases else ""
        return self._replace_tables(Change(commit_ts, job.query, tables, moved=moved), job)

    def _flashback_database(self, job: Job, commit_ts: int) -> Change:
        """FLASHBACK DATABASE: the job has the database, and of its tables at most the old form."""
        name = job.schema_name
        if job.database:
            name = _database_name(job.database, f"DDL job {job.id} at {commit_ts}")
        if name:
            self._databases[job.schema_id] = name
        return Change(commit_ts, job.query, moved=_UNWRITTEN_ROWS[job.action], database=name)

    def _why_rows_unknown(self, job: Job, tables: Sequence[Table]) -> str:
        """Why rows of the job's tables cannot be known; empty: they can."""
        if job.action is Action.UNKNOWN:
            return f"a DDL of kind {job.kind}, which this version does not know"
        if job.action is Action.ALTER_TABLE_MODE:
            imported = any(_is_normal(table) for table in tables)
            return "IMPORT INTO or BR bring rows that nobody writes again" if imported else ""
        return _UNWRITTEN_ROWS.get(job.action, "")

    def _tables_concerned(self, job: Job) -> tuple[Table, ...]:
        """The tables that a job without a TableInfo may concern: the one of its id, or all of its
        database.
        """
        table = self._tables.get(job.table_id)
        if table is not None:
            return (table,)
        return tuple(each for each in self._tables.values() if each.schema_id == job.schema_id)

    def _truncate(self, job: Job, commit_ts: int) -> Change | None:
        # Without the old table the meta keys, read after the job, showed the new one already.
        if not self._remove(job.table_id):
            return None
        tables = tuple(self._replacements(job, commit_ts))
        return self._replace_tables(Change(commit_ts, job.query, tables, truncated=tables), job)

    def _replacements(self, job: Job, commit_ts: int) -> Iterator[Table]:
        """The tables of the job in their new form, each once:
        RENAME TABLES repeats a table in each of its steps.
        """
        infos = {table_head(info).id: info for info in (job.table, *job.tables) if info}.values()
        moved_to = job.new_schema_ids if job.action is Action.RENAME_TABLES else {}
        for info in infos:
            schema_id = moved_to.get(table_head(info).id, job.schema_id)
            name = self._databases.get(schema_id)
            if name is None:
                raise CorruptError(
                    f"DDL job {job.id} at {commit_ts} is in database {schema_id}, which is not "
                    "known"
                )
            table = Table(schema_id, name, info)
            marks = self._removed_partitions(job, table, commit_ts) | _modified(job, commit_ts)
            if job.kind in _NEW_ID_KINDS and table.id != job.table_id:
                marks[FORMER_ID] = job.table_id
            yield replace(table, info={**info, **marks})

    def _removed_partitions(self, job: Job, table: Table, commit_ts: int) -> dict[str, Any]:
        before = self._tables.get(table.id)
        if job.action not in {Action.DROP_PARTITION, Action.TRUNCATE_PARTITION} or before is None:
            return {}
        partition_ids = dict.fromkeys((*before.partition_ids, *before.head.dropping_ids))
        removed = [number for number in partition_ids if number not in table.partition_ids]
        return {REMOVED: {"ts": commit_ts, "partition_ids": removed}} if removed else {}

    def _replace_tables(self, change: Change, job: Job) -> Change:
        """Replace tables by their new forms; one whose name or id changed leaves its old name."""
        dropped = list(change.dropped)
        names = {table.name for table in change.tables}
        for table in change.tables:
            old = self._tables.get(table.id) or self._tables.get(job.table_id)
            if old is not None and old.name not in names:
                dropped.append(old)
            if old is not None and old.id != table.id:
                del self._tables[old.id]
            self._tables[table.id] = table
        tables = tuple(filter(_belongs_to_users, change.tables))
        return replace(
            change,
            tables=tables,
            dropped=tuple(filter(_belongs_to_users, dropped)),
            truncated=tuple(filter(_belongs_to_users, change.truncated)),
            moved=change.moved if tables or not change.tables else "",
        )

    def _exchange(self, job: Job) -> tuple[Table, ...]:
        """Both tables of EXCHANGE PARTITION, with the ids of the plain table and of the partition
        swapped.
        """
        partition_id, table_id = job.exchanged
        plain, partitioned = self._tables.get(job.table_id), self._tables.get(table_id)
        if plain is None or partitioned is None or partition_id not in partitioned.partition_ids:
            return ()  # the meta keys showed it already
        partition = partitioned.info["partition"]
        parts = [
            {**part, "id": plain.id} if part["id"] == partition_id else part
            for part in partition["definitions"]
        ]
        info = {**partitioned.info, "partition": {**partition, "definitions": parts}}
        return replace(partitioned, info=info), replace(
            plain, info={**plain.info, "id": partition_id}
        )

    def _remove(self, *table_ids: int) -> tuple[Table, ...]:
        gone = [self._tables.pop(number) for number in table_ids if number in self._tables]
        return tuple(filter(_belongs_to_users, gone))


def _modified(job: Job, commit_ts: int) -> dict[str, Any]:
    if job.action not in {Action.MODIFY_COLUMN, Action.MULTI_SCHEMA_CHANGE}:
        return {}
    alone = job.action is Action.MODIFY_COLUMN
    return {MODIFIED: {"ts": commit_ts, "alone": alone, "added": job.added_columns}}


def _is_normal(table: Table) -> bool:
    """Whether users may write to the table (model.TableModeNormal)."""
    return not table.info.get("mode")


def _belongs_to_users(table: Table) -> bool:
    return table.has_rows and table.schema_name.lower() not in OF_TIDB


def _document(key: bytes, value: bytes) -> Document:
    try:
        return read_document(value)
    except TableInfoError as err:
        raise CorruptError(f"the meta key {key.hex()} holds no schema: {err.message}") from err


def _database_name(info: Document, where: str) -> str:
    match info:
        case {"db_name": {"O": str(name)}}:
            return name
    raise CorruptError(f"{where} holds no database with a name: {str(info)[:200]}")
