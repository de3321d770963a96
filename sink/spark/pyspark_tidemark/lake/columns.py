"""Columns of Spark DataFrames with names and values of the upstream: any name, any value."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import from_arrow_type

_PLAIN = re.compile(r"\w+")


def quoted(name: str) -> str:
    """`name` as an identifier of SQL: unquoted, a dot would mean a field of a struct."""
    return "`" + name.replace("`", "``") + "`"


def internal(name: str) -> str:
    """What a column of ours is called beside a table's own: no upstream has a name that ends with a
    blank.
    """
    return f"{name} "


def free_name(name: str, taken: Iterable[str]) -> str:
    """The same where names may not end with a blank: one that is none of those `taken`."""
    used = {each.lower() for each in taken}
    while name.lower() in used:
        name += "_"
    return name


def literal(value: Any, kind: Any) -> Column:
    """`value` (pyarrow.Scalar of the type `kind`; None: null) as a column."""
    # By way of text: Spark would shift a Python datetime by the session's time zone.
    if value is None or pa.types.is_binary(kind):
        plain = None if value is None else value.as_py()
    else:
        plain = pa.array([value.as_py()], kind).cast(pa.string())[0].as_py()
    return F.lit(plain).cast(from_arrow_type(kind))


def sql_literal(value: Any, kind: Any) -> str:
    """The same as text of a statement."""
    sql_type = from_arrow_type(kind).simpleString()
    if value is None:
        return f"CAST(NULL AS {sql_type})"
    if pa.types.is_binary(kind):
        return f"X'{value.as_py().hex()}'"
    text = pa.array([value.as_py()], kind).cast(pa.string())[0].as_py()
    return f"CAST({text_literal(text)} AS {sql_type})"


def text_literal(text: str) -> str:
    """A text in a statement."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def with_columns(frame: Any, added: Any, filled: dict[str, Any]) -> Any:
    """A DataFrame with more columns (pyarrow fields), the same in each row: `filled` or null."""
    return frame.withColumns(
        {field.name: literal(filled.get(field.name), field.type) for field in added}
    )


def map_in_arrow(
    frame: DataFrame, task: Callable[[Iterator[Any]], Iterator[Any]], schema: Any
) -> DataFrame:
    """`frame.mapInArrow(task, schema)`, for columns of any name, too."""
    # Spark takes a dot for a field and `*` for all columns, so it gets numbers for names and the
    # task gets them back.
    names = list(frame.columns)
    if all(_PLAIN.fullmatch(name) for name in names):
        return frame.mapInArrow(task, schema)

    def named(batches: Iterator[Any]) -> Iterator[Any]:
        return task(batch.rename_columns(names) for batch in batches)

    return frame.toDF(*(f"c{number}" for number in range(len(names)))).mapInArrow(named, schema)
