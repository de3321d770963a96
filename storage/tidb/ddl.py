"""TiDB's schemas in the store: the meta keys of databases and tables, and the DDL jobs that change
them, statement by statement, as JSON (model.Job).

Databases, table schemas and jobs that have ended live at meta keys, as of any timestamp; a job that
runs is a row of mysql.tidb_ddl_job.

A job counts once it is `done`: the transaction that writes that state brings the job's schema in
force. States before it (an index being filled, a column that is write-only) are no schemas for
readers. But an ALTER with several changes brings all of them in force in one transaction, and is
`done` in a later one. So does DROP PARTITION, and TRUNCATE PARTITION where the table has global
indexes: what they delete from these comes after users have the new partitions. So does MODIFY
COLUMN of newer TiDBs: the old column, which nobody reads any more, goes in steps of its own.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from storage.codec import decode_bytes, decode_u64, encode_bytes, encode_u64, prefix_end
from storage.model.errors import CorruptError
from storage.model.span import Span
from storage.tidb.document import PUBLIC, TableInfoError, read_document
from storage.tidb.record import record_key, record_prefix
from storage.tidb.row import as_v2, decode_row

Document = Mapping[str, Any]
JOB_TABLE_ID: Final = (1 << 48) - 2
"""mysql.tidb_ddl_job, since TiDB 6.2."""
JOB_META_COLUMN_ID: Final = 5
SCHEMAS_BEGIN: Final = b"mDB"
SCHEMAS_END: Final = prefix_end(SCHEMAS_BEGIN)
"""All databases and tables, and their counters, lie in `[SCHEMAS_BEGIN, SCHEMAS_END)`."""
_META = b"m"
_HASH = ord("h")
_DATABASES = b"DBs"
_DATABASE = b"DB:"
_TABLE_FIELD = b"Table:"
_HISTORY = b"DDLJobHistory"
_DONE: Final = frozenset({4, 6})  # model.JobStateDone, JobStateSynced
# model.JobStateRollingback, JobStateRollbackDone, JobStateCancelled
_UNDONE: Final = frozenset({2, 3, 5})
# model.StateDeleteOnly, StateDeleteReorganization
_DELETING: Final = frozenset({1, 4})
_REPLACE_ONE_SCHEMA: Final = frozenset(
    {
        *(6, 7, 8, 9, 10, 13, 15, 16, 17, 18, 19),  # columns, indexes, keys, options, ADD PARTITION
        *(21, 22, 27, 28, 30, 31, 32, 33, 34, 35),  # views, sequences, charsets, locks, TiFlash
        *(37, 38, 39, 40, 41, 43, 44, 45, 46, 48),  # several columns, ids, checks
        *range(49, 60),  # attributes, placement, cache, statistics
        *(64, 65, 67, 71, 72),  # REORGANIZE PARTITION, TTL, PARTITION BY, REMOVE PARTITIONING
        *(68, 69, 70),  # resource groups
        *(73, 74, 77, 78, 81, 82, 83, 84),  # columnar indexes, engines, affinity, masks, splits
    }
)
"""The kinds of jobs (model.ActionType) that leave rows as they are: at most one table has another
schema, or its rows another place.
"""


class SchemaKey(NamedTuple):
    """The object of a meta key: a database (`table_id` 0), or a table of one."""

    database_id: int
    table_id: int


def job_span() -> Span:
    """The records of mysql.tidb_ddl_job."""
    prefix = record_prefix(JOB_TABLE_ID)
    return Span(JOB_TABLE_ID, prefix, prefix_end(prefix))


def job_key(job_id: int) -> bytes:
    """The key of a job before it has ended."""
    return record_key(JOB_TABLE_ID, job_id)


def history_key(job_id: int) -> bytes:
    """The key of a job after it has ended."""
    return _hash_key(_HISTORY, encode_u64(job_id))


def decode_schema_key(key: bytes) -> SchemaKey | None:
    """Return the object that `key` is about; None: a counter, a policy or the like.

    Raises:
        CorruptError: `key` is none of TiDB's meta keys.
    """
    if key[:1] != _META:
        raise CorruptError(f"not a meta key: {key.hex()}")
    name, at = decode_bytes(key, 1)
    if len(key) < at + 8 or decode_u64(key, at) != _HASH:
        return None
    field, _ = decode_bytes(key, at + 8)
    if name == _DATABASES and field.startswith(_DATABASE):
        return SchemaKey(_number(field.removeprefix(_DATABASE), key), 0)
    if name.startswith(_DATABASE) and field.startswith(_TABLE_FIELD):
        return SchemaKey(
            _number(name.removeprefix(_DATABASE), key),
            _number(field.removeprefix(_TABLE_FIELD), key),
        )
    return None


def _hash_key(name: bytes, field: bytes) -> bytes:
    return _META + encode_bytes(name) + encode_u64(_HASH) + encode_bytes(field)


def _number(digits: bytes, key: bytes) -> int:
    if not digits.isdigit():
        raise CorruptError(f"a meta key without a number: {key.hex()}")
    return int(digits)


class Action(enum.IntEnum):
    """The kinds of jobs that do more than replace one table's schema (model.ActionType)."""

    UNKNOWN = -1
    """One that this version has not heard of, whatever it does."""
    OTHER = 0
    """One that does no more than that."""
    CREATE_SCHEMA = 1
    DROP_SCHEMA = 2
    CREATE_TABLE = 3
    DROP_TABLE = 4
    ADD_COLUMN = 5
    TRUNCATE_TABLE = 11
    MODIFY_COLUMN = 12
    RENAME_TABLE = 14
    DROP_PARTITION = 20
    TRUNCATE_PARTITION = 23
    DROP_VIEW = 24
    RECOVER_TABLE = 25
    MODIFY_SCHEMA_CHARSET = 26
    REPAIR_TABLE = 29
    DROP_SEQUENCE = 36
    EXCHANGE_PARTITION = 42
    RENAME_TABLES = 47
    CREATE_TABLES = 60
    MULTI_SCHEMA_CHANGE = 61
    FLASHBACK_CLUSTER = 62
    RECOVER_SCHEMA = 63
    ALTER_TABLE_MODE = 75
    REFRESH_META = 76
    ALTER_TABLE_SOFT_DELETE = 79
    ALTER_SCHEMA_SOFT_DELETE = 80

    @classmethod
    def of(cls, kind: int) -> "Action":
        """The action of a job's type."""
        if kind > 0 and kind in cls.__members__.values():
            return cls(kind)
        return cls.OTHER if kind in _REPLACE_ONE_SCHEMA else cls.UNKNOWN


