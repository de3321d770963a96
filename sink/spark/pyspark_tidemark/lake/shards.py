"""Shards: several tables of the source that are merged into one table of the target. Pure.

To the captures each shard is a table of its own; here they are merged. A column of ours, the shard
column, has each row's `schema.table`. The merged table's key is the shard column and the key of the
source; its columns are those of all shards, each with the widest of its types, null where a shard
does not have it.

1. At each cut a merged table has exactly the rows of the shards that the changefeed has then. Rows
   of a shard that is dropped, truncated or filtered out are removed at that schema change, whatever
   `--on-drop` says, which is about the whole table. In mode `soft-delete` they are marked.
2. Columns are compared by name, since column ids differ between shards. What a DDL of one shard
   does to the rows of that shard is described by `ShardRows`; each of these steps can be repeated.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pyspark_tidemark.column_metadata import scalar
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import ChangefeedMeta, Ddl, TableMeta
from pyspark_tidemark.lake.schema import ENVELOPE, widens

Tables = Mapping[str, TableMeta]


@dataclasses.dataclass(frozen=True)
class ShardRows:
    """A change of the rows that a merged table has of one shard; false if it changes nothing."""

    column: str
    """The shard column."""
    shard: str
    """Its value in these rows."""
    ts: int
    """The commit_ts of the schema change."""
    is_gone: bool = False
    """The rows are removed; in mode `soft-delete` they are marked."""
    new_name: str = ""
    """The new value of the shard column; empty: it stays."""
    filled: tuple[tuple[Any, Any], ...] = ()
    """Columns (pyarrow fields) and their new values (pyarrow.Scalar; None: null)."""

    def __bool__(self) -> bool:
        return bool(self.is_gone or self.new_name or self.filled)


def merged(described: ChangefeedMeta) -> ChangefeedMeta:
    """The changefeed with merged tables in the place of their shards; unchanged if it has no
    shards, or is merged already.
    """
    if not any(table.shard for table in described.tables.values()):
        return described
    return dataclasses.replace(described, tables=_merged_tables(described.tables.values()))


def merged_table(shards: Sequence[TableMeta]) -> TableMeta:
    """One table of its shards.

    Raises:
        SourceError: ErrSchemaIncompatible, they cannot be merged.
    """
    first = shards[0]
    assert first.shard is not None, "what is merged is a shard"
    place = first.shard
    fields: dict[str, Any] = {}
    spellings: dict[str, tuple[str, str]] = {}
    for shard in shards:
        _check_key(first, shard)
        for field in _own(shard):
            spelling, other = spellings.setdefault(field.name.lower(), (field.name, shard.name))
            if spelling != field.name:
                raise _differing(
                    place.table, f"{spelling} of {other} is {field.name} in {shard.name}"
                )
            widest = fields.get(field.name, field)
            fields[field.name] = _widest(place.table, widest, shard, field)
    if place.column.lower() in spellings:
        name, owner = spellings[place.column.lower()]
        raise _differing(
            place.table, f"{owner} has {name} besides the column that tells shards apart"
        )
    column = pa.field(place.column, pa.string())
    envelope = [first.schema.field(name) for name in ENVELOPE]
    return TableMeta(
        place.table,
        (place.column, *first.key),
        pa.schema([*envelope, column, *fields.values()]),
        max(shard.schema_ts for shard in shards),
        shards=tuple(shards),
    )


def owners(tables: Tables) -> dict[str, str]:
    """The merged table of each shard, by their names."""
    return {shard.name: table.name for table in tables.values() for shard in table.shards}


def with_shard(rows: Any, table: TableMeta, shard: str) -> Any:
    """Changes (pyarrow.Table) of one shard with the column of a merged table that has its name."""
    if not table.shards:
        return rows
    return rows.append_column(
        table.key[0],
        pa.array([shard] * len(rows), pa.string()),
    )


def merged_ddl(ddl: Ddl, before: Tables, now: Tables) -> Ddl:
    """A schema change with the names of merged tables in the place of their shards; `before` and
    `now` are the merged tables below and above it.

    Raises:
        SourceError: ErrRenameUnsupported, a table becomes a shard of another one.
    """
    old_owners, new_owners = owners(before), owners(now)
    if not (old_owners or new_owners):
        return ddl
    for old, new in ddl.renamed:
        if old_owners.get(old) != new_owners.get(new):
            raise SourceError(
                "ErrRenameUnsupported",
                f"{old} becomes {new}, which is a part of another table in the target: start a new "
                "changefeed and target",
            )
    tables = [new_owners.get(name, name) for name in ddl.tables]
    # Other shards keep their rows: one that is emptied or dropped only changes the merged table.
    truncated: list[str] = []
    for name in ddl.truncated:
        owner = old_owners.get(name) or new_owners.get(name)
        (truncated if owner is None else tables).append(owner or name)
    dropped: list[str] = []
    for name in ddl.dropped:
        owner = old_owners.get(name, name)
        (tables if name in old_owners and owner in now else dropped).append(owner)
    return dataclasses.replace(
        ddl,
        tables=tuple(dict.fromkeys(name for name in tables if name in now)),
        dropped=tuple(dict.fromkeys(dropped)),
        truncated=tuple(truncated),
        renamed=tuple(pair for pair in ddl.renamed if pair[0] not in old_owners),
    )


def shard_rows(ddl: Ddl, before: Tables, now: Tables) -> dict[str, list[ShardRows]]:
    """The changes of rows that a schema change makes in merged tables which exist before and after
    it, by table; `ddl` names shards, as it comes from the captures.
    """
    steps = {
        name: _shard_rows(ddl, before[name], table)
        for name, table in now.items()
        if table.shards and name in before and before[name].shards
    }
    return {name: rows for name, rows in steps.items() if rows}


def never_narrower(table: TableMeta, actual: Any) -> TableMeta:
    """A merged table whose columns are at least as wide as those of the target (pyarrow.Schema),
    also where the shards with the wider types are gone; any other table unchanged.
    """
    if not table.shards:
        return table
    fields = [
        field.with_type(actual.field(field.name).type)
        if field.name in actual.names and widens(field.type, actual.field(field.name).type)
        else field
        for field in table.schema
    ]
    return dataclasses.replace(table, schema=pa.schema(fields))


def vanished(table: TableMeta, shards: Iterable[str], ts: int) -> list[ShardRows]:
    """The removal of those `shards` of a merged table that the changefeed does not have at `ts`."""
    gone = {*shards} - {shard.name for shard in table.shards}
    return [ShardRows(table.key[0], name, ts, is_gone=True) for name in sorted(gone)]


def _merged_tables(tables: Iterable[TableMeta]) -> dict[str, TableMeta]:
    groups: dict[str, list[TableMeta]] = {}
    for table in tables:
        groups.setdefault(table.name if table.shard is None else table.shard.table, []).append(
            table
        )
    return {
        name: merged_table(group) if group[0].shard else group[0] for name, group in groups.items()
    }


def _shard_rows(ddl: Ddl, before: TableMeta, now: TableMeta) -> list[ShardRows]:
    old = {shard.name: shard for shard in before.shards}
    new = {shard.name: shard for shard in now.shards}
    new_names = dict(ddl.renamed)
    steps = []
    for name, shard in old.items():
        new_name = new_names.get(name, name)
        after = new.get(new_name)
        if after is None or _is_emptied(ddl, shard, after):
            # Under both of its names: an earlier try of the barrier may have renamed it.
            names = dict.fromkeys((name, new_name))
            steps += [ShardRows(now.key[0], each, ddl.ts, is_gone=True) for each in names]
            continue
        changed_name = "" if new_name == name else new_name
        filled = tuple(_filled(shard, after, now))
        steps.append(ShardRows(now.key[0], name, ddl.ts, new_name=changed_name, filled=filled))
    return [step for step in steps if step]


def _is_emptied(ddl: Ddl, before: TableMeta, after: TableMeta) -> bool:
    is_another = 0 not in (before.table_id, after.table_id) and before.table_id != after.table_id
    return is_another or before.name in ddl.truncated or after.name in ddl.truncated


def _filled(before: TableMeta, after: TableMeta, whole: TableMeta) -> Iterable[tuple[Any, Any]]:
    """What the columns of a merged table hold in a shard's rows that had another value, or none."""
    old_names = {number: name for name, number in before.column_ids.items()}
    for name, number in after.column_ids.items():
        if old_names.get(number, name) != name:
            raise _differing(
                whole.name,
                f"{old_names[number]} of {before.name} becomes {name} in this shard alone",
            )
    unchanged = {name for name in after.schema.names if _is_same(name, before, after)}
    for field in _own(whole):
        name = field.name
        if name in unchanged or name in whole.key:
            continue
        default = after.defaults.get(name)
        value = None if default is None else scalar(default, after.schema.field(name).type)
        # A column that no shard had, or only others, is null in these rows already.
        if value is not None or name in before.schema.names:
            yield field, None if value is None else value.cast(field.type)


