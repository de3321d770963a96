"""Partitions of Delta tables: which one a row belongs to, and how the log and the directories of
files write its values (Delta's protocol, "Partition Value Serialization"). Pure.

A file has rows of one partition only, and not the columns that say which: readers take these from
the log. An empty text is a null there, so it is refused rather than written as one, and so is what
the directory of a null is called, which Spark reads from the directory's name as it writes.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.partition_columns import check_fields, field_fault, grouped
from pyspark_tidemark.lake.partitioning import PartitionField

Values = Mapping[str, str | None]
"""The values of a partition as the log has them, by what files would call the columns."""

NULL_DIRECTORY: Final = "__HIVE_DEFAULT_PARTITION__"
"""What a directory calls a null."""
NULL_TEXTS: Final = ("", NULL_DIRECTORY)
"""Texts that would be read as nulls."""
_DIRECTORY_BYTES_MAX: Final = 255
"""Of a directory's name: what file systems take."""
# What Hive and Spark escape.
_ESCAPED: Final = re.compile(r"""[\x00-\x1f"#%'*/:=?\\\x7f{\[\]^]""")
_BARE: Final = "/_-!.~'()*:@&=+$,;"
_QUOTED: Final = ("Cc", "Zs", "Zl", "Zp")
"""What java.net.URI leaves as it is in a path, and which letters it does not."""
_FORMATS: Final = {True: "%Y-%m-%dT%H:%M:%SZ", False: "%Y-%m-%d %H:%M:%S"}
"""Of times, with a zone (in UTC) and without one."""


def check_columns(table: str, fields: Sequence[PartitionField], schema: Any) -> None:
    """Check that a table with the columns of `schema` (pyarrow.Schema) can be partitioned as it is
    to be.

    Raises:
        SourceError: ErrPartitionUnsupported.
    """
    check_fields(table, fields, schema)
    faults = [fault for field in fields if (fault := fault_of(field, schema))]
    if not faults and len(fields) == len(schema):
        faults.append("a column must be left that does not partition it")
    if faults:
        raise SourceError(
            "ErrPartitionUnsupported",
            f"{table} cannot be partitioned as partition-by asks: {'; '.join(faults)}",
        )


def fault_of(field: PartitionField, schema: Any) -> str:
    """Why a table with these columns cannot be partitioned by a field; empty: it can."""
    if fault := field_fault(field, schema):
        return fault
    if not is_possible(schema.field(field.column).type):
        return f"Delta has no text for every value of {field.column}, which is binary"
    return ""


def is_possible(kind: Any) -> bool:
    """Whether each value of a type has a text in the log that all engines read alike."""
    types = pa.types
    is_number = types.is_integer(kind) or types.is_decimal(kind) or types.is_boolean(kind)
    is_time = types.is_date(kind) or types.is_timestamp(kind)
    return bool(is_number or is_time or types.is_string(kind))


def split(rows: Any, physical: Mapping[str, str]) -> Iterator[tuple[Values, Any]]:
    """The rows (pyarrow.Table) of each partition, in their order; `physical` has the partition
    columns, with what files would call them.

    Raises:
        SourceError: ErrPartitionUnsupported, a text is none that a partition can have.
    """
    if not physical:
        yield {}, rows
        return
    texts = [_texts(name, rows[name]) for name in physical]
    for first, part in grouped(rows, texts):
        values = {
            stored: column[first].as_py()
            for stored, column in zip(physical.values(), texts, strict=True)
        }
        _check_directories(values)
        yield values, part


def _texts(name: str, column: Any) -> Any:
    """A column as the log has its values."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    encoded = pc.dictionary_encode(whole)
    texts = _encoded(encoded.dictionary)
    if pa.types.is_string(column.type) and pc.any(pc.is_in(texts, pa.array(NULL_TEXTS))).as_py():
        raise SourceError("ErrPartitionUnsupported", refusal(name))
    return texts.take(encoded.indices)


def _encoded(values: Any) -> Any:
    """Values without nulls."""
    kind = values.type
    if pa.types.is_timestamp(kind):
        return pc.strftime(values, _FORMATS[kind.tz is not None])
    if pa.types.is_decimal(kind):
        # Arrow would write an exponent for some.
        return pa.array([format(value, "f") for value in values.to_pylist()], pa.string())
    return values.cast(pa.string())


def refusal(name: str) -> str:
    """What is said of a row with one of `NULL_TEXTS` in a column that partitions the table."""
    return (
        f"a row has the empty text, or {NULL_DIRECTORY}, in {name}, which partitions the table, "
        "and Delta would read a null there: start a new target without this partition column"
    )


def decoded(text: str | None, kind: Any) -> Any:
    """A value of the log (pyarrow.Scalar)."""
    if not text:
        return pa.scalar(None, kind)
    if pa.types.is_timestamp(kind):
        bare = text.removesuffix("Z")
        # Without a zone it is of the writer's session: ours is UTC.
        return pa.scalar(f"{bare}Z" if kind.tz else bare).cast(kind)
    return pa.scalar(text).cast(kind)


def directory(values: Values) -> str:
    """Where the files of a partition lie in the table's directory, with a slash at the end; a name
    of the file system. Engines need it not, but some that read Hive's tables do.
    """
    return "".join(f"{_name(column, text)}/" for column, text in values.items())


def in_log(path: str) -> str:
    """A path in the table's directory as an action has it: as a URI, to the letter as Java writes
    one. Delta's VACUUM compares them with those of the files that it finds, and removes others.
    """
    return "".join(letter if _is_bare(letter) else quote(letter, safe="") for letter in path)


def _is_bare(letter: str) -> bool:
    if letter.isascii():
        return letter.isalnum() or letter in _BARE
    return unicodedata.category(letter) not in _QUOTED


def _name(column: str, text: str | None) -> str:
    return f"{_escaped(column)}={NULL_DIRECTORY if text is None else _escaped(text)}"


def _escaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: f"%{ord(match[0]):02X}", text)


def _check_directories(values: Values) -> None:
    for column, text in values.items():
        if len(_name(column, text).encode()) > _DIRECTORY_BYTES_MAX:
            raise SourceError(
                "ErrPartitionUnsupported",
                f"a row's text in {column} is too long for the name of a partition's directory, "
                f"which has at most {_DIRECTORY_BYTES_MAX} bytes: start a new target without this "
                "partition column",
            )