@dataclass(frozen=True, slots=True)
class Job:
    """One DDL job; the documents are TiDB's own, as JSON values."""

    id: int
    action: Action
    kind: int
    """The number that TiDB has for the action."""
    is_done: bool
    schema_id: int
    table_id: int
    """The table it is about; of a TRUNCATE the old one."""
    schema_name: str
    query: str
    database: Document | None = None
    table: Document | None = None
    tables: tuple[Document, ...] = ()
    """The tables of a job about several."""
    arguments: Any = None
    """The arguments, which depend on the kind of job; a list, or since TiDB 8.4 an object."""
    is_public: bool = False
    """Whether users have its result: it is done, or only has steps left that undo nothing."""
    added_columns: int = 0
    """How many columns an ALTER with several changes adds."""

    @property
    def new_schema_ids(self) -> dict[int, int]:
        """The database that each table of a RENAME TABLES is in afterwards, by table id."""
        try:
            match self.arguments:
                case {"rename_table_infos": [*infos]}:
                    return {int(info["table_id"]): int(info["new_schema_id"]) for info in infos}
                case [_, [*schema_ids], _, [*table_ids], *_]:
                    return {
                        int(table): int(schema)
                        for table, schema in zip(table_ids, schema_ids, strict=True)
                    }
        except (KeyError, TypeError, ValueError, OverflowError) as err:
            raise CorruptError(
                f"DDL job {self.id} renames tables to {self.arguments!r:.200}: {self.query}"
            ) from err
        raise CorruptError(
            f"DDL job {self.id} renames tables, but does not say where to: {self.query}"
        )

    @property
    def exchanged(self) -> tuple[int, int]:
        """Return the ids of the partition and of its table of an EXCHANGE PARTITION."""
        match self.arguments:
            case {"partition_id": int(partition_id), "pt_table_id": int(table_id)}:
                return partition_id, table_id
            case [int(partition_id), _, int(table_id), *_]:
                return partition_id, table_id
        raise CorruptError(
            f"DDL job {self.id} exchanges a partition, but does not say which: {self.query}"
        )

    @classmethod
    def parse(cls, text: str | bytes) -> "Job":
        """Read model.Job JSON; unknown members are ignored.

        Raises:
            CorruptError: the text is no job.
        """
        try:
            return _job(read_document(text))
        except (
            TableInfoError,
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
        ) as err:
            raise CorruptError(f"not a DDL job of TiDB: {err!r}: {text[:200]!r}") from err

    @classmethod
    def of_row(cls, row: bytes) -> "Job":
        """Read a row of mysql.tidb_ddl_job.

        Raises:
            CorruptError: it holds no job.
        """
        text = decode_row(as_v2(row)).get(JOB_META_COLUMN_ID)
        if text is None:
            raise CorruptError(f"a row of mysql.tidb_ddl_job without job_meta: {row[:64].hex()}")
        return cls.parse(text)


def _job(doc: dict[str, Any]) -> Job:
    info = doc.get("binlog") or {}
    kind, state, step = int(doc["type"]), int(doc["state"]), int(doc.get("schema_state") or 0)
    several = doc.get("multi_schema_info") or {}
    removes = kind in {Action.DROP_PARTITION, Action.TRUNCATE_PARTITION} and step in _DELETING
    modified = kind == Action.MODIFY_COLUMN and step == PUBLIC and state not in _UNDONE
    return Job(
        id=int(doc["id"]),
        action=Action.of(kind),
        kind=kind,
        is_done=state in _DONE,
        schema_id=int(doc["schema_id"]),
        table_id=int(doc["table_id"]),
        schema_name=doc.get("schema_name") or "",
        query=doc.get("query") or "",
        database=info.get("DBInfo"),
        table=info.get("TableInfo"),
        tables=tuple(info.get("MultipleTableInfos") or ()),
        arguments=doc.get("raw_args"),
        is_public=state in _DONE or several.get("revertible") is False or removes or modified,
        added_columns=[each["type"] for each in several.get("sub_jobs") or ()].count(
            Action.ADD_COLUMN
        ),
    )