def _is_same(name: str, before: TableMeta, after: TableMeta) -> bool:
    if name not in before.schema.names:
        return False
    return before.column_ids.get(name, 0) == after.column_ids.get(name, 0)


def _own(table: TableMeta) -> Collection[Any]:
    """The columns of the upstream, or of its shards."""
    ours = {*ENVELOPE, *(table.key[:1] if table.shards else ())}
    return [field for field in table.schema if field.name not in ours]


def _check_key(first: TableMeta, shard: TableMeta) -> None:
    one, other = (
        [(name, table.schema.field(name).type) for name in table.key] for table in (first, shard)
    )
    assert first.shard is not None, "what is merged is a shard"
    if one != other:
        shown = " and ".join(
            f"{', '.join(f'{name} {kind}' for name, kind in key) or 'nothing'} in {table.name}"
            for key, table in ((one, first), (other, shard))
        )
        raise _differing(first.shard.table, f"the key is {shown}")


def _widest(table: str, widest: Any, shard: TableMeta, field: Any) -> Any:
    if widest.type == field.type or widens(widest.type, field.type):
        return field
    if widens(field.type, widest.type):
        return widest
    raise _differing(
        table,
        f"column {field.name} is {field.type} in {shard.name}, and {widest.type} in another one",
    )


def _differing(table: str, what: str) -> SourceError:
    return SourceError(
        "ErrSchemaIncompatible", f"the shards of {table} cannot be merged into one table: {what}"
    )
