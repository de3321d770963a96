"""Tables that are altered by a copy: a tool such as gh-ost alters an empty copy, fills it beside
the table, and gives it the table's name at last. Pure.

The changefeed does not follow the rows of the copy. What they hold, and whether all were copied, is
derived from the two definitions; what that does not tell is read again.
"""

from typing import Final

from server.puller.mysql.ddl.stored_values import change_of_values
from server.puller.mysql.ddl.tracker import Context, Tracked
from server.puller.mysql.ddl.tree import (
    AddColumn,
    AddKey,
    AlterTable,
    ChangeColumn,
    DropColumn,
    RenameColumn,
)
from storage.mysql.schema import Index, Table

_KEYS_UNTOLD: Final = "its rows were copied, and whether a unique key left some out is not known"


def taken_over(
    before: Table, table: Table, context: Context, *, keys_known: bool = True
) -> Tracked:
    """Another table, with its rows, has become the one of a name: gh-ost ends so.

    Columns of one name are the same; what the rows hold in others was never seen, so they are read
    again. Nor was it seen which rows are in it: they are copied by INSERT IGNORE, which leaves
    out what a new unique key does not let in. `keys_known`: whether `table` has its own keys.
    """
    columns_before = {column.name.lower(): column for column in before.columns}
    unclear = [_left_out(before, table)] if keys_known else [_KEYS_UNTOLD]
    unclear = list(filter(None, unclear))
    for column in table.columns:
        was = columns_before.get(column.name.lower())
        why = (
            change_of_values(was, column, context.dialect, ignores=True)
            if was is not None
            else "it came with another table, whose rows were not followed"
        )
        if why:
            unclear.append(f"column {column.name}: {why}")
    return Tracked(table, tuple(unclear))


def doubt_of_copy(tree: AlterTable) -> str:
    """Why columns of a copy that is altered so may hold something else than those of their names in
    its table; nothing: they hold the same.
    """
    specs = tree.specs
    dropped = {spec.name.lower() for spec in specs if isinstance(spec, DropColumn)}
    added = {spec.column.name.lower() for spec in specs if isinstance(spec, AddColumn)}
    if again := sorted(dropped & added):
        return f"column {again[0]} was dropped and added in the copy"
    if any(isinstance(spec, RenameColumn) for spec in specs) or any(
        isinstance(spec, ChangeColumn) and spec.old.lower() != spec.column.name.lower()
        for spec in specs
    ):
        return "columns were renamed in the copy"
    keys = [spec.key for spec in specs if isinstance(spec, AddKey) and spec.key.kind != "plain"]
    if any(part.prefix is not None for key in keys for part in key.parts):
        return "a unique key of prefixes may have left out rows that were copied"
    return tree.unsure


def _left_out(before: Table, table: Table) -> str:
    """Why rows of `before` may be missing in a copy of it; nothing: it has all of them."""
    if before.indexes is None or table.indexes is None:
        return _KEYS_UNTOLD
    collations = {column.name.lower(): column.collation for column in before.columns}
    collations_now = {column.name.lower(): column.collation for column in table.columns}
    had = {_unique_over(index) for index in before.indexes} - {None}
    for index in table.indexes:
        if index.kind == "plain":
            continue
        # What was unique before is so still, but by another collation more values are equal.
        names = [name.lower() for name in index.columns]
        same_order = all(collations.get(name) == collations_now.get(name) for name in names)
        if _unique_over(index) not in had or not same_order:
            return f"key {index.name} is unique, and may have left out rows that were copied"
    return ""


def _unique_over(index: Index) -> frozenset[str] | None:
    """The columns of a unique key; None: it is none, or has an expression."""
    is_plain = index.kind == "plain" or "" in index.columns
    return None if is_plain else frozenset(name.lower() for name in index.columns)
