"""One Arrow value as a Spark column."""

from typing import Any

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import from_arrow_type


def literal(value: Any, kind: Any) -> Column:
    """`value` (pyarrow.Scalar of the type `found`; None: null),
    whatever the session's time zone.
    """
    if value is None or pa.types.is_binary(kind):
        plain = None if value is None else value.as_py()
    else:
        plain = pa.array([value.as_py()], kind).cast(pa.string())[0].as_py()
    return F.lit(plain).cast(from_arrow_type(kind))


def with_columns(frame: Any, added: Any, filled: dict[str, Any]) -> Any:
    """A DataFrame with more columns (pyarrow fields), the same in each row: `filled` or null."""
    return frame.withColumns(
        {field.name: literal(filled.get(field.name), field.type) for field in added}
    )
