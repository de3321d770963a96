"""How a target's table must change to have another schema: columns to rename, add, drop and widen. Pure.

A DDL's text says which columns were renamed; everything else follows from the two schemas. A change is repeatable:
what is done already is not in the difference any more.
"""

import dataclasses
import re
from typing import Any

import pyarrow as pa

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.mode import ENVELOPE, IS_CURRENT, VALID_FROM, VALID_TO

_NAME = r"(?:`(?:[^`]|``)+`|[\w$]+)"
_RENAME = re.compile(rf"\bRENAME\s+COLUMN\s+(?P<old>{_NAME})\s+TO\s+(?P<new>{_NAME})", re.I)
_CHANGE = re.compile(rf"\bCHANGE\s+(?:COLUMN\s+)?(?:IF\s+EXISTS\s+)?(?P<old>{_NAME})\s+(?P<new>{_NAME})\s", re.I)
_OURS = (*ENVELOPE, VALID_FROM, VALID_TO, IS_CURRENT)
_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())


@dataclasses.dataclass(frozen=True)
class SchemaChange:
    """The steps from one schema to another, in the order in which they are made."""

    renamed: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()
    widened: tuple[Any, ...] = ()
    """The pyarrow fields as they become."""
    added: tuple[Any, ...] = ()
    filled: tuple[tuple[str, Any], ...] = ()
    """The added columns whose existing rows hold a value (pyarrow.Scalar) and not null."""
    incompatible: tuple[tuple[Any, Any], ...] = ()
    """(old, new) fields that no widening leads from one to the other."""

    def __bool__(self) -> bool:
        return bool(self.renamed or self.dropped or self.widened or self.added or self.incompatible)

    def __str__(self) -> str:
        parts = [f"{old} becomes {new}" for old, new in self.renamed]
        parts += [f"{name} is dropped" for name in self.dropped]
        parts += [f"{field.name} is widened to {field.type}" for field in self.widened]
        parts += [f"{field.name} {field.type} is added" for field in self.added]
        parts += [f"{old.name} {old.type} becomes {new.type}" for old, new in self.incompatible]
        return ", ".join(parts)

    def require_possible(self, table: str) -> None:
        """See that the target can follow.

        Raises:
            SourceError: ErrSchemaIncompatible.
        """
        if self.incompatible:
            raise SourceError(
                "ErrSchemaIncompatible",
                f"{table}: {self}; no format widens that: start a new target, or go on with "
                "--schema-evolution ignore, which casts to the old type",
            )


def difference(old: Any, new: Any, queries: tuple[str, ...] = ()) -> SchemaChange:
    """What leads from the pyarrow.Schema `old` to `new`; `queries` are the DDLs that came between them."""
    renamed = [pair for query in queries for pair in renamed_in(query) if pair[0] in old.names]
    renamed = [(before, after) for before, after in renamed if after in new.names and after not in old.names]
    names = dict(renamed)
    before = {names.get(field.name, field.name): field for field in old}
    pairs = [(before[field.name], field) for field in new if field.name in before]
    changed = [(was, now) for was, now in pairs if was.type != now.type]
    return SchemaChange(
        renamed=tuple(renamed),
        dropped=tuple(name for name in before if name not in new.names),
        widened=tuple(now for was, now in changed if widens(was.type, now.type)),
        added=tuple(field for field in new if field.name not in before),
        incompatible=tuple((was, now) for was, now in changed if not widens(was.type, now.type)),
    )


def renamed_in(query: str) -> list[tuple[str, str]]:
    """The (old, new) column names in an ALTER TABLE; none in other statements."""
    if not re.match(r"\s*ALTER\s", query, re.I):
        return []
    found = [(_plain(m["old"]), _plain(m["new"])) for rule in (_RENAME, _CHANGE) for m in rule.finditer(query)]
    return [(old, new) for old, new in found if old != new and old not in _OURS]


def widens(old: Any, new: Any) -> bool:
    """Whether every value of the type `old` is one of `new`, and all formats know how to get from one to the other."""
    if old in _INTEGERS and new in _INTEGERS:
        return bool(new.bit_width > old.bit_width)
    if pa.types.is_decimal(old) and pa.types.is_decimal(new):
        return bool(new.scale == old.scale and new.precision > old.precision)
    return bool(old == pa.float32() and new == pa.float64())


def fitted(rows: Any, schema: Any) -> Any:
    """`rows` (pyarrow.Table) as the columns of `schema`: null where they have none, cast where types differ.

    Raises:
        SourceError: ErrSchemaIncompatible, a value does not fit.
    """
    if rows.schema.equals(schema):
        return rows
    try:
        columns = [
            rows[field.name].cast(field.type) if field.name in rows.schema.names else pa.nulls(len(rows), field.type)
            for field in schema
        ]
    except pa.ArrowInvalid as err:
        raise SourceError(
            "ErrSchemaIncompatible", f"a new value does not fit into the target's type ({err}); start a new target"
        ) from None
    return pa.Table.from_arrays(columns, schema=schema)


def _plain(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name
