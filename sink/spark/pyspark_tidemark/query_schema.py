"""Schema changes are barriers: no cut crosses one,
and a query with the columns of before ends there. Pure.

A typed query has the columns it was started with. Where the table's columns change, everything
before is read and committed, then the query ends with an error that names the ts; started again, it
goes on from there with the new ones.
"""

from collections.abc import Callable, Iterator

from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructField, StructType, TimestampType

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import ChangefeedMeta, Ddl, TableMeta

COMMIT_TIME = "_commit_time"
_AGAIN = "all rows up to it are read; start the query again, with the same checkpoint, to go on"


def spark_schema(table: TableMeta) -> StructType:
    """The columns of a table as Spark has them; DATETIME is TIMESTAMP_NTZ in every version."""
    return from_arrow_schema(table.schema, True)  # noqa: FBT003 - named differently in Spark's versions


def with_commit_time(columns: StructType) -> StructType:
    """The columns, with `_commit_time` behind `_commit_ts`.

    Raises:
        SourceError: ErrOptionInvalid, the table has a column of that name.
    """
    if COMMIT_TIME in columns.names:
        raise SourceError(
            "ErrOptionInvalid",
            f"the table has a column {COMMIT_TIME} of its own; leave out 'commitTime'",
        )
    place = columns.names.index("_commit_ts") + 1
    time = StructField(COMMIT_TIME, TimestampType(), nullable=True)
    return StructType([*columns.fields[:place], time, *columns.fields[place:]])


def without_commit_time(columns: StructType) -> StructType:
    """The opposite of `with_commit_time`."""
    return StructType([field for field in columns.fields if field.name != COMMIT_TIME])


def table_of(changefeed: ChangefeedMeta, name: str) -> TableMeta:
    """The table called `name`.

    Raises:
        SourceError: ErrTableNotFound, listing those there are.
    """
    if name not in changefeed.tables:
        names = ", ".join(sorted(changefeed.tables)) or "none"
        raise SourceError(
            "ErrTableNotFound", f"the changefeed has no table {name!r}; it has: {names}"
        )
    return changefeed.tables[name]


def check_schema(
    described: ChangefeedMeta, name: str, ts: int, expected: StructType, *, hint: str = _AGAIN
) -> None:
    """Check that the rows of table `name` above `ts` have the columns `expected`.

    Raises:
        SourceError: ErrTableDropped or ErrSchemaChanged.
    """
    here = ddl_at(described, ts)
    cause = f" by: {here.query}" if here is not None and name in here.touched else ""
    if name not in described.tables:
        renamed = next(
            (f", it is {new} now" for old, new in (here.renamed if here else ()) if old == name), ""
        )
        raise SourceError(
            "ErrTableDropped",
            f"table {name} ends at {ts}{cause}{renamed}; all rows up to it are read",
        )
    actual = spark_schema(described.tables[name])
    if actual != expected:
        raise SourceError(
            "ErrSchemaChanged",
            f"table {name} {_difference(expected, actual)} above {ts}{cause}; {hint}",
        )


def check_truncated(described: ChangefeedMeta, name: str, ts: int) -> None:
    """End a query whose table was emptied at `ts`, which no row says.

    Raises:
        SourceError: ErrTableTruncated.
    """
    here = ddl_at(described, ts)
    if here is not None and name in here.truncated:
        raise SourceError(
            "ErrTableTruncated",
            f"table {name} was emptied at {ts}: empty what you made of it; {_AGAIN}",
        )


def ddl_at(described: ChangefeedMeta, ts: int) -> Ddl | None:
    """The schema change at `ts`, if there is one."""
    return next((ddl for ddl in described.ddls if ddl.ts == ts), None)


def segments(
    describe: Callable[[int], ChangefeedMeta], start_ts: int, end_ts: int
) -> Iterator[tuple[int, int, ChangefeedMeta]]:
    """The parts of `(start_ts, end_ts]` between schema changes,
    each with the tables in force in it.
    """
    while True:
        described = describe(start_ts)
        barrier = next((ddl.ts for ddl in described.ddls if start_ts < ddl.ts < end_ts), end_ts)
        yield start_ts, barrier, described
        if barrier == end_ts:
            return
        start_ts = barrier


def _difference(before: StructType, after: StructType) -> str:
    old, new = (
        {field.name: field.dataType.simpleString() for field in schema}
        for schema in (before, after)
    )
    changes = [f"gets {name} {new[name]}" for name in new if name not in old]
    changes += [f"loses {name}" for name in old if name not in new]
    changes += [
        f"changes {name} from {old[name]} to {new[name]}"
        for name in old
        if new.get(name, old[name]) != old[name]
    ]
    return ", ".join(changes) or "orders its columns anew"
