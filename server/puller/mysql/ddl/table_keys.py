"""The keys of a table while a statement changes them, and what tells its rows apart. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from server.puller.mysql.ddl.column_types import LostError
from server.puller.mysql.ddl.tree import DropKey, Key, RenameKey
from storage.mysql.schema import Column, Index


class TableKeys:
    """The keys of a table while a statement changes them."""

    def __init__(self, indexes: Sequence[Index], names: dict[str, str | None]) -> None:
        """Begin with the keys there were; `names` are their columns' new names, None of those that
        are dropped.
        """
        self._indexes: list[Index] = []
        for index in indexes:
            columns = [names.get(name.lower(), name) if name else "" for name in index.columns]
            left = tuple(name for name in columns if name is not None)
            if left:
                self._indexes.append(replace(index, columns=left))

    @property
    def all(self) -> tuple[Index, ...]:
        """Those there are now."""
        return tuple(self._indexes)

    def drop(self, spec: DropKey) -> None:
        """Take a key away, if there is one of that name; foreign keys and checks are none here."""
        if spec.kind in ("foreign", "check"):
            return
        name = "primary" if spec.kind == "primary" else spec.name.lower()
        self._indexes = [index for index in self._indexes if index.name.lower() != name]

    def rename(self, spec: RenameKey) -> None:
        """Give a key another name."""
        self._indexes = [
            replace(index, name=spec.new) if index.name.lower() == spec.old.lower() else index
            for index in self._indexes
        ]

    def add_all(self, keys: Sequence[Key]) -> None:
        """Add those that are indexes.

        Raises:
            LostError: two have one name, or one is over a period.
        """
        for key in keys:
            if any(part.is_period for part in key.parts):
                raise LostError(f"which columns the period of key {key.name} has is not known")
            if key.kind in ("primary", "unique", "plain"):
                self._add(key)

    def _add(self, key: Key) -> None:
        columns = tuple(part.column for part in key.parts)
        name = "PRIMARY" if key.kind == "primary" else key.name or self._own_name(columns)
        taken = any(index.name.lower() == name.lower() for index in self._indexes)
        if taken and not key.if_not_exists:
            raise LostError(f"two keys have the name {name}")
        if not taken:
            self._indexes.append(Index(name, key.kind, columns))

    def _own_name(self, columns: Sequence[str]) -> str:
        """The name of its first column, with a number where that is taken."""
        first = columns[0] or "functional_index"
        taken = {index.name.lower() for index in self._indexes}
        number, name = 1, first
        while name.lower() in taken or name.lower() == "primary":
            number += 1
            name = f"{first}_{number}"
        return name


def row_key(columns: Sequence[Column], indexes: Sequence[Index]) -> tuple[str, ...]:
    """What tells rows apart: the primary key, else the unique key of the fewest columns,
    none of them nullable.
    """
    by_name = {column.name.lower(): column for column in columns}
    usable = []
    for index in indexes:
        parts = [by_name.get(name.lower()) for name in index.columns]
        if index.kind != "plain" and all(part is not None and not part.nullable for part in parts):
            usable.append(
                (
                    index.kind != "primary",
                    len(parts),
                    index.name,
                    [part.name for part in parts if part],
                )
            )
    return tuple(min(usable)[3]) if usable else ()


def with_names_of(
    indexes: tuple[Index, ...] | None, columns: Sequence[Column]
) -> tuple[Index, ...] | None:
    """Keys with their columns' names as the columns spell them.

    Raises:
        LostError: a key is over a column that is not there.
    """
    if indexes is None:
        return None
    names = {column.name.lower(): column.name for column in columns}
    for index in indexes:
        if any(name and name.lower() not in names for name in index.columns):
            raise LostError(f"key {index.name} is over a column that is not there")
    return tuple(
        replace(index, columns=tuple(names[name.lower()] if name else "" for name in index.columns))
        for index in indexes
    )
